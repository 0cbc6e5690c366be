"""Interval estimates of benchmark scores: what a few runs say, and how sure they are.

Agarwal, Schwarzer, Castro, Courville & Bellemare, "Deep Reinforcement Learning at the Edge of the
Statistical Precipice", NeurIPS 2021.

A task (an environment, a game) has an array of runs, shape [n]; tasks may have different numbers of
them. `Tasks` stands for a sequence of such arrays, or for one array if there is one task. Scores of
different tasks meet in one number, so they must be on one scale: normalise them first.

Every score must be a finite number: ValueError otherwise, and where there is no score at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy import typing as npt

Tasks: TypeAlias = Sequence[npt.ArrayLike] | npt.NDArray[np.floating]
# From scores [..., n] to their statistic [...].
Statistic: TypeAlias = Callable[[np.ndarray], np.ndarray]

_NUM_RESAMPLES = 50_000
# Where each resample costs more, or only a picture comes of it.
_FEW_RESAMPLES = 2_000
# Resampled at a time: 32 MiB.
_CHUNK_VALUES = 2**22


class Estimate(NamedTuple):
    """A statistic of `n` runs with its 95 % confidence interval."""

    point: float
    low: float
    high: float
    n: int


class Band(NamedTuple):
    """A statistic at each point of a curve with its 95 % confidence interval; [points] each."""

    point: np.ndarray
    low: np.ndarray
    high: np.ndarray


def mean(scores: npt.ArrayLike) -> np.ndarray:
    """The mean over the last axis: [..., n] to [...]."""
    return np.mean(_checked(scores), axis=-1)


def interquartile_mean(scores: npt.ArrayLike) -> np.ndarray:
    """The mean of the middle half over the last axis: [..., n] to [...].

    Of n sorted scores it leaves out the lowest and the highest floor(n / 4), as
    `scipy.stats.trim_mean(scores, 0.25)` and thereby rliable do. Up to three runs it is the mean.
    """
    ordered = np.sort(_checked(scores), axis=-1)
    n = ordered.shape[-1]
    return np.mean(ordered[..., n // 4 : n - n // 4], axis=-1)


def optimality_gap(scores: npt.ArrayLike, target: float = 1.0) -> np.ndarray:
    """By how much scores fall short of `target` on average, [..., n] to [...]; more than the
    target counts as the target (Agarwal et al., section 4.3)."""
    return target - np.mean(np.minimum(_checked(scores), target), axis=-1)


def performance_profile(groups: Tasks, thresholds: npt.ArrayLike) -> np.ndarray:
    """The fraction of all runs of all tasks whose score is above each of [k] thresholds: [k].

    Dolan & Moré 2002; the score distribution of Agarwal et al., section 4.2.
    """
    return np.mean(_above(np.concatenate(_tasks(groups)), thresholds), axis=0)


def probability_of_improvement(x: Tasks, y: Tasks) -> float:
    """P(X > Y) + P(X = Y) / 2 for a run of x and a run of y on the same task, mean over the tasks.

    The Mann-Whitney statistic over the number of pairs; Agarwal et al., section 4.3.

    Raises:
        ValueError: x and y have different numbers of tasks.
    """
    return float(_improvement(_tasks(x), _tasks(y)))


def stratified_bootstrap(
    groups: Tasks,
    statistic: Statistic = interquartile_mean,
    *,
    num_resamples: int = _NUM_RESAMPLES,
    seed: int = 0,
) -> np.ndarray:
    """The statistic of `num_resamples` resamples, [num_resamples].

    A resample draws as many runs of each task as it has, with replacement, from that task's runs
    only. The statistic gets them concatenated over the tasks, many resamples at a time.
    """
    return _bootstrap(_tasks(groups), _over_all(statistic), num_resamples, seed)


def confidence_interval(
    resampled: npt.ArrayLike, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Between which the middle `level` of the resampled statistics lies (percentile method).

    [..., num_resamples] gives low and high, [...] each.
    """
    tail = (1 - level) / 2
    low, high = np.quantile(_checked(resampled), [tail, 1 - tail], axis=-1)
    return low, high


def interval_estimate(
    groups: Tasks,
    statistic: Statistic = interquartile_mean,
    *,
    num_resamples: int = _NUM_RESAMPLES,
) -> Estimate:
    """The statistic over all runs of all tasks, with its stratified bootstrap interval."""
    return _estimate(_tasks(groups), _over_all(statistic), num_resamples)


def median_estimate(groups: Tasks, *, num_resamples: int = _NUM_RESAMPLES) -> Estimate:
    """The median over tasks of the mean of a task's runs, as papers on many games report it."""
    return _estimate(_tasks(groups), _median_of_means, num_resamples)


def improvement_estimate(
    x: Tasks,
    y: Tasks,
    *,
    num_resamples: int = _FEW_RESAMPLES,
) -> Estimate:
    """`probability_of_improvement` with the interval of resampling both; n counts both's runs."""
    x, y = _tasks(x), _tasks(y)

    def of_both(tasks: list[np.ndarray]) -> np.ndarray:
        return _improvement(tasks[: len(x)], tasks[len(x) :])

    return _estimate([*x, *y], of_both, num_resamples)


def paired_difference_estimate(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    statistic: Statistic = interquartile_mean,
    *,
    num_resamples: int = _NUM_RESAMPLES,
) -> Estimate:
    """The statistic of x minus that of y, [n] each, whose runs go in pairs; n counts the pairs.

    A pair, such as two runs of one seed, is resampled as a whole.
    """

    def of_pairs(tasks: list[np.ndarray]) -> np.ndarray:
        of_x, of_y = statistic(tasks[0])
        return of_x - of_y

    return _estimate([_checked(np.stack([x, y]))], of_pairs, num_resamples)


def profile_estimate(
    groups: Tasks,
    thresholds: npt.ArrayLike,
    *,
    num_resamples: int = _FEW_RESAMPLES,
) -> Band:
    """`performance_profile` over all tasks with its pointwise band; [k] thresholds, k points."""
    curves = [_above(scores, thresholds) for scores in _tasks(groups)]
    return curve_estimate(curves, mean, num_resamples=num_resamples)


def curve_estimate(
    curves: Tasks,
    statistic: Statistic = interquartile_mean,
    *,
    num_resamples: int = _FEW_RESAMPLES,
) -> Band:
    """The statistic over all runs at each point of their curves, with its pointwise band.

    Args:
        curves: for each task [runs, points]: the runs at the same points (environment steps), the
            same number of points for all tasks. A run is resampled with the whole of its curve.
        statistic: as `stratified_bootstrap` wants it.
        num_resamples: how often to resample.
    """
    tasks = [_checked(np.transpose(curve)) for curve in curves]
    of_tasks = _over_all(statistic)
    resampled = _bootstrap(tasks, of_tasks, num_resamples)
    return Band(of_tasks(tasks), *confidence_interval(resampled))


# Inside, tasks are a list of arrays [..., n], runs last, and a statistic of tasks gives [...].
_OfTasks: TypeAlias = Callable[[list[np.ndarray]], np.ndarray]


def _tasks(groups: Tasks) -> list[np.ndarray]:
    if len(groups) == 0:
        raise ValueError("no scores")
    rows: list[Any] = [groups] if np.ndim(groups[0]) == 0 else list(groups)
    tasks = [_checked(runs) for runs in rows]
    if any(task.ndim != 1 for task in tasks):
        raise ValueError("a task's scores must be an array of one axis, its runs")
    return tasks


def _checked(scores: npt.ArrayLike) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    if scores.size == 0:
        raise ValueError("no scores")
    if not np.all(np.isfinite(scores)):
        raise ValueError("a score is not a finite number")
    return scores


def _above(scores: np.ndarray, thresholds: npt.ArrayLike) -> np.ndarray:
    """[n] and [k] give [n, k]."""
    return scores[:, np.newaxis] > np.asarray(thresholds, np.float64)


def _over_all(statistic: Statistic) -> _OfTasks:
    return lambda tasks: statistic(np.concatenate(tasks, axis=-1))


def _median_of_means(tasks: list[np.ndarray]) -> np.ndarray:
    return np.median([np.mean(scores, axis=-1) for scores in tasks], axis=0)


def _improvement(x: list[np.ndarray], y: list[np.ndarray]) -> np.ndarray:
    return np.mean([_wins(*pair) for pair in zip(x, y, strict=True)], axis=0)


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    difference = x[..., :, np.newaxis] - y[..., np.newaxis, :]
    return np.mean((np.sign(difference) + 1) / 2, axis=(-2, -1))


def _estimate(tasks: list[np.ndarray], statistic: _OfTasks, num_resamples: int) -> Estimate:
    low, high = confidence_interval(_bootstrap(tasks, statistic, num_resamples))
    n = sum(scores.shape[-1] for scores in tasks)
    return Estimate(float(statistic(tasks)), float(low), float(high), n)


def _bootstrap(
    tasks: list[np.ndarray], statistic: _OfTasks, num_resamples: int, seed: int = 0
) -> np.ndarray:
    """[..., num_resamples]."""
    generator = np.random.default_rng(seed)
    largest = max(1, _CHUNK_VALUES // sum(scores.size for scores in tasks))
    resampled = [
        statistic([_resample(scores, count, generator) for scores in tasks])
        for count in _chunks(num_resamples, largest)
    ]
    return np.concatenate(resampled, axis=-1)


def _chunks(total: int, largest: int) -> Iterator[int]:
    for start in range(0, total, largest):
        yield min(largest, total - start)


def _resample(scores: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """[..., n] gives [..., count, n]."""
    n = scores.shape[-1]
    return scores[..., generator.integers(n, size=(count, n))]
