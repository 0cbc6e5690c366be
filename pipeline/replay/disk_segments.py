"""Saves and restores rings of rows as segments, files that later checkpoints share.

    <column>-<stream>-<first row>.rows      raw bytes of up to `_SEGMENT_BYTES`, at least one row
    <column>-<stream>-<first row>.rows.z    the same, compressed with zlib: uint8 frames

A segment is never modified after it is written. If its rows are the same as in the previous
checkpoint, it is a hard link to that checkpoint's file. A checkpoint's cost therefore depends on
what has changed since, not on the size of the ring, and the file system deletes a segment together
with the last checkpoint that needs it.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipeline.replay import columns
from pipeline.utils import files
from pipeline.utils.execution import HOST, on_device

_SEGMENT_BYTES = 32 * 2**20
_FRAME_BYTES = 1_024  # uint8 rows of at least this size are images, which zlib compresses well
_FASTEST = 1


class Column(NamedTuple):
    """Column of rings: the ring of stream s begins at row s * capacity of the variable."""

    name: str
    variable: tf.Variable
    capacity: int


class _Segment(NamedTuple):
    """Rows [start, stop) of a stream's ring."""

    column: Column
    stream: int
    start: int
    stop: int

    @property
    def is_compressed(self) -> bool:
        """Returns True if the rows are images, for which compression is worth its time."""
        variable = self.column.variable
        return variable.dtype == tf.uint8 and _row_bytes(variable) >= _FRAME_BYTES

    @property
    def keys(self) -> tf.Tensor:
        """Returns the indices of the segment's rows in the variable, int64."""
        first = self.stream * self.column.capacity
        return tf.range(first + self.start, first + self.stop, dtype=tf.int64)

    def path(self, folder: pathlib.Path) -> pathlib.Path:
        """Returns the path of the segment's file in `folder`."""
        suffix = ".rows.z" if self.is_compressed else ".rows"
        return folder / f"{self.column.name}-{self.stream:04d}-{self.start:09d}{suffix}"


def save(
    folder: pathlib.Path,
    columns: Sequence[Column],
    positions: np.ndarray,
    earlier: tuple[pathlib.Path, np.ndarray] | None,
) -> None:
    """Writes all rows of the rings.

    Args:
      folder: Empty folder to write to.
      columns: Columns of the rings, all of the same capacity.
      positions: int64 [N], number of rows ever written to each stream.
      earlier: Folder and positions of an earlier checkpoint of the same rings. Segments that have
        not changed since are linked to its files.
    """

    def write(segment: _Segment) -> None:
        if earlier and not _changed(segment, earlier[1], positions):
            # It fails if the file is gone, or where there are no hard links.
            with contextlib.suppress(OSError):
                os.link(segment.path(earlier[0]), segment.path(folder))
                return
        _write(segment, folder)

    _in_threads(write, columns, positions)


def restore(folder: pathlib.Path, columns: Sequence[Column], positions: np.ndarray) -> None:
    """Reads what `save` wrote.

    Raises:
      ValueError: If a file is missing or damaged, or holds other rows.
      OSError: If a file cannot be read now.
    """
    _in_threads(lambda segment: _read(segment, folder), columns, positions)


def _in_threads(
    function: Callable[[_Segment], None], columns: Sequence[Column], positions: np.ndarray
) -> None:
    """Calls the function with each segment.

    The threads work on the host: on a GPU, a thread can read the values of a tensor that another
    thread has created.
    """
    with futures.ThreadPoolExecutor() as pool:
        for _ in pool.map(on_device(HOST, function), _segments(columns, positions)):
            pass


def _segments(columns: Sequence[Column], positions: np.ndarray) -> Iterator[_Segment]:
    for column in columns:
        rows = max(1, _SEGMENT_BYTES // max(1, _row_bytes(column.variable)))
        for stream, position in enumerate(positions.tolist()):
            filled = min(position, column.capacity)
            for start in range(0, filled, rows):
                yield _Segment(column, stream, start, min(start + rows, filled))


def _changed(segment: _Segment, before: np.ndarray, now: np.ndarray) -> bool:
    """Returns True if any row of the segment may have changed since `before`."""
    capacity = segment.column.capacity
    # The newest earlier row counts as changed, because `ReplayBuffer.truncate` may have marked it.
    first, end = max(int(before[segment.stream]) - 1, 0), int(now[segment.stream])
    if end - first >= capacity:
        return True
    # The changed rows begin at this offset of the ring, and wrap around at its end.
    offset = first % capacity
    if segment.start <= offset < segment.stop:
        return True
    return (segment.start - offset) % capacity < end - first


def _row_bytes(variable: tf.Variable) -> int:
    return columns.row_bytes(tf.TensorSpec(variable.shape[1:], variable.dtype))


def _write(segment: _Segment, folder: pathlib.Path) -> None:
    rows = columns.gather(segment.column.variable, segment.keys).numpy()
    data = np.ascontiguousarray(rows).data
    segment.path(folder).write_bytes(
        zlib.compress(data, _FASTEST) if segment.is_compressed else data
    )


def _read(segment: _Segment, folder: pathlib.Path) -> None:
    path, variable = segment.path(folder), segment.column.variable
    shape = (segment.stop - segment.start, *variable.shape[1:])
    with files.damage_named(path):
        data = path.read_bytes()
        plain = _decompress(data, math.prod(shape)) if segment.is_compressed else data
        rows = np.frombuffer(plain, variable.dtype.as_numpy_dtype).reshape(shape)
    columns.scatter(variable, segment.keys, tf.constant(rows))


def _decompress(data: bytes, size: int) -> bytes:
    """Decompresses at most `size` + 1 bytes, even if damaged data would expand to more."""
    decoder = zlib.decompressobj()
    plain = decoder.decompress(data, size + 1)
    if not decoder.eof:
        raise ValueError("its compressed data does not end where it should")
    return plain
