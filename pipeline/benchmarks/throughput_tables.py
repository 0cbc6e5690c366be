"""The measurements of `throughput` as tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipeline.benchmarks.document import (
    Block,
    Column,
    Heading,
    Notice,
    Paragraph,
    Table,
    to_markdown,
)

Results = dict[str, Any]
Side = dict[str, Any]

_OURS, _OURS_IN_BFLOAT16, _SB3, _TF_AGENTS = "ours", "ours:bfloat16", "sb3", "tf_agents"
_TITLES = {
    _OURS: "ours, float32",
    _OURS_IN_BFLOAT16: "ours, bfloat16",
    _SB3: "Stable-Baselines3",
    _TF_AGENTS: "TF-Agents' examples",
    "dqn": "DQN",
    "ppo": "PPO",
    "sac": "SAC",
    "pong": "Pong",
    "cartpole": "CartPole",
    "pendulum": "Pendulum",
}
_NAME = re.compile(r"(?P<words>\w+)_(?P<num_envs>\d+)")
_STAGES = ("environment", "collect", "sample", "update", "training")


def table(results: Results) -> str:
    """Environment steps per second of whole trainings and their ratios, as Markdown.

    Args:
        results: what throughput.json holds.
    """
    return to_markdown([_speeds(results)], "")


def document(results: Results) -> str:
    """All of throughput.md."""
    blocks: list[Block] = [
        Heading("Throughput", 1),
        Paragraph(_circumstances(results)),
        *_failures(results),
        *(table for table in (_speeds(results), _stages(results), _others(results)) if table.rows),
        Heading("What differs"),
        *_differences(results),
    ]
    return to_markdown(blocks, "")


def _circumstances(results: Results) -> str:
    return (
        f"Measured on {results['cpu_count']} cores of {results['cpu_model'] or 'an unnamed CPU'}, "
        f"{results['memory_gib']:.0f} GiB, by `{results['command']}` at revision "
        f"{results['git_revision'] or 'unknown'}. Every stage ran for at least "
        f"{results['seconds']:g} s in each of {results['rounds']} rounds, the sides in turns; "
        "medians are shown, throughput.json has every round."
    )


def _sides(results: Results) -> Iterator[tuple[str, str, Side]]:
    for work, measured in results["works"].items():
        for name, side in measured["sides"].items():
            yield work, name, side


def _failures(results: Results) -> list[Block]:
    points = tuple(
        f"{_work(work)}, {_title(name)}: {side['error']}"
        for work, name, side in _sides(results)
        if side["error"]
    )
    return [Notice("Not everything was measured.", points)] if points else []


def _speeds(results: Results) -> Table:
    names = (_OURS, _OURS_IN_BFLOAT16, _SB3, _TF_AGENTS)
    rows = []
    for work, measured in results["works"].items():
        speeds = [_speed(measured["sides"].get(name), "training") for name in names]
        if any(speeds):
            shown = [_number(speed) for speed in speeds]
            ratios = [_ratios(speeds[:2], peer) for peer in speeds[2:]]
            rows.append((_work(work), *shown, *ratios))
    columns = (
        Column("work", "text"),
        *(Column(_title(name)) for name in names),
        *(Column(f"ours : {_title(name)}") for name in names[2:]),
    )
    return Table("Environment steps per second, training included", columns, tuple(rows))


def _speed(side: Side | None, stage: str) -> float | None:
    """Units a second; None if that was not measured."""
    measured = side["stages"].get(stage) if side else None
    return measured["per_second"] if measured else None


def _ratios(ours: list[float | None], peer: float | None) -> str:
    """In float32 and bfloat16, where measured: "2.1 / 2.3"."""
    known = [f"{speed / peer:.2f}" for speed in ours if speed and peer]
    return " / ".join(known)


def _stages(results: Results) -> Table:
    columns = (
        Column("work", "text"),
        Column("side", "text"),
        Column("environment, ms a vector step"),
        Column("collecting, ms a vector step"),
        Column("sampling, ms a batch"),
        Column("update, ms"),
        Column("of the matrix peak"),
        Column("training, ms a vector step"),
        Column("environment steps an update"),
    )
    rows = tuple(
        (
            _work(work),
            _title(name),
            *(_milliseconds(work, side, stage) for stage in _STAGES[:4]),
            _share_of_peak(results, name, side),
            _milliseconds(work, side, "training"),
            _steps_per_update(side),
        )
        for work, name, side in _sides(results)
        if any(stage in side["stages"] for stage in _STAGES)
    )
    return Table("Stages, each alone", columns, rows)


def _milliseconds(work: str, side: Side, stage: str) -> str:
    """Of a batch or an update, or of as many environment steps as there are environments."""
    speed = _speed(side, stage)
    if not speed:
        return ""
    name = _NAME.fullmatch(work)
    is_counted_in_steps = side["stages"][stage]["rounds"][0]["unit"] == "environment steps"
    units = int(name["num_envs"]) if name and is_counted_in_steps else 1
    return f"{1000 * units / speed:.3g}"


def _share_of_peak(results: Results, name: str, side: Side) -> str:
    speed, peak = _speed(side, "update"), _matrix_peak(results, name.partition(":")[2] or "float32")
    if not speed or not peak:
        return ""
    flops = side["stages"]["update"]["rounds"][0].get("flops_per_count")
    return f"{flops * speed / 1e9 / peak:.0%}" if flops else ""


def _matrix_peak(results: Results, precision: str) -> float | None:
    """GFLOP/s of the fastest matrix multiplication in this precision."""
    speeds = (_speed(side, f"matmul_{precision}") for _, _, side in _sides(results))
    return max((speed for speed in speeds if speed), default=None)


def _steps_per_update(side: Side) -> str:
    """While training, as counted by the worker itself."""
    rounds = side["stages"].get("training", {}).get("rounds", [])
    updates = sum(answer.get("updates", 0) for answer in rounds)
    return f"{sum(answer['count'] for answer in rounds) / updates:.3g}" if updates else ""


def _others(results: Results) -> Table:
    columns = (
        Column("work", "text"),
        Column("side", "text"),
        Column("measured", "text"),
        Column("per second"),
        Column("seconds each"),
        Column("unit", "text"),
        Column("also", "text"),
    )
    rows = tuple(
        (
            _work(work),
            _title(name),
            stage,
            _number(measured["per_second"]),
            f"{1 / measured['per_second']:.3g}",
            measured["rounds"][0]["unit"],
            _facts(measured["rounds"][-1]),
        )
        for work, name, side in _sides(results)
        for stage, measured in side["stages"].items()
        if stage not in _STAGES
    )
    return Table("The machine, memory, checkpoints", columns, rows)


def _facts(answer: dict[str, Any]) -> str:
    known = ("stage", "seconds", "count", "unit")
    facts = {name: value for name, value in answer.items() if name not in known}
    return ", ".join(
        f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in facts.items()
    )


def _differences(results: Results) -> Iterator[Block]:
    """For each peer what it told, with the works that it told it of."""
    told: dict[str, dict[str, list[str]]] = {}
    for work, name, side in _sides(results):
        for difference in side["facts"].get("differences", []):
            told.setdefault(name, {}).setdefault(difference, []).append(_work(work))
    for name, works_of in told.items():
        points = tuple(f"{text} ({'; '.join(works)})" for text, works in works_of.items())
        yield Notice(f"{_title(name)}, beside what its own loop and networks make of it", points)


def _title(name: str) -> str:
    return _TITLES.get(name, name)


def _work(name: str) -> str:
    """ "DQN Pong, 8 environments" for dqn_pong_8; others as they are."""
    match = _NAME.fullmatch(name)
    if not match:
        return name
    words = " ".join(_title(word) for word in match["words"].split("_"))
    count = match["num_envs"]
    return f"{words}, {count} environment{'' if count == '1' else 's'}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
