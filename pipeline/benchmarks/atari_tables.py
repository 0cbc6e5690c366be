"""Tables in human-normalised scores, which only Atari games have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pipeline.benchmarks import scores, statistics, wording
from pipeline.benchmarks.document import Column, Table
from pipeline.benchmarks.results import Group
from pipeline.benchmarks.statistics import Estimate

_AGENT, _STEPS = Column("agent", "text"), Column("environment steps")
_GAMES = sorted(scores.ATARI5_WEIGHTS)


def normalised(group: Group) -> Table:
    """A row for each agent and game: the score between a random player's and a human's."""
    columns = (
        *(Column("game", "text"), _AGENT, _STEPS, Column("random"), Column("human")),
        *(Column("score: IQM (runs)"), Column("human-normalised: IQM [95 % interval] (runs)")),
    )
    rows = [
        (
            pair.environment,
            wording.agent(pair.algorithm),
            wording.steps(pair.num_env_steps, True),
            wording.number(scores.random_score(pair.environment)),
            wording.number(scores.human_score(pair.environment)),
            f"{wording.number(pair.estimate.point)} ({pair.estimate.n})",
            wording.interval(
                statistics.interval_estimate(
                    scores.human_normalized(pair.environment, pair.scores)
                ),
                ".3f",
            ),
        )
        for pair in group.pairs
        if pair.estimate
    ]
    return Table("Human-normalised scores: 0 is random, 1 is human", columns, tuple(rows))


def aggregates(group: Group) -> Table:
    """A row for each agent and budget: what all its runs in all games come to."""
    estimates: dict[str, Callable[[list[np.ndarray]], Estimate]] = {
        "IQM": statistics.interval_estimate,
        "median": statistics.median_estimate,
        "mean": lambda tasks: statistics.interval_estimate(tasks, statistics.mean),
        "optimality gap": lambda tasks: statistics.interval_estimate(
            tasks, statistics.optimality_gap
        ),
    }
    columns = (_AGENT, _STEPS, Column("games"), Column("runs"), *map(Column, estimates))
    rows = []
    for algorithm in group.algorithms:
        for steps in _budgets(group, algorithm):
            tasks = _tasks(group, algorithm, steps)
            cells = [_interval(estimate(tasks), len(tasks)) for estimate in estimates.values()]
            games = f"{len(tasks)} of {len(group.of(algorithm=algorithm))}"
            runs = str(sum(map(len, tasks)))
            shown = wording.steps(steps, True)
            rows.append((wording.agent(algorithm), shown, games, runs, *cells))
    caption = "Human-normalised scores over all games, [95 % interval]"
    return Table(caption, columns, tuple(rows))


def _interval(estimate: Estimate, num_tasks: int) -> str:
    """Without the number of runs, which has a column of its own."""
    return wording.interval(estimate, ".3f", tasks=num_tasks).rpartition(" (")[0]


def _budgets(group: Group, algorithm: str) -> list[int]:
    """At which an agent has scores."""
    ends = {pair.num_env_steps for pair in group.of(algorithm=algorithm)}
    return [steps for steps in sorted({*group.budgets, *ends}) if _tasks(group, algorithm, steps)]


def _tasks(group: Group, algorithm: str, steps: int) -> list[np.ndarray]:
    """For each game that was trained for so many steps, the normalised scores of its runs."""
    reached = [pair for pair in group.of(algorithm=algorithm) if steps <= pair.num_env_steps]
    of_games = [(pair.environment, pair.scores_at(steps)) for pair in reached]
    return [scores.human_normalized(game, of) for game, of in of_games if len(of)]


def atari5(group: Group) -> Table | None:
    """The estimated median over 57 games, for whom all five games are known; None for nobody."""
    columns = (_AGENT, Column("by", "text"), _STEPS, Column("estimated median [95 % interval], %"))
    rows = [*_our_medians(group), *_published_medians(group)]
    caption = "Atari-5: the median human-normalised score over 57 games, estimated from five"
    return Table(caption, columns, tuple(rows)) if rows else None


def _our_medians(group: Group) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for algorithm in group.algorithms:
        of_game = {pair.environment: pair for pair in group.of(algorithm=algorithm)}
        runs = {game: of_game[game].scores for game in _GAMES if game in of_game}
        if len(runs) == len(_GAMES) and all(map(len, runs.values())):
            (*_, steps) = sorted({of_game[game].num_env_steps for game in _GAMES})
            shown = _interval_of_median(runs)
            who = (wording.agent(algorithm), "this project", wording.steps(steps, True))
            rows.append((*who, shown))
    return rows


def _interval_of_median(runs: Mapping[str, np.ndarray]) -> str:
    """Of the games' mean scores, every game's runs resampled on their own."""
    point = scores.atari5_median({game: float(np.mean(of)) for game, of in runs.items()})
    resampled = {
        game: statistics.stratified_bootstrap(of, statistics.mean, seed=seed)
        for seed, (game, of) in enumerate(sorted(runs.items()))
    }
    low, high = statistics.confidence_interval(scores.atari5_median(resampled))
    estimate = Estimate(point, float(low), float(high), sum(map(len, runs.values())))
    return wording.interval(estimate, ".1f", tasks=len(runs)).rpartition(" (")[0]


def _published_medians(group: Group) -> list[tuple[str, ...]]:
    games: dict[tuple[str, str, int], dict[str, float]] = {}
    for game in _GAMES:
        for score in group.published(game):
            who = (score.algorithm, score.peer, score.env_steps)
            games.setdefault(who, {})[game] = score.score
    return [
        (
            wording.agent(algorithm),
            peer,
            wording.steps(env_steps, True),
            f"{scores.atari5_median(of):.1f}",
        )
        for (algorithm, peer, env_steps), of in sorted(games.items())
        if len(of) == len(_GAMES)
    ]
