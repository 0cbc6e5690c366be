"""Interval estimates against plain Python, exact enumeration, and rliable and SciPy.

Reference numbers come from rliable 1.2.0 (arch 7.2.0, pandas 2) and SciPy 1.17.1 with NumPy 2.4.6,
in an environment of their own (`pip install rliable==1.2.0 'pandas<3'`), on X, Y and CURVES below.
np.random.seed(0) came before each of the four kinds; rliable wants runs as rows:

    for f in (metrics.aggregate_iqm, metrics.aggregate_mean, metrics.aggregate_median,
              metrics.aggregate_optimality_gap):
        library.get_interval_estimates({"": X.T}, lambda s: np.array([f(s)]), reps=50_000)
    library.get_interval_estimates({"": (X.T, Y.T)}, lambda a, b: np.array(
        [metrics.probability_of_improvement(a, b)]), reps=2_000)
    library.create_performance_profile({"": X.T}, np.array(THRESHOLDS), reps=10_000)
    library.get_interval_estimates({"": CURVES.transpose(1, 0, 2)}, lambda s: np.array(
        [metrics.aggregate_iqm(s[..., i]) for i in range(4)]), reps=10_000)
    scipy.stats.bootstrap(tuple(X), lambda *a, axis: scipy.stats.trim_mean(
        np.concatenate(a, axis=axis), 0.25, axis=axis), n_resamples=50_000, method="percentile",
        random_state=np.random.default_rng(0))           # and (X[2],) alone, also with np.mean
"""

import collections
import itertools
import math
import statistics as plain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from pipeline.benchmarks import statistics

SEED = 20211
THRESHOLDS = [0.25, 0.5, 1.0, 2.0, 4.0]

values = st.floats(-1e4, 1e4)
runs = st.lists(values, min_size=1, max_size=12)
tasks = st.lists(runs, min_size=1, max_size=4)


def _generate() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(SEED)
    scale = np.linspace(0.4, 1.6, 6)[:, np.newaxis]
    x = generator.lognormal(0.0, 0.7, (6, 10)) * scale
    y = generator.lognormal(0.2, 0.7, (6, 8)) * scale
    return x, y, np.cumsum(generator.normal(1.0, 2.0, (6, 10, 4)), axis=-1)


# [tasks, runs] of two algorithms, 6 x 10 and 6 x 8, and [tasks, runs, points], 6 x 10 x 4.
X, Y, CURVES = _generate()


def test_pairs_are_resampled_as_a_whole():
    x = np.arange(12.0) ** 2
    estimate = statistics.paired_difference_estimate(x + 3.0, x, num_resamples=500)
    assert_allclose(estimate, (3.0, 3.0, 3.0, 12))

    y = np.random.default_rng(1).permutation(x)
    estimate = statistics.paired_difference_estimate(x, y, num_resamples=20_000)
    picks = np.random.default_rng(3).integers(12, size=(20_000, 12))
    of_x, of_y = (statistics.interquartile_mean(scores[picks]) for scores in (x, y))
    expected = np.quantile(of_x - of_y, [0.025, 0.975])
    assert_allclose([estimate.low, estimate.high], expected, atol=0.05 * np.ptp(expected))
    assert estimate.point == 0.0


@pytest.mark.parametrize("y", [[1.0, 2.0], [1.0, 2.0, np.nan]])
def test_pairs_that_are_none_are_refused(y):
    with pytest.raises(ValueError):
        statistics.paired_difference_estimate([1.0, 2.0, 3.0], y)


def test_the_reference_data_are_what_they_were():
    sums = [np.sum(part) for part in (X, Y, CURVES)]
    assert_allclose(sums, [70.3244161507474, 72.99810188496669, 426.45796818450185])


@pytest.mark.parametrize(
    "statistic, reference",
    [
        (
            statistics.interquartile_mean,
            (0.8386664298889297, 0.6920383813655695, 1.0346871248801544),
        ),
        (statistics.mean, (1.1720736025124567, 0.9273477896383089, 1.4476538958452678)),
        (
            statistics.optimality_gap,
            (0.28015387153938454, 0.21815744290743797, 0.34332157184882955),
        ),
    ],
)
def test_estimates_agree_with_rliable(statistic, reference):
    assert_agrees(statistics.interval_estimate(X, statistic), reference, 60)


def test_the_median_over_tasks_agrees_with_rliable():
    reference = (1.3708945882069479, 0.8280591593574698, 1.6373908359206917)
    assert_agrees(statistics.median_estimate(X), reference, 60)


def test_the_probability_of_improvement_agrees_with_rliable():
    reference = (0.3541666666666667, 0.24791666666666667, 0.4583854166666665)
    assert_agrees(statistics.improvement_estimate(X, Y), reference, 108)
    assert statistics.probability_of_improvement(X, Y) == pytest.approx(reference[0])


def assert_agrees(estimate: statistics.Estimate, reference: tuple, n: int) -> None:
    """The same point; bounds that differ by the noise of resampling, 2 % of the interval."""
    point, low, high = reference
    assert estimate.point == pytest.approx(point, rel=1e-12)
    assert_allclose(estimate[1:3], (low, high), atol=0.02 * (high - low))
    assert estimate.n == n


def test_the_performance_profile_agrees_with_rliable():
    point = [0.9333333333333333, 0.7166666666666667, 0.36666666666666664, 0.13333333333333333, 0.05]
    low = [0.8666666666666667, 0.6166666666666667, 0.26625, 0.05, 0.0]
    high = [0.98333333333333, 0.81666666666667, 0.46666666666667, 0.21666666666667, 0.1166666666667]
    band = statistics.profile_estimate(X, THRESHOLDS, num_resamples=10_000)
    assert_allclose(band.point, point, rtol=1e-12)
    assert_allclose(statistics.performance_profile(X, THRESHOLDS), point, rtol=1e-12)
    # A fraction of 60 runs moves in steps of one run.
    assert_allclose(band.low, low, atol=1.01 / 60)
    assert_allclose(band.high, high, atol=1.01 / 60)


def test_curve_bands_agree_with_rliable():
    point = [0.4181047359512676, 1.2870243784351465, 2.184806367574786, 3.519266007111305]
    low = [0.004119077538940404, 0.8193292056546708, 1.4031769110076642, 2.4794458391282967]
    high = [0.8406882061783236, 1.7738563530108418, 2.8518912072035767, 4.499800257586312]
    band = statistics.curve_estimate(CURVES, num_resamples=10_000)
    assert_allclose(band.point, point, rtol=1e-12)
    tolerance = 0.03 * (np.array(high) - low)
    assert np.all(np.abs(band.low - low) < tolerance)
    assert np.all(np.abs(band.high - high) < tolerance)


@pytest.mark.parametrize(
    "tasks_, statistic, low, high",
    [
        (X, statistics.interquartile_mean, 0.6927739203805506, 1.0319492576112406),
        (X[2], statistics.interquartile_mean, 0.46067947153281885, 2.174982920646495),
        (X[2], statistics.mean, 0.620828335863559, 2.339420456736766),
    ],
)
def test_the_bootstrap_is_scipys(tasks_, statistic, low, high):
    """SciPy draws the same resamples from the same generator: no noise is left to allow for."""
    estimate = statistics.interval_estimate(tasks_, statistic)
    assert_allclose(estimate[1:3], (low, high), rtol=1e-12)


def test_the_interquartile_mean_trims_as_scipy_does():
    """scipy.stats.trim_mean(runs, 0.25) of the first 1 to 9 runs of X[2]."""
    trim_means = [
        *(1.26217284169473, 3.05175908815521, 2.142982845433753, 0.9806927224464416),
        *(1.236517454817512, 1.0457591368722894, 0.9912198227309258, 0.801983048523744),
        0.9912198227309258,
    ]
    ours = [statistics.interquartile_mean(X[2][:n]) for n in range(1, 10)]
    assert_allclose(ours, trim_means, rtol=1e-12)


def test_ties_count_half_as_in_scipys_mann_whitney():
    """scipy.stats.mannwhitneyu(x, y, alternative="greater").statistic / 20."""
    assert statistics.probability_of_improvement([1, 2, 2, 3, 5], [2, 2, 4, 1]) == 0.575


@given(runs)
def test_the_interquartile_mean_of_plain_python(values_):
    n = len(values_)
    middle = sorted(values_)[n // 4 : n - n // 4]
    expected = math.fsum(middle) / len(middle)
    assert statistics.interquartile_mean(values_) == pytest.approx(expected, abs=1e-9)


@given(runs)
def test_the_interquartile_mean_lies_among_the_scores(values_):
    assert min(values_) - 1e-9 <= statistics.interquartile_mean(values_) <= max(values_) + 1e-9


@given(st.data(), runs, st.floats(-10, 10), values)
def test_the_interquartile_mean_follows_order_and_scale(data, values_, factor, offset):
    shuffled = np.array(data.draw(st.permutations(values_)))
    expected = factor * statistics.interquartile_mean(values_) + offset
    mapped = statistics.interquartile_mean(factor * shuffled + offset)
    assert mapped == pytest.approx(expected, abs=1e-6)


@given(runs, values)
def test_the_optimality_gap_of_plain_python(values_, target):
    expected = plain.fmean(max(0.0, target - value) for value in values_)
    assert statistics.optimality_gap(values_, target) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(runs, runs), min_size=1, max_size=4))
def test_the_probabilities_of_both_directions_add_up(pairs):
    x, y = zip(*pairs, strict=True)
    forward = statistics.probability_of_improvement(x, y)
    assert forward + statistics.probability_of_improvement(y, x) == pytest.approx(1)
    wins = [
        plain.fmean((a > b) + (a == b) / 2 for a, b in itertools.product(*pair)) for pair in pairs
    ]
    assert forward == pytest.approx(plain.fmean(wins))


@given(tasks, st.lists(values, min_size=1, max_size=8))
def test_the_profile_counts_and_never_rises(tasks_, thresholds):
    thresholds = sorted(thresholds)
    profile = statistics.performance_profile(tasks_, thresholds)
    every = [value for task in tasks_ for value in task]
    expected = [plain.fmean(value > threshold for value in every) for threshold in thresholds]
    assert profile == pytest.approx(expected)
    assert np.all(np.diff(profile) <= 0)


@given(tasks)
def test_the_median_of_plain_python(tasks_):
    estimate = statistics.median_estimate(tasks_, num_resamples=10)
    expected = plain.median(plain.fmean(task) for task in tasks_)
    assert estimate.point == pytest.approx(expected, abs=1e-9)


def test_resamples_have_the_exact_distribution():
    """Three runs and two runs: 27 x 4 resamples, all equally likely."""
    groups = [[1.0, 2.0, 4.0], [10.0, 17.0]]
    exact = collections.Counter(
        round(float(np.mean(sorted(first + second)[1:-1])), 6)
        for first in itertools.product(groups[0], repeat=3)
        for second in itertools.product(groups[1], repeat=2)
    )
    resampled = statistics.stratified_bootstrap(groups, num_resamples=50_000)
    found = collections.Counter(np.round(resampled, 6).tolist())
    assert found.keys() == exact.keys()
    for value, count in exact.items():
        probability = count / 108
        deviation = math.sqrt(probability * (1 - probability) / 50_000)
        assert found[value] / 50_000 == pytest.approx(probability, abs=4 * deviation)


def test_a_resample_keeps_the_number_of_runs_of_each_task():
    resampled = statistics.stratified_bootstrap([[1.0] * 3, [5.0] * 2], statistics.mean)
    assert_allclose(resampled, 13 / 5)


def test_the_seed_decides():
    def bootstrap(seed: int) -> np.ndarray:
        return statistics.stratified_bootstrap(X, num_resamples=50, seed=seed)

    assert np.array_equal(bootstrap(1), bootstrap(1))
    assert not np.array_equal(bootstrap(1), bootstrap(2))


def test_resampling_in_chunks_goes_on_where_it_was(monkeypatch):
    task = X[0]
    whole = statistics.stratified_bootstrap(task, num_resamples=101)
    monkeypatch.setattr(statistics, "_CHUNK_VALUES", 7 * len(task))
    assert np.array_equal(statistics.stratified_bootstrap(task, num_resamples=101), whole)


def test_a_curve_of_equal_points_is_the_interval_at_each():
    band = statistics.curve_estimate(np.stack([X, 2 * X], axis=-1), num_resamples=500)
    estimate = statistics.interval_estimate(X, num_resamples=500)
    for bound, expected in zip(band, estimate[:3], strict=True):
        assert_allclose(bound, [expected, 2 * expected], rtol=1e-12)


def test_the_interval_holds_what_level_says():
    low, high = statistics.confidence_interval(np.arange(101), level=0.9)
    assert (low, high) == (pytest.approx(5), pytest.approx(95))


def test_one_run_is_certain_of_itself():
    assert statistics.interval_estimate([7.5]) == (7.5, 7.5, 7.5, 1)


@pytest.mark.parametrize(
    "groups, message",
    [
        ([], "no scores"),
        ([[1.0], []], "no scores"),
        ([1.0, float("nan")], "not a finite number"),
        ([[1.0], [float("inf")]], "not a finite number"),
        ([[[1.0, 2.0]]], "one axis"),
    ],
)
def test_what_is_no_score_is_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        statistics.interval_estimate(groups)


def test_algorithms_are_compared_on_the_same_number_of_tasks():
    with pytest.raises(ValueError):
        statistics.improvement_estimate([[1.0], [2.0]], [[1.0]])
