"""The replay buffer of DeepMind's Lua program: minibatches are cut from blocks of samples."""

from __future__ import annotations

import json
import pathlib

import gin
import numpy as np
import tensorflow as tf
from tf_agents.trajectories import time_step as ts
from tf_agents.trajectories import trajectory

from pipeline import data_files
from pipeline.errors import UserError, check_whole
from pipeline.experience import segments, storage
from pipeline.experience.replay_buffer import DISCOUNT, NEXT_STEP_TYPE, STEP_TYPE, ReplayBuffer
from pipeline.returns import valid_mask

_JSON = "block.json"
_MAX_DRAWS = 100


@gin.configurable(denylist=["data_spec", "num_envs", "sequence_length", "seed", "training_spec"])
class BlockReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer`, whose bindings hold here too, with three differences.

    * `block_size` sequences are sampled at a time, with replacement, and their rows copied; batches
      are taken from the block in order until less than one is left. So with 512 and batches of 32 a
      batch may be 15 updates old (`TransitionTable:sample`, its `bufferSize`).
    * No sequence starts at a boundary row: every weight is 1.
    * A stack of frames does not reach back beyond a lost life (discount 0, and the next row MID).

    What is left of the block is part of a checkpoint.
    """

    def __init__(
        self,
        data_spec: trajectory.Trajectory,
        num_envs: int,
        *,
        sequence_length: int,
        seed: int,
        training_spec: trajectory.Trajectory | None = None,
        block_size: int = 512,
    ) -> None:
        """Args:
            data_spec, num_envs, sequence_length, seed, training_spec: see `ReplayBuffer`.
            block_size: sequences sampled at a time.

        Raises:
            UserError: a block holds no batch; see also `ReplayBuffer`.
        """
        check_whole("BlockReplayBuffer.block_size", block_size)
        super().__init__(
            data_spec,
            num_envs,
            sequence_length=sequence_length,
            seed=seed,
            training_spec=training_spec,
        )
        if block_size < self._batch_size:
            raise UserError(
                f"BlockReplayBuffer.block_size = {block_size} holds no batch of "
                f"ReplayBuffer.batch_size = {self._batch_size}: raise the one or lower the other"
            )
        self._block_size = block_size
        # A column for each leaf of a sequence, and one for the keys of first rows.
        leaves = [*tf.nest.flatten(self._spec), tf.TensorSpec([], tf.int64)]
        shapes = [[self._sequence_length, *leaf.shape] for leaf in leaves[:-1]] + [[]]
        self._block = [
            storage.create_column(tf.TensorSpec(shape, leaf.dtype), block_size)
            for shape, leaf in zip(shapes, leaves, strict=True)
        ]
        with tf.device("/CPU:0"):
            self._taken = tf.Variable(tf.constant(block_size, tf.int64), trainable=False)

    def next_batch(self) -> tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor]:
        """The block's next sequences, of a new block if it has not enough.

        Returns:
            As `ReplayBuffer.next_batch`; keys name the rows as they were when the block was drawn.
        """
        is_used_up = self._taken > self._block_size - self._batch_size
        tf.cond(is_used_up, self._refill, tf.no_op)
        places = self._taken + tf.range(self._batch_size, dtype=tf.int64)
        *leaves, keys = [storage.gather(column, places) for column in self._block]
        self._taken.assign_add(self._batch_size)
        rows = tf.nest.pack_sequence_as(self._spec, leaves)
        return rows, valid_mask(rows.step_type[:, 0]), keys

    def _refill(self) -> tf.Operation:
        rows, keys = self._read(*self._draw_transitions(), self._sequence_length)
        places = tf.range(self._block_size, dtype=tf.int64)
        values = [*tf.nest.flatten(rows), keys[:, 0]]
        for column, of_column in zip(self._block, values, strict=True):
            storage.scatter(column, places, of_column)
        return tf.group(self._taken.assign(0, read_value=False))

    def _draw_transitions(self) -> tuple[tf.Tensor, tf.Tensor]:
        """As `_draw`; boundary rows are drawn again, until there are none or in vain."""

        def is_boundary(streams: tf.Tensor, starts: tf.Tensor) -> tf.Tensor:
            keys = self._keys(streams, starts)
            return storage.gather(self._columns[STEP_TYPE], keys) == ts.StepType.LAST

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
        is_mid = storage.gather(self._columns[NEXT_STEP_TYPE], keys) == ts.StepType.MID
        is_cut = storage.gather(self._columns[DISCOUNT], keys) == 0
        return super()._cuts(keys) | (is_mid & is_cut)

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """As `ReplayBuffer.save`, and the block, if a batch of it is left."""
        super().save(folder, earlier)
        filled = self._filled()
        # Used up for batches of another size, too, that a resumed run may have.
        taken = int(self._taken) if filled.any() else self._block_size
        (folder / _JSON).write_text(json.dumps(self._block_header() | {"taken": taken}))
        segments.save(folder, self._block_columns(), filled, None)

    def restore(self, folder: pathlib.Path) -> None:
        """As `ReplayBuffer.restore`."""
        header = self._block_header()
        saved = data_files.read_object(folder / _JSON, *header, "taken")
        if {name: saved[name] for name in header} != header:
            raise ValueError(f"Replay buffer: its block was saved as {saved}, now {header}")
        super().restore(folder)
        self._taken.assign(data_files.counts(saved["taken"]))
        segments.restore(folder, self._block_columns(), self._filled())

    def _block_header(self) -> dict[str, int]:
        return {"block_size": self._block_size, "sequence_length": self._sequence_length}

    def _block_columns(self) -> list[segments.Column]:
        names = [f"block_{name}" for name in (*storage.column_names(self._spec), "keys")]
        return [
            segments.Column(name, variable, self._block_size)
            for name, variable in zip(names, self._block, strict=True)
        ]

    def _filled(self) -> np.ndarray:
        """Rows of the block that a checkpoint holds, int64 [1]."""
        is_left = int(self._taken) <= self._block_size - self._batch_size
        return np.array([self._block_size if is_left else 0])
