"""Creates, reads and writes columns of rows in TensorFlow variables that are too large to copy.

A dense read of such a variable, or a slice assignment to it, copies all of it. These functions
therefore read with `ResourceGather` and write with `ResourceScatterUpdate`, which work in place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf
import tree
from tf_agents.trajectories import trajectory

from pipeline.ops.batches import are_finite
from pipeline.utils.execution import HOST

_BLOCK_ROWS = 10_000  # Rows that `bad_columns` reads at a time.


def row_bytes(spec: Any) -> int:
    """Returns the size in bytes of one row of the columns of a nest of specs."""
    return sum(math.prod(leaf.shape) * leaf.dtype.size for leaf in tf.nest.flatten(spec))


def column_names(spec: trajectory.Trajectory) -> list[str]:
    """Returns a file name for each leaf of `spec`, in the order of `tf.nest.flatten`."""
    return [
        f"{field}_{i}"
        for field, part in zip(spec._fields, spec, strict=True)
        for i in range(len(tf.nest.flatten(part)))
    ]


def describe_columns(spec: trajectory.Trajectory) -> list[list]:
    """Returns the name, dtype and shape of each leaf of `spec`, as JSON types."""
    leaves = zip(column_names(spec), tf.nest.flatten(spec), strict=True)
    return [[name, leaf.dtype.name, leaf.shape.as_list()] for name, leaf in leaves]


def create_column(spec: tf.TensorSpec, num_rows: int) -> tf.Variable:
    """Creates an uninitialized variable [num_rows, *spec.shape] in main memory.

    The pages of a large variable occupy no physical memory until a row is written to them.
    """
    shape = [num_rows, *spec.shape]
    with tf.device(HOST):
        return tf.Variable(
            lambda: tf.raw_ops.Empty(shape=shape, dtype=spec.dtype),
            trainable=False,
            dtype=spec.dtype,
        )


def gather(variable: tf.Variable, indices: tf.Tensor) -> tf.Tensor:
    """Returns rows of `variable` at `indices` (int64, any shape): [*indices.shape, *row shape]."""
    return tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=indices, dtype=variable.dtype
    )


def scatter(variable: tf.Variable, indices: tf.Tensor, rows: tf.Tensor) -> None:
    """Writes `rows` [*indices.shape, *row shape] to `variable` at `indices` (int64)."""
    tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=indices, updates=rows)


def bad_columns(
    spec: trajectory.Trajectory, columns: list[tf.Variable], keys: np.ndarray
) -> list[str]:
    """Describes the columns that `are_finite` refuses, one text per column.

    Args:
      spec: Specs of a row.
      columns: Columns, in the order of `tf.nest.flatten`.
      keys: int64 [K], rows to check.
    """

    def is_bad(column: tf.Variable) -> bool:
        blocks = (keys[i : i + _BLOCK_ROWS] for i in range(0, len(keys), _BLOCK_ROWS))
        return column.dtype.is_floating and not all(
            are_finite(gather(column, block)) for block in blocks
        )

    paths = [path for path, _ in tree.flatten_with_path(spec)]
    bad = [path for path, column in zip(paths, columns, strict=True) if is_bad(column)]
    return [f"{'.'.join(map(str, path))} of the rows collected" for path in bad]
