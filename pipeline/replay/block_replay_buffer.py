"""Defines the replay buffer of DeepMind's Lua program, which cuts batches from sampled blocks."""

from __future__ import annotations

import json
import pathlib

import gin
import numpy as np
import tensorflow as tf
from tf_agents.trajectories import time_step as ts
from tf_agents.trajectories import trajectory

from pipeline.ops.returns import valid_mask
from pipeline.replay import columns, disk_segments
from pipeline.replay.replay_buffer import DISCOUNT, NEXT_STEP_TYPE, STEP_TYPE, ReplayBuffer
from pipeline.replay.size_checks import check_memory
from pipeline.utils import files
from pipeline.utils.constraints import PositiveInt, check_arguments
from pipeline.utils.errors import UserError
from pipeline.utils.execution import HOST

_JSON = "block.json"
_MAX_DRAWS = 100


@gin.configurable(denylist=["data_spec", "num_envs", "sequence_length", "seed", "training_spec"])
class BlockReplayBuffer(ReplayBuffer):
    """Stores rows like `ReplayBuffer`, but samples blocks of sequences and cuts batches from them.

    Gin bindings of `ReplayBuffer` apply here, too. There are three differences from it:

    * `block_size` sequences are sampled at a time, with replacement, and their rows are copied.
      Batches are taken from the block in order until less than one batch is left. With blocks of
      512 and batches of 32, a batch may therefore be 15 updates old (`TransitionTable:sample` and
      its `bufferSize`).
    * No sequence starts at a boundary row, so every weight is 1. The exception is a block for which
      `_MAX_DRAWS` redraws do not find enough other rows.
    * A stack of frames does not reach back beyond a lost life (discount 0, and the next row MID).

    A checkpoint contains what is left of the block.
    """

    def __init__(
        self,
        data_spec: trajectory.Trajectory,
        num_envs: int,
        *,
        sequence_length: int,
        seed: int,
        training_spec: trajectory.Trajectory | None = None,
        block_size: PositiveInt = 512,
    ) -> None:
        """Allocates the rings and the block.

        Args:
          data_spec, num_envs, sequence_length, seed, training_spec: See `ReplayBuffer`.
          block_size: Number of sequences sampled at a time.

        Raises:
          UserError: If a block is smaller than a batch; see also `ReplayBuffer`.
        """
        check_arguments(BlockReplayBuffer, locals())
        super().__init__(
            data_spec,
            num_envs,
            sequence_length=sequence_length,
            seed=seed,
            training_spec=training_spec,
        )
        if block_size < self._batch_size:
            raise UserError(
                f"BlockReplayBuffer.block_size = {block_size} is less than ReplayBuffer.batch_size "
                f"= {self._batch_size}. Raise block_size or lower batch_size."
            )
        self._block_size = block_size
        sequence = self._sequence_length * columns.row_bytes(self._spec)
        check_memory("BlockReplayBuffer.block_size", block_size, sequence)
        # A column for each leaf of a sequence, and one for the keys of first rows.
        leaves = [*tf.nest.flatten(self._spec), tf.TensorSpec([], tf.int64)]
        shapes = [[self._sequence_length, *leaf.shape] for leaf in leaves[:-1]] + [[]]
        self._block = [
            columns.create_column(tf.TensorSpec(shape, leaf.dtype), block_size)
            for shape, leaf in zip(shapes, leaves, strict=True)
        ]
        with tf.device(HOST):
            self._taken = tf.Variable(tf.constant(block_size, tf.int64), trainable=False)

    def next_batch(self) -> tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor]:
        """Returns the block's next sequences, from a new block if too few are left.

        Returns:
          See `ReplayBuffer.next_batch`. The keys identify the rows as they were when the block was
          sampled.
        """
        is_used_up = self._taken > self._block_size - self._batch_size
        tf.cond(is_used_up, self._refill, tf.no_op)
        places = self._taken + tf.range(self._batch_size, dtype=tf.int64)
        *leaves, keys = [columns.gather(column, places) for column in self._block]
        self._taken.assign_add(self._batch_size)
        rows = tf.nest.pack_sequence_as(self._spec, leaves)
        return rows, valid_mask(rows.step_type[:, 0]), keys

    def _refill(self) -> tf.Operation:
        rows, keys = self._read(*self._draw_transitions(), self._sequence_length)
        places = tf.range(self._block_size, dtype=tf.int64)
        values = [*tf.nest.flatten(rows), keys[:, 0]]
        for column, of_column in zip(self._block, values, strict=True):
            columns.scatter(column, places, of_column)
        return tf.group(self._taken.assign(0, read_value=False))

    def _draw_transitions(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Draws start rows as `_draw` does, redrawing boundary rows up to `_MAX_DRAWS` times."""

        def is_boundary(streams: tf.Tensor, starts: tf.Tensor) -> tf.Tensor:
            keys = self._keys(streams, starts)
            return columns.gather(self._columns[STEP_TYPE], keys) == ts.StepType.LAST

        def redraw(streams: tf.Tensor, starts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            boundary = is_boundary(streams, starts)
            others, positions = self._draw(self._block_size)
            return tf.where(boundary, others, streams), tf.where(boundary, positions, starts)

        return tf.while_loop(
            lambda *drawn: tf.reduce_any(is_boundary(*drawn)),
            redraw,
            self._draw(self._block_size),
            parallel_iterations=1,
            maximum_iterations=_MAX_DRAWS,
        )

    def _cuts(self, keys: tf.Tensor) -> tf.Tensor:
        is_mid = columns.gather(self._columns[NEXT_STEP_TYPE], keys) == ts.StepType.MID
        is_cut = columns.gather(self._columns[DISCOUNT], keys) == 0
        return super()._cuts(keys) | (is_mid & is_cut)

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes what `ReplayBuffer.save` writes, and the block if a batch of it is left."""
        super().save(folder, earlier)
        filled = self._filled()
        # A block that is not saved counts as used up, even if a resumed run has smaller batches.
        taken = int(self._taken) if filled.any() else self._block_size
        (folder / _JSON).write_text(json.dumps(self._block_header() | {"taken": taken}))
        disk_segments.save(folder, self._block_columns(), filled, None)

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote into this buffer, which must be empty.

        Raises:
          ValueError: If the buffer is not empty, or what was saved does not fit it.
        """
        header = self._block_header()
        saved = files.read_object(folder / _JSON, *header, "taken")
        if {name: saved[name] for name in header} != header:
            raise ValueError(
                f"The replay buffer's block was saved as {saved}, but this run has {header}"
            )
        super().restore(folder)
        self._taken.assign(files.counts(saved["taken"]))
        disk_segments.restore(folder, self._block_columns(), self._filled())

    def _block_header(self) -> dict[str, int]:
        return {"block_size": self._block_size, "sequence_length": self._sequence_length}

    def _block_columns(self) -> list[disk_segments.Column]:
        names = [f"block_{name}" for name in (*columns.column_names(self._spec), "keys")]
        return [
            disk_segments.Column(name, variable, self._block_size)
            for name, variable in zip(names, self._block, strict=True)
        ]

    def _filled(self) -> np.ndarray:
        """Returns the number of rows of the block that a checkpoint contains, int64 [1]."""
        is_left = int(self._taken) <= self._block_size - self._batch_size
        return np.array([self._block_size if is_left else 0])
