"""How many times as fast one side of a throughput measurement trains as another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipeline.benchmarks.throughput_numbers import Side


def ratios(ours: Sequence[Side | None], peer: Side | None) -> str:
    """Of each of our sides to a peer: "2.10 (2.05 to 2.20) / 2.32 (2.30 to 2.41)".

    Of a first side that was not measured "–" stands, so that it is clear whose number follows.

    The median over the rounds and, of more than one, their range. The two speeds of a round were
    measured one after the other, so what slows the machine for a while slows both.

    Args:
        ours: what throughput.json holds of each side; None if it was not measured.
        peer: likewise; without it there is no ratio.
    """
    shown = [_with_range(values) if (values := _by_round(side, peer)) else "–" for side in ours]
    while shown and shown[-1] == "–":
        shown.pop()
    return " / ".join(shown)


def _by_round(side: Side | None, peer: Side | None) -> list[float]:
    return [ours / theirs for ours, theirs in zip(_speeds(side), _speeds(peer), strict=False)]


def _speeds(side: Side | None) -> list[float]:
    measured = side["stages"].get("training") if side else None
    return [x["count"] / x["seconds"] for x in measured["rounds"]] if measured else []


def _with_range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"
