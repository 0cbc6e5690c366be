"""Rings of rows on the disk, as segments that later checkpoints share.

    <column>-<stream>-<first row>.rows      bytes of as many rows as make `_SEGMENT_BYTES`
    <column>-<stream>-<first row>.rows.z    the same, compressed with zlib: frames of bytes

A segment is never written to again. One that holds the same rows as in the checkpoint before is a
hard link to that one's file, so that a checkpoint costs what has happened since, whatever the size
of the ring, and the file system drops a segment with the last checkpoint that needs it.
"""

from __future__ import annotations

import math
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipeline.experience import storage

_SEGMENT_BYTES = 32 * 2**20
_FRAME_BYTES = 1_024  # rows of bytes from this size on are images, which zlib shrinks by far
_FASTEST = 1


class Column(NamedTuple):
    """A column of rings: the ring of stream s begins at row s * capacity of the variable."""

    name: str
    variable: tf.Variable
    capacity: int


class Segment(NamedTuple):
    """Rows [start, stop) of a stream's ring."""

    column: Column
    stream: int
    start: int
    stop: int

    @property
    def is_compressed(self) -> bool:
        """Whether it is worth the time."""
        variable = self.column.variable
        return variable.dtype == tf.uint8 and _row_bytes(variable) >= _FRAME_BYTES

    @property
    def keys(self) -> tf.Tensor:
        """int64, where its rows lie in the variable."""
        first = self.stream * self.column.capacity
        return tf.range(first + self.start, first + self.stop, dtype=tf.int64)

    def path(self, folder: pathlib.Path) -> pathlib.Path:
        """Of its file."""
        suffix = ".rows.z" if self.is_compressed else ".rows"
        return folder / f"{self.column.name}-{self.stream:04d}-{self.start:09d}{suffix}"


def save(
    folder: pathlib.Path,
    columns: Sequence[Column],
    positions: np.ndarray,
    earlier: tuple[pathlib.Path, np.ndarray] | None,
) -> None:
    """Writes all rows of rings.

    Args:
      folder: empty.
      columns: of the same capacity.
      positions: int64 [N], rows ever written to each stream.
      earlier: folder and positions of a checkpoint of the same rings, for the rows since.
    """

    def write(segment: Segment) -> None:
        if (
            earlier
            and not _changed(segment, earlier[1], positions)
            and _link(segment.path(earlier[0]), segment.path(folder))
        ):
            return
        _write(segment, folder)

    with futures.ThreadPoolExecutor() as pool:
        for _ in pool.map(write, _segments(columns, positions)):
            pass


def restore(folder: pathlib.Path, columns: Sequence[Column], positions: np.ndarray) -> None:
    """Reads what `save` wrote.

    Raises:
      ValueError: a file is missing, is damaged, or holds other rows.
    """
    with futures.ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda segment: _read(segment, folder), _segments(columns, positions)):
            pass


def _segments(columns: Sequence[Column], positions: np.ndarray) -> Iterator[Segment]:
    for column in columns:
        rows = max(1, _SEGMENT_BYTES // max(1, _row_bytes(column.variable)))
        for stream, position in enumerate(positions.tolist()):
            filled = min(position, column.capacity)
            for start in range(0, filled, rows):
                yield Segment(column, stream, start, min(start + rows, filled))


def _changed(segment: Segment, before: np.ndarray, now: np.ndarray) -> bool:
    """Whether rows of the segment were written since, or the newest before may have been marked."""
    capacity = segment.column.capacity
    first, end = max(int(before[segment.stream]) - 1, 0), int(now[segment.stream])
    if end - first >= capacity:
        return True
    # Where in the ring the next write to the segment's first row lies, or one inside the segment.
    offset = first % capacity
    if segment.start <= offset < segment.stop:
        return True
    return (segment.start - offset) % capacity < end - first


def _row_bytes(variable: tf.Variable) -> int:
    return storage.row_bytes(tf.TensorSpec(variable.shape[1:], variable.dtype))


def _link(source: pathlib.Path, target: pathlib.Path) -> bool:
    """Whether the source was there."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        return False
    except OSError:
        shutil.copyfile(source, target)  # a file system without hard links
    return True


def _write(segment: Segment, folder: pathlib.Path) -> None:
    rows = storage.gather(segment.column.variable, segment.keys).numpy()
    data = np.ascontiguousarray(rows).data
    segment.path(folder).write_bytes(
        zlib.compress(data, _FASTEST) if segment.is_compressed else data
    )


def _read(segment: Segment, folder: pathlib.Path) -> None:
    path, variable = segment.path(folder), segment.column.variable
    shape = (segment.stop - segment.start, *variable.shape[1:])
    try:
        data = path.read_bytes()
        plain = _decompress(data, math.prod(shape)) if segment.is_compressed else data
        rows = np.frombuffer(plain, variable.dtype.as_numpy_dtype).reshape(shape)
    except (OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    storage.scatter(variable, segment.keys, tf.constant(rows))


def _decompress(data: bytes, size: int) -> bytes:
    """The bytes, never many more than `size`, whatever the data would grow to."""
    decoder = zlib.decompressobj()
    plain = decoder.decompress(data, size + 1)
    if not decoder.eof:
        raise ValueError("its compressed data does not end where it should")
    return plain
