"""Collects rows for a learner that trains on the rows of several collectors."""

from __future__ import annotations

import contextvars
import functools
import pathlib
import socket
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin
import numpy as np
import tensorflow as tf
from tf_agents.trajectories import StepType

from pipeline.acting.collect_driver import Carry, CollectDriver, initial_carry, interrupt_episodes
from pipeline.acting.episode_statistics import EpisodeStatistics, initial_statistics
from pipeline.acting.policies import RandomPolicy
from pipeline.agents.agent import Agent
from pipeline.checkpointing import exactness
from pipeline.checkpointing.checkpoints import Parts
from pipeline.checkpointing.saveables import Tensors
from pipeline.environments.saved_spaces import to_json
from pipeline.environments.training_environment import named_failures
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.ops.observations import is_colour_stack, is_frame_stack
from pipeline.ops.randomness import stream_key
from pipeline.runs.source_revision import own_modules, source_sha256
from pipeline.training.components import build_agent, closed_on_error, count_of_env_steps
from pipeline.utils.constraints import Fraction, NonNegative, check_arguments
from pipeline.utils.errors import UserError
from pipeline.utils.execution import device_name

# Position of the collector that is being built among all, from 0 to 1.
_share: contextvars.ContextVar[float] = contextvars.ContextVar("collector_share", default=0.0)


@gin.configurable
def collector_epsilon(
    base: Fraction = 0.4,
    exponent: NonNegative = 7.0,
) -> float:
    """Returns the epsilon of the collector that is being built.

    It is base ** (1 + exponent * i / (K - 1)) for collector i = 0, ..., K - 1, so that each
    collector explores less than the one before it. See Horgan et al. 2018, "Distributed prioritized
    experience replay", section 4. If no collector is being built, it is `base`.

    Args:
      base: Epsilon of the first collector.
      exponent: The last collector's epsilon is base^(1 + exponent).

    Raises:
      UserError: If a value is out of its range.
    """
    check_arguments(collector_epsilon, locals())
    return base ** (1 + exponent * _share.get())


class Identity(NamedTuple):
    """Identifies a collector of a run.

    Attributes:
      number: Number of the collector, from 0.
      restarts: Number of collectors that were lost before in its place.
      num_collectors: Number of collectors of the run.
      seed: Seed of the run.
    """

    number: int
    restarts: int
    num_collectors: int
    seed: int


class Request(NamedTuple):
    """Asks a collector for one message.

    Attributes:
      weights: Values of the learner's `weights`; None if the collector has them already.
      version: Version of the weights: number of iterations that the learner had trained when it
        sent them.
      env_steps: Environment steps of the run so far, which schedules depend on.
      is_random: Whether to act at random, as in the warm-up.
    """

    weights: Sequence[np.ndarray] | None
    version: int
    env_steps: int
    is_random: bool


class Message(NamedTuple):
    """Rows that a collector has collected, as NumPy arrays.

    Attributes:
      rows: `Trajectory` [T, M, ...] of T vector steps of M environments.
      time_step: `TimeStep` [M, ...] that the next action responds to.
      statistics: Episode statistics of these rows. The returns and lengths of unfinished episodes
        are of all of their steps.
      version: Number of the weights with which the rows were collected.
    """

    rows: Any
    time_step: Any
    statistics: EpisodeStatistics
    version: int


def weights(agent: Agent) -> list[tf.Variable]:
    """Returns the variables of the networks and normalisers of an agent, each once."""
    found = [v for module in agent.trained.values() for v in module.variables]
    return list({id(variable): variable for variable in found}.values())


class Collector:
    """Collects messages with its own environments and a copy of the policy.

    `save` returns all of its state.
    """

    def __init__(
        self,
        identity: Identity,
        create_environment: Callable[..., VectorEnvironment],
        create_agent: Callable[..., Agent],
        num_steps: int,
    ):
        """Builds the environments and the policy.

        Args:
          identity: The random streams depend on it.
          create_environment: Factory of the environments.
          create_agent: Factory of the agent.
          num_steps: Vector steps of a message.
        """
        key = stream_key(identity.seed, "collector", identity.number)
        if identity.restarts:  # no episode is repeated
            key = stream_key(key, "restart", identity.restarts)
        self.environment = environment = create_environment(stream_key(key, "training"))
        with closed_on_error(self):
            self._env_steps = count_of_env_steps()
            specs = environment.time_step_spec(), environment.action_spec()
            token = _share.set(identity.number / max(identity.num_collectors - 1, 1))
            try:
                agent = build_agent(
                    *specs, environment.batch_size, key, create_agent, self._env_steps
                )
            finally:
                _share.reset(token)
            self._weights = weights(agent)
            run = CollectDriver(environment, seed=key).run
            policy = agent.collect_policy
            random = RandomPolicy(policy.time_step_spec, policy.action_spec, policy.info_spec)
            self._collect = {
                False: tf.function(lambda carry: run(policy, carry, num_steps), autograph=False),
                True: tf.function(lambda carry: run(random, carry, num_steps), autograph=False),
            }
            self._policy = policy
            carry = Tensors(lambda: self._carry, self._set_carry)
            # The carry comes first, because it resets the environments if nothing has before.
            self._parts = Parts({"carry": carry, "environment": environment})

    @functools.cached_property
    def _carry(self) -> Carry:
        # Reset at the first use, because nothing watches the environments before.
        with named_failures(self.environment):
            return initial_carry(self.environment, self._policy)

    def collect(self, request: Request) -> Message:
        """Collects a message.

        Raises:
          UserError: If the environment fails.
        """
        if request.weights is not None:
            for variable, value in zip(self._weights, request.weights, strict=True):
                variable.assign(value)
        self._env_steps.assign(np.int64(request.env_steps))  # see `execution.int64`
        unfinished = self._carry.statistics
        statistics = initial_statistics(1)._replace(
            episode_return=unfinished.episode_return, episode_length=unfinished.episode_length
        )
        with named_failures(self.environment):
            self._carry, rows = self._collect[request.is_random](
                self._carry._replace(statistics=statistics)
            )
        rows, time_step, counted = tf.nest.map_structure(
            lambda x: x.numpy(), (rows, self._carry.time_step, self._carry.statistics)
        )
        return Message(rows, time_step, self._with_own_returns(counted), request.version)

    def collect_leaves(self, *request: Any) -> tuple[list[Any], bool, float]:
        """Collects a message, given the fields of its request, and splits its stacks of frames.

        Returns:
          The leaves of the message, whether `split_stacks` has split it, and the seconds that the
          environments took.
        """
        before = self.environment.seconds
        message = self.collect(Request(*request))
        split = split_stacks(message)
        return tf.nest.flatten(split), split is not message, self.environment.seconds - before

    def _with_own_returns(self, statistics: EpisodeStatistics) -> EpisodeStatistics:
        """Returns the statistics with the returns that the environments have recorded, if any."""
        episodes = self.environment.episodes
        if not episodes.own_returns:
            return statistics
        returns = np.array([value for _, value in episodes.own_returns], np.float32)
        kept = statistics.last_returns[: len(statistics.last_returns) - len(returns)]
        return_sum = np.float64(episodes.own_return_sum)
        episodes.own_returns.clear()
        episodes.own_return_sum = 0.0
        return statistics._replace(
            last_returns=np.concatenate([kept, returns]), return_sum=return_sum
        )

    def machine(self) -> tuple[str, dict[str, str], list[Any], dict[str, str]]:
        """Returns the machine's name and `machine_traits`, the spaces, and the digests of source.

        The digests are those of this package, under its name, and of `own_modules`.
        """
        spaces = self.environment.observation_space, self.environment.action_space
        return socket.gethostname(), machine_traits(), [*map(to_json, spaces)], source_digests()

    def save(self) -> dict[str, bytes]:
        """Returns the files that `restore` needs, by their relative paths."""
        with tempfile.TemporaryDirectory() as name:
            self._parts.save(pathlib.Path(name))
            return files_in(pathlib.Path(name))

    def restore(self, saved: dict[str, bytes]) -> str:
        """Reads what `save` returned. If the episodes cannot be continued, new ones begin.

        Returns:
          Why the episodes cannot be continued, or "" if they can.

        Raises:
          ValueError: If the saved state does not fit this collector.
        """
        with tempfile.TemporaryDirectory() as name:
            unpack(saved, pathlib.Path(name))
            self._parts.restore(pathlib.Path(name))
        divergence = self.environment.divergence
        if divergence:
            self.environment.episodes.abandon()
            self._carry = interrupt_episodes(self._carry)
        return divergence

    def _set_carry(self, carry: Carry) -> None:
        self._carry = carry

    def close(self) -> None:
        """Closes the environments."""
        self.environment.close()


def machine_traits() -> dict[str, str]:
    """Returns what changes the bits of a message from machine to machine."""
    chosen = {
        "intra_op": tf.config.threading.get_intra_op_parallelism_threads(),
        "inter_op": tf.config.threading.get_inter_op_parallelism_threads(),
    }
    return exactness.traits() | exactness.threads(chosen) | {"device": device_name()}


def source_digests() -> dict[str, str]:
    """Returns the SHA-256 of this package and of the user's own modules, by name."""
    return {"pipeline": source_sha256(), **own_modules()}


def files_in(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the files in a folder by their relative paths."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def unpack(files: dict[str, bytes], folder: pathlib.Path) -> None:
    """Writes files by their relative paths, as `files_in` returns them."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def split_stacks(message: Message) -> Message:
    """Returns a message in which consecutive stacks of frames share their frames, if they can.

    Observations [T, M, S, ...] become a pair: the stacks of the first rows [M, S, ...], and the
    newest frames of all later rows [T - 1, M, ...]. `join_stacks` returns the same message.
    """
    rows = message.rows
    stacks = rows.observation
    if tf.nest.is_nested(stacks):
        return message
    spec = tf.TensorSpec(stacks.shape[2:], stacks.dtype)
    if not is_frame_stack(spec) and not is_colour_stack(spec):
        return message
    pair = stacks[0], stacks[1:, :, -1]
    split = message._replace(rows=rows._replace(observation=pair))
    is_exact = np.array_equal(join_stacks(split).rows.observation, stacks)
    return split if is_exact else message


def join_stacks(message: Message) -> Message:
    """Returns the message that `split_stacks` has split.

    The first stack of an episode has zeros before its first frame.
    """
    rows = message.rows
    first, newest = rows.observation
    stacks = np.empty([len(newest) + 1, *first.shape], first.dtype)
    stacks[0] = first
    for t, frames in enumerate(newest, 1):
        stacks[t, :, :-1] = stacks[t - 1, :, 1:]
        stacks[t, rows.step_type[t - 1] == StepType.LAST, :-1] = 0
        stacks[t, :, -1] = frames
    return message._replace(rows=rows._replace(observation=stacks))


def check_messages(
    message: Message, num_collectors: int, in_flight: int, memory: float, owner: str, more: str = ""
) -> None:
    """Checks that all messages under way fit into a memory.

    Args:
      message: Message of the size of all messages.
      num_collectors: Number of collectors.
      in_flight: Messages that each collector is asked for in advance.
      memory: Size of the memory in bytes.
      owner: Subject and verb of the sentence that tells this size, such as "this process may use".
      more: How to get more memory, or "".

    Raises:
      UserError: If they do not fit.
    """
    size = sum(np.asarray(leaf).nbytes for leaf in tf.nest.flatten(message))
    total = num_collectors * in_flight * size
    if total > memory:
        raise UserError(
            f"{num_collectors} collectors with {in_flight} messages of {size:_} bytes under way "
            f"need {total / 2**30:.1f} GiB, but {owner} {memory / 2**30:.1f} GiB. "
            "Lower distributed_runner.message_steps (with a Rollout, Rollout.num_steps), "
            f"in_flight or num_collectors{more}."
        )
