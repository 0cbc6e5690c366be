"""Decides by successive halving what is trained next, and what each suggestion may depend on.

Trials are numbered from 0 and grouped in brackets of `reduction ** len(rungs)`. All trials of a
bracket are trained up to the first rung. The best of them, 1 of every `reduction`, are trained up
to the second rung, and so on (Jamieson & Talwalkar 2016, "Non-stochastic best arm identification
and hyperparameter optimization"). The others are not continued, unless a better one fails later.

The parameters of a trial depend only on results that are known whichever runs finish first. These
are the first-rung results of all trials whose numbers are lower by at least `num_concurrent`, and
all results of earlier brackets, except the bracket just before the trial's own. The search
therefore has the same trials with any number of workers, and after any interruption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.tuning.search import Search, Told

FINISHED, NOT_CONTINUED, FAILED = ENDED = ("finished", "not continued", "failed")


class Trial(NamedTuple):
    """Trial and its results.

    Attributes:
      number: Number of the trial, from 0.
      parameters: Values of the search's parameters, by name.
      returns: Returns of all seeds, [num_seeds], at each rung that the trial has passed.
      error: None, or why the trial failed after the last of these rungs.
    """

    number: int
    parameters: Mapping[str, Any]
    returns: tuple[tuple[float, ...], ...] = ()
    error: str | None = None

    @property
    def in_words(self) -> str:
        """Returns the parameters in one line."""
        return ", ".join(f"{name} = {value!r}" for name, value in self.parameters.items())

    def value(self, rung: int) -> float:
        """Returns the mean over the seeds at a rung that the trial has passed."""
        return float(np.mean(self.returns[rung]))

    def is_over(self, rung: int) -> bool:
        """Returns True if the trial has passed the rung or failed."""
        return self.error is not None or len(self.returns) > rung


Trials = Mapping[int, Trial]  # by number


class Job(NamedTuple):
    """Training of a trial up to a rung; the last rung is the whole budget."""

    number: int
    rung: int


def best_first(trials: Trials) -> list[Trial]:
    """Returns the trials from best to worst: longer trained ones first, and failed ones last."""

    def order(trial: Trial) -> tuple[bool, int, float, int]:
        value = trial.value(-1) if trial.returns else 0.0
        return trial.error is not None, -len(trial.returns), -value, trial.number

    return sorted(trials.values(), key=order)


def best_trial(trials: Trials) -> Trial | None:
    """Returns the trial with the highest value among those that were trained longest."""
    return next((x for x in best_first(trials) if x.error is None and x.returns), None)


def bracket(search: Search, number: int, num_trials: int) -> range:
    """Returns the numbers of the trials in the bracket of trial `number`."""
    size = search.reduction ** len(search.rungs)
    first = number - number % size
    return range(first, min(first + size, num_trials))


def cohorts(search: Search, trials: Trials, of_bracket: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of the trials trained up to each rung whose participants are known."""
    cohort = list(of_bracket)
    known = [cohort]
    for rung in range(len(search.rungs)):
        if not _are_over(trials, cohort, rung):
            break
        going_on = [number for number in cohort if trials[number].error is None]
        best_first = sorted(going_on, key=lambda number: _order(trials[number], rung))
        cohort = sorted(best_first[: _cohort_size(search, len(cohort))])
        known.append(cohort)
    return known


def cohort_sizes(search: Search, size: int) -> list[int]:
    """Returns how many trials of a bracket of `size` are trained up to each rung."""
    sizes = [size]
    for _ in search.rungs:
        sizes.append(_cohort_size(search, sizes[-1]))
    return sizes


def _cohort_size(search: Search, size: int) -> int:
    """Returns how many trials of a cohort of `size` are trained up to the next rung."""
    return max(1, size // search.reduction)


def _order(trial: Trial, rung: int) -> tuple[float, int]:
    """Returns a sort key that ranks trials that have passed a rung."""
    return -trial.value(rung), trial.number


def planned_steps(search: Search, num_trials: int) -> int:
    """Returns the environment steps of all runs of `num_trials` trials if none of them fails."""
    lengths = np.diff([0, *search.ends])
    firsts = range(0, num_trials, search.reduction ** len(search.rungs))
    sizes = [cohort_sizes(search, len(bracket(search, n, num_trials))) for n in firsts]
    return int(sum(np.dot(x, lengths) for x in sizes)) * search.num_seeds


def trained_steps(search: Search, trials: Trials) -> int:
    """Returns the environment steps of all runs up to the last rung that each trial has passed."""
    lasts = (search.ends[len(trial.returns) - 1] for trial in trials.values() if trial.returns)
    return sum(lasts) * search.num_seeds


def ready_jobs(search: Search, trials: Trials, num_trials: int) -> Iterator[Job]:
    """Yields the jobs that can be done now: those of a bracket before those of later brackets.

    Trials that have no parameters yet are yielded in order. A caller that takes one of them must
    take those before it, too.
    """
    for first in range(0, num_trials, search.reduction ** len(search.rungs)):
        known = cohorts(search, trials, bracket(search, first, num_trials))
        for rung in reversed(range(len(known))):
            for number in known[rung]:
                if number not in trials and not _can_begin(search, trials, number, num_trials):
                    return
                if number not in trials or not trials[number].is_over(rung):
                    yield Job(number, rung)


def told(search: Search, trials: Trials, number: int, num_trials: int) -> list[Told]:
    """Returns all earlier trials, in order, with the results that a suggestion may use."""
    visible = []
    for trial in (trials[n] for n in range(number)):
        if trial.number > number - search.num_concurrent:
            visible.append(Told(trial.parameters, None, is_complete=False))
            continue
        of_trial = bracket(search, trial.number, num_trials)
        is_early = _is_early(search, of_trial, number, num_trials)
        num_rungs = _num_told(search, trials, trial, of_trial) if is_early else 1
        means = [trial.value(rung) for rung in range(len(trial.returns))][:num_rungs]
        visible.append(Told(trial.parameters, means, len(means) == len(search.ends)))
    return visible


def _num_told(search: Search, trials: Trials, trial: Trial, of_bracket: Sequence[int]) -> int:
    """Returns how many returns of a trial are told; none if it failed and ranks below all others.

    A search with fewer trials may have trained it longer, in a smaller bracket. What happened after
    the rung at which the whole bracket leaves it behind is not told.
    """
    known = cohorts(search, trials, of_bracket)
    if trial.error is None:
        return sum(trial.number in cohort for cohort in known)
    for rung in range(min(len(trial.returns), len(known) - 1)):
        better = [n for n in known[rung + 1] if _order(trials[n], rung) < _order(trial, rung)]
        if len(better) == _cohort_size(search, len(known[rung])):
            return rung + 1
    return 0


def trial_states(search: Search, trials: Trials, num_trials: int) -> dict[int, str]:
    """Returns the state of each trial in words: one of `ENDED`, "begun" or "at 5,000 steps"."""
    found: dict[int, str] = {}
    for first in range(0, len(trials), search.reduction ** len(search.rungs)):
        of_bracket = bracket(search, first, num_trials)
        known = cohorts(search, trials, of_bracket)
        begun = (trials[number] for number in of_bracket if number in trials)
        found |= {trial.number: _state(search, trial, known) for trial in begun}
    return found


def _state(search: Search, trial: Trial, known: Sequence[Sequence[int]]) -> str:
    num_passed = len(trial.returns)
    if trial.error is not None:
        return FAILED
    if num_passed == len(search.ends):
        return FINISHED
    if num_passed < len(known) and trial.number not in known[num_passed]:
        return NOT_CONTINUED
    return f"at {search.ends[num_passed - 1]:,} steps" if num_passed else "begun"


def _can_begin(search: Search, trials: Trials, number: int, num_trials: int) -> bool:
    """Returns True if everything that the suggestion of trial `number` depends on is known."""
    if not _are_over(trials, range(number - search.num_concurrent + 1), 0):
        return False
    # Later brackets are not early.
    firsts = range(0, number - search.num_concurrent + 1, search.reduction ** len(search.rungs))
    brackets = [bracket(search, first, num_trials) for first in firsts]
    return all(
        _is_complete(search, trials, of_bracket)
        for of_bracket in brackets
        if _is_early(search, of_bracket, number, num_trials)
    )


def _is_early(search: Search, of_bracket: range, number: int, num_trials: int) -> bool:
    """Returns True if the suggestion of trial `number` depends on all results of a bracket.

    These are brackets before the last one, so that trials can begin while the best of the last
    bracket are trained on.
    """
    own = bracket(search, number, num_trials)
    return of_bracket.stop < own.start and of_bracket[-1] <= number - search.num_concurrent


def _is_complete(search: Search, trials: Trials, of_bracket: Sequence[int]) -> bool:
    known = cohorts(search, trials, of_bracket)
    return len(known) == len(search.ends) and _are_over(trials, known[-1], len(search.rungs))


def _are_over(trials: Trials, numbers: Sequence[int], rung: int) -> bool:
    return all(number in trials and trials[number].is_over(rung) for number in numbers)
