"""Records grouped as a report tells them: by suite and protocol, then by environment and agent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from pipeline.benchmarks import scores, statistics, suites, wording
from pipeline.benchmarks.records import FINISHED, Record
from pipeline.benchmarks.scores import Published
from pipeline.benchmarks.statistics import Estimate

# Budgets this close are the same: an iteration may cross its budget by some steps.
SAME_BUDGET = 0.02
_LATE = 0.05  # a score noted so much later counts for a budget, for logs have intervals


@dataclasses.dataclass(frozen=True)
class Pair:
    """One agent in one environment: the runs of all seeds.

    Attributes:
        algorithm: "dqn".
        environment: a gymnasium id or a game.
        seeds: how many were asked for, 1 to `seeds`.
        records: the last of each run that has ended, by seed; at least one.
    """

    algorithm: str
    environment: str
    seeds: int
    records: tuple[Record, ...]

    @property
    def config(self) -> str:
        """Name of the gin file."""
        return self.records[0]["config"]

    @property
    def num_env_steps(self) -> int:
        """The budget, in environment steps."""
        return self.records[0]["num_env_steps"]

    @property
    def name(self) -> str:
        """ "DQN on CartPole-v1"."""
        return f"{wording.agent(self.algorithm)} on {self.environment}"

    @property
    def finished(self) -> list[Record]:
        """Of the runs that came to their end."""
        return [record for record in self.records if record["status"] == FINISHED]

    @property
    def failed(self) -> list[Record]:
        """Of the runs that did not."""
        return [record for record in self.records if record["status"] != FINISHED]

    @property
    def missing(self) -> list[int]:
        """Seeds that were asked for and have no record."""
        return sorted(set(range(1, self.seeds + 1)) - {record["seed"] for record in self.records})

    @property
    def unscored(self) -> list[Record]:
        """Finished, but without the number that counts."""
        return [record for record in self.finished if score_of(record) is None]

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """[n], of the finished runs that have one."""
        return _known(score_of(record) for record in self.finished)

    @functools.cached_property
    def estimate(self) -> Estimate | None:
        """Interquartile mean of `scores`; None if there are none."""
        return estimate(self.scores)

    @functools.cached_property
    def mean(self) -> Estimate | None:
        """Mean of `scores`, which is what others publish; None if there are none."""
        return mean(self.scores)

    def scores_at(self, env_steps: int) -> np.ndarray:
        """[n], of the finished runs whose curve reaches this many environment steps."""
        return _known(score_of(record, env_steps) for record in self.finished)

    def numbers(self, name: str) -> np.ndarray:
        """[n], a field of the finished runs, where known."""
        return _known(record[name] for record in self.finished)

    @property
    def curves(self) -> list[np.ndarray]:
        """[points, 2] for each finished run that has at least two: environment steps, return."""
        return [np.array(r["curve"], np.float64) for r in self.finished if len(r["curve"]) > 1]


@dataclasses.dataclass(frozen=True)
class Group:
    """Pairs that may be compared: of one suite, under one protocol.

    Attributes:
        suite: its name.
        protocol: in words.
        score: "evaluation", "training" or "iteration": see `records`.
        budgets: environment steps at which scores are tabled, below the final one's.
        pairs: by environment, then algorithm.
    """

    suite: str
    protocol: str
    score: str
    budgets: tuple[int, ...]
    pairs: tuple[Pair, ...]

    @property
    def environments(self) -> list[str]:
        """In order."""
        return list(dict.fromkeys(pair.environment for pair in self.pairs))

    @property
    def algorithms(self) -> list[str]:
        """In order."""
        return sorted({pair.algorithm for pair in self.pairs})

    @property
    def is_atari(self) -> bool:
        """Whether every environment is a game with a human score."""
        return set(self.environments) <= set(scores.atari_games())

    def of(self, environment: str | None = None, algorithm: str | None = None) -> list[Pair]:
        """The pairs of an environment, an algorithm, or both."""
        return [
            pair
            for pair in self.pairs
            if environment in (None, pair.environment) and algorithm in (None, pair.algorithm)
        ]

    def published(self, environment: str) -> list[Published]:
        """What others published under this protocol, of whatever version of the environment."""
        return [p for p in scores.published(environment) if p.protocol == self.protocol]

    def comparable(self, pair: Pair, env_steps: int | None = None) -> list[Published]:
        """What others published of the same agent after as many steps, under this protocol.

        Args:
            pair: of this group.
            env_steps: of training; the pair's budget if None.
        """
        return [p for p in self.published(pair.environment) if is_comparable(p, pair, env_steps)]

    def published_otherwise(self, environment: str) -> list[Published]:
        """What others published under other protocols: not to be compared."""
        return [p for p in scores.published(environment) if p.protocol != self.protocol]


def most_seeds(records: Sequence[Record], num_seeds: int = 0) -> int:
    """The most seeds that were asked for: `num_seeds`, or what a record tells of."""
    return max([num_seeds, *(record["num_seeds"] for record in records)])


def groups(records: Sequence[Record], num_seeds: int = 0) -> list[Group]:
    """The records of one suite, by protocol.

    The number of seeds and the budgets are the suite's largest: it may have been asked for more in
    a later call than in an earlier one, and for more (`num_seeds`) than any record tells of.
    """
    seeds = most_seeds(records, num_seeds)
    budgets = {budget for record in records for budget in record["budgets"]}
    kinds = sorted({(r["suite"], r["protocol"], r["score"]) for r in records})
    split = [Group(*kind, tuple(sorted(budgets)), _pairs(records, kind, seeds)) for kind in kinds]
    return sorted(split, key=lambda group: group.algorithms)


def _pairs(records: Sequence[Record], kind: tuple[str, ...], seeds: int) -> tuple[Pair, ...]:
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if (record["suite"], record["protocol"], record["score"]) == kind:
            runs.setdefault((record["environment"], record["algorithm"]), []).append(record)
    return tuple(
        Pair(algorithm, environment, seeds, tuple(sorted(of, key=lambda record: record["seed"])))
        for (environment, algorithm), of in sorted(runs.items())
    )


def not_begun(suite: str, records: Sequence[Record], asked: Collection[str] = ()) -> list[str]:
    """Names of the experiments that `records` know nothing of.

    Of those that were asked for; if that is not known, of those that a shipped suite has.
    """
    if not asked and suite in suites.shipped():
        asked = [experiment.name for experiment in suites.load(suite).experiments]
    known = {suites.name_of(record["algorithm"], record["environment"]) for record in records}
    return [name for name in asked if name not in known]


def score_of(record: Record, env_steps: int | None = None) -> float | None:
    """A run's score at its end, or when it had taken so many environment steps; None if unknown."""
    end = record["num_env_steps"]
    if env_steps is not None and env_steps > end * (1 + SAME_BUDGET):
        return None
    at = end if env_steps is None else min(env_steps, end)
    is_end = at == end
    if record["score"] == "evaluation" and is_end:
        returns = record["evaluation_returns"]
        return float(np.mean(returns)) if returns else None
    if record["score"] == "iteration":
        return next((mean for steps, mean in record["iterations"] if steps == at), None)
    points = record["evaluations" if record["score"] == "evaluation" else "curve"]
    if is_end:
        return points[-1][1] if points else None
    return next((value for steps, value in points if at <= steps <= at * (1 + _LATE)), None)


def estimate(values: np.ndarray) -> Estimate | None:
    """The interquartile mean with its interval; None without values."""
    return statistics.interval_estimate(values) if len(values) else None


def mean(values: np.ndarray) -> Estimate | None:
    """The mean with its interval; None without values."""
    return statistics.interval_estimate(values, statistics.mean) if len(values) else None


def is_comparable(score: Published, pair: Pair, env_steps: int | None = None) -> bool:
    """Whether a score under the same protocol is of the same agent after as many steps."""
    steps = env_steps or pair.num_env_steps
    is_same_budget = abs(score.env_steps - steps) <= SAME_BUDGET * steps
    return score.algorithm == pair.algorithm and is_same_budget


def _known(values: Iterable[float | None]) -> np.ndarray:
    return np.array([value for value in values if value is not None], np.float64)
