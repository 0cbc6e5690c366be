"""Trains one learner on the rows of several collectors, each with its own environments.

Every collector has a vector of environments and a copy of the policy. It collects *messages*: the
rows of several vector steps. The learner asks each collector for several messages in advance, so
that collectors and learner work at the same time. It takes one message after the other, adds the
rows to the replay buffer or rollout, and makes the updates that are due for them.

If the learner takes messages in turns, counts alone determine their order and the weights that
collect each of them. The results are then the same, bit for bit, wherever the collectors are and
after a resume. If the learner takes messages as they arrive, no collector waits for a slower one,
and a new collector replaces one that is lost.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Literal

import gin

from pipeline import configuration
from pipeline.acting.collect_driver import CollectDriver
from pipeline.agents.agent import Agent
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.replay import Experience
from pipeline.training.collector import Collector, Identity, check_messages
from pipeline.training.collector_places import InProcess
from pipeline.training.collectors import Collectors, empty_message, is_on_policy
from pipeline.training.components import (
    Components,
    build_agent,
    build_environment,
    build_evaluator,
    build_experience,
    closed_on_error,
    compile_update,
    count_of_env_steps,
    seed_generators,
)
from pipeline.utils.constraints import Positive, PositiveInt, check_arguments
from pipeline.utils.errors import UserError
from pipeline.utils.memory import available_memory


def _message_length(experience: Experience, num_collectors: int, message_steps: int) -> int:
    """Returns the vector steps of a message, which makes a whole number of updates.

    Raises:
      UserError: If its rows do not fit into a stream of the replay buffer.
    """
    if not experience.keeps_rows:
        reason = "a message has Rollout.num_steps vector steps"
        configuration.without_effect["distributed_runner.message_steps"] = reason
        return experience.collect_steps
    unit = num_collectors * experience.collect_steps
    num_steps = unit * -(-message_steps // unit)
    rows = getattr(experience, "longest_addition", num_steps)  # a store of one's own may lack it
    if num_steps > rows:
        raise UserError(
            f"A message of {num_steps} vector steps does not fit into a replay buffer that keeps "
            f"{rows} rows of each environment. Lower distributed_runner.message_steps or "
            "num_collectors, or raise ReplayBuffer.capacity."
        )
    return num_steps


@gin.configurable(denylist=["seed", "create_environment", "create_agent", "create_experience"])
def distributed_runner(
    seed: int,
    create_environment: Callable[..., VectorEnvironment],
    create_agent: Callable[..., Agent],
    create_experience: Callable[..., Experience],
    *,
    num_collectors: PositiveInt = 2,
    message_steps: PositiveInt = 32,
    in_flight: PositiveInt = 2,
    order: Literal["turns", "ready"] = "turns",
    timeout: Positive = 240.0,
    ray_address: str | None = None,
) -> Components:
    """Builds a run of collectors and a learner; bind `train.runner` to it.

    Args:
      seed: Seed of the run.
      create_environment: Factory of the environments. Each collector has a vector of them.
      create_agent: Factory of the agent.
      create_experience: Factory of the replay buffer or rollout.
      num_collectors: Number of collectors.
      message_steps: Vector steps of a message, rounded up so that a message makes a whole number of
        updates. Agents with a `Rollout` use `Rollout.num_steps` instead.
      in_flight: Messages that each collector is asked for in advance. A higher number keeps the
        collectors busy, but they use older weights. On-policy agents always use 1.
      order: "turns" takes messages in a fixed order and makes the run repeatable. "ready" takes
        each message when it arrives and replaces collectors that are lost.
      timeout: Longest time in seconds in which a collector of a cluster must answer: send the next
        message, save its environments or restore them. The time for its start is included.
      ray_address: Address of the Ray cluster that runs the collectors, such as "auto". If None,
        they run in this process. With order "turns", the results are the same. The flag
        --ray_address sets this parameter.

    Raises:
      UserError: If a parameter is out of range, a message does not fit the replay buffer, the
        messages do not fit into memory or object stores, the agent cannot learn from messages as
        they arrive, Ray is not installed or cannot be reached, or an environment fails.
    """
    check_arguments(distributed_runner, locals())
    seed_generators(seed)
    with contextlib.closing(build_environment(seed, create_environment)) as sample:
        specs = sample.time_step_spec(), sample.action_spec()
        CollectDriver(sample, seed=seed)  # for gin, which does not see those of a cluster
    env_steps = count_of_env_steps()
    num_streams = num_collectors * sample.batch_size
    agent = build_agent(*specs, num_streams, seed, create_agent, env_steps)
    compile_update(agent)
    width = sample.batch_size if agent.learns_off_policy else num_streams
    experience = build_experience(agent, width, seed, create_experience)
    num_steps = _message_length(experience, num_collectors, message_steps)
    if is_on_policy(agent, experience):
        if order != "turns":
            raise UserError(
                f'distributed_runner.order = "{order}" does not work with this agent, which needs '
                "messages of all collectors with the same weights. "
                'Set distributed_runner.order = "turns".'
            )
        in_flight = 1
        reason = "an on-policy agent waits for every message"
        configuration.without_effect["distributed_runner.in_flight"] = reason
    like = empty_message(agent, num_steps, sample.batch_size)
    check_messages(like, num_collectors, in_flight, available_memory(), "this process may use")

    def create(number: int, restarts: int) -> Collector:
        identity = Identity(number, restarts, num_collectors, seed)
        return Collector(identity, create_environment, create_agent, num_steps)

    place: InProcess | OverRay
    if ray_address is None:
        reason = "collectors run in this process without --ray_address"
        configuration.without_effect["distributed_runner.timeout"] = reason
        place = InProcess(num_collectors, create)
    elif importlib.util.find_spec("ray") is None:
        raise UserError("--ray_address needs Ray, which is not installed: pip install ray==2.60.0")
    else:
        from pipeline.training.ray_collectors import OverRay

        place = OverRay(
            ray_address, num_collectors, seed, like, sample, in_flight, order == "turns", timeout
        )
    with closed_on_error(place):
        runner = Collectors(
            agent, experience, place, sample, env_steps, num_collectors, like, in_flight, order
        )
        evaluator = build_evaluator(agent, seed, create_environment, sample, may_share=False)
        return Components(runner, agent, experience, runner, evaluator, env_steps)
