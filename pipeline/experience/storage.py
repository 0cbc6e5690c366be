"""Columns of rows in TensorFlow variables that are too large to copy.

A dense read of such a variable, or a slice assignment to it, copies all of it. So everything here
reads with `ResourceGather` and writes with `ResourceScatterUpdate`, which stay in place.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
from tf_agents.trajectories import trajectory

_BLOCK_BYTES = 32 * 2**20

Span = tuple[int, int]  # rows [start, stop)


def row_bytes(spec: tf.TensorSpec) -> int:
    """Bytes that one row of a column takes."""
    return math.prod(spec.shape) * spec.dtype.size


def physical_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def column_names(spec: trajectory.Trajectory) -> list[str]:
    """A file name for each leaf of `spec`, in the order of `tf.nest.flatten`."""
    return [
        f"{field}_{i}"
        for field, part in zip(spec._fields, spec, strict=True)
        for i in range(len(tf.nest.flatten(part)))
    ]


def create_column(spec: tf.TensorSpec, num_rows: int) -> tf.Variable:
    """An uninitialised variable [num_rows, *spec.shape] in main memory.

    Pages of a large one are not touched, and so not resident, before a row is written to them.
    """
    shape = [num_rows, *spec.shape]
    with tf.device("/CPU:0"):
        return tf.Variable(
            lambda: tf.raw_ops.Empty(shape=shape, dtype=spec.dtype),
            trainable=False,
            dtype=spec.dtype,
        )


def gather(variable: tf.Variable, indices: tf.Tensor) -> tf.Tensor:
    """Rows of `variable` at `indices` (int64, any shape): [*indices.shape, *row shape]."""
    return tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=indices, dtype=variable.dtype
    )


def scatter(variable: tf.Variable, indices: tf.Tensor, rows: tf.Tensor) -> None:
    """Writes `rows` [*indices.shape, *row shape] to `variable` at `indices` (int64)."""
    tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=indices, updates=rows)


def save_rows(path: pathlib.Path, variable: tf.Variable, spans: Sequence[Span]) -> None:
    """Writes the rows of `spans`, one after the other, to an npy file, a block at a time."""
    dtype = np.dtype(variable.dtype.as_numpy_dtype)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (sum(stop - start for start, stop in spans), *variable.shape[1:]),
    }
    with path.open("wb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        for start, stop in _blocks(variable, spans):
            gather(variable, tf.range(start, stop, dtype=tf.int64)).numpy().tofile(file)


def restore_rows(path: pathlib.Path, variable: tf.Variable, spans: Sequence[Span]) -> None:
    """Reads what `save_rows` wrote. Raises ValueError if shape or dtype differ, or bytes miss."""
    dtype = np.dtype(variable.dtype.as_numpy_dtype)
    shape = (sum(stop - start for start, stop in spans), *variable.shape[1:])
    with path.open("rb") as file:
        if np.lib.format.read_magic(file) != (2, 0):
            raise ValueError(f"{path}: not an npy file of version 2.0")
        header = np.lib.format.read_array_header_2_0(file)
        if header != (shape, False, dtype):
            raise ValueError(f"{path}: saved {header[2]} {header[0]}, now {dtype} {shape}")
        for start, stop in _blocks(variable, spans):
            count = (stop - start) * math.prod(shape[1:])
            block = np.fromfile(file, dtype, count)
            if block.size != count:
                raise ValueError(f"{path}: the file is cut off")
            indices = tf.range(start, stop, dtype=tf.int64)
            scatter(variable, indices, tf.constant(block.reshape(-1, *shape[1:])))


def _blocks(variable: tf.Variable, spans: Sequence[Span]) -> Iterator[Span]:
    row_size = max(1, math.prod(variable.shape[1:]) * variable.dtype.size)
    block = max(1, _BLOCK_BYTES // row_size)
    for start, stop in spans:
        for first in range(start, stop, block):
            yield first, min(first + block, stop)
