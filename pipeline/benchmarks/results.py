"""Groups records for a report: by suite and protocol, then by environment and agent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from pipeline.benchmarks import formatting, interval_estimates, published_scores, suites
from pipeline.benchmarks.interval_estimates import Estimate, Statistic
from pipeline.benchmarks.published_scores import Published
from pipeline.benchmarks.records import FINISHED, Record
from pipeline.benchmarks.suite_folder import Plan

# Relative difference up to which budgets are the same, because iterations may exceed a budget.
SAME_BUDGET = 0.02
# Relative delay up to which a logged score counts for a budget, because logs have intervals.
_LATE = 0.05


@dataclasses.dataclass(frozen=True)
class Pair:
    """The runs of one agent in one environment, with all seeds.

    Attributes:
      algorithm: Name of the algorithm, "dqn".
      environment: A gymnasium id or a game.
      seeds: Number of seeds that were requested, 1 to `seeds`.
      records: The last record of each run that has ended, by seed; at least one.
    """

    algorithm: str
    environment: str
    seeds: int
    records: tuple[Record, ...]

    @property
    def config(self) -> str:
        """Returns the name of the gin file."""
        return self.records[0]["config"]

    @property
    def num_env_steps(self) -> int:
        """Returns the budget in environment steps."""
        return self.records[0]["num_env_steps"]

    @property
    def name(self) -> str:
        """Returns the name of the pair: "DQN on CartPole-v1"."""
        return f"{formatting.agent(self.algorithm)} on {self.environment}"

    @property
    def finished(self) -> list[Record]:
        """Returns the records of the runs that have finished."""
        return [record for record in self.records if record["status"] == FINISHED]

    @property
    def failed(self) -> list[Record]:
        """Returns the records of the runs that have failed."""
        return [record for record in self.records if record["status"] != FINISHED]

    @property
    def missing(self) -> list[int]:
        """Returns the seeds that were requested and have no record."""
        return sorted(set(range(1, self.seeds + 1)) - {record["seed"] for record in self.records})

    @property
    def unscored(self) -> list[Record]:
        """Returns the records of the finished runs that have no score."""
        return [record for record in self.finished if score_of(record) is None]

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """Returns the scores of the finished runs, [n]."""
        return _known(score_of(record) for record in self.finished)

    @functools.cached_property
    def estimate(self) -> Estimate | None:
        """Returns the interquartile mean of `scores`; None if there are none."""
        return estimate(self.scores)

    @functools.cached_property
    def mean(self) -> Estimate | None:
        """Returns the mean of `scores`, which others publish; None if there are none."""
        return estimate(self.scores, interval_estimates.mean)

    def scores_at(self, env_steps: int) -> np.ndarray:
        """Returns the scores of the finished runs at `env_steps` environment steps, [n]."""
        return _known(score_of(record, env_steps) for record in self.finished)

    def numbers(self, name: str) -> np.ndarray:
        """Returns a field of the records of the finished runs where it is known, [n]."""
        return _known(record[name] for record in self.finished)

    @property
    def curves(self) -> list[np.ndarray]:
        """Returns a curve for each finished run that has at least two points.

        A curve has an environment step and a return for each point, [points, 2].
        """
        return [np.array(r["curve"], np.float64) for r in self.finished if len(r["curve"]) > 1]


@dataclasses.dataclass(frozen=True)
class Group:
    """Pairs that may be compared, because they are of one suite and under one protocol.

    Attributes:
      suite: Name of the suite.
      protocol: How environments are made and scores are taken, in words.
      score: "evaluation", "training" or "iteration"; see `records`.
      budgets: Environment steps at which scores are tabulated in addition to the final one.
      pairs: The pairs, by environment, then algorithm.
      not_begun: Names of the experiments of the suite, under any protocol, that were requested and
        have no record.
    """

    suite: str
    protocol: str
    score: str
    budgets: tuple[int, ...]
    pairs: tuple[Pair, ...]
    not_begun: tuple[str, ...] = ()

    @property
    def environments(self) -> list[str]:
        """Returns the environments, in order."""
        return list(dict.fromkeys(pair.environment for pair in self.pairs))

    @property
    def algorithms(self) -> list[str]:
        """Returns the algorithms, in order."""
        return sorted({pair.algorithm for pair in self.pairs})

    @property
    def is_atari(self) -> bool:
        """Returns True if every environment is a game with a human score."""
        return set(self.environments) <= set(published_scores.atari_games())

    def of(self, environment: str | None = None, algorithm: str | None = None) -> list[Pair]:
        """Returns the pairs of an environment, an algorithm, or both."""
        return [
            pair
            for pair in self.pairs
            if environment in (None, pair.environment) and algorithm in (None, pair.algorithm)
        ]

    def num_games(self, algorithm: str) -> int:
        """Returns the number of games that were requested for an agent."""
        requested = {suites.name_of(algorithm, game) for game in published_scores.atari_games()}
        return len(self.of(algorithm=algorithm)) + len(requested.intersection(self.not_begun))

    def common_steps(self, algorithm: str) -> int:
        """Returns the environment steps for which an agent was trained in all environments."""
        return min(pair.num_env_steps for pair in self.of(algorithm=algorithm))

    def normalized_scores(self, algorithm: str, env_steps: int) -> list[np.ndarray]:
        """Returns an agent's human-normalized scores at `env_steps`, one array for each game."""
        scores = [(p.environment, p.scores_at(env_steps)) for p in self.of(algorithm=algorithm)]
        return [published_scores.human_normalized(game, of) for game, of in scores if len(of)]

    def published(self, environment: str) -> list[Published]:
        """Returns the scores published under this protocol for any version of the environment."""
        return [p for p in published_scores.published(environment) if p.protocol == self.protocol]

    def comparable(self, pair: Pair, env_steps: int | None = None) -> list[Published]:
        """Returns published scores of this protocol and the pair's agent after as many steps.

        Args:
          pair: A pair of this group.
          env_steps: Environment steps of training; None for the budget of the pair.
        """
        steps = env_steps or pair.num_env_steps
        return [
            score
            for score in self.published(pair.environment)
            if score.algorithm == pair.algorithm
            and abs(score.env_steps - steps) <= SAME_BUDGET * steps
        ]


def most_seeds(records: Sequence[Record]) -> int:
    """Returns the largest number of seeds that was requested, by the records; 0 without records."""
    return max((record["num_seeds"] for record in records), default=0)


def groups(records: Sequence[Record], plan: Plan) -> list[Group]:
    """Groups the records of one suite by protocol. Every group has the budgets of all records.

    Args:
      records: Records of the suite.
      plan: What was requested. More seeds can be requested than a record says.
    """
    budgets = {budget for record in records for budget in record["budgets"]}
    kinds = sorted({(r["suite"], r["protocol"], r["score"]) for r in records})
    steps = tuple(sorted(budgets))
    split = [
        Group(*kind, steps, _pairs(records, kind, plan), tuple(not_begun(kind[0], records, plan)))
        for kind in kinds
    ]
    return sorted(split, key=lambda group: group.algorithms)


def _pairs(records: Sequence[Record], kind: tuple[str, ...], plan: Plan) -> tuple[Pair, ...]:
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if (record["suite"], record["protocol"], record["score"]) == kind:
            runs.setdefault((record["environment"], record["algorithm"]), []).append(record)
    pairs = []
    for (environment, algorithm), of in sorted(runs.items()):
        num_seeds, name = most_seeds(of), suites.name_of(algorithm, environment)
        if name in plan:
            num_seeds = max(num_seeds, plan[name].num_seeds)
        in_order = tuple(sorted(of, key=lambda record: record["seed"]))
        pairs.append(Pair(algorithm, environment, num_seeds, in_order))
    return tuple(pairs)


def not_begun(suite: str, records: Sequence[Record], requested: Collection[str] = ()) -> list[str]:
    """Returns the names of the experiments that have no record.

    Args:
      suite: Name of the suite.
      records: Its records.
      requested: Names of the requested experiments; if empty, those of the shipped suite.
    """
    if not requested and suite in suites.shipped():
        requested = [experiment.name for experiment in suites.load(suite).experiments]
    known = {suites.name_of(record["algorithm"], record["environment"]) for record in records}
    return [name for name in requested if name not in known]


def score_of(record: Record, env_steps: int | None = None) -> float | None:
    """Returns the score of a run at its end, or at `env_steps`; None if it is not known."""
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


def estimate(
    values: np.ndarray, statistic: Statistic = interval_estimates.interquartile_mean
) -> Estimate | None:
    """Estimates a statistic of the values. Returns None if there are no values."""
    return interval_estimates.estimate([values], statistic) if len(values) else None


def _known(values: Iterable[float | None]) -> np.ndarray:
    return np.array([value for value in values if value is not None], np.float64)
