"""Makes the text that `python -m pipeline.parity` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.benchmarks.eager_graph.paired_runs import SeedPair
from pipeline.benchmarks.eager_graph.updates import (
    REWRITES,
    Difference,
    Effect,
    Updates,
    Weights,
    differences,
    effects,
    same_bits,
)
from pipeline.benchmarks.formatting import FEWEST_RUNS
from pipeline.benchmarks.interval_estimates import estimate_paired_difference
from pipeline.utils.execution import Execution

_UPDATES_A_TABLE = 10
_SECONDS = 1.0  # for which each way of running is timed in each round
_ROUNDS = 3


def of_updates(updates: Updates) -> Iterator[str]:
    """Compares eager, graph and exact graph; yields each part of the text when it is known."""
    eager, graph, exact = (
        updates.run(execution)
        for execution in (Execution.EAGER, Execution.GRAPH, Execution.EXACT_GRAPH)
    )
    yield from _drift("eager and graph", eager, graph)
    yield from _drift("eager and exact graph", eager, exact)
    if not same_bits(eager, graph):
        found = effects(updates, eager, graph)
        yield _rewrites_text(found)
        yield _verdict(updates, eager, [name for name, x in found.items() if x.changes_bits])
    # Take turns, so that other load on the machine slows all ways alike. The fastest round counts.
    rounds = [{way: updates.per_second(way, _SECONDS) for way in Execution} for _ in range(_ROUNDS)]
    yield _speed_text({way: max(speeds[way] for speeds in rounds) for way in Execution})


def _drift(what: str, first: list[Weights], second: list[Weights]) -> Iterator[str]:
    if same_bits(first, second):
        yield f"Between {what}: the same bits in all variables after each of {len(first)} updates."
        return
    apart = differences(first, second)
    for kind in Difference._fields:
        title = f"Largest {kind} difference between {what} after each update"
        yield title + "\n\n" + "\n\n".join(difference_tables(apart, kind))


def difference_tables(apart: Mapping[str, list[Difference]], kind: str) -> Iterator[str]:
    """Yields tables of each variable's differences, with ten updates per table.

    Args:
      apart: Differences of each variable after each update, by the name of the variable.
      kind: Field of `Difference` that is shown.
    """
    total = len(next(iter(apart.values())))
    for start in range(0, total, _UPDATES_A_TABLE):
        numbers = range(start, min(start + _UPDATES_A_TABLE, total))
        header = ["after update", *(str(number + 1) for number in numbers)]
        yield table(
            header,
            [
                [name, *(_number(getattr(values[number], kind)) for number in numbers)]
                for name, values in apart.items()
            ],
        )


def _rewrites_text(found: Mapping[str, Effect]) -> str:
    """Returns a table of the effect of each rewrite."""
    rows = [
        [name, _number(effect.without), _number(effect.alone), "yes" if effect.changes_bits else ""]
        for name, effect in found.items()
    ]
    header = ["rewrite", "without it", "only it", "changes bits"]
    return "Largest difference from eager, by rewrite\n\n" + table(header, rows)


def _verdict(updates: Updates, eager: list[Weights], names: list[str]) -> str:
    def outcome(without: Sequence[str]) -> str:
        history = updates.run(Execution.GRAPH, without)
        return "same bits as eager" if same_bits(history, eager) else "other bits than eager"

    lines = ["No single rewrite is responsible."]
    if names:
        lines = [
            f"Responsible rewrites: {', '.join(names)}.",
            f"Without {'them' if len(names) > 1 else 'it'}: {outcome(names)}.",
        ]
    return "\n".join([*lines, f"Without any of the {len(REWRITES)} rewrites: {outcome(REWRITES)}."])


def _speed_text(per_second: Mapping[Execution, float]) -> str:
    """Returns a table of updates per second, absolute and relative to graph mode."""
    graph = per_second[Execution.GRAPH]
    rows = [
        [way.value, f"{speed:,.1f}", f"{speed / graph:.2f}"] for way, speed in per_second.items()
    ]
    header = ["run as", "updates per second", "relative to graph"]
    return "Speed of updates alone, one call per batch\n\n" + table(header, rows)


def of_pairs(pairs: Sequence[SeedPair]) -> str:
    """Returns a table of the returns by seed, and the difference of their interquartile means."""
    rows = [
        [str(pair.seed), *(f"{x:z.1f}" for x in (pair.graph, pair.exact, pair.graph - pair.exact))]
        for pair in pairs
    ]
    found = estimate_paired_difference([x.graph for x in pairs], [x.exact for x in pairs])
    returns = table(["seed", "graph", "eager's bits", "difference"], rows)
    difference = f"IQM of graph minus IQM of eager's bits: {found.point:z.1f}"
    if found.n == 1:
        return f"{returns}\n\n{difference}. A single pair has no interval."
    holds = "contains" if found.low <= 0 <= found.high else "does not contain"
    is_narrow = found.n < FEWEST_RUNS
    trust = "\nThe interval of so few pairs is too narrow to be trusted." if is_narrow else ""
    return (
        f"{returns}\n\n{difference}, 95 % bootstrap interval of {found.n} pairs "
        f"[{found.low:z.1f}, {found.high:z.1f}],\n"
        f"which {holds} 0 and is {found.high - found.low:.1f} wide.{trust}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in plain text: the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join(
            [f"{first[0]:<{first[1]}}", *(f"{text:>{width}}" for text, width in others)]
        )

    return "\n".join(line(cells).rstrip() for cells in [header, *rows])


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"
