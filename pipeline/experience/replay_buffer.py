"""A replay buffer: one ring of rows a stream, sampled uniformly inside the graph."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import tensorflow as tf
from tf_agents.trajectories import time_step as ts
from tf_agents.trajectories import trajectory

from pipeline import data_files
from pipeline.errors import UserError, check_whole
from pipeline.experience import segments, storage
from pipeline.experience.sizes import check_capacity, iteration_sizes
from pipeline.observations import is_frame_stack
from pipeline.randomness import stateless_seed, stream_key
from pipeline.returns import valid_mask

# Places among the flattened columns of a Trajectory.
STEP_TYPE, OBSERVATION, NEXT_STEP_TYPE, REWARD, DISCOUNT = 0, 1, -3, -2, -1

_JSON = "replay_buffer.json"


@gin.configurable(denylist=["data_spec", "num_envs", "sequence_length", "seed", "training_spec"])
class ReplayBuffer:
    """Keeps the newest rows of every stream and samples sequences of them uniformly.

    Layout: see `pipeline.experience`. Of a stack of frames (`is_frame_stack`) only the newest frame
    is stored; sampling rebuilds the stack from the rows before, with zero frames before the
    episode's first row, as the Arcade Learning Environment pads it (Mnih et al. 2015, "Human-level
    control through deep reinforcement learning", methods; `dqn_zoo` stores frames likewise). Until
    `check_ready` accepts them, every added stack is compared with what sampling makes of it.

    A sequence of T rows may start at any row whose T - 1 successors are held and whose older frames
    are not overwritten. It may run across episodes; masking what lies beyond a boundary row is the
    learner's part (`pipeline.returns`).
    """

    keeps_rows = True

    def __init__(
        self,
        data_spec: trajectory.Trajectory,
        num_envs: int,
        *,
        sequence_length: int,
        seed: int,
        training_spec: trajectory.Trajectory | None = None,
        capacity: int = gin.REQUIRED,
        batch_size: int = 32,
        env_steps_per_update: int | float = 1,
        store_single_frames: bool = True,
    ) -> None:
        """Allocates the rings.

        Args:
            data_spec: unbatched specs of a row.
            num_envs: streams.
            sequence_length: rows of a sampled sequence, n + 1 for n-step targets: the last row only
                supplies the observation to bootstrap from.
            seed: the run's seed.
            training_spec: not used; the ring hands out rows as they were collected.
            capacity: rows held over all streams; each stream has `capacity // num_envs`.
            batch_size: sequences in a batch.
            env_steps_per_update: environment steps collected for each batch.
            store_single_frames: whether to store only the newest frame of a stack of frames.

        Raises:
            UserError: a value makes no sense, or the capacity is too small or too large.
        """
        del training_spec
        check_whole("ReplayBuffer.batch_size", batch_size)
        frames = data_spec.observation
        stacked = store_single_frames and not tf.nest.is_nested(frames) and is_frame_stack(frames)
        self._num_envs = num_envs
        self._sequence_length = sequence_length
        self._stack = frames.shape[0] if stacked else 1
        self._batch_size = batch_size
        self._spec = data_spec
        self._stored_spec = storage.newest_frame_spec(data_spec) if self._stack > 1 else data_spec
        self._names = storage.column_names(self._stored_spec)
        self._key = stream_key(seed, "replay")
        self._collect_steps, self._num_batches = iteration_sizes(env_steps_per_update, num_envs)
        needs = {"sequence": sequence_length, "iteration": self._collect_steps}
        check_capacity(capacity, num_envs, needs, self._stack - 1, self._stored_spec)
        self._stream_capacity = capacity // num_envs
        self._create_variables()

    def _create_variables(self) -> None:
        # The rings, and after them one row for the zero frame.
        self._zero_row = self._num_envs * self._stream_capacity
        leaves = tf.nest.flatten(self._stored_spec)
        self._columns = [storage.create_column(spec, self._zero_row + 1) for spec in leaves]
        # Rows not yet written read as episode ends, so that no stack reaches back into them.
        self._columns[STEP_TYPE].assign(tf.fill([self._zero_row + 1], ts.StepType.LAST))
        if self._stack > 1:
            zero_frame = tf.zeros(leaves[OBSERVATION].shape, tf.uint8)
            zero_row = tf.constant(self._zero_row, tf.int64)
            storage.scatter(self._columns[OBSERVATION], zero_row, zero_frame)
        with tf.device("/CPU:0"):
            # Rows ever written to each stream: row p lies at p % stream_capacity of its ring.
            self._positions = tf.Variable(tf.zeros([self._num_envs], tf.int64), trainable=False)
            self._batches = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            self._stacks_hold = tf.Variable(True, trainable=False)  # all that were compared
        self._compares_stacks = self._stack > 1

    @property
    def collect_steps(self) -> int:
        """Vector steps collected in an iteration."""
        return self._collect_steps

    @property
    def num_batches(self) -> int:
        """Batches handed out in an iteration."""
        return self._num_batches

    @property
    def size(self) -> tf.Tensor:
        """Rows held now, over all streams: int64 []."""
        return tf.reduce_sum(tf.minimum(self._positions, self._stream_capacity))

    def add(self, stream_ids: tf.Tensor, rows: trajectory.Trajectory) -> None:
        """Writes `rows` [T, S, ...] over the oldest rows of the streams `stream_ids` [S].

        T and a stack's older frames are at most the rows of a ring: nothing here is overwritten at
        once. What is traced after `check_ready`, as training is, compares no stacks any more.
        """
        streams = tf.cast(stream_ids, tf.int64)
        num_rows = rows.step_type.shape[0] or tf.shape(rows.step_type)[0]
        positions = storage.gather(self._positions, streams)
        positions += tf.range(tf.cast(num_rows, tf.int64))[:, tf.newaxis]
        keys = self._keys(streams, positions)
        stored = rows
        if self._stack > 1:
            stored = rows._replace(observation=rows.observation[:, :, -1])
        for column, values in zip(self._columns, tf.nest.flatten(stored), strict=True):
            storage.scatter(column, keys, values)
        storage.scatter(self._positions, streams, positions[-1] + 1)
        if self._compares_stacks:
            self._compare_stacks(streams, positions, rows.observation)

    def _compare_stacks(self, streams: tf.Tensor, positions: tf.Tensor, seen: tf.Tensor) -> None:
        """Compares the stacks `seen` [T, S, ...], just added, with those that sampling rebuilds."""
        of_each = tf.reshape(tf.broadcast_to(streams, tf.shape(positions)), [-1, 1])
        rebuilt = self._read(of_each, tf.reshape(positions, [-1, 1]), 1)[0].observation
        same = tf.reshape(rebuilt, tf.shape(seen)) == seen
        self._stacks_hold.assign(self._stacks_hold & tf.reduce_all(same))

    def begin(self, prepare: Callable[[trajectory.Trajectory], trajectory.Trajectory]) -> None:
        """Does nothing: rows are learnt from as they were collected."""

    def next_batch(self) -> tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor]:
        """Samples sequences, every start row that `check_ready` counts being equally likely.

        Returns:
            The trajectory [batch_size, sequence_length, ...]; weights [batch_size] float32, 0 where
            the first row is a boundary row and 1 elsewhere; keys [batch_size] int64.
        """
        rows, keys = self._read(*self._draw(self._batch_size), self._sequence_length)
        return rows, valid_mask(rows.step_type[:, 0]), keys[:, 0]

    def feedback(self, keys: tf.Tensor, loss_info: Any) -> None:
        """Does nothing: the probability of a row does not depend on its loss."""

    def end(self, finish: Callable[[trajectory.Trajectory], Any]) -> None:
        """Does nothing: the rows stay until newer ones overwrite them."""

    def _draw(self, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Streams [number, 1] and positions [number, 1] of start rows, uniform over all of them."""
        lowest, counts = self._valid_starts()
        ends = tf.cumsum(counts)
        seed = stateless_seed(self._key, self._batches.assign_add(1))
        ranks = tf.random.stateless_uniform([number, 1], seed, 0, ends[-1], tf.int64, alg="philox")
        # The stream in which the start row of that rank lies, all streams' start rows in a line.
        streams = tf.reduce_sum(tf.cast(ranks >= ends, tf.int64), axis=1, keepdims=True)
        return streams, ranks - tf.gather(ends - counts - lowest, streams)

    def _keys(self, streams: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        return streams * self._stream_capacity + positions % self._stream_capacity

    def _valid_starts(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The lowest position [N] of a stream that may start a sequence, and how many may [N]."""
        # The frames of a stack's older rows must still be there: positions below 0 were never
        # written, and stay so until the ring's last rows are.
        lowest = tf.maximum(self._positions - (self._stream_capacity - self._stack + 1), 0)
        return lowest, tf.maximum(self._positions - (self._sequence_length - 1) - lowest, 0)

    def _read(
        self, streams: tf.Tensor, starts: tf.Tensor, num_rows: int
    ) -> tuple[trajectory.Trajectory, tf.Tensor]:
        """Rows [B, num_rows, ...] from `starts` [B, 1] of `streams` [B, 1], and their keys."""
        older = self._stack - 1
        window = self._keys(streams, starts + tf.range(-older, num_rows, dtype=tf.int64))
        keys = window[:, older:]
        indices = [keys] * len(self._columns)
        if self._stack > 1:
            indices[OBSERVATION] = self._frame_keys(window)
        leaves = map(storage.gather, self._columns, indices)
        return tf.nest.pack_sequence_as(self._spec, list(leaves)), keys

    def _frame_keys(self, window: tf.Tensor) -> tf.Tensor:
        """Keys [B, T, stack] of the frames that make the stacks of `window` [B, stack - 1 + T]."""
        num_rows = window.shape[1] - self._stack + 1
        stacks = np.arange(num_rows)[:, np.newaxis] + np.arange(self._stack)
        part = tf.cumsum(tf.cast(self._cuts(window), tf.int32), axis=1, exclusive=True)
        same = tf.gather(part, stacks, axis=1) == part[:, self._stack - 1 :, tf.newaxis]
        return tf.where(same, tf.gather(window, stacks, axis=1), self._zero_row)

    def _cuts(self, keys: tf.Tensor) -> tf.Tensor:
        """Which rows' frames belong to no later stack, bool of the shape of `keys`."""
        return storage.gather(self._columns[STEP_TYPE], keys) == ts.StepType.LAST

    def check_ready(self) -> None:
        """Raises UserError if no row can start a sequence, or rows are no stacks of frames."""
        if not tf.reduce_any(self._valid_starts()[1] > 0):
            raise UserError(
                f"The replay buffer holds {self.size:_} rows of {self._num_envs} environments, too "
                f"few for one sequence of {self._sequence_length}: raise "
                "initialize_replay_buffer.num_env_steps"
            )
        if not self._stacks_hold:
            raise UserError(
                f"Observations of shape {self._spec.observation.shape} are no stacks of the newest "
                "frames, zeros before an episode's first. Set ReplayBuffer.store_single_frames = "
                "False; or, with environments/atari_deepmind, train.create_experience = "
                '@BlockReplayBuffer; or of FrameStackObservation (gymnasium) padding_type="zero"'
            )
        self._compares_stacks = False

    def truncate(self) -> None:
        """Marks that each stream's newest transition led to its episode's last time step.

        That time step's observation is not held yet; it has to be the next row of the stream.
        """
        streams = tf.where(self._positions > 0)[:, 0]
        newest = self._keys(streams, tf.gather(self._positions, streams) - 1)
        column = self._columns[NEXT_STEP_TYPE]
        newest = newest[tf.gather(self._columns[STEP_TYPE], newest) != ts.StepType.LAST]
        storage.scatter(column, newest, tf.fill(newest.shape, ts.StepType.LAST))

    def bad_columns(self) -> list[str]:
        """Columns of which a row held is NaN or infinite (eager)."""
        held = np.minimum(self._positions, self._stream_capacity)
        return storage.bad_columns(self._names, self._columns, held, self._stream_capacity)

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes `replay_buffer.json` and the rows as `segments`, those since `earlier` only."""
        state = {name: variable.numpy().tolist() for name, variable in self._state().items()}
        (folder / _JSON).write_text(json.dumps(self._header() | state, indent=2))
        shared = None
        with contextlib.suppress(ValueError):  # what was damaged since is written anew
            shared = (earlier, self._read_state(earlier)["positions"]) if earlier else None
        segments.save(folder, self._rings(), self._positions.numpy(), shared)

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote into this buffer, which must be empty.

        Raises:
            ValueError: the buffer is not empty, or what was saved does not fit it.
        """
        if self.size > 0:
            raise ValueError(f"The replay buffer holds {self.size:_} rows: restore an empty one.")
        saved = self._read_state(folder)
        for name, variable in self._state().items():
            variable.assign(saved[name])
        segments.restore(folder, self._rings(), self._positions.numpy())

    def _read_state(self, folder: pathlib.Path) -> dict[str, Any]:
        saved = data_files.read_object(folder / _JSON, *self._header(), *self._state())
        for field, now in self._header().items():
            if saved[field] != now:
                raise ValueError(f"Replay buffer: {field} was saved as {saved[field]}, now {now}")
        return {
            "positions": data_files.counts(saved["positions"], self._num_envs),
            "batches": data_files.counts(saved["batches"]),
            "stacks_hold": saved["stacks_hold"] is True,
        }

    def _header(self) -> dict[str, Any]:
        """What must be the same when saving and restoring."""
        return {
            "num_envs": self._num_envs,
            "stream_capacity": self._stream_capacity,
            "stack": self._stack,
            "columns": storage.describe_columns(self._stored_spec),
        }

    def _state(self) -> dict[str, tf.Variable]:
        return dict(positions=self._positions, batches=self._batches, stacks_hold=self._stacks_hold)

    def _rings(self) -> list[segments.Column]:
        named = zip(self._names, self._columns, strict=True)
        return [segments.Column(*column, self._stream_capacity) for column in named]
