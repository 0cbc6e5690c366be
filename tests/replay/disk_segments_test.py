"""Tests that segments are exact, shared while unchanged, and refused if damaged."""

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.replay import columns, disk_segments
from pipeline.replay.disk_segments import Column
from pipeline.utils.execution import HOST


class Rings:
    """Ring buffers of rows that count up, and the plain arrays that they should hold."""

    def __init__(self, num_streams: int, capacity: int, row_shape=(), dtype=tf.int64):
        spec = tf.TensorSpec(row_shape, dtype)
        rows = num_streams * capacity
        self.column = Column("value", columns.create_column(spec, rows), capacity)
        self.positions = np.zeros(num_streams, np.int64)
        self.expected = np.zeros((rows, *row_shape), dtype.as_numpy_dtype)

    def write(self, stream: int, count: int) -> None:
        capacity = self.column.capacity
        positions = self.positions[stream] + np.arange(count)
        keys = stream * capacity + positions % capacity
        shape = self.expected.shape[1:]
        fill = (7 * positions + stream + 1).reshape(-1, *[1] * len(shape))
        rows = np.broadcast_to(fill, (count, *shape)).astype(self.expected.dtype)
        self.expected[keys] = rows
        columns.scatter(self.column.variable, tf.constant(keys), tf.constant(rows))
        self.positions[stream] += count

    def filled(self, variable: tf.Variable) -> list[np.ndarray]:
        capacity, values = self.column.capacity, variable.numpy()
        return [
            values[s * capacity : s * capacity + min(int(p), capacity)]
            for s, p in enumerate(self.positions)
        ]


def restored(rings: Rings, folder: pathlib.Path) -> list[np.ndarray]:
    with tf.device(HOST):
        variable = tf.Variable(tf.zeros_like(rings.column.variable))
    disk_segments.restore(folder, [rings.column._replace(variable=variable)], rings.positions)
    return rings.filled(variable)


def assert_exact(rings: Rings, folder: pathlib.Path) -> None:
    for got, expected in zip(
        restored(rings, folder), rings.filled(tf.constant(rings.expected)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@given(
    writes=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 23)), max_size=5),
        min_size=1,
        max_size=5,
    ),
    segment_rows=st.integers(1, 30),
    capacity=st.integers(1, 23),
)
@settings(max_examples=60)
def test_every_checkpoint_is_exact_whatever_was_written_between(
    tmp_path_factory, writes, segment_rows, capacity
):
    rings, earlier = Rings(3, capacity), None
    root = tmp_path_factory.mktemp("segments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_segments, "_SEGMENT_BYTES", 8 * segment_rows)
        for number, batch in enumerate(writes):
            for stream, count in batch:
                rings.write(stream, min(count, capacity))
            folder = root / str(number)
            folder.mkdir()
            disk_segments.save(folder, [rings.column], rings.positions, earlier)
            assert_exact(rings, folder)
            earlier = folder, rings.positions.copy()


@pytest.fixture
def folders(tmp_path):
    """Returns the empty folders of an earlier and a later checkpoint."""
    both = [tmp_path / "1", tmp_path / "2"]
    for folder in both:
        folder.mkdir()
    return both


def test_only_what_changed_is_written_again(folders, monkeypatch):
    monkeypatch.setattr(disk_segments, "_SEGMENT_BYTES", 80)  # ten rows
    rings = Rings(1, 100)
    rings.write(0, 100)
    first, second = folders
    disk_segments.save(first, [rings.column], rings.positions, None)
    before = rings.positions.copy()
    rings.write(0, 15)  # overwrites rows 0 to 14; row 99 may have been marked since
    disk_segments.save(second, [rings.column], rings.positions, (first, before))
    names = sorted(path.name for path in second.iterdir())
    assert len(names) == 10
    again = [n for n in names if not os.path.samefile(first / n, second / n)]
    assert again == [
        "value-0000-000000000.rows",
        "value-0000-000000010.rows",
        "value-0000-000000090.rows",
    ]
    assert_exact(rings, second)


def test_removing_the_earlier_checkpoint_leaves_the_later_whole(folders, monkeypatch):
    monkeypatch.setattr(disk_segments, "_SEGMENT_BYTES", 80)
    rings = Rings(2, 50)
    rings.write(0, 50)
    disk_segments.save(folders[0], [rings.column], rings.positions, None)
    disk_segments.save(
        folders[1], [rings.column], rings.positions, (folders[0], rings.positions.copy())
    )
    for path in folders[0].iterdir():
        path.unlink()
    assert_exact(rings, folders[1])


def test_without_hard_links_all_rows_are_written(folders, monkeypatch):
    rings = Rings(1, 20)
    rings.write(0, 20)
    first, second = folders
    monkeypatch.setattr(disk_segments, "_SEGMENT_BYTES", 80)
    disk_segments.save(first, [rings.column], rings.positions, None)

    def refuse(source, target):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    for path in first.iterdir():  # what is on the disk may be damaged
        path.write_bytes(b"")
    disk_segments.save(second, [rings.column], rings.positions, (first, rings.positions.copy()))
    assert_exact(rings, second)


def test_what_the_earlier_checkpoint_has_lost_since_is_written_anew(folders, monkeypatch):
    monkeypatch.setattr(disk_segments, "_SEGMENT_BYTES", 80)
    rings = Rings(1, 20)
    rings.write(0, 20)
    first, second = folders
    disk_segments.save(first, [rings.column], rings.positions, None)
    (first / "value-0000-000000000.rows").unlink()
    disk_segments.save(second, [rings.column], rings.positions, (first, rings.positions.copy()))
    assert_exact(rings, second)


def test_frames_are_compressed(tmp_path):
    rings = Rings(1, 50, (84, 84), tf.uint8)
    rings.write(0, 50)
    disk_segments.save(tmp_path, [rings.column], rings.positions, None)
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".rows.z")
    assert path.stat().st_size < 50 * 84 * 84 / 10
    assert_exact(rings, tmp_path)


@pytest.mark.parametrize("dtype, shape", [(tf.uint8, (84, 84)), (tf.float32, (3,))])
@given(position=st.floats(0, 1), data=st.binary(max_size=40), cuts=st.booleans())
@settings(max_examples=40)
def test_damage_gives_a_value_error_or_nothing_worse(
    tmp_path_factory, dtype, shape, position, data, cuts
):
    rings = Rings(1, 6, shape, dtype)
    rings.write(0, 6)
    folder = tmp_path_factory.mktemp("damaged")
    disk_segments.save(folder, [rings.column], rings.positions, None)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    place = int(position * len(content))
    path.write_bytes(content[:place] + data + (b"" if cuts else content[place + len(data) :]))
    try:
        restored(rings, folder)
    except ValueError as error:
        assert path.name in str(error)


def test_a_missing_segment_is_named(tmp_path):
    rings = Rings(1, 6)
    rings.write(0, 6)
    disk_segments.save(tmp_path, [rings.column], rings.positions, None)
    (path,) = tmp_path.iterdir()
    path.unlink()
    with pytest.raises(ValueError, match=path.name):
        restored(rings, tmp_path)
