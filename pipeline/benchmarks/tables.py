"""The tables that every suite has: what was run, scores beside published ones, speeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline import progress
from pipeline.benchmarks import results, statistics, wording
from pipeline.benchmarks.document import Column, Table
from pipeline.benchmarks.results import Group, Pair
from pipeline.benchmarks.scores import Published

_ENVIRONMENT, _AGENT = Column("environment", "text"), Column("agent", "text")
_STEPS = Column("environment steps")
_SCORE = Column("score: IQM [95 % interval] (runs)")
_MEAN = Column("mean [95 % interval]")
_WALL = "wall-clock of a run, h:mm:ss"
_SPEED = "environment steps/s"


def what_was_run(group: Group) -> Table:
    """A row for each pair: config, budget, and how its runs ended."""
    columns = (
        *(_ENVIRONMENT, _AGENT, Column("config", "code"), _STEPS),
        *(Column("finished"), Column("failed"), Column("missing")),
        Column("final evaluation", "text"),
    )
    rows = [
        (
            *_names(pair),
            pair.config,
            _steps(group, pair.num_env_steps),
            f"{len(pair.finished)} of {pair.seeds}",
            str(len(pair.failed)),
            str(len(pair.missing)),
            _evaluation(pair),
        )
        for pair in group.pairs
    ]
    return Table("What was run", columns, tuple(rows))


def _evaluation(pair: Pair) -> str:
    kinds = {(len(r["evaluation_returns"]), r["evaluation_policy"]) for r in pair.finished}
    named = [f"{wording.count(n, 'episode')}, {policy}" for n, policy in sorted(kinds) if n]
    return "; ".join(named) or "none"


def overview(group: Group) -> Table:
    """A row for each pair: its score, the best comparable published one, and which is higher."""
    best = Column("best published: same agent, protocol and steps", "text")
    ours = (_STEPS, _SCORE, _MEAN)
    columns = (_ENVIRONMENT, _AGENT, *ours, best, Column("mean at or above?", "text"))
    rows = [_overview_row(group, pair) for pair in group.pairs]
    return Table("Results", columns, tuple(rows))


def _overview_row(group: Group, pair: Pair) -> tuple[str, ...]:
    best = max(group.comparable(pair), key=lambda score: score.score, default=None)
    return (
        *_names(pair),
        _steps(group, pair.num_env_steps),
        _score(pair),
        _mean(pair),
        f"{wording.published(best)}, {wording.peer(best, pair.environment)}" if best else "none",
        _verdict(pair, best) if best else "",
    )


def environment(group: Group, name: str) -> Table:
    """One environment: our agents, and below them everything published under this protocol.

    Of a peer's learning curve the last point within our budget counts, or the first beyond it.
    """
    columns = (
        *(_AGENT, Column("by", "text"), _STEPS, _SCORE, _MEAN),
        *(Column(f"{_WALL}, median"), Column(f"{_SPEED}, median")),
        *(Column("ours at or above?", "text"), Column("source, note", "text")),
    )
    rows = [
        *(_our_row(group, pair) for pair in group.of(name)),
        *(_published_row(group, name, score) for score in _nearest(group, name)),
    ]
    return Table(f"{name}: {group.protocol}", columns, tuple(rows))


def _nearest(group: Group, name: str) -> Iterable[Published]:
    largest = max(pair.num_env_steps for pair in group.of(name)) * (1 + results.SAME_BUDGET)
    nearest: dict[tuple[str, str], Published] = {}
    for score in sorted(group.published(name), key=_order):
        who = (score.algorithm, score.peer)
        if score.env_steps <= largest or who not in nearest:
            nearest[who] = score
    return nearest.values()


def _our_row(group: Group, pair: Pair) -> tuple[str, ...]:
    return (
        wording.agent(pair.algorithm),
        "this project",
        _steps(group, pair.num_env_steps),
        _score(pair),
        _mean(pair),
        _median(pair.numbers("wall_seconds"), progress.duration),
        _median(pair.numbers("env_steps_per_second"), "{:,.0f}".format),
        "",
        f"`{pair.config}`",
    )


def _published_row(group: Group, name: str, score: Published) -> tuple[str, ...]:
    ours = [pair for pair in group.of(name) if results.is_comparable(score, pair)]
    return (
        wording.agent(score.algorithm),
        score.peer,
        _steps(group, score.env_steps),
        wording.published(score),
        *("", "", ""),
        ", ".join(_verdict(pair, score) for pair in ours),
        "; ".join(text for text in (score.source, score.note) if text),
    )


def elsewhere(group: Group, name: str) -> Table | None:
    """What was published about an environment under other protocols; None if nothing was."""
    peers = sorted(
        group.published_otherwise(name), key=lambda score: (score.protocol, *_order(score))
    )
    columns = (
        *(Column("protocol", "text"), _AGENT, Column("by", "text"), _STEPS),
        *(Column("score ± standard deviation (runs)"), Column("source, note", "text")),
    )
    rows = [
        (
            score.protocol,
            wording.agent(score.algorithm),
            score.peer,
            _steps(group, score.env_steps),
            wording.published(score),
            "; ".join(text for text in (score.source, score.note) if text),
        )
        for score in peers
    ]
    caption = f"{name}: published under other protocols, not comparable"
    return Table(caption, columns, tuple(rows)) if rows else None


def budgets(group: Group) -> Table | None:
    """Scores after a part of the training, beside those published; None without budgets."""
    if not group.budgets:
        return None
    columns = (
        *(_ENVIRONMENT, _AGENT, Column("by", "text")),
        *(Column(_steps(group, budget)) for budget in group.budgets),
    )
    rows = [row for pair in group.pairs for row in _budget_rows(group, pair)]
    return Table("Scores by environment steps", columns, tuple(rows))


def _budget_rows(group: Group, pair: Pair) -> list[tuple[str, ...]]:
    ours = [results.estimate(pair.scores_at(budget)) for budget in group.budgets]
    means = [results.mean(pair.scores_at(budget)) for budget in group.budgets]
    rows = [(*_names(pair), "this project", *map(wording.interval, ours))]
    published = [group.comparable(pair, budget) for budget in group.budgets]
    for peer in dict.fromkeys(score.peer for scores in published for score in scores):
        theirs = [next((s for s in scores if s.peer == peer), None) for scores in published]
        rows.append((*_names(pair), peer, *(wording.published(s) if s else "" for s in theirs)))
        verdicts = [
            wording.verdict(our, s.score) if our and s else ""
            for our, s in zip(means, theirs, strict=True)
        ]
        rows.append((*_names(pair), f"ours at or above {peer}?", *verdicts))
    return rows


def improvement(group: Group) -> Table | None:
    """How probably a run of one agent beats one of another; None if no two share an environment."""
    columns = (
        *(Column("probability that", "text"), _ENVIRONMENT, _STEPS),
        Column("probability [95 % interval] (runs)"),
    )
    rows = [
        row
        for first, second in itertools.combinations(group.algorithms, 2)
        for row in _improvement_rows(group, first, second)
    ]
    return Table("Probability of improvement", columns, tuple(rows)) if rows else None


def _improvement_rows(group: Group, first: str, second: str) -> list[tuple[str, ...]]:
    shared = [
        (x, y)
        for x in group.of(algorithm=first)
        for y in group.of(x.environment, second)
        if len(x.scores) and len(y.scores)
    ]
    claim = f"{wording.agent(first)} > {wording.agent(second)}"
    rows: list[tuple[str, ...]] = [
        (claim, x.environment, _both_steps(group, x, y), _probability([(x, y)])) for x, y in shared
    ]
    if len(shared) > 1:
        rows.append((claim, f"mean of {len(shared)} environments", "", _probability(shared)))
    return rows


def _both_steps(group: Group, x: Pair, y: Pair) -> str:
    steps = dict.fromkeys(_steps(group, pair.num_env_steps) for pair in (x, y))
    return " against ".join(steps)


def _probability(shared: Sequence[tuple[Pair, Pair]]) -> str:
    x, y = ([pair.scores for pair in side] for side in zip(*shared, strict=True))
    estimate = statistics.improvement_estimate(x, y)
    return wording.interval(estimate, ".2f", tasks=2 * len(shared))


def speeds(group: Group) -> Table:
    """A row for each pair: how long its runs took and how fast they were."""
    columns = (
        *(_ENVIRONMENT, _AGENT, _STEPS, Column("updates, median")),
        *(Column(f"{_WALL}: median [range]"), Column(f"{_SPEED}: median [range]")),
        *(Column("runs at once, at most", "text"), Column("CPU (usable cores)", "text")),
    )
    rows = [
        (
            *_names(pair),
            _steps(group, pair.num_env_steps),
            _median(pair.numbers("updates"), "{:,.0f}".format),
            wording.middle(pair.numbers("wall_seconds"), progress.duration),
            wording.middle(pair.numbers("env_steps_per_second"), "{:,.0f}".format),
            wording.numbers(pair.numbers("workers").astype(int)),
            "; ".join(sorted({_cpu(r["cpu_model"], r["cpu_count"]) for r in pair.finished})),
        )
        for pair in group.pairs
    ]
    return Table("Wall-clock and speed", columns, tuple(rows))


def _cpu(model: str | None, count: int) -> str:
    return f"{model or 'unknown'} ({count})"


def _names(pair: Pair) -> tuple[str, str]:
    return pair.environment, wording.agent(pair.algorithm)


def _steps(group: Group, env_steps: int) -> str:
    return wording.steps(env_steps, group.is_atari)


def _score(pair: Pair) -> str:
    """With how many runs were asked for, if some have no score."""
    if pair.estimate is None:
        return "no finished run"
    shown = wording.interval(pair.estimate)
    is_partial = pair.estimate.n < pair.seeds
    return f"{shown.removesuffix(')')} of {pair.seeds})" if is_partial else shown


def _mean(pair: Pair) -> str:
    """Of as many runs as the score beside it, and so without their number."""
    return wording.interval(pair.mean).rpartition(" (")[0]


def _verdict(pair: Pair, score: Published) -> str:
    if pair.mean is None:
        return ""
    other = wording.other_version(score, pair.environment)
    return wording.verdict(pair.mean, score.score) + (f"; theirs is {other}" if other else "")


def _median(values: np.ndarray, show: Callable[[float], str]) -> str:
    return show(float(np.median(values))) if len(values) else ""


def _order(score: Published) -> tuple[str, int, str]:
    return score.algorithm, score.env_steps, score.peer
