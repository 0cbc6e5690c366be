"""Tests of interval estimates against plain Python and rliable.

Reference numbers come from rliable 1.2.0 on X, Y and CURVES below, with np.random.seed(0) before
each call and runs as rows: metrics.aggregate_{iqm,mean,median,optimality_gap} and
metrics.probability_of_improvement with 50,000 (2,000) resamples, library.create_performance_profile
and the IQM of CURVES with 10,000.
"""

import itertools
import math
import statistics as plain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from pipeline.benchmarks import interval_estimates as ours

SEED = 20211
THRESHOLDS = np.array([0.25, 0.5, 1.0, 2.0, 4.0])

values = st.floats(-1e4, 1e4)
runs = st.lists(values, min_size=1, max_size=12).map(np.array)


def _generate() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(SEED)
    scale = np.linspace(0.4, 1.6, 6)[:, np.newaxis]
    x = generator.lognormal(0.0, 0.7, (6, 10)) * scale
    y = generator.lognormal(0.2, 0.7, (6, 8)) * scale
    return x, y, np.cumsum(generator.normal(1.0, 2.0, (6, 10, 4)), axis=-1)


# Scores [tasks, runs] of two algorithms, 6 x 10 and 6 x 8; curves [tasks, runs, points].
X, Y, CURVES = _generate()


def assert_agrees(estimate: ours.Estimate, point, low, high, n: int, noise: float) -> None:
    """Checks that points are equal and that bounds differ by at most the noise of resampling."""
    assert_allclose(estimate.point, point, rtol=1e-12)
    tolerance = noise * (np.asarray(high) - np.asarray(low))
    assert np.all(np.abs(estimate.low - low) <= tolerance)
    assert np.all(np.abs(estimate.high - high) <= tolerance)
    assert estimate.n == n


@pytest.mark.parametrize(
    "statistic, reference",
    [
        (ours.interquartile_mean, (0.8386664298889297, 0.6920383813655695, 1.0346871248801544)),
        (ours.mean, (1.1720736025124567, 0.9273477896383089, 1.4476538958452678)),
        (ours.median_of_means, (1.3708945882069479, 0.8280591593574698, 1.6373908359206917)),
        (ours.optimality_gap, (0.28015387153938454, 0.21815744290743797, 0.34332157184882955)),
    ],
)
def test_estimates_agree_with_rliable(statistic, reference):
    point, low, high = reference
    assert_agrees(ours.estimate(X, statistic), point, low, high, 60, 0.03)


def test_the_probability_of_improvement_agrees_with_rliable():
    reference = (0.3541666666666667, 0.24791666666666667, 0.4583854166666665)
    point, low, high = reference
    assert_agrees(ours.estimate_improvement(X, Y), point, low, high, 108, 0.05)


def test_curves_agree_with_rliable():
    point = [0.4181047359512676, 1.2870243784351465, 2.184806367574786, 3.519266007111305]
    low = [0.004119077538940404, 0.8193292056546708, 1.4031769110076642, 2.4794458391282967]
    high = [0.8406882061783236, 1.7738563530108418, 2.8518912072035767, 4.499800257586312]
    assert_agrees(ours.estimate_curve(CURVES), point, low, high, 60, 0.08)


def test_the_performance_profile_agrees_with_rliable():
    point = [0.9333333333333333, 0.7166666666666667, 0.36666666666666664, 0.13333333333333333, 0.05]
    profile = ours.estimate_profile(X, THRESHOLDS)
    assert_allclose(profile.point, point, rtol=1e-12)
    # A fraction of 60 runs is a multiple of 1 / 60.
    low, high = [0.8667, 0.6167, 0.2663, 0.05, 0.0], [0.9833, 0.8167, 0.4667, 0.2167, 0.1167]
    assert_allclose(profile.low, low, atol=1.01 / 60)
    assert_allclose(profile.high, high, atol=1.01 / 60)


def test_tasks_are_resampled_on_their_own():
    # All runs of a task are equal, so resampling changes nothing.
    assert ours.estimate([[1.0] * 3, [5.0] * 2], ours.mean)[1:3] == pytest.approx((3.0, 3.0))


def test_there_is_no_interval_if_a_task_has_one_run():
    assert ours.estimate([[7.5]]) == (7.5, 7.5, 7.5, 1, 1)
    both = ours.estimate([[0.0], [1.0, 3.0, 5.0]], ours.median_of_means)
    assert both == (1.5, 1.5, 1.5, 4, 1)
    curves = ours.estimate_curve([[[0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]]], ours.mean)
    assert_allclose(curves[:3], [[1.0, 2.0]] * 3)
    assert ours.estimate_improvement([[1.0]], [[2.0, 0.0, 0.0]]).fewest == 1


@pytest.mark.parametrize("statistic", [ours.mean, ours.median_of_means, ours.optimality_gap])
@given(tasks=st.lists(runs, min_size=1, max_size=5), times=st.integers(2, 4))
def test_a_task_has_the_same_weight_however_many_runs_it_has(statistic, tasks, times):
    more = [np.tile(tasks[0], times), *tasks[1:]]
    assert statistic(*more) == pytest.approx(statistic(*tasks), abs=1e-9)


def test_the_interquartile_mean_weighs_all_tasks_alike():
    one_each = [np.array([x]) for x in (1.15, 0.045, 0.003, 0.018)]
    ten_of_first = [np.full(10, 1.15), *one_each[1:]]
    assert ours.interquartile_mean(*ten_of_first) == pytest.approx((0.045 + 0.018) / 2)
    assert ours.interquartile_mean(*one_each) == pytest.approx((0.045 + 0.018) / 2)
    unequal = [np.array([10.0]), np.array([0.0, 1.0])]  # as [10, 10] and [0, 1]
    assert ours.interquartile_mean(*unequal) == pytest.approx((1 + 10) / 2)
    profile = ours.estimate_profile(ten_of_first, np.array([0.04]))
    assert profile.point == pytest.approx(0.5)


def test_pairs_are_resampled_as_a_whole():
    x = np.arange(12.0) ** 2
    estimate = ours.estimate_paired_difference(x + 3.0, x)
    assert estimate == pytest.approx((3.0, 3.0, 3.0, 12, 12))
    assert ours.estimate_paired_difference(x, np.roll(x, 5)).low < 0
    with pytest.raises(ValueError):
        ours.estimate_paired_difference([1.0, 2.0, 3.0], [1.0, 2.0])


def test_an_estimate_can_be_repeated():
    assert ours.estimate(list(X)) == ours.estimate(list(X))


@given(runs)
def test_the_interquartile_mean_of_plain_python(values_):
    n = len(values_)
    middle = sorted(values_)[n // 4 : n - n // 4]
    expected = math.fsum(middle) / len(middle)
    assert ours.interquartile_mean(values_) == pytest.approx(expected, abs=1e-9)


@given(runs)
def test_the_optimality_gap_of_plain_python(values_):
    expected = plain.fmean(max(0.0, 1.0 - value) for value in values_)
    assert ours.optimality_gap(values_) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(runs, runs), min_size=1, max_size=4))
def test_the_probabilities_of_both_directions_add_up(pairs):
    x, y = zip(*pairs, strict=True)
    forward = ours.probability_of_improvement(x, y)
    assert forward + ours.probability_of_improvement(y, x) == pytest.approx(1)
    wins = [
        plain.fmean(float(a > b) + (a == b) / 2 for a, b in itertools.product(*pair))
        for pair in pairs
    ]
    assert forward == pytest.approx(plain.fmean(wins))


@pytest.mark.parametrize(
    "tasks, message",
    [
        ([], "no scores"),
        ([[1.0], []], "no scores"),
        ([[1.0, float("nan")]], "not a finite number"),
        ([[1.0], [float("inf")]], "not a finite number"),
    ],
)
def test_what_is_no_score_is_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        ours.estimate(tasks)


def test_agents_are_compared_on_the_same_number_of_tasks():
    with pytest.raises(ValueError):
        ours.estimate_improvement([[1.0], [2.0]], [[1.0]])
