"""Defines a replay buffer: one ring of rows per stream, sampled uniformly inside the graph."""

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

from pipeline.ops.observations import is_frame_stack
from pipeline.ops.randomness import stateless_seed, stream_key
from pipeline.ops.returns import valid_mask
from pipeline.replay import columns, disk_segments
from pipeline.replay.size_checks import check_capacity, iteration_sizes
from pipeline.utils import files
from pipeline.utils.constraints import Positive, PositiveInt, check_arguments
from pipeline.utils.errors import UserError
from pipeline.utils.execution import HOST

# Indices into the flattened columns of a Trajectory.
STEP_TYPE, OBSERVATION, NEXT_STEP_TYPE, DISCOUNT = 0, 1, -3, -1

_JSON = "replay_buffer.json"


@gin.configurable(denylist=["data_spec", "num_envs", "sequence_length", "seed", "training_spec"])
class ReplayBuffer:
    """Stores the newest rows of every stream and samples sequences of them uniformly.

    See `pipeline.replay.experience` for the memory layout.

    If observations are stacks of frames (`is_frame_stack`), only the newest frame of each stack is
    stored. Sampling rebuilds the stack from the preceding rows, with zero frames before the
    episode's first row, as the Arcade Learning Environment pads it (Mnih et al. 2015, "Human-level
    control through deep reinforcement learning", methods; `dqn_zoo` stores frames in the same way).

    A sequence of T rows may start at any row whose T - 1 successors are stored and whose older
    frames are not overwritten. It may span several episodes: the learner masks the rows beyond a
    boundary row (`pipeline.ops.returns`).

    Attributes:
      collect_steps: Vector steps collected in an iteration.
      num_batches: Batches sampled in an iteration.
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
        capacity: PositiveInt = gin.REQUIRED,
        batch_size: PositiveInt = 32,
        env_steps_per_update: Positive = 1,
        store_single_frames: bool = True,
    ) -> None:
        """Allocates the rings.

        Args:
          data_spec: Unbatched specs of a row.
          num_envs: Number of streams.
          sequence_length: Rows of a sampled sequence, n + 1 for n-step targets: the last row only
            supplies the observation to bootstrap from.
          seed: Seed of the run.
          training_spec: Not used, because rows are returned as they were collected.
          capacity: Rows stored over all environments. Each has `capacity // num_envs`.
          batch_size: Number of sequences in a batch.
          env_steps_per_update: Number of environment steps collected for each batch. The vector
            step that resets an environment counts, too.
          store_single_frames: Whether to store only the newest frame of a stack of frames.

        Raises:
          UserError: If a value is invalid, or the capacity is too small or too large.
        """
        del training_spec
        check_arguments(ReplayBuffer, locals())
        frames = data_spec.observation
        stacked = store_single_frames and not tf.nest.is_nested(frames) and is_frame_stack(frames)
        self._num_envs = num_envs
        self._sequence_length = sequence_length
        self._stack = frames.shape[0] if stacked else 1
        self._batch_size = batch_size
        self._spec = data_spec
        newest = tf.TensorSpec(frames.shape[1:], frames.dtype) if self._stack > 1 else frames
        self._stored_spec = data_spec._replace(observation=newest)
        self._names = columns.column_names(self._stored_spec)
        self._key = stream_key(seed, "replay")
        self.collect_steps, self.num_batches = iteration_sizes(env_steps_per_update, num_envs)
        needs = {
            "sequence": sequence_length,
            "iteration (ReplayBuffer.env_steps_per_update)": self.collect_steps,
        }
        check_capacity(capacity, num_envs, needs, self._stack - 1, self._stored_spec)
        self.capacity = capacity
        self._stream_capacity = capacity // num_envs
        self._create_variables()

    def _create_variables(self) -> None:
        # One more row, after the rings, holds the zero frame.
        self._zero_row = self._num_envs * self._stream_capacity
        leaves = tf.nest.flatten(self._stored_spec)
        self._columns = [columns.create_column(spec, self._zero_row + 1) for spec in leaves]
        # Unwritten rows read as episode ends, so that no stack reaches back into them.
        self._columns[STEP_TYPE].assign(tf.fill([self._zero_row + 1], ts.StepType.LAST))
        if self._stack > 1:
            zero_frame = tf.zeros(leaves[OBSERVATION].shape, tf.uint8)
            zero_row = tf.constant(self._zero_row, tf.int64)
            columns.scatter(self._columns[OBSERVATION], zero_row, zero_frame)
        with tf.device(HOST):
            # Rows ever written to each stream. Row p is at p % stream_capacity of its ring.
            self._positions = tf.Variable(tf.zeros([self._num_envs], tf.int64), trainable=False)
            self._batches = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            # True as long as every compared stack was rebuilt correctly.
            self._stacks_hold = tf.Variable(True, trainable=False)
        self._checked = np.zeros([self._num_envs], np.int64)  # rows found finite, as positions

    @property
    def longest_addition(self) -> int:
        """Returns the largest number of a stream's rows that may be added at a time."""
        return self._stream_capacity - (self._stack - 1)

    @property
    def size(self) -> tf.Tensor:
        """Returns the number of rows stored over all streams, int64 []."""
        return tf.reduce_sum(tf.minimum(self._positions, self._stream_capacity))

    def add(self, stream_ids: tf.Tensor, rows: trajectory.Trajectory) -> None:
        """Writes `rows` [T, S, ...] over the oldest rows of the streams `stream_ids` [S].

        T plus the number of older frames in a stack must not exceed the rows of a ring, so that no
        added row is overwritten in the same call. Every added stack is compared with the one that
        sampling rebuilds; see `check_rows`.
        """
        streams = tf.cast(stream_ids, tf.int64)
        num_rows = rows.step_type.shape[0] or tf.shape(rows.step_type)[0]
        positions = columns.gather(self._positions, streams)
        positions += tf.range(tf.cast(num_rows, tf.int64))[:, tf.newaxis]
        keys = self._keys(streams, positions)
        stored = rows
        if self._stack > 1:
            stored = rows._replace(observation=rows.observation[:, :, -1])
        for column, values in zip(self._columns, tf.nest.flatten(stored), strict=True):
            columns.scatter(column, keys, values)
        columns.scatter(self._positions, streams, positions[-1] + 1)
        if self._stack > 1:
            self._compare_stacks(streams, positions, rows.observation)

    def _compare_stacks(self, streams: tf.Tensor, positions: tf.Tensor, seen: tf.Tensor) -> None:
        """Compares the added stacks `seen` [T, S, ...] with those that sampling rebuilds."""
        of_each = tf.reshape(tf.broadcast_to(streams, tf.shape(positions)), [-1, 1])
        rebuilt = self._read(of_each, tf.reshape(positions, [-1, 1]), 1)[0].observation
        same = tf.reshape(rebuilt, tf.shape(seen)) == seen
        self._stacks_hold.assign(self._stacks_hold & tf.reduce_all(same))

    def begin(self, prepare: Callable[[trajectory.Trajectory], trajectory.Trajectory]) -> None:
        """Does nothing, because rows are trained on as they were collected."""

    def next_batch(self) -> tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor]:
        """Samples sequences uniformly from all valid start rows, those that `check_ready` counts.

        Returns:
          The trajectory [batch_size, sequence_length, ...]; weights [batch_size] float32, 0 where
          the first row is a boundary row and 1 elsewhere; keys [batch_size] int64.
        """
        rows, keys = self._read(*self._draw(self._batch_size), self._sequence_length)
        return rows, valid_mask(rows.step_type[:, 0]), keys[:, 0]

    def end(self, finish: Callable[[trajectory.Trajectory], Any]) -> None:
        """Does nothing, because rows stay until newer ones overwrite them."""

    def _draw(self, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Draws streams [number, 1] and positions [number, 1] of start rows, all equally likely."""
        lowest, counts = self._valid_starts()
        ends = tf.cumsum(counts)
        seed = stateless_seed(self._key, self._batches.assign_add(1))
        ranks = tf.random.stateless_uniform([number, 1], seed, 0, ends[-1], tf.int64, alg="philox")
        # Ranks number the start rows of all streams consecutively, stream by stream.
        streams = tf.reduce_sum(tf.cast(ranks >= ends, tf.int64), axis=1, keepdims=True)
        return streams, ranks - tf.gather(ends - counts - lowest, streams)

    def _keys(self, streams: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        return streams * self._stream_capacity + positions % self._stream_capacity

    def _valid_starts(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns each stream's lowest valid start position [N] and number of valid starts [N]."""
        # The older frames of a start row's stack must still be stored. Positions below 0 map to the
        # ring's last rows, which read as episode ends until they are written.
        lowest = tf.maximum(self._positions - (self._stream_capacity - self._stack + 1), 0)
        return lowest, tf.maximum(self._positions - (self._sequence_length - 1) - lowest, 0)

    def _read(
        self, streams: tf.Tensor, starts: tf.Tensor, num_rows: int
    ) -> tuple[trajectory.Trajectory, tf.Tensor]:
        """Returns rows [B, num_rows, ...] from `starts` [B, 1] of `streams` [B, 1], and keys."""
        older = self._stack - 1
        window = self._keys(streams, starts + tf.range(-older, num_rows, dtype=tf.int64))
        keys = window[:, older:]
        indices = [keys] * len(self._columns)
        if self._stack > 1:
            indices[OBSERVATION] = self._frame_keys(window)
        leaves = map(columns.gather, self._columns, indices)
        return tf.nest.pack_sequence_as(self._spec, list(leaves)), keys

    def _frame_keys(self, window: tf.Tensor) -> tf.Tensor:
        """Returns the keys [B, T, stack] of the frames in the stacks of `window` [B, stack-1+T]."""
        num_rows = window.shape[1] - self._stack + 1
        stacks = np.arange(num_rows)[:, np.newaxis] + np.arange(self._stack)
        part = tf.cumsum(tf.cast(self._cuts(window), tf.int32), axis=1, exclusive=True)
        same = tf.gather(part, stacks, axis=1) == part[:, self._stack - 1 :, tf.newaxis]
        return tf.where(same, tf.gather(window, stacks, axis=1), self._zero_row)

    def _cuts(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns True for rows whose frames belong to no later stack; bool, shaped like `keys`."""
        return columns.gather(self._columns[STEP_TYPE], keys) == ts.StepType.LAST

    def check_ready(self) -> None:
        """Checks that a sequence can be sampled.

        Raises:
          UserError: If no row can start a sequence.
        """
        if not tf.reduce_any(self._valid_starts()[1] > 0):
            raise UserError(
                f"The replay buffer holds {self.size:_} rows of {self._num_envs} environments, "
                f"which is too few for one sequence of {self._sequence_length} rows. Raise "
                "initialize_replay_buffer.num_env_steps."
            )

    def check_rows(self) -> None:
        """Checks that all stacks were rebuilt correctly.

        Raises:
          UserError: If a stack cannot be rebuilt from its rows.
        """
        if not self._stacks_hold:
            raise UserError(
                f"Observations of shape {self._spec.observation.shape} are not stacks of the "
                "newest frames with zeros before an episode's first frame. Set "
                "ReplayBuffer.store_single_frames = False. Alternatively, set "
                "train.create_experience = @BlockReplayBuffer (with environments/atari_deepmind) "
                'or padding_type="zero" (in gymnasium.wrappers.FrameStackObservation). Start over '
                "with --restart_behavior=restart if there is a checkpoint."
            )

    def truncate(self, stream_ids: tf.Tensor | None = None) -> None:
        """Marks each stream's newest transition as leading to its episode's last time step.

        The observation of that time step is not stored yet. It must be the stream's next row.

        Args:
          stream_ids: Streams [S] int64; None for all.
        """
        streams = tf.range(self._num_envs, dtype=tf.int64) if stream_ids is None else stream_ids
        streams = streams[tf.gather(self._positions, streams) > 0]
        newest = self._keys(streams, tf.gather(self._positions, streams) - 1)
        column = self._columns[NEXT_STEP_TYPE]
        newest = newest[~self._cuts(newest)]  # where something has ended already
        columns.scatter(column, newest, tf.fill(newest.shape, ts.StepType.LAST))

    def bad_columns(self) -> list[str]:
        """Describes the columns with NaN or infinity in a stored row. Runs eagerly.

        Rows that were found finite are not read again.
        """
        size, ends = self._stream_capacity, self._positions.numpy()
        starts = np.maximum(self._checked, ends - size)
        of_streams = enumerate(zip(starts, ends, strict=True))
        keys = np.concatenate([i * size + np.arange(*ends) % size for i, ends in of_streams])
        if not (bad := columns.bad_columns(self._stored_spec, self._columns, keys)):
            self._checked = ends
        return bad

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes `replay_buffer.json` and the rows, as segments (see `disk_segments`).

        Segments that have not changed since `earlier` are linked to its files.
        """
        state = {name: variable.numpy().tolist() for name, variable in self._state().items()}
        (folder / _JSON).write_text(json.dumps(self._header() | state, indent=2))
        shared = None
        with contextlib.suppress(ValueError, OSError):  # Write all rows again if it is damaged.
            shared = (earlier, self._read_state(earlier)["positions"]) if earlier else None
        disk_segments.save(folder, self._rings(), self._positions.numpy(), shared)

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote into this buffer, which must be empty.

        Raises:
          ValueError: If the buffer is not empty, or the saved rows do not fit it.
        """
        if self.size > 0:
            raise ValueError(
                f"The replay buffer holds {self.size:_} rows. Restore into an empty one."
            )
        saved = self._read_state(folder)
        for name, variable in self._state().items():
            variable.assign(saved[name])
        disk_segments.restore(folder, self._rings(), self._positions.numpy())
        self._checked = np.zeros_like(self._checked)

    def _read_state(self, folder: pathlib.Path) -> dict[str, Any]:
        saved = files.read_object(folder / _JSON, *self._header(), *self._state())
        for field, now in self._header().items():
            if saved[field] != now:
                raise ValueError(
                    f"The replay buffer was saved with {field} = {saved[field]}, but now has "
                    f"{field} = {now}"
                )
        return {
            "positions": files.counts(saved["positions"], self._num_envs),
            "batches": files.counts(saved["batches"]),
            "stacks_hold": saved["stacks_hold"] is True,
        }

    def _header(self) -> dict[str, Any]:
        """Returns the values that must be the same when saving and restoring."""
        return {
            "num_envs": self._num_envs,
            "stream_capacity": self._stream_capacity,
            "stack": self._stack,
            "columns": columns.describe_columns(self._stored_spec),
        }

    def _state(self) -> dict[str, tf.Variable]:
        return dict(positions=self._positions, batches=self._batches, stacks_hold=self._stacks_hold)

    def _rings(self) -> list[disk_segments.Column]:
        named = zip(self._names, self._columns, strict=True)
        return [disk_segments.Column(*column, self._stream_capacity) for column in named]
