"""Trains one learner on the messages of several collectors."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import StepType, TimeStep, Trajectory

from pipeline.acting.collect_driver import Carry
from pipeline.acting.episode_statistics import (
    EpisodeStatistics,
    initial_statistics,
    merge_statistics,
    with_empty_window,
)
from pipeline.agents.agent import Agent
from pipeline.checkpointing.saveables import Tensors
from pipeline.environments.training_environment import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.watchdog import Watched
from pipeline.ops.batches import are_finite, ordered_sum
from pipeline.replay import Experience
from pipeline.training.collector import Message, Request, files_in, unpack, weights
from pipeline.training.collector_places import CollectorLost, InProcess
from pipeline.training.iteration import Chunk, LoopState, Updates, first_state
from pipeline.utils import files
from pipeline.utils.errors import RetryableError, UserError
from pipeline.utils.execution import HOST, int64, on_device

if TYPE_CHECKING:
    from pipeline.training.ray_collectors import OverRay

_STATE = "state.json"
_LAGS = 100  # messages
_MAX_LOSSES = 10  # of a collector in a row, without a message from it


class Collectors:
    """Runs iterations with the messages of collectors; implements `iteration.Runner`.

    It is also the run's `TrainingEnvironment`: the collectors' files and the messages that are
    under way are its part of a checkpoint.

    Attributes:
      divergence: Why the last `restore` could not continue some episodes, or "" if it did.
    """

    at_once = 1

    def __init__(
        self,
        agent: Agent,
        experience: Experience,
        place: InProcess | OverRay,
        sample: TrainingEnvironment,
        env_steps: tf.Variable,
        num_collectors: int,
        like: Message,
        in_flight: int,
        order: str,
    ):
        """Initializes the runner.

        Args:
          agent: Agent to train.
          experience: Store with a stream for each environment of each collector.
          place: Where the collectors are.
          sample: Environment like theirs, which may be closed.
          env_steps: Counts the environment steps of the run, int64 [].
          num_collectors: Number of collectors, K.
          like: Message of the structure, shapes and dtypes of all messages.
          in_flight: Messages under way for each collector.
          order: "turns", or "ready" to take messages as they arrive.
        """
        self._updates = Updates(agent, experience)
        self._place = place
        self._env_steps = env_steps
        self._like = like
        self._num_steps, self._num_envs = like.rows.step_type.shape  # of a collector's message
        self._in_flight = in_flight
        # An on-policy agent learns from a message of every collector, others from one at a time.
        self._messages_per_iteration = num_collectors if is_on_policy(agent, experience) else 1
        unit = num_collectors * experience.collect_steps
        self._repeats = self._num_steps // unit if experience.keeps_rows else 1
        # None stands between the last message of a lost collector and the first of the next.
        self._arrived: list[deque[Message | None]] = [deque() for _ in range(num_collectors)]
        self._submitted = [0] * num_collectors
        self._restarts = [0] * num_collectors
        self._losses_in_a_row = [0] * num_collectors
        self._lost_steps = 0
        self._next = 0
        self._version = 0
        self._known = [-1] * num_collectors
        self._sent: tuple[int, list[np.ndarray]] = -1, []
        self.divergence = ""
        self._lags: deque[int] = deque(maxlen=_LAGS)
        self._learn = {
            is_random: tf.function(
                on_device(HOST, functools.partial(self._learn_from, is_random)), autograph=False
            )
            for is_random in (False, True)
        }
        self.is_repeatable = order == "turns"
        self.observation_space = sample.observation_space
        self.action_space = sample.action_space
        self.batch_size = num_collectors * self._num_envs
        self.collect_steps = self._num_steps * self._messages_per_iteration
        self.description: Mapping[str, Any] = {"num_collectors": num_collectors, "order": order}
        self.train: Chunk = on_device(HOST, functools.partial(self._run, False))
        self.collect_randomly: Chunk = on_device(HOST, functools.partial(self._run, True))

    @property
    def environments(self) -> Sequence[VectorEnvironment]:
        """Returns the environments that are in this process."""
        return self._place.environments

    @property
    def watched(self) -> Sequence[Watched]:
        """Returns the objects that may hang: the environments, or the waits for collectors."""
        return self._place.watched

    def initial_state(self) -> LoopState:
        """Returns the state before the first iteration; collectors reset at their first message."""
        agent = self._updates.agent
        time_step = tensor_spec.zero_spec_nest(agent.time_step_spec, [self.batch_size])
        carry = Carry(
            time_step,
            agent.collect_policy.get_initial_state(self.batch_size),
            tf.zeros([len(self._arrived)], tf.int64),
            initial_statistics(self.batch_size),
        )
        return first_state(carry, agent)

    def _run(
        self, is_random: bool, state: LoopState, max_iterations: tf.Tensor, until: tf.Tensor
    ) -> LoopState:
        if not int(max_iterations) and not tf.config.functions_run_eagerly():  # only trace
            tensors = _as_tensors([self._like] * self._messages_per_iteration)
            self._learn[is_random].get_concrete_function(state, int64(0), *tensors)
        for _ in range(int(max_iterations)):
            losses = ordered_sum(list(state.loss_sums.values()))
            if int(self._env_steps) >= int(until) or not np.isfinite(losses.numpy()):
                break
            state = self._iterate(state, int(until) if is_random else None)
        return state

    def _iterate(self, state: LoopState, random_until: int | None) -> LoopState:
        """Learns from the next messages, and requests new ones from their collectors.

        Args:
          state: State before the iteration.
          random_until: Environment steps at which the warm-up ends; None after it.
        """
        is_random = random_until is not None
        started = time.perf_counter()
        state, by_number = self._next_messages(state, random_until)
        waited = time.perf_counter() - started
        messages = list(by_number.values())
        first = int64(min(by_number) * self._num_envs)
        before = int(state.carry.statistics.env_steps)
        seconds = tf.convert_to_tensor(np.asarray(waited))
        state = self._learn[is_random](state, first, *_as_tensors(messages))
        self._env_steps.assign_add(int(state.carry.statistics.env_steps) - before)
        if not is_random:
            self._lags += [self._version - message.version for message in messages]
            self._version += 1
        return state._replace(collect_seconds=state.collect_seconds + seconds)

    def _learn_from(
        self,
        is_random: bool,
        state: LoopState,
        first: tf.Tensor,
        rows: Any,
        time_step: Any,
        statistics: Sequence[EpisodeStatistics],
    ) -> LoopState:
        """Makes the part of an iteration that runs in the graph."""
        width = rows.step_type.shape[1]
        streams = first + tf.range(width, dtype=tf.int64)
        # A rollout has the streams of one iteration, a replay buffer those of all collectors.
        is_kept = self._updates.experience.keeps_rows
        self._updates.experience.add(streams if is_kept else streams - first, rows)
        self._updates.observe(rows)
        carry = state.carry
        of_collector = tf.range(len(self._arrived), dtype=tf.int64) * self._num_envs
        has_collected = (of_collector >= first) & (of_collector < first + width)
        steps = self._num_steps * tf.cast(has_collected, tf.int64)
        state = state._replace(
            carry=carry._replace(
                time_step=time_step,  # after the last row
                vector_steps=carry.vector_steps + steps,
                statistics=_added(carry.statistics, streams, statistics),
            )
        )
        if not is_random:
            _, state = tf.while_loop(
                lambda n, _: n < self._repeats,
                lambda n, state: (n + 1, self._updates.update(state)),
                (tf.constant(0), state),
                parallel_iterations=1,
            )
        time_step = _replaced(carry.time_step, streams, time_step)
        return state._replace(carry=state.carry._replace(time_step=time_step))

    def _next_messages(
        self, state: LoopState, random_until: int | None
    ) -> tuple[LoopState, dict[int, Message]]:
        """Waits for the messages of an iteration; returns them by their collectors' numbers."""
        messages: dict[int, Message] = {}
        while len(messages) < self._messages_per_iteration:
            self._fill(random_until, messages)
            try:
                number = self._next if self.is_repeatable else self._first()
                message = self._take(number)
            except CollectorLost as lost:
                self._replace_collector(lost)
                continue
            if message is None:
                state = self._end_episodes(state, number)
            else:
                messages[number] = message
                self._next = (number + 1) % len(self._arrived)
        return state, messages

    def _fill(self, random_until: int | None, taken: Collection[int]) -> None:
        """Asks each collector that is not in `taken` for messages until enough are under way.

        During the warm-up, no more random messages are asked for than it needs. Collectors with the
        fewest messages come first, from the next one on, which then never waits for a message that
        was not asked for.
        """
        first = self._next
        for level in range(self._in_flight):
            for number in (*range(first, len(self._arrived)), *range(first)):
                if random_until is not None and self._steps_under_way() >= random_until:
                    return
                if self._under_way(number) <= level and number not in taken:
                    self._submit(number, random_until is not None)

    def _under_way(self, number: int) -> int:
        """Returns how many messages a collector was asked for that were not learnt from."""
        return sum(x is not None for x in self._arrived[number]) + self._submitted[number]

    def _steps_under_way(self) -> int:
        """Returns the environment steps of the run, with those of all messages under way."""
        messages = sum(map(self._under_way, range(len(self._arrived))))
        return int(self._env_steps) + messages * self._num_steps * self._num_envs

    def _submit(self, number: int, is_random: bool) -> None:
        values = None
        # Random messages need no weights. Without an update, they change normalizers all the same.
        if not is_random and self._known[number] != self._version:
            if self._sent[0] != self._version:
                self._sent = self._version, [x.numpy() for x in weights(self._updates.agent)]
            self._known[number], values = self._sent
        request = Request(values, self._version, int(self._env_steps), is_random)
        self._place.submit(number, request)
        self._submitted[number] += 1

    def _first(self) -> int:
        """Returns the number of a collector whose next message has arrived."""
        numbers = [(self._next + n) % len(self._arrived) for n in range(len(self._arrived))]
        arrived = next((number for number in numbers if self._arrived[number]), None)
        return self._place.first() if arrived is None else arrived

    def _take(self, number: int) -> Message | None:
        if self._arrived[number]:
            return self._arrived[number].popleft()
        return self._receive(number)

    def _receive(self, number: int) -> Message:
        message = self._place.take(number)
        self._submitted[number] -= 1
        self._losses_in_a_row[number] = 0
        return message

    def _replace_collector(self, lost: CollectorLost) -> None:
        """Puts a new collector, with random numbers of its own, in the place of a lost one.

        Raises:
          UserError: If messages are taken in turns, or the collector is lost again and again.
        """
        number = lost.number
        if self.is_repeatable:
            raise _fatal(lost) from lost
        self._losses_in_a_row[number] += 1
        if self._losses_in_a_row[number] >= _MAX_LOSSES:
            raise _fatal(
                lost,
                f" It was lost {_MAX_LOSSES} times in a row without a message: check the cluster's "
                "machines.",
            ) from lost
        self._restarts[number] += 1
        self._lost_steps += self._submitted[number] * self._num_steps * self._num_envs
        self._submitted[number] = 0
        self._known[number] = -1
        self._arrived[number].append(None)
        print(f"{lost}; a new one takes its place", file=sys.stderr, flush=True)
        self._place.replace(number, self._restarts[number])

    def _end_episodes(self, state: LoopState, number: int) -> LoopState:
        """Truncates the episodes of a lost collector at the observations after its last rows."""
        if not self._updates.experience.keeps_rows:
            return state
        own = slice(number * self._num_envs, (number + 1) * self._num_envs)
        time_step = state.carry.time_step
        mine = tf.nest.map_structure(lambda x: x[own], time_step)
        unfinished = mine.step_type != StepType.FIRST
        streams = tf.range(own.start, own.stop, dtype=tf.int64)[unfinished]
        last = tf.nest.map_structure(lambda x: x[unfinished], mine)
        self._updates.experience.truncate(streams)
        boundary_rows = _boundary_rows(self._updates.agent.collect_data_spec, last)
        self._updates.experience.add(streams, boundary_rows)
        begun = tf.fill(tf.shape(streams), tf.constant(StepType.FIRST))
        step_type = _replaced(time_step.step_type, streams, begun)
        time_step = time_step._replace(step_type=step_type)
        return state._replace(carry=state.carry._replace(time_step=time_step))

    def begin_new_episodes(self, state: LoopState) -> LoopState:
        """Returns the state unchanged: collectors begin new episodes while they are restored."""
        return state

    def measurements(self) -> dict[str, Any]:
        """Returns the mean staleness of the last 100 messages, and what was lost since the start.

        The staleness of a message is the number of messages that the learner has learnt from since
        it sent the weights with which the message was collected.
        """
        losses = {"collector_restarts": sum(self._restarts), "lost_env_steps": self._lost_steps}
        return {
            "staleness_mean": float(np.mean(self._lags)) if self._lags else None,
            **({} if self.is_repeatable else losses),
        }

    @property
    def seconds(self) -> float:
        """Returns the seconds spent in environments: the mean if collectors run in parallel."""
        return self._place.seconds

    def failure_message(self) -> str:
        """Returns what environments raised, one line for each, or "" if none raised."""
        return self._place.failure_message()

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Waits for all messages that are under way, and writes them with the collectors' files.

        Raises:
          UserError: If a message holds numbers that `are_finite` refuses.
        """
        for number in range(len(self._arrived)):
            unpack(self._files_of(number), folder / str(number))
        messages = [x for arrived in self._arrived for x in arrived if x is not None]
        if not are_finite([(x.rows, x.time_step) for x in messages]):
            raise UserError(
                "the message of a collector holds NaN, infinity or a number too large for float32. "
                "Check the observations and the rewards of the environment."
            )
        Tensors(lambda: messages, messages.extend).save(folder)
        state = {
            "next": self._next,
            "version": self._version,
            "are_messages": [[x is not None for x in arrived] for arrived in self._arrived],
            "restarts": self._restarts,
            "lost_steps": self._lost_steps,
            "lags": list(self._lags),
        }
        (folder / _STATE).write_text(json.dumps(state))

    def _files_of(self, number: int) -> dict[str, bytes]:
        """Waits for the messages of a collector, and returns its files."""
        while True:
            try:
                while self._submitted[number]:
                    self._arrived[number].append(self._receive(number))
                return self._place.save(number)
            except CollectorLost as lost:
                self._replace_collector(lost)

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote.

        Raises:
          ValueError: If the saved state does not fit this run.
          UserError: If a collector is lost meanwhile and messages are taken in turns.
        """
        names = "next", "version", "are_messages", "restarts", "lost_steps", "lags"
        state = files.read_object(folder / _STATE, *names)
        are_messages, lags = state["are_messages"], state["lags"]
        are_lists = isinstance(are_messages, list) and isinstance(lags, list)
        if not are_lists or not all(isinstance(x, list) for x in are_messages):
            raise ValueError(f"{_STATE} does not hold lists")
        if len(are_messages) != len(self._arrived):
            raise ValueError(
                f"{len(are_messages)} collectors were saved, but this run has {len(self._arrived)}"
            )
        self._next, self._version, self._lost_steps = (
            int(files.counts(state[name])) for name in ("next", "version", "lost_steps")
        )
        if self._next >= len(self._arrived):
            raise ValueError(f"{_STATE} names a collector that this run does not have")
        self._lags = deque((int(files.counts(lag)) for lag in lags), _LAGS)
        self._restarts = files.counts(state["restarts"], len(self._arrived)).tolist()
        likes = [self._like for of_one in are_messages for is_message in of_one if is_message]
        restored: list[Message] = []
        Tensors(lambda: likes, restored.extend).restore(folder)
        messages = (message._replace(version=int(message.version)) for message in restored)
        for number, restarts in enumerate(self._restarts):
            if restarts:
                self._place.replace(number, restarts)  # with its random numbers
            self._place.begin_restore(number, files_in(folder / str(number)))
        for number, arrived in enumerate(self._arrived):
            arrived.clear()
            for is_message in are_messages[number]:
                arrived.append(next(messages) if is_message else None)
            divergence = self._restored(number)
            if divergence and not arrived:  # The newest row has been learnt from.
                first = number * self._num_envs
                streams = tf.range(first, first + self._num_envs, dtype=tf.int64)
                self._updates.experience.truncate(streams)
            elif divergence and (newest := arrived[-1]) is not None:
                arrived[-1] = _truncated(newest)
            self.divergence = self.divergence or divergence
        self._known = [-1] * len(self._arrived)

    def _restored(self, number: int) -> str:
        try:
            return self._place.restored(number)
        except CollectorLost as lost:
            self._replace_collector(lost)
            return ""  # `_replace_collector` has appended None, which marks the loss.

    def close(self) -> None:
        """Closes the environments."""
        self._place.close()


def empty_message(agent: Agent, num_steps: int, num_envs: int) -> Message:
    """Returns a message of zeros, which has the structure, shapes and dtypes of all messages."""

    def zeros(*leading: int) -> Callable[[tf.TensorSpec], np.ndarray]:
        return lambda spec: np.zeros([*leading, *spec.shape], spec.dtype.as_numpy_dtype)

    return Message(
        tf.nest.map_structure(zeros(num_steps, num_envs), agent.collect_data_spec),
        tf.nest.map_structure(zeros(num_envs), agent.time_step_spec),
        tf.nest.map_structure(lambda x: x.numpy(), initial_statistics(num_envs)),
        0,
    )


def is_on_policy(agent: Agent, experience: Experience) -> bool:
    """Returns whether all rows of an update must be collected with the current weights."""
    return not experience.keeps_rows and not agent.learns_off_policy


def _fatal(lost: CollectorLost, why: str = "") -> RetryableError:
    """Returns the error that ends a run whose collector was lost."""
    return RetryableError(f"{lost}.{why} Run the same command again to resume the run.")


def _as_tensors(messages: Sequence[Message]) -> tuple[Any, Any, Sequence[EpisodeStatistics]]:
    """Returns the rows and time steps of messages, side by side, and their statistics."""
    rows = _joined([message.rows for message in messages], axis=1)
    time_step = _joined([message.time_step for message in messages], axis=0)
    statistics = [message.statistics for message in messages]
    # A float64 of NumPy is a Python number, too; see `int64`.
    arrays = tf.nest.map_structure(np.asarray, (rows, time_step, statistics))
    return tf.nest.map_structure(tf.convert_to_tensor, arrays)


def _joined(nests: Sequence[Any], axis: int) -> Any:
    """Returns one nest of arrays, which are those of `nests` side by side."""
    if len(nests) == 1:
        return nests[0]  # without a copy
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts, axis), *nests)


def _replaced(nest: Any, streams: tf.Tensor, values: Any) -> Any:
    """Returns a nest of tensors [N, ...] in which the rows `streams` [W] have new values."""
    indices = streams[:, tf.newaxis]
    return tf.nest.map_structure(
        lambda old, new: tf.tensor_scatter_nd_update(old, indices, new), nest, values
    )


def _added(
    before: EpisodeStatistics, streams: tf.Tensor, messages: Sequence[EpisodeStatistics]
) -> EpisodeStatistics:
    """Returns the statistics with those of messages added."""
    nothing = before.episode_return[:0], before.episode_length[:0]
    counts = with_empty_window(before)._replace(
        episode_return=nothing[0], episode_length=nothing[1]
    )
    merged = merge_statistics([counts, *messages], before)
    in_flight = _replaced(
        (before.episode_return, before.episode_length),
        streams,
        (merged.episode_return, merged.episode_length),
    )
    return merged._replace(episode_return=in_flight[0], episode_length=in_flight[1])


def _boundary_rows(spec: Trajectory, time_step: TimeStep) -> Trajectory:
    """Returns rows [1, S, ...] that end episodes at a time step [S, ...]."""
    row = tensor_spec.zero_spec_nest(spec, outer_dims=[1, tf.shape(time_step.step_type)[0]])
    return row.replace(
        step_type=tf.fill(tf.shape(row.step_type), tf.constant(StepType.LAST)),
        observation=tf.nest.map_structure(lambda x: x[tf.newaxis], time_step.observation),
        next_step_type=tf.fill(tf.shape(row.step_type), tf.constant(StepType.FIRST)),
        discount=tf.ones_like(row.discount),
    )


def _truncated(message: Message) -> Message:
    """Returns a message whose unfinished episodes end with its last rows."""
    rows = message.rows
    next_step_type = rows.next_step_type.copy()
    next_step_type[-1][rows.step_type[-1] != StepType.LAST] = StepType.LAST
    return message._replace(rows=rows._replace(next_step_type=next_step_type))
