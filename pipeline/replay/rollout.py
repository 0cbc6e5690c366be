"""Defines a rollout: rows collected with one policy, trained on for some epochs, then discarded."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import tensorflow as tf
from tf_agents.trajectories import trajectory

from pipeline.ops.randomness import permutations, stateless_seed, stream_key
from pipeline.ops.returns import valid_mask
from pipeline.replay import columns
from pipeline.replay.size_checks import check_memory, check_minibatches
from pipeline.utils import files
from pipeline.utils.constraints import PositiveInt, check_arguments
from pipeline.utils.execution import HOST

_JSON = "rollout.json"


@gin.configurable(denylist=["data_spec", "num_envs", "sequence_length", "seed", "training_spec"])
class Rollout:
    """Stores `num_steps` rows of every stream and returns them in shuffled minibatches.

    See `pipeline.replay.experience` for the memory layout. In an epoch every row is returned once,
    as a sequence of one row. The minibatches are gathered in the graph (Schulman et al. 2017,
    "Proximal policy optimization algorithms", algorithm 1).

    Attributes:
      collect_steps: Vector steps collected in an iteration, `num_steps`.
      num_batches: Minibatches in an iteration.
    """

    keeps_rows = False

    def __init__(
        self,
        data_spec: trajectory.Trajectory,
        num_envs: int,
        *,
        training_spec: trajectory.Trajectory,
        seed: int,
        sequence_length: int = 1,
        num_steps: PositiveInt = 128,
        minibatch_size: PositiveInt | None = 256,
        num_epochs: PositiveInt = 4,
    ) -> None:
        """Allocates the rollout.

        Args:
          data_spec: Unbatched specs of a row as collected.
          num_envs: Number of streams.
          training_spec: Unbatched specs of a row as returned by the `prepare` of `begin`.
          seed: Seed of the run.
          sequence_length: Not used, because a minibatch consists of single rows.
          num_steps: Number of rows collected from each environment.
          minibatch_size: Number of rows in a minibatch; divides `num_steps * num_envs`. None for
            all rows.
          num_epochs: Number of times that each row is trained on.

        Raises:
          UserError: If a size is not a whole number of at least 1, `minibatch_size` does not
            divide the rollout, or the rollout does not fit into memory.
        """
        del sequence_length
        check_arguments(Rollout, locals())
        self._num_envs, self.collect_steps, self._num_epochs = num_envs, num_steps, num_epochs
        self._num_rows = num_steps * num_envs
        minibatch_size = self._num_rows if minibatch_size is None else minibatch_size
        vector_step = num_envs * columns.row_bytes((data_spec, training_spec))
        check_memory("Rollout.num_steps", num_steps, vector_step)
        check_minibatches(num_steps, num_envs, minibatch_size)
        self.num_batches = num_epochs * (self._num_rows // minibatch_size)
        self._data_spec, self._training_spec = data_spec, training_spec
        self._key = stream_key(seed, "rollout")
        self._collected = self._create_columns(data_spec)
        self._prepared = self._create_columns(training_spec)
        with tf.device(HOST):
            # Rows of each stream collected so far, rollouts begun so far, and minibatches returned
            # since `begin`.
            self._positions = tf.Variable(tf.zeros([num_envs], tf.int64), trainable=False)
            self._rollouts = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            self._minibatch = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            # Keys of every minibatch of every epoch.
            order = tf.zeros([self.num_batches, minibatch_size], tf.int64)
            self._order = tf.Variable(order, trainable=False)

    def _create_columns(self, spec: trajectory.Trajectory) -> list[tf.Variable]:
        """Creates columns of zeros, because `bad_columns` reads rows that were never collected."""
        with tf.device(HOST):
            return [
                tf.Variable(tf.zeros([self._num_rows, *leaf.shape], leaf.dtype), trainable=False)
                for leaf in tf.nest.flatten(spec)
            ]

    @property
    def size(self) -> tf.Tensor:
        """Returns the number of rows stored over all streams, int64 []."""
        return tf.reduce_sum(self._positions)

    def add(self, stream_ids: tf.Tensor, rows: trajectory.Trajectory) -> None:
        """Appends `rows` [T, S, ...], the next T rows of the streams `stream_ids` [S]."""
        streams = tf.cast(stream_ids, tf.int64)
        num_rows = rows.step_type.shape[0] or tf.shape(rows.step_type)[0]
        steps = columns.gather(self._positions, streams)
        steps += tf.range(tf.cast(num_rows, tf.int64))[:, tf.newaxis]
        keys = steps * self._num_envs + streams
        for column, values in zip(self._collected, tf.nest.flatten(rows), strict=True):
            columns.scatter(column, keys, values)
        columns.scatter(self._positions, streams, steps[-1] + 1)

    def begin(self, prepare: Callable[[trajectory.Trajectory], trajectory.Trajectory]) -> None:
        """Prepares the rows and draws the order of all epochs.

        Args:
          prepare: Maps the collected rows [num_steps, num_envs, ...] to training rows of the same
            leading shape, whose leaves match `training_spec`.

        Raises:
          tf.errors.InvalidArgumentError: If a stream does not have `num_steps` rows.
        """
        num_steps = self.collect_steps
        message = f"Rollout.begin needs Rollout.num_steps = {num_steps} rows of each stream"
        tf.debugging.assert_equal(self._positions, tf.constant(num_steps, tf.int64), message)
        training_rows = prepare(self._rows())
        tf.nest.assert_same_structure(training_rows, self._training_spec)
        for column, leaf in zip(self._prepared, tf.nest.flatten(training_rows), strict=True):
            column.assign(tf.reshape(leaf, column.shape))
        self._shuffle()
        self._minibatch.assign(0)

    def _rows(self) -> trajectory.Trajectory:
        shape = [self.collect_steps, self._num_envs]
        leaves = [tf.reshape(column, [*shape, *column.shape[1:]]) for column in self._collected]
        return tf.nest.pack_sequence_as(self._data_spec, leaves)

    def _shuffle(self) -> None:
        seed = stateless_seed(self._key, self._rollouts.assign_add(1))
        order = permutations(self._num_epochs, self._num_rows, seed)
        self._order.assign(tf.reshape(order, self._order.shape))

    def next_batch(self) -> tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor]:
        """Returns the next minibatch since `begin`.

        Returns:
          The training rows [minibatch_size, 1, ...]; weights [minibatch_size] float32, 0 for
          boundary rows and 1 elsewhere; keys [minibatch_size] int64.
        """
        keys = columns.gather(self._order, self._minibatch)
        self._minibatch.assign_add(1)
        leaves = [columns.gather(column, keys[:, tf.newaxis]) for column in self._prepared]
        rows = tf.nest.pack_sequence_as(self._training_spec, leaves)
        weights = valid_mask(rows.step_type[:, 0])
        return rows, weights, keys

    def end(self, finish: Callable[[trajectory.Trajectory], Any]) -> None:
        """Calls `finish` with the collected rows [num_steps, num_envs, ...], then removes them."""
        finish(self._rows())
        self._positions.assign(tf.zeros_like(self._positions))

    def truncate(self, stream_ids: tf.Tensor | None = None) -> None:
        """Does nothing, because between iterations there are no rows to truncate."""

    def check_rows(self) -> None:
        """Does nothing, because rows are trained on as they were collected."""

    def check_ready(self) -> None:
        """Does nothing, because each iteration collects all rows that it trains on."""

    def bad_columns(self) -> list[str]:
        """Describes the columns with NaN or infinity in the last rollout's rows. Runs eagerly."""
        rows = np.arange(self._num_rows)
        bad = [
            columns.bad_columns(spec, variables, rows)
            for spec, variables in (
                (self._data_spec, self._collected),
                (self._training_spec, self._prepared),
            )
        ]
        return list(dict.fromkeys([*bad[0], *bad[1]]))

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes the counter of rollouts to `rollout.json`.

        Raises:
          ValueError: If the rollout holds rows. Restored rows would come from an older policy than
            the one that they train.
        """
        if self.size > 0:
            raise ValueError(f"The rollout holds {self.size:_} rows. Save it when it is empty.")
        (folder / _JSON).write_text(json.dumps({"rollouts": int(self._rollouts)}))

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote.

        Raises:
          ValueError: If the rollout holds rows, or the file holds no counter of rollouts.
        """
        if self.size > 0:
            raise ValueError(f"The rollout holds {self.size:_} rows. Restore it when it is empty.")
        saved = files.read_object(folder / _JSON, "rollouts")
        self._rollouts.assign(files.counts(saved["rollouts"]))
