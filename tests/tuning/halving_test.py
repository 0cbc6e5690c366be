"""Successive halving: which trials go on, and that no order of events changes a search."""

import random
from unittest import mock

import pytest
from conftest import combinations
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_searches import make_search

from pipeline.tuning import halving
from pipeline.tuning.halving import Job, Trial
from pipeline.tuning.search import Search

SAMPLERS, RUNGS, COUNTS = ("tpe", "random"), ((), (10,), (10, 30)), (1, 3, 30)


def test_what_can_begin_is_found_in_little_time(monkeypatch):
    bracket = mock.Mock(wraps=halving.bracket)
    monkeypatch.setattr(halving, "bracket", bracket)
    search = make_search(rungs=(), num_concurrent=300)
    assert len(list(halving.ready_jobs(search, {}, 300))) == 300
    assert bracket.call_count < 3_000


def simulate(
    search: Search, num_trials: int, workers: int, seed: int, begun: halving.Trials | None = None
) -> dict[int, Trial]:
    """Runs a search in which jobs end in a random order, and some trials fail."""
    trials = dict(begun or {})
    active: list[Job] = []
    order = random.Random(seed)
    while True:
        jobs = list(halving.ready_jobs(search, trials, num_trials))
        if not jobs:
            return trials
        for job in jobs:
            if job in active or len(active) == workers:
                continue
            if job.number not in trials:
                seen = halving.told(search, trials, job.number, num_trials)
                assert len(seen) == job.number
                trials[job.number] = Trial(job.number, search.suggest(job.number, seen))
            active.append(job)
        job = active.pop(order.randrange(len(active)))
        trial = trials[job.number]
        assert len(trial.returns) == job.rung
        value = trial.parameters["fake.quality"] + 0.1 * job.rung + job.number * 7 % 5 / 100
        if job.number % 11 == 10 or (job.number % 3 == 0 and job.rung == 1):
            trials[job.number] = trial._replace(error="it failed")
        else:
            trials[job.number] = trial._replace(returns=(*trial.returns, (value,)))


@pytest.mark.parametrize(
    ("sampler", "rungs", "num_concurrent"),
    combinations(
        SAMPLERS,
        RUNGS,
        COUNTS,
        often=[  # every pair of values
            (SAMPLERS[(i + j) % 2], rungs, count)
            for i, rungs in enumerate(RUNGS)
            for j, count in enumerate(COUNTS)
        ],
    ),
)
def test_the_trials_depend_neither_on_the_workers_nor_on_the_order(sampler, rungs, num_concurrent):
    search = make_search(sampler=sampler, rungs=rungs, num_concurrent=num_concurrent)
    alone = simulate(search, 22, workers=1, seed=0)
    assert len(alone) == 22
    for workers in (2, 40):
        assert simulate(search, 22, workers, seed=workers) == alone


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 99))
def test_every_bracket_trains_its_best_to_the_end(num_trials, workers, seed):
    search = make_search()
    trials = simulate(search, num_trials, workers, seed)
    for first in range(0, num_trials, 9):
        of_bracket = halving.bracket(search, first, num_trials)
        cohorts = halving.cohorts(search, trials, of_bracket)
        assert len(cohorts) == 3
        for rung, cohort in enumerate(cohorts):
            assert len(cohort) <= halving.cohort_sizes(search, len(of_bracket))[rung]
            out = [n for n in of_bracket if n not in cohort and len(trials[n].returns) > rung]
            assert out == []
        for before, after, rung in ((cohorts[0], cohorts[1], 0), (cohorts[1], cohorts[2], 1)):
            values = {n: trials[n].value(rung) for n in before if len(trials[n].returns) > rung}
            lowest = min((values[n] for n in after), default=None)
            paused = [values[n] for n in values if n not in after and trials[n].error is None]
            assert lowest is None or all(value <= lowest for value in paused)


@pytest.mark.parametrize("rungs", [(10,), (10, 30)])
@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
def test_a_search_with_fewer_trials_first_is_told_the_same(rungs, fewer, more, seed):
    search = make_search(rungs=rungs, num_concurrent=2)
    num_trials = fewer + more
    whole = simulate(search, num_trials, 3, seed)
    begun = simulate(search, fewer, 3, seed)
    extended = simulate(search, num_trials, 3, seed, begun)
    for number in range(num_trials):
        expected = halving.told(search, whole, number, num_trials)
        assert halving.told(search, extended, number, num_trials) == expected


def test_a_search_is_as_long_as_planned():
    search = make_search(rungs=(10,), num_seeds=2)
    # Brackets of 3: the first has 3 trials of 10 steps and one that goes on for 80, the last has a
    # single trial of 90.
    assert halving.planned_steps(search, 4) == 2 * (3 * 10 + 80 + 90)


def test_a_failed_trial_does_not_go_on_and_a_trial_waits_for_those_before():
    search = make_search(rungs=(10,), num_concurrent=2)
    trials = {
        0: Trial(0, {}, ((0.5,),)),
        1: Trial(1, {}, (), "it failed"),
        2: Trial(2, {}),
    }
    assert list(halving.ready_jobs(search, trials, 9)) == [Job(2, 0), Job(3, 0)]
    trials[2] = Trial(2, {}, ((0.4,),))
    trials[3] = Trial(3, {})
    assert list(halving.ready_jobs(search, trials, 9)) == [Job(0, 1), Job(3, 0), Job(4, 0)]


def test_a_trial_that_fails_after_any_rung_ranks_below_all_others():
    search = make_search(sampler="tpe", num_concurrent=1)
    for passed in range(3):
        returns = {n: ((float(n),),) for n in range(9)}
        trials = {n: Trial(n, {}, of) for n, of in returns.items()}
        for n in (6, 7, 8):
            trials[n] = trials[n]._replace(returns=trials[n].returns * 2)
        trials[8] = trials[8]._replace(returns=((8.0,),) * passed, error="the loss is NaN")
        trials[7] = trials[7]._replace(returns=((7.0,),) * 3)
        trials |= {n: Trial(n, {}, ((1.0,),)) for n in range(9, 18)}
        assert halving.told(search, trials, 18, 27)[8].returns == []


def test_a_suggestion_sees_running_failed_paused_and_finished_trials():
    search = make_search(rungs=(10,), reduction=2, num_concurrent=2)
    trials = {
        0: Trial(0, {"fake.quality": 0.0}, ((0.2,), (0.3,))),
        1: Trial(1, {"fake.quality": 0.1}, (), "it failed"),
        2: Trial(2, {"fake.quality": 0.2}, ((0.5,), (0.6,))),
        3: Trial(3, {"fake.quality": 0.3}, ((0.4,),)),
        4: Trial(4, {"fake.quality": 0.4}, ((0.7,),)),
    }
    seen = halving.told(search, trials, 5, 6)
    # Of the bracket before its own, only the first rung is known in every order of events.
    assert [x.returns for x in seen] == [[0.2, 0.3], [], [0.5], [0.4], None]
    assert [x.is_complete for x in seen] == [True, False, False, False, False]
