"""Measures how far two trainings are apart, for each variable and update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pipeline.benchmarks.eager_graph.updates import Weights


class Difference(NamedTuple):
    """Largest elementwise difference of two arrays.

    Attributes:
      absolute: Largest absolute difference, in the unit of the arrays.
      relative: Largest difference relative to the larger magnitude of the two elements, at most 2.
    """

    absolute: float
    relative: float


def difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Computes the difference of two arrays of the same shape, which may be empty.

    It is 0 only if all elements are equal.
    """
    gap = np.abs(first.astype(np.float64) - second.astype(np.float64))
    magnitude = np.maximum(np.abs(first), np.abs(second)).astype(np.float64)
    relative = np.divide(gap, magnitude, out=np.zeros_like(gap), where=magnitude > 0)
    return Difference(float(np.max(gap, initial=0.0)), float(np.max(relative, initial=0.0)))


def differences(first: list[Weights], second: list[Weights]) -> dict[str, list[Difference]]:
    """Returns the differences of each variable, one after each update."""
    return {
        name: [difference(a[name], b[name]) for a, b in zip(first, second, strict=True)]
        for name in first[0]
    }


def largest(first: list[Weights], second: list[Weights]) -> float:
    """Returns the largest absolute difference over all variables and updates."""
    of_each = differences(first, second).values()
    return max(apart.absolute for variable in of_each for apart in variable)


def same_bits(first: Iterable[Weights], second: Iterable[Weights]) -> bool:
    """Returns True if all variables are equal to the last bit after every update."""
    return all(
        a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)
        for a, b in zip(first, second, strict=True)
    )
