"""Estimates benchmark scores with confidence intervals from SciPy's bootstrap.

Agarwal, Schwarzer, Castro, Courville & Bellemare, "Deep Reinforcement Learning at the Edge of the
Statistical Precipice", NeurIPS 2021.

A task (an environment or a game) has an array of the scores of its runs, shape [n]. Scores of
different tasks are pooled into one number, so normalize them to a common scale first. Tasks may
have different numbers of runs; each task has the same weight. The bootstrap is stratified: it
resamples the runs of each task separately. If a task has a single run, there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy import typing as npt

Tasks: TypeAlias = Sequence[npt.ArrayLike] | np.ndarray
#: Maps the arrays of all tasks, [..., n] each, to the statistic [...].
Statistic: TypeAlias = Callable[..., np.ndarray]

_RESAMPLES = 20_000
_RESAMPLES_OF_CURVES = 2_000
_BATCH_VALUES = 2**22  # values resampled at a time, 32 MiB


class Estimate(NamedTuple):
    """A statistic of `n` runs with its 95 % confidence interval.

    Attributes:
      point: The statistic, float or [points].
      low: Lower end of the interval, of the same shape; `point` if a task has a single run.
      high: Upper end of the interval, of the same shape; `point` if a task has a single run.
      n: Number of runs of all tasks.
      fewest: Number of runs of the task that has the fewest.
    """

    point: Any
    low: Any
    high: Any
    n: int
    fewest: int


def mean(*tasks: np.ndarray) -> np.ndarray:
    """Computes the mean over tasks of the mean of a task's runs: [..., n] each to [...]."""
    return np.mean([np.mean(runs, axis=-1) for runs in tasks], axis=0)


def interquartile_mean(*tasks: np.ndarray) -> np.ndarray:
    """Computes the mean of the middle half of all runs of all tasks: [..., n] each to [...].

    Of n runs, the lowest floor(n / 4) and the highest floor(n / 4) are left out. For one task of up
    to three runs this is the mean. If tasks have different numbers of runs, their runs count as if
    they were repeated until all tasks have equally many.
    """
    sizes = [np.shape(runs)[-1] for runs in tasks]
    most = math.lcm(*sizes)
    n = most * len(sizes)
    pooled = np.concatenate(tasks, axis=-1)
    order = np.argsort(pooled, axis=-1)
    repeats = np.repeat([most // size for size in sizes], sizes)[order]
    ends = np.cumsum(repeats, axis=-1)
    kept = np.diff(np.clip(ends, n // 4, n - n // 4), axis=-1, prepend=n // 4)
    return np.average(np.take_along_axis(pooled, order, axis=-1), axis=-1, weights=kept)


def median_of_means(*tasks: np.ndarray) -> np.ndarray:
    """Computes the median over tasks of the mean of a task's runs: [..., n] each to [...]."""
    return np.median([np.mean(runs, axis=-1) for runs in tasks], axis=0)


def optimality_gap(*tasks: np.ndarray) -> np.ndarray:
    """Computes the mean amount by which scores fall short of 1: [..., n] each to [...].

    A score above 1 counts as 1 (Agarwal et al., section 4.3).
    """
    return 1.0 - mean(*(np.minimum(runs, 1.0) for runs in tasks))


def probability_of_improvement(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> np.ndarray:
    """Computes P(X > Y) + P(X = Y) / 2 for a run of x and a run of y, as the mean over tasks.

    This is the Mann-Whitney statistic divided by the number of pairs (Agarwal et al., section 4.3).

    Args:
      x: Runs of the first agent, [..., n] for each task.
      y: Runs of the second agent, [..., m] for each task, in the same order.

    Returns:
      The probability, [...].
    """
    wins = [
        np.mean((np.sign(a[..., :, None] - b[..., None, :]) + 1) / 2, axis=(-2, -1))
        for a, b in zip(x, y, strict=True)
    ]
    return np.mean(wins, axis=0)


def estimate(tasks: Tasks, statistic: Statistic = interquartile_mean) -> Estimate:
    """Estimates a statistic over all runs of all tasks.

    Raises:
      ValueError: If there is no score, or if one is not finite.
    """
    return _estimate(tasks, statistic, _RESAMPLES)


def estimate_improvement(x: Tasks, y: Tasks) -> Estimate:
    """Estimates `probability_of_improvement`, resampling the runs of both agents."""

    def statistic(*tasks: np.ndarray) -> np.ndarray:
        return probability_of_improvement(tasks[: len(x)], tasks[len(x) :])

    return _estimate([*x, *y], statistic, _RESAMPLES_OF_CURVES)


def estimate_paired_difference(x: npt.ArrayLike, y: npt.ArrayLike) -> Estimate:
    """Estimates the IQM of x minus the IQM of y, [n] each, for paired runs.

    A pair, such as two runs of one seed, is resampled as a whole. `n` is the number of pairs.
    """

    def statistic(pairs: np.ndarray) -> np.ndarray:
        scores = interquartile_mean(pairs)
        return scores[0] - scores[1]

    return _estimate([np.stack([x, y])], statistic, _RESAMPLES)


def estimate_curve(curves: Tasks, statistic: Statistic = interquartile_mean) -> Estimate:
    """Estimates a statistic over all runs at each point of their curves, with pointwise intervals.

    Args:
      curves: [runs, points] for each task, with the same number of points. A run is resampled
        with the whole of its curve.
      statistic: The statistic.

    Returns:
      The estimate, [points] each.
    """
    tasks = [np.transpose(curve) for curve in curves]
    return _estimate(tasks, statistic, _RESAMPLES_OF_CURVES)


def estimate_profile(tasks: Tasks, thresholds: np.ndarray) -> Estimate:
    """Estimates the fraction of runs that score above each threshold, [k], as the mean over tasks.

    This is the performance profile of Dolan & Moré 2002 (Agarwal et al., section 4.2).
    """
    curves = [np.asarray(runs)[:, None] > thresholds for runs in tasks]
    return estimate_curve([curve.astype(np.float64) for curve in curves], mean)


def _estimate(tasks: Tasks, statistic: Statistic, num_resamples: int) -> Estimate:
    arrays = [_checked(runs) for runs in tasks]
    if not arrays:
        raise ValueError("no scores")
    sizes = [runs.shape[-1] for runs in arrays]
    point, n, fewest = statistic(*arrays), sum(sizes), min(sizes)
    if fewest == 1:
        return Estimate(point, point, point, n, fewest)
    from scipy import stats  # takes seconds, and `pipeline.plot` does not need it

    interval = stats.bootstrap(
        arrays,
        lambda *samples, axis: statistic(*samples),  # the axis is always the last
        n_resamples=num_resamples,
        batch=max(1, _BATCH_VALUES // sum(runs.size for runs in arrays)),
        vectorized=True,
        axis=-1,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(point, interval.low, interval.high, n, fewest)


def _checked(runs: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(runs, np.float64)
    if array.size == 0:
        raise ValueError("no scores")
    if not np.all(np.isfinite(array)):
        raise ValueError("a score is not a finite number")
    return array
