"""Makes the tables of a report, as Markdown."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.benchmarks import formatting, interval_estimates, published_scores, results
from pipeline.benchmarks.interval_estimates import Estimate
from pipeline.benchmarks.markdown import code, escaped, table
from pipeline.benchmarks.published_scores import Published
from pipeline.benchmarks.records import FINISHED, Record
from pipeline.benchmarks.results import Group, Pair
from pipeline.utils import progress

_SCORE = "score: IQM [95 % interval] (runs)"
_MEAN = "mean [95 % interval]"
_OURS = "this project"
_OF_THE_MACHINE = (
    "cpu_model", "cpu_count", "threads", "onednn", "device", "encoder_precision", "versions",
)  # fmt: skip
_ATARI5 = sorted(published_scores.ATARI5_WEIGHTS)


# Who is best.


def best(group: Group) -> str:
    """Returns a table of the best agent of each environment, its lead, and how sure the lead is.

    Agents whose scores look equal in print share the first place, without an interval, because
    each has its own. The first of them is compared with the next agent.
    """
    columns = (
        *("environment", "best agent", _SCORE, "next", "its score", "ahead by"),
        *("probability that a run of the best scores more", "environment steps"),
    )
    rows = [_best_row(group, name) for name in group.environments]
    return table("Who is best", columns, [row for row in rows if row])


def _point(pair: Pair) -> float:
    assert pair.estimate
    return float(pair.estimate.point)


def _printed(pair: Pair) -> str:
    return format(_point(pair), progress.score_format(_point(pair)))


def _best_row(group: Group, environment: str) -> tuple[str, ...] | None:
    pairs = [pair for pair in group.of(environment) if pair.estimate]
    ranked = sorted(pairs, key=_point, reverse=True)
    if not ranked:
        return None
    first = ranked[0]
    shown = _printed(first)
    leaders = [pair for pair in ranked if _printed(pair) == shown]
    agents = ", ".join(agent(pair.algorithm) for pair in leaders)
    score = _score(first) if len(leaders) == 1 else shown
    compared = ranked[: len(leaders) + 1]
    steps = " against ".join(dict.fromkeys(_steps(group, pair.num_env_steps) for pair in compared))
    if len(leaders) == len(ranked):
        return escaped(environment), agents, score, "", "", "", "", steps
    second = ranked[len(leaders)]
    lead = _point(first) - _point(second)
    return (
        escaped(environment),
        agents,
        score,
        agent(second.algorithm),
        _score(second),
        progress.score_text(lead),
        _probability([(first, second)]),
        steps,
    )


# What was run, and how it compares.


def overview(group: Group) -> str:
    """Returns a table with a row per pair: its score and the best comparable published score."""
    columns = (
        *("environment", "agent", "environment steps", _SCORE, _MEAN),
        *("best published: same agent, protocol and steps", "mean at or above?"),
    )
    return table("Results", columns, [_overview_row(group, pair) for pair in group.pairs])


def _overview_row(group: Group, pair: Pair) -> tuple[str, ...]:
    highest = max(group.comparable(pair), key=lambda score: score.score, default=None)
    theirs = "none"
    if highest:
        peer = formatting.peer(highest, pair.environment)
        theirs = f"{formatting.published(highest)}, {escaped(peer)}"
    return (
        *_names(pair),
        _steps(group, pair.num_env_steps),
        _score(pair),
        _mean(pair),
        theirs,
        _verdict(pair, highest) if highest else "",
    )


def what_was_run(group: Group) -> str:
    """Returns a table with a row per pair: its config, its budget, and how its runs ended."""
    columns = (
        *("environment", "agent", "config", "environment steps", "finished", "failed", "missing"),
        "final evaluation",
    )
    rows = [
        (
            *_names(pair),
            code(pair.config),
            _steps(group, pair.num_env_steps),
            f"{len(pair.finished)} of {pair.seeds}",
            str(len(pair.failed)),
            str(len(pair.missing)),
            _evaluation(pair),
        )
        for pair in group.pairs
    ]
    return table("What was run", columns, rows)


def _evaluation(pair: Pair) -> str:
    kinds = {(len(r["evaluation_returns"]), r["evaluation_policy"]) for r in pair.finished}
    named = [f"{formatting.count(n, 'episode')}, {policy}" for n, policy in sorted(kinds) if n]
    return "; ".join(named) or "none"


def environment(group: Group, name: str) -> str:
    """Returns a table of our agents in one environment and of scores published under this protocol.

    For each agent of a peer it shows the last score within our budget. If there is none, it shows
    the first score beyond our budget.
    """
    columns = (
        *("agent", "by", "environment steps", _SCORE, _MEAN, "wall-clock of a run, median"),
        *("environment steps/s, median", "ours at or above?", "source, note"),
    )
    rows = [
        *(_our_row(group, pair) for pair in group.of(name)),
        *(_published_row(group, name, score) for score in _nearest(group, name)),
    ]
    return table(f"{escaped(name)}: {escaped(group.protocol)}", columns, rows)


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
        agent(pair.algorithm),
        _OURS,
        _steps(group, pair.num_env_steps),
        _score(pair),
        _mean(pair),
        _median(pair.numbers("wall_seconds"), formatting.clock),
        _median(pair.numbers("env_steps_per_second"), "{:,.0f}".format),
        "",
        code(pair.config),
    )


def _published_row(group: Group, name: str, score: Published) -> tuple[str, ...]:
    ours = [pair for pair in group.of(name) if score in group.comparable(pair)]
    return (
        *_who(group, score),
        formatting.published(score),
        *("", "", ""),
        ", ".join(_verdict(pair, score) for pair in ours),
        _source(score),
    )


def elsewhere(group: Group, name: str) -> tuple[int, str]:
    """Returns the number of scores published under other protocols, and a table of them."""
    others = [x for x in published_scores.published(name) if x.protocol != group.protocol]
    peers = sorted(others, key=lambda x: (x.protocol, *_order(x)))
    columns = (
        *("protocol", "agent", "by", "environment steps"),
        *("score ± standard deviation (runs)", "source, note"),
    )
    rows = [
        (escaped(x.protocol), *_who(group, x), formatting.published(x), _source(x)) for x in peers
    ]
    caption = f"{escaped(name)}: published under other protocols, not comparable"
    return len(rows), table(caption, columns, rows)


def budgets(group: Group) -> str:
    """Returns a table of our and published scores at the budgets; "" without budgets."""
    if not group.budgets:
        return ""
    columns = ("environment", "agent", "by", *(_steps(group, budget) for budget in group.budgets))
    rows = [row for pair in group.pairs for row in _budget_rows(group, pair)]
    return table("Scores by environment steps", columns, rows)


def _budget_rows(group: Group, pair: Pair) -> Iterator[tuple[str, ...]]:
    ours = [results.estimate(pair.scores_at(budget)) for budget in group.budgets]
    means = [
        results.estimate(pair.scores_at(budget), interval_estimates.mean)
        for budget in group.budgets
    ]
    yield (*_names(pair), _OURS, *map(formatting.interval, ours))
    published = [group.comparable(pair, budget) for budget in group.budgets]
    for peer in dict.fromkeys(score.peer for scores in published for score in scores):
        theirs = [next((s for s in scores if s.peer == peer), None) for scores in published]
        shown = [formatting.published(score) if score else "" for score in theirs]
        yield (*_names(pair), escaped(peer), *shown)
        verdicts = [
            formatting.verdict(our, score) if our and score else ""
            for our, score in zip(means, theirs, strict=True)
        ]
        yield (*_names(pair), f"ours at or above {escaped(peer)}?", *verdicts)


def improvement(group: Group) -> str:
    """Returns a table of the probabilities that a run of one agent scores more than one of another.

    Returns "" if no two agents have scores in the same environment.
    """
    columns = ("probability that", "environment", "environment steps", "probability")
    rows = [
        row
        for first, second in itertools.combinations(group.algorithms, 2)
        for row in _improvement_rows(group, first, second)
    ]
    return table("Probability of improvement [95 % interval] (runs)", columns, rows) if rows else ""


def _improvement_rows(group: Group, first: str, second: str) -> Iterator[tuple[str, ...]]:
    shared = [
        (x, y)
        for x in group.of(algorithm=first)
        for y in group.of(x.environment, second)
        if len(x.scores) and len(y.scores)
    ]
    claim = f"{agent(first)} scores more than {agent(second)}"
    for x, y in shared:
        steps = dict.fromkeys(_steps(group, pair.num_env_steps) for pair in (x, y))
        yield claim, escaped(x.environment), " against ".join(steps), _probability([(x, y)])
    if len(shared) > 1:
        yield claim, f"mean of {len(shared)} environments", "", _probability(shared)


def _probability(shared: Sequence[tuple[Pair, Pair]]) -> str:
    x, y = ([pair.scores for pair in agent] for agent in zip(*shared, strict=True))
    estimate = interval_estimates.estimate_improvement(x, y)
    return formatting.interval(estimate, ".2f")


# Speed, and how each number was made.


def speeds(group: Group) -> str:
    """Returns a table with a row per pair: the duration and the speed of its runs."""
    columns = (
        *("environment", "agent", "environment steps", "updates, median"),
        *("wall-clock of a run, h:mm:ss: median [range]", "environment steps/s: median [range]"),
        *("runs at once, at most", "CPU (usable cores)"),
    )
    rows = [
        (
            *_names(pair),
            _steps(group, pair.num_env_steps),
            _median(pair.numbers("updates"), "{:,.0f}".format),
            formatting.middle(pair.numbers("wall_seconds"), formatting.clock),
            formatting.middle(pair.numbers("env_steps_per_second"), "{:,.0f}".format),
            formatting.numbers(pair.numbers("workers").astype(int)),
            "; ".join(sorted({f"{_cpu(r)} ({r['cpu_count']})" for r in pair.finished})),
        )
        for pair in group.pairs
    ]
    return table("Wall-clock and speed", columns, rows)


def _cpu(record: Record) -> str:
    return escaped(record["cpu_model"] or "unknown")


def provenance(group: Group) -> tuple[int, str]:
    """Returns the number of runs, and tables of the command, versions and machine of each run."""
    records = [record for pair in group.pairs for record in pair.records]
    machines = list(dict.fromkeys(map(_machine, records)))
    columns = (
        *("environment", "agent", "seed", "status", "score", "environment steps", "updates"),
        *("episodes", "wall-clock", "machine", "inexact resumes", "git revision"),
        *("SHA-256 of the configuration", "SHA-256 of the weights", "command"),
    )
    rows = [_run_row(record, machines.index(_machine(record)) + 1) for record in records]
    return len(records), f"{_machines(machines)}\n{table('Runs', columns, rows)}"


def differences(records: Sequence[Record]) -> Iterator[str]:
    """Yields descriptions of how finished runs that should be alike differ."""
    if len({record["config_sha256"] for record in records}) > 1:
        yield "made with different configurations"
    yield from differences_of_programs(records)
    if len({tuple(record["budgets"]) for record in records}) > 1:
        yield "recorded with different suite.budgets"
    if inexact := [record["seed"] for record in records if record["inexact_resumes"]]:
        yield f"not resumed bit for bit: {formatting.seeds(inexact)}"


def differences_of_programs(records: Sequence[Record]) -> Iterator[str]:
    """Yields descriptions of how the programs and machines of runs differ."""
    if len({revision for record in records for revision in _revisions(record)}) > 1:
        yield "made by different revisions"
    elif _differ(records, "source_sha256"):
        yield "made by different source"
    modules = {x for record in records for x in (record.get("own_modules") or {}).items()}
    if len(modules) > len(dict(modules)):
        yield "made with different modules of your own"
    if any(_differ(records, name) for name in _OF_THE_MACHINE):
        yield "made on different machines, in different precisions or with different versions"


def _differ(records: Sequence[Record], name: str) -> bool:
    """Returns True if records that have a value have different ones."""
    known = [record[name] for record in records if record.get(name) is not None]
    return any(value != known[0] for value in known)


def _revisions(record: Record) -> list[str]:
    """Returns the revisions of all processes of a run, the earliest first."""
    of_run = [*record["earlier_revisions"], record["git_revision"]]
    return [revision or "unknown" for revision in of_run]


def _machine(record: Record) -> str:
    """Returns a text that is equal for runs on the same kind of machine with the same software."""
    return json.dumps([record.get(name) for name in _OF_THE_MACHINE], sort_keys=True)


def _machines(machines: Sequence[str]) -> str:
    columns = (
        *("machine", "CPU", "usable cores", "threads (0: as many as cores)", "oneDNN"),
        *("device", "precision of encoders", "versions"),
    )
    rows = []
    for index, machine in enumerate(machines, start=1):
        model, count, threads, onednn, device, precision, versions = json.loads(machine)
        shown = (
            *(model or "unknown", str(count), _items(threads), str(onednn)),
            *(device or "unknown", precision or "unknown", _items(versions)),
        )
        rows.append((str(index), *map(escaped, shown)))
    return table("Machines and software", columns, rows)


def _items(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items()) or "unknown"


def _run_row(record: Record, machine: int) -> tuple[str, ...]:
    score, seconds = results.score_of(record), record["wall_seconds"]
    counts = [record[name] for name in ("env_steps", "updates", "episodes")]
    hashes = [record[name] or "" for name in ("config_sha256", "weights_sha256")]
    revisions = ", ".join(_revisions(record)) if record["status"] == FINISHED else ""
    return (
        escaped(record["environment"]),
        agent(record["algorithm"]),
        str(record["seed"]),
        record["status"],
        "" if score is None else progress.score_text(score),
        *("" if count is None else f"{count:,}" for count in counts),
        "" if seconds is None else formatting.clock(seconds),
        str(machine),
        "" if record["inexact_resumes"] is None else str(record["inexact_resumes"]),
        *map(code, (revisions, *hashes, record["command"])),
    )


# Atari.


def normalized(group: Group) -> str:
    """Returns a table of scores and human-normalized scores, by game and agent."""
    columns = (
        *("game", "agent", "environment steps", "random", "human", "score: IQM (runs)"),
        "human-normalized: IQM [95 % interval] (runs)",
    )
    rows = [
        (
            *_names(pair),
            _steps(group, pair.num_env_steps),
            progress.score_text(published_scores.random_score(pair.environment)),
            progress.score_text(published_scores.human_score(pair.environment)),
            f"{progress.score_text(float(pair.estimate.point))} ({pair.estimate.n})",
            formatting.interval(
                results.estimate(published_scores.human_normalized(pair.environment, pair.scores)),
                ".3f",
            ),
        )
        for pair in group.pairs
        if pair.estimate
    ]
    return table("Human-normalized scores: 0 is random, 1 is human", columns, rows)


def aggregates(group: Group) -> str:
    """Returns a table with a row per agent and budget: aggregates of all its runs in all games."""
    statistics = {
        "IQM": interval_estimates.interquartile_mean,
        "median": interval_estimates.median_of_means,
        "mean": interval_estimates.mean,
        "optimality gap": interval_estimates.optimality_gap,
    }
    rows = []
    for algorithm in group.algorithms:
        end = group.common_steps(algorithm)
        for steps in sorted({*(budget for budget in group.budgets if budget < end), end}):
            tasks = group.normalized_scores(algorithm, steps)
            if not tasks:
                continue
            estimates = [interval_estimates.estimate(tasks, x) for x in statistics.values()]
            games = f"{len(tasks)} of {group.num_games(algorithm)}"
            runs = str(sum(map(len, tasks)))
            shown = [_without_runs(estimate, "z.3f") for estimate in estimates]
            rows.append((agent(algorithm), formatting.steps(steps, True), games, runs, *shown))
    columns = ("agent", "environment steps", "games", "runs", *statistics)
    return table("Human-normalized scores over all games [95 % interval]", columns, rows)


def atari5(group: Group) -> str:
    """Returns a table of the estimated medians over 57 games; "" if there are none.

    A median is estimated only if the scores of all five games of the estimate are known.
    """
    rows = [*_our_medians(group), *_published_medians(group)]
    columns = ("agent", "by", "environment steps", "estimated median [95 % interval], %")
    caption = "Atari-5: the median human-normalized score over 57 games, estimated from five"
    return table(caption, columns, rows) if rows else ""


def _our_medians(group: Group) -> Iterator[tuple[str, ...]]:
    def median(*runs: np.ndarray) -> np.ndarray:
        means = {game: np.mean(of, axis=-1) for game, of in zip(_ATARI5, runs, strict=True)}
        return published_scores.atari5_median(means)

    for algorithm in group.algorithms:
        of_game = {pair.environment: pair for pair in group.of(algorithm=algorithm)}
        pairs = [of_game[game] for game in _ATARI5 if game in of_game]
        steps = min((pair.num_env_steps for pair in pairs), default=0)
        runs = [pair.scores_at(steps) for pair in pairs]
        if len(runs) == len(_ATARI5) and all(map(len, runs)):
            shown = _without_runs(interval_estimates.estimate(runs, median), ".1f")
            yield agent(algorithm), _OURS, formatting.steps(steps, True), shown


def _published_medians(group: Group) -> Iterator[tuple[str, ...]]:
    games: dict[tuple[str, str, int], dict[str, float]] = {}
    for game in _ATARI5:
        for score in group.published(game):
            who = (score.algorithm, score.peer, score.env_steps)
            games.setdefault(who, {})[game] = score.score
    for (algorithm, peer, env_steps), of in sorted(games.items()):
        if len(of) == len(_ATARI5):
            median = f"{published_scores.atari5_median(of):.1f}"
            steps = formatting.steps(env_steps, True)
            yield agent(algorithm), escaped(peer), steps, median


# Cells.


def agent(algorithm: str) -> str:
    """Returns the name of an algorithm as Markdown."""
    return escaped(formatting.agent(algorithm))


def _names(pair: Pair) -> tuple[str, str]:
    return escaped(pair.environment), agent(pair.algorithm)


def _who(group: Group, score: Published) -> tuple[str, str, str]:
    return agent(score.algorithm), escaped(score.peer), _steps(group, score.env_steps)


def _source(score: Published) -> str:
    return escaped("; ".join(text for text in (score.source, score.note) if text))


def _steps(group: Group, env_steps: int) -> str:
    return formatting.steps(env_steps, group.is_atari)


def _score(pair: Pair) -> str:
    """Returns the score of a pair, with the number of requested runs if some have no score."""
    if pair.estimate is None:
        return "no score" if pair.finished else "no finished run"
    shown = formatting.interval(pair.estimate)
    is_partial = pair.estimate.n < pair.seeds
    return f"{shown.removesuffix(')')} of {pair.seeds})" if is_partial else shown


def _mean(pair: Pair) -> str:
    return _without_runs(pair.mean) if pair.mean else ""


def _without_runs(estimate: Estimate, spec: str = "") -> str:
    return formatting.interval(estimate, spec).rpartition(" (")[0]


def _verdict(pair: Pair, score: Published) -> str:
    if pair.mean is None:
        return ""
    other = formatting.other_version(score, pair.environment)
    theirs = f"; theirs is {other}" if other else ""
    return formatting.verdict(pair.mean, score) + theirs


def _median(values: np.ndarray, show: Callable[[float], str]) -> str:
    return show(float(np.median(values))) if len(values) else ""


def _order(score: Published) -> tuple[str, int, str]:
    return score.algorithm, score.env_steps, score.peer
