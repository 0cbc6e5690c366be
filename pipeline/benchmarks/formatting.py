"""Formats the numbers and names of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline.benchmarks.interval_estimates import Estimate
from pipeline.benchmarks.published_scores import Published
from pipeline.utils import progress

FEWEST_RUNS = 5  # with fewer runs, the bootstrap interval is far too narrow


def agent(algorithm: str) -> str:
    """Returns the name of an algorithm in reports: "DQN", "DQN 3.0", "n-step Q"."""
    return {"nstep_q": "n-step Q", "dqn3": "DQN 3.0"}.get(algorithm, algorithm.upper())


def interval(estimate: Estimate | None, spec: str = "") -> str:
    """Formats an estimate as "IQM [low, high] (n)".

    The interval is left out if a task has a single run.

    Args:
      estimate: Estimate over the runs of all tasks; None is formatted as "".
      spec: Format specification of the three numbers. If empty, it is `score_format` of the
        largest of them.
    """
    if estimate is None:
        return ""
    spec = spec or progress.score_format(max(estimate[:3], key=abs))
    if estimate.fewest == 1:
        return f"{estimate.point:{spec}} ({estimate.n})"
    point, low, high = (format(value, spec) for value in estimate[:3])
    return f"{point} [{low}, {high}] ({estimate.n})"


def published(score: Published) -> str:
    """Formats a published score as "mean ± standard deviation (n)"; unknown parts are left out."""
    spec = _format_of(score)
    spread = "" if score.spread is None else f" ± {score.spread:{spec}}"
    runs = "" if score.num_runs is None else f" ({score.num_runs})"
    return f"{score.score:{spec}}{spread}{runs}"


def _format_of(score: Published) -> str:
    """Returns the format of a published score, with no more decimals than were published."""
    of_size = progress.score_decimals(max(score.score, score.spread or 0.0, key=abs))
    return f"z,.{min(of_size, score.decimals)}f"


def verdict(ours: Estimate, theirs: Published) -> str:
    """Returns whether our mean is at or above theirs: "yes", "no" or "no, but in its interval".

    Both are compared as printed, because published scores are rounded. The last answer means that
    theirs is above our mean, but not above the interval of our mean.
    """
    spec = _format_of(theirs)
    point, high, other = (_printed(x, spec) for x in (ours.point, ours.high, theirs.score))
    if point >= other:
        return "yes"
    is_within = high >= other
    return "no, but in its interval" if is_within and ours.n >= FEWEST_RUNS else "no"


def _printed(value: float, spec: str) -> float:
    return float(format(value, spec).replace(",", ""))


def middle(values: np.ndarray, show: Callable[[float], str] = "{:,.0f}".format) -> str:
    """Formats values as "median [lowest, highest]"; "" without values."""
    if not len(values):
        return ""
    center, *ends = (show(float(value)) for value in (np.median(values), min(values), max(values)))
    return center if len(values) == 1 else f"{center} [{', '.join(ends)}]"


def clock(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds: "0:00:56", "26:03:04"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def steps(env_steps: int, is_atari: bool) -> str:
    """Formats environment steps; in Atari with the number of frames, which is four per step."""
    frames = f" ({env_steps * 4 / 1e6:g} M frames)" if is_atari else ""
    return f"{env_steps:,}{frames}"


def numbers(values: Iterable[int]) -> str:
    """Formats whole numbers as ranges: "1 to 3, 7"."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)


def seeds(values: Sequence[int]) -> str:
    """Formats seeds: "seed 2", "seeds 1 to 3, 7"."""
    return f"seed{'' if len(values) == 1 else 's'} {numbers(values)}"


def listed(names: Sequence[str]) -> str:
    """Formats names as a list: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def of_runs(num_runs: int, seeds: int) -> str:
    """Formats a number of runs: "10 runs", or "3 of 10 runs" if more seeds were requested."""
    if num_runs < seeds:
        return f"{num_runs} of {seeds} runs"
    return count(num_runs, "run")


def count(number_of: int, noun: str) -> str:
    """Formats a number with its noun: "1 run", "2 runs"."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def peer(score: Published, environment: str) -> str:
    """Returns the peer and agent of a score: "RL Zoo DQN".

    The text is "RL Zoo DQN (v2)" if the score is of another version of the environment.
    """
    other = other_version(score, environment)
    return f"{score.peer} {agent(score.algorithm)}" + (f" ({other})" if other else "")


def other_version(score: Published, environment: str) -> str:
    """Returns "v2" if a score is of version 2 and our environment is another version, else ""."""
    return "" if score.environment == environment else score.environment.rpartition("-")[2]


def short(value: float) -> str:
    """Formats a number with a suffix: "500k" for 500000, "1.5M" for 1500000."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"
