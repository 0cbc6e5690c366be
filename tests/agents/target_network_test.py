"""Tests of the environment steps at which a target network is copied."""

from __future__ import annotations

import pathlib

import pytest
import tensorflow as tf

from pipeline.agents.target_network import PeriodicTarget
from pipeline.checkpointing.saveables import Variables


class Network(tf.Module):
    def __init__(self, value: float):
        super().__init__()
        self.weights = [tf.Variable(value), tf.Variable([value, value])]


class Pair:
    def __init__(self, period: int = 10):
        self.count = tf.Variable(0, dtype=tf.int64)
        self.online, self.target = Network(1.0), Network(0.0)
        self.periodic = PeriodicTarget(self.online, self.target, period, self.count.read_value)
        self.graph = tf.function(self.periodic.update)

    def copied_at(self, counts: list[int], graph: bool = True) -> list[int]:
        """Returns those of `counts` at which weights were copied; each count has other weights."""
        copies = []
        for index, count in enumerate(counts, 1):
            self.count.assign(count)
            for weight in self.online.weights:
                weight.assign(tf.zeros_like(weight) + 100 * count + index)
            self.graph() if graph else self.periodic.update()
            if float(self.target.weights[0]) == 100 * count + index:
                copies.append(count)
        return copies


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("counts", "copies"),
    [
        ([0, 4, 8, 9, 10, 11, 19, 20], [10, 20]),
        ([3, 12, 15, 29, 30, 31], [12, 29, 30]),  # iterations that step over a multiple
        ([50, 54, 58, 62], [50, 62]),  # after a warm-up
        ([10, 10, 10], [10]),  # several updates in an iteration
    ],
)
def test_it_copies_where_a_multiple_was_crossed(
    counts: list[int], copies: list[int], graph: bool
) -> None:
    pair = Pair()
    assert pair.copied_at(counts, graph) == copies
    for weight in pair.target.weights:
        assert (weight.numpy() // 100 == copies[-1]).all()


def test_when_it_copied_last_is_restored(tmp_path: pathlib.Path) -> None:
    first, second = Pair(), Pair()
    assert first.copied_at([25]) == [25]
    Variables(periodic=first.periodic).save(tmp_path)
    Variables(periodic=second.periodic).restore(tmp_path)
    assert Pair().copied_at([26]) == [26]
    assert second.copied_at([26, 30]) == [30]
