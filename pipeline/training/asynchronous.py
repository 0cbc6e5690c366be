"""Runs asynchronous actors on one machine (Mnih et al. 2016, "Asynchronous methods for deep RL").

Every actor has its own environment and its own copy of the weights. It repeats these steps: copy
the shared weights, collect a rollout, compute its gradients, apply them to the shared weights with
the shared optimizer (algorithms S2 and S3). Actors are either threads, each of which makes graph
calls in which only the environment's step runs Python code, or they take turns in one thread. If
they take turns, runs with the same seed have the same results.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Literal, cast

import gin
import numpy as np
import tensorflow as tf

from pipeline import configuration
from pipeline.acting.collect_driver import CollectDriver, interrupt_episodes
from pipeline.acting.episode_statistics import initial_statistics, with_empty_window
from pipeline.agents.agent import Agent
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.watchdog import Watched
from pipeline.ops.normalizers import ObservationNormalizer, RewardScaler
from pipeline.ops.randomness import stream_key
from pipeline.ops.schedules import Schedule
from pipeline.replay import Experience
from pipeline.training.asynchronous_actors import (
    Actor,
    ActorEnvironments,
    ActorExperience,
    join_states,
    split_state,
    sum_states,
    with_counts,
)
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
from pipeline.training.iteration import Chunk, LoopState
from pipeline.utils.constraints import PositiveInt, check_arguments
from pipeline.utils.errors import UserError
from pipeline.utils.execution import HOST, int64, on_device

_NO_LIMIT = tf.int64.max

_split = tf.function(split_state, autograph=False)
_join = tf.function(join_states, autograph=False)
_sum = tf.function(sum_states, autograph=False)

_actor_key: contextvars.ContextVar[int | None] = contextvars.ContextVar("actor_key", default=None)


@gin.configurable
def actor_epsilon(
    values: Sequence[float] = (0.1, 0.01, 0.5),
    probabilities: Sequence[float] = (0.4, 0.3, 0.3),
) -> float:
    """Draws the final epsilon of the actor that is being built (Mnih et al. 2016).

    The paper's actors draw theirs periodically. If no actor is being built, the mean is returned.
    This is the case for the evaluated agent.

    Args:
      values: Final epsilons to draw from.
      probabilities: Probability of each of them.

    Raises:
      UserError: If a number is not in [0, 1], or if the probabilities do not match the values.
    """
    are_chances = all(0 <= number <= 1 for number in (*values, *probabilities))
    total = sum(probabilities)
    if not are_chances or len(values) != len(probabilities) or abs(total - 1) > 1e-6:
        raise UserError(
            f"actor_epsilon(values={values}, probabilities={probabilities}): all numbers must be "
            "in [0, 1], with one probability for each value, and the probabilities must sum to 1."
        )
    shares = np.asarray(probabilities) / total
    key = _actor_key.get()
    if key is None:
        return float(np.dot(values, shares))
    generator = np.random.default_rng(stream_key(key, "epsilon"))
    return float(generator.choice(values, p=shares))


class Actors:
    """Runs actors in threads or in turns; implements `iteration.Runner`.

    Attributes:
      actors: The actors.
    """

    def __init__(self, actors: Sequence[Actor], env_steps: tf.Variable, scheduler: str, seed: int):
        self.environments: Sequence[VectorEnvironment] = [x.environments[0] for x in actors]
        self.watched: Sequence[Watched] = [x.episodes for x in self.environments]
        self.collect_steps = sum(actor.collect_steps for actor in actors)
        self.is_repeatable = scheduler == "deterministic"
        self.description: Mapping[str, Any] = {"scheduler": scheduler, "num_actors": len(actors)}
        self.train: Chunk = on_device(HOST, self._run)
        self.collect_randomly = self.train  # never called: rollouts have no warm-up
        self.actors = actors
        self._env_steps = env_steps
        self._seed = seed
        self._schedule = self._in_threads if scheduler == "threads" else self._in_turns
        self.at_once = len(actors) if scheduler == "threads" else 1
        self._threads = futures.ThreadPoolExecutor(len(actors), "actor")

    def initial_state(self) -> LoopState:
        """Resets the environments and returns the joint state of all actors."""
        states = [actor.initial_state() for actor in self.actors]
        return sum_states(states, initial_statistics(1))

    def begin_new_episodes(self, state: LoopState) -> LoopState:
        """Truncates the unfinished episodes; see `Runner.begin_new_episodes`."""
        for environment in self.environments:
            environment.episodes.abandon()
        return state._replace(carry=interrupt_episodes(state.carry))

    def measurements(self) -> dict[str, Any]:
        """Returns the mean and the histogram of staleness.

        Staleness is the number of updates that other actors make between an actor's copy of the
        weights and its own update.
        """
        counts = sum(actor.staleness.numpy() for actor in self.actors)
        total = counts.sum()
        mean = float(counts @ np.arange(len(counts)) / total) if total else None
        return {"staleness_mean": mean, "staleness_counts": np.trim_zeros(counts, "b").tolist()}

    def close(self) -> None:
        """Ends the threads and closes the environments."""
        self._threads.shutdown()
        for actor in self.actors:
            actor.close()

    def _run(self, state: LoopState, max_iterations: tf.Tensor, until: tf.Tensor) -> LoopState:
        """Runs a chunk of iterations of all actors. Afterwards, every actor has finished a rollout.

        If an actor raises, the exception is passed on, with threads once all others are done.
        """
        states = _split(state)
        if max_iterations == 0:  # traces all graphs before there is a thread
            for actor, own in zip(self.actors, states, strict=True):
                actor.train(own, max_iterations, until)
            return state
        states[0] = with_counts(states[0], state)
        return self._schedule(states, int(max_iterations), int(until))

    def _in_threads(self, states: list[LoopState], rounds: int, until: int) -> LoopState:
        """Runs all actors at once, for the number of steps of `rounds` iterations of each actor."""
        taken, rows = int(self._env_steps), sum(int(s.carry.vector_steps) for s in states)
        steps_per_row = taken / rows if rows else 1.0  # Rollouts end with their episodes.
        until = min(until, taken + math.ceil(rounds * self.collect_steps * steps_per_row))
        before = states[0].carry.statistics
        carry = states[0].carry._replace(statistics=with_empty_window(before))
        states = [states[0]._replace(carry=carry), *states[1:]]
        # Threads do not inherit the device. On a GPU, a thread can read the values of a tensor that
        # another thread has created.
        train = on_device(HOST, _train)
        calls = [
            self._threads.submit(train, actor, state, _NO_LIMIT, until)
            for actor, state in zip(self.actors, states, strict=True)
        ]
        futures.wait(calls)
        return _sum([call.result() for call in calls], before)

    def _in_turns(self, states: list[LoopState], rounds: int, until: int) -> LoopState:
        """Runs one iteration of each actor per round. The order is drawn anew for every round."""
        counts = states[0]
        for _ in range(rounds):
            if int(self._env_steps) >= until:
                break
            for number in self._order(states):
                state = with_counts(states[number], counts)
                counts = states[number] = _train(self.actors[number], state, 1, _NO_LIMIT)
        return _join(states, counts)

    def _order(self, states: Sequence[LoopState]) -> np.ndarray:
        turn = int(states[0].carry.vector_steps) // self.actors[0].collect_steps
        generator = np.random.default_rng(stream_key(self._seed, "turns", turn))
        return generator.permutation(len(self.actors))


def _train(actor: Actor, state: LoopState, max_iterations: int, until: int) -> LoopState:
    return actor.train(state, int64(max_iterations), int64(until))


@gin.configurable(denylist=["seed", "create_environment", "create_agent", "create_experience"])
def asynchronous_runner(
    seed: int,
    create_environment: Callable[..., VectorEnvironment],
    create_agent: Callable[..., Agent],
    create_experience: Callable[..., Experience],
    *,
    num_actors: PositiveInt = 4,
    scheduler: Literal["threads", "deterministic"] = "threads",
    use_locking: bool = False,
) -> Components:
    """Builds a run of asynchronous actors; bind `train.runner` to it.

    Args:
      seed: Seed of the run.
      create_environment: Factory of the environments; every actor has one environment.
      create_agent: Factory of the agents.
      create_experience: Factory of the actors' rollouts.
      num_actors: Number of actors.
      scheduler: "threads" runs the actors at the same time; "deterministic" lets them take turns,
        so that the run is resumed bit for bit.
      use_locking: True to make copies and updates of all weights exclude each other. Without it,
        as in the paper, an actor may copy weights of which another has updated only some. A
        single variable is never torn, because TensorFlow's kernels lock each variable that they
        write. Target networks are outside of the lock.

    Raises:
      UserError: If a parameter is out of range, if the agent does not learn from the gradients of
        whole rollouts or normalises observations or rewards, or if threads would run eagerly.
    """
    check_arguments(asynchronous_runner, locals())
    if scheduler == "threads" and tf.config.functions_run_eagerly():
        raise UserError(
            "Actors in threads cannot run with --eager: leave it out, or bind "
            'asynchronous_runner.scheduler = "deterministic".'
        )
    if scheduler == "deterministic":
        reason = "actors that take turns never exclude each other"
        configuration.without_effect["asynchronous_runner.use_locking"] = reason
    seed_generators(seed)
    keys = [stream_key(seed, "actor", number) for number in range(num_actors)]
    with closed_on_error() as opened:
        environments = []
        for key in keys:
            built = build_environment(stream_key(key, "training"), create_environment, num_envs=1)
            opened.callback(built.close)
            environments.append(built)
        env_steps = count_of_env_steps()
        first = environments[0]
        specs = first.time_step_spec(), first.action_spec()
        shared = build_agent(*specs, num_actors, seed, create_agent, env_steps)
        _check_agent(shared)
        lock = tf.CriticalSection() if use_locking else None
        actors = []
        for key, environment in zip(keys, environments, strict=True):
            agent = _build_agent(key, environment, create_agent, env_steps)
            experience = build_experience(agent, 1, key, create_experience)
            driver = CollectDriver(environment, seed=key, ends_with_episode=True)
            actors.append(Actor(shared, agent, experience, driver, env_steps, lock))
        shared.schedules = {
            name: _mean([actor.agent.schedules[name] for actor in actors])
            for name in shared.schedules
        }
        evaluator = build_evaluator(shared, seed, create_environment, first, may_share=False)
        return Components(
            ActorEnvironments(environments),
            shared,
            cast(Experience, ActorExperience(actors)),  # it has all that the host calls
            Actors(actors, env_steps, scheduler, seed),
            evaluator,
            env_steps,
        )


def _check_agent(agent: Agent) -> None:
    if not agent.needs_whole_rollouts or type(agent)._train is not Agent._train:
        raise UserError(
            "Asynchronous actors learn from the gradients of whole rollouts: bind "
            "train.create_agent to @create_a2c_agent or @create_nstep_q_agent."
        )
    if any(isinstance(x, (ObservationNormalizer, RewardScaler)) for x in agent.submodules):
        raise UserError(
            "Asynchronous actors share weights but not statistics of observations and rewards. "
            "Bind normalize_observations (of the agent or of ActorCritic) and normalize_returns of "
            "the agent to False."
        )


def _build_agent(
    key: int,
    environment: VectorEnvironment,
    create_agent: Callable[..., Agent],
    env_steps: tf.Variable,
) -> Agent:
    token = _actor_key.set(key)
    try:
        specs = environment.time_step_spec(), environment.action_spec()
        agent = build_agent(*specs, 1, key, create_agent, env_steps)
    finally:
        _actor_key.reset(token)
    compile_update(agent)
    return agent


def _mean(schedules: Sequence[Schedule]) -> Schedule:
    return lambda counter: tf.reduce_mean([schedule(counter) for schedule in schedules])
