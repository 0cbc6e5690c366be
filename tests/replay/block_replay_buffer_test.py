"""Tests of blocks of samples against a naive list of rows."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_operations import stateful_draws, stateless_draws
from numpy_references import bound
from replay_buffer_test import (
    LAST,
    MID,
    SIDE,
    Stream,
    check_batch,
    collect,
    create,
    data_spec,
    valid_starts,
)

from pipeline.replay.block_replay_buffer import BlockReplayBuffer
from pipeline.utils.errors import UserError


class LivesStream(Stream):
    """Stream that loses lives: the return is cut, the game goes on, and earlier frames are zero."""

    def step(self):
        row = super().step()
        if row.step_type != LAST and row.next_step_type == MID and self._rng.random() < 0.3:
            self.rows[-1] = row = row._replace(discount=np.float32(0))
            self._frames = [np.zeros([SIDE, SIDE], np.uint8)] * self._stack
        return row


def create_block(stack: int = 0, num_envs: int = 1, **kwargs: Any) -> BlockReplayBuffer:
    given = {"batch_size": 8, "block_size": 32} | kwargs
    block_size = given.pop("block_size")
    with bound({f"ReplayBuffer.{name}": value for name, value in given.items()}):
        return BlockReplayBuffer(
            data_spec(stack), num_envs, sequence_length=2, seed=0, block_size=block_size
        )


def filled(stack: int = 0, num_rows: int = 60, **kwargs: Any):
    buffer = create_block(stack, 2, capacity=200, **kwargs)
    streams: list[Stream] = [LivesStream(i, stack, 3) for i in range(2)]
    collect(buffer, streams, [0, 1], num_rows)
    buffer.check_rows()
    return buffer, streams


def as_arrays(batch):
    return tf.nest.map_structure(lambda x: x.numpy(), batch)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("stack", [0, 4])
def test_a_block_is_what_the_rows_were_when_it_was_drawn(stack: int, graph: bool) -> None:
    buffer, streams = filled(stack)
    next_batch = tf.function(buffer.next_batch, autograph=False) if graph else buffer.next_batch
    check_batch(next_batch(), streams, 100, 2)
    collect(buffer, streams, [0, 1], 97)  # overwrites all earlier rows
    for _ in range(3):
        batch = as_arrays(next_batch())
        positions = batch[0].action[:, 0] % 10**12
        assert (positions < 60).all()
        check_batch(batch_of(batch), streams, 100, 2)
    batches = [as_arrays(next_batch()) for _ in range(4)]
    assert all((batch[0].action[:, 0] % 10**12 >= 57).all() for batch in batches)


def batch_of(batch):
    return tf.nest.map_structure(tf.constant, batch)


def test_transitions_are_equally_likely_and_boundary_rows_are_never_drawn() -> None:
    buffer, streams = filled(num_rows=40, batch_size=512, block_size=512)
    counts = np.zeros(200)
    for _ in range(20):
        rows, weights, keys = buffer.next_batch()
        assert (weights.numpy() == 1).all()
        assert (rows.step_type.numpy()[:, 0] != LAST).all()
        np.add.at(counts, keys.numpy(), 1)
    expected = [
        100 * n + p
        for n in range(2)
        for p in valid_starts(streams[n], 100, 2, 0)
        if streams[n].rows[p].step_type != LAST
    ]
    np.testing.assert_array_equal(np.flatnonzero(counts), expected)
    assert len(expected) < 70
    mean = counts[expected].mean()
    chi_square = np.sum((counts[expected] - mean) ** 2) / mean
    assert chi_square < len(expected) - 1 + 3 * np.sqrt(2 * len(expected))


def test_stacks_do_not_reach_beyond_a_lost_life() -> None:
    """Checks also that the plain buffer, which does not support lost lives, raises an error."""
    buffer, streams = filled(4)
    for _ in range(8):
        check_batch(buffer.next_batch(), streams, 100, 2)
    plain = create(4, 2, capacity=200)
    collect(plain, [LivesStream(i, 4, 3) for i in range(2)], [0, 1], 60)
    with pytest.raises(UserError, match="are not stacks of the newest.* @BlockReplayBuffer"):
        plain.check_rows()


def test_a_game_that_is_truncated_after_a_lost_life_keeps_its_stacks() -> None:
    buffer, stream = create_block(4, 1, capacity=200), LivesStream(0, 4, 3)
    lost = False
    while not lost:
        collect(buffer, [stream], [0], 1)
        lost = stream.rows[-1].discount == 0 and stream.rows[-1].next_step_type == MID
    newest = stream.rows[-1]
    buffer.truncate()
    stream.interrupt()
    stream.rows[-1] = newest  # It has ended already.
    collect(buffer, [stream], [0], 40)
    buffer.check_rows()
    for _ in range(8):
        check_batch(buffer.next_batch(), [stream], 200, 2)


def test_what_is_too_little_for_a_batch_is_left() -> None:
    buffer, streams = filled(batch_size=12)
    for _ in range(2):
        buffer.next_batch()  # 8 are left
    collect(buffer, streams, [0, 1], 97)
    rows, *_ = buffer.next_batch()
    assert (rows.action.numpy()[:, 0] % 10**12 >= 57).all()  # all are of the next block


@pytest.mark.parametrize("stack", [0, 4])
@pytest.mark.parametrize("num_batches", [0, 1, 3, 4, 5])
def test_the_block_is_restored(tmp_path: pathlib.Path, stack: int, num_batches: int) -> None:
    buffer, streams = filled(stack)
    for _ in range(num_batches):
        buffer.next_batch()
    collect(buffer, streams, [0, 1], 80)  # overwrites the rows of the block
    buffer.save(tmp_path)
    is_left = num_batches % 4 > 0
    assert any(path.name.startswith("block_") for path in tmp_path.glob("*.rows*")) == is_left
    restored = create_block(stack, 2, capacity=200)
    restored.restore(tmp_path)
    for _ in range(6):
        tf.nest.map_structure(
            np.testing.assert_array_equal,
            as_arrays(restored.next_batch()),
            as_arrays(buffer.next_batch()),
        )


def test_a_block_is_used_up_for_batches_of_another_size_too(tmp_path: pathlib.Path) -> None:
    buffer, streams = filled(batch_size=12)
    for _ in range(2):
        buffer.next_batch()  # 8 are left, too few for a third batch
    buffer.save(tmp_path)
    restored = create_block(0, 2, capacity=200, batch_size=8)
    restored.restore(tmp_path)
    collect(restored, streams, [0, 1], 97)
    drawn = check_batch(restored.next_batch(), streams, 100, 2)
    assert min(position for _, position in drawn) >= 57


def test_another_block_is_not_restored(tmp_path: pathlib.Path) -> None:
    buffer, _ = filled()
    buffer.next_batch()
    buffer.save(tmp_path)
    with pytest.raises(ValueError, match="block was saved as .*32.*this run has .*64"):
        create_block(num_envs=2, capacity=200, block_size=64).restore(tmp_path)
    (tmp_path / "block_reward_0-0000-000000000.rows").unlink()
    with pytest.raises(ValueError, match="block_reward_0.* cannot be read"):
        create_block(num_envs=2, capacity=200).restore(tmp_path)
    (tmp_path / "block.json").write_text(json.dumps({"taken": 8}))
    with pytest.raises(ValueError, match="it lacks block_size"):
        create_block(num_envs=2, capacity=200).restore(tmp_path)


def test_a_block_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"BlockReplayBuffer.block_size = 7 is less than .* 8"):
        create_block(capacity=100, block_size=7)


def test_randomness_is_stateless() -> None:
    buffer, _ = filled()
    graph = tf.function(buffer.next_batch, autograph=False).get_concrete_function().graph
    assert stateless_draws(graph) and not stateful_draws(graph)
