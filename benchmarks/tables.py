"""Makes tables in Markdown from the measurements of `throughput`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from benchmarks.measurements import (
    OURS,
    OURS_ASYNCHRONOUS,
    OURS_IN_BFLOAT16,
    OURS_IN_TURNS,
    SB3,
    TF_AGENTS,
    Results,
    Side,
    number,
    parse,
    ratio_at_floor,
    ratios,
    share_of_peak,
    sides_of,
    speed_of,
    steps_per_update,
    title,
    vector_step,
    workload_title,
)
from benchmarks.workers.protocol import STAGES
from pipeline.benchmarks.markdown import code, escaped, notice, table


def summary(results: Results) -> str:
    """Returns how whole trainings were measured, their speeds and their ratios.

    Args:
      results: Contents of throughput.json, here and below.
    """
    return f"{_circumstances(results)}\n\n{_speeds(results)}"


def time_budget(results: Results) -> str:
    """Returns a table of where the time of this pipeline's vector steps goes."""
    return _budget(results, (OURS, OURS_IN_BFLOAT16))


def document(results: Results) -> str:
    """Returns the text of throughput.md."""
    blocks = [
        "# Throughput\n",
        f"{_circumstances(results)}\n",
        _failures(results),
        _speeds(results),
        asynchronous_actors(results),
        _stages(results),
        _budget(results),
        _others(results),
        *_differences(results),
    ]
    return "\n".join(block for block in blocks if block)


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(caption, columns, rows) if rows else ""


def _circumstances(results: Results) -> str:
    names = {name for _, name, _ in sides_of(results)}
    compares = bool(names & {SB3, TF_AGENTS})
    precisions = " (float32 / bfloat16)" if OURS_IN_BFLOAT16 in names else ""
    return (
        f"Measured on {results['cpu_count']} cores of {results['cpu_model'] or 'an unnamed CPU'}, "
        f"{results['memory_gib']:.0f} GiB, by {code(results['command'])} at revision "
        f"{results['git_revision'] or 'unknown'}. Every stage ran for at least "
        f"{results['seconds']:g} s in each of {results['rounds']} rounds, in which the sides took "
        "turns. Stages that cannot be repeated ran once. The tables show medians over the rounds"
        f"{f'; ratios{precisions} are medians of those of the rounds, with their range' * compares}"
        f". throughput.json has every round. {_load(results)}".rstrip()
    )


def _load(results: Results) -> str:
    """Returns a sentence about the load average before each workload, which shows other load."""
    known = (workload.get("load_average_before") for workload in results["workloads"].values())
    loads = [load for load in known if load is not None]
    if not loads:
        return ""
    return (
        f"The load average was {loads[0]:.1f} at the start of the measurement, and at most "
        f"{max(loads):.1f} at the start of a workload, mostly from the one before it."
    )


def _failures(results: Results) -> str:
    points = [
        escaped(f"{workload_title(workload)}, {title(name)}: {side['error']}")
        for workload, name, side in sides_of(results)
        if side["error"]
    ]
    return notice("Not everything was measured.", points) if points else ""


def _speeds(results: Results) -> str:
    ours = _known(results, (OURS, OURS_IN_BFLOAT16))
    peers = _known(results, (SB3, TF_AGENTS))
    rows = []
    for workload, measured in results["workloads"].items():
        sides = measured["sides"]
        speeds = [speed_of(sides.get(name), "training") for name in (*ours, *peers)]
        if any(speeds):
            compared = [sides.get(name) for name in (OURS, OURS_IN_BFLOAT16)]
            of_peers = [ratios(compared, sides.get(peer)) for peer in peers]
            rows.append((workload_title(workload), *map(number, speeds), *of_peers))
    titles = [title(name) for name in (*ours, *peers)]
    columns = ("workload", *titles, *(f"ours : {title(name)}" for name in peers))
    return _table("Environment steps per second, training included", columns, rows)


def asynchronous_actors(results: Results) -> str:
    """Returns a table of the speeds of asynchronous actors and of batches of environments."""
    names = _known(results, (OURS, OURS_ASYNCHRONOUS, OURS_IN_TURNS))
    rows = []
    for workload, measured in results["workloads"].items():
        speeds = [speed_of(measured["sides"].get(name), "training") for name in names]
        if any(speeds[1:]):
            rows.append((workload_title(workload), *map(number, speeds)))
    caption = (
        "Environment steps per second, training included, of a batch of environments and of the "
        "same number of asynchronous actors"
    )
    return _table(caption, ("workload", *map(title, names)), rows)


def _known(results: Results, names: Sequence[str]) -> list[str]:
    """Returns the members of `names` that are sides of a workload, in the order of `names`."""
    known = {name for _, name, _ in sides_of(results)}
    return [name for name in names if name in known]


def _stages(results: Results) -> str:
    columns = (
        *("workload", "side", "environment, ms per vector step", "collecting, ms per vector step"),
        *("sampling, ms per batch", "update, ms", "share of the matrix peak"),
        *("training, ms per vector step", "environment steps per update", "mean return at the end"),
    )
    rows = [
        (
            workload_title(workload),
            title(name),
            *(_milliseconds(workload, side, stage) for stage in STAGES[:4]),
            _percent(share_of_peak(results, name, side)),
            _milliseconds(workload, side, "training"),
            number(steps_per_update(side)),
            _return(side),
        )
        for workload, name, side in sides_of(results)
        if any(stage in side["stages"] for stage in STAGES)
    ]
    return _table(f"Stages, each alone{_what_updates_are(results)}", columns, rows)


def _what_updates_are(results: Results) -> str:
    """Returns a note if workloads have updates of more than one optimizer step, else ""."""
    names = map(parse, results["workloads"])
    if not any(name and name.algorithm == "trpo" for name in names):
        return ""
    return (
        " (an update of TRPO is the policy step and all optimizer steps that fit the value "
        "function to a rollout)"
    )


def _budget(results: Results, names: Collection[str] | None = None) -> str:
    """Returns a table of where the time of a vector step goes.

    The time of each stage is that of the stage alone, times how often it occurs in a vector step.

    Args:
      results: Contents of throughput.json.
      names: The sides to show; None shows all.
    """
    stages = ("environment", "acting, storing", "sampling", "updates", "the rest")
    columns = (
        *("workload", "side", *stages, "training", "updates at the peak", "floor"),
        *(f"at the floor : {title(peer)}" for peer in (SB3, TF_AGENTS)),
    )
    rows = []
    for workload, name, _ in sides_of(results):
        step = vector_step(results, workload, name)
        if step and (names is None or name in names):
            times = (*step.stages, step.training, step.updates_at_peak, step.floor)
            shown = (number(None if time is None else 1000 * time) for time in times)
            reached = (ratio_at_floor(results, workload, name, peer) for peer in (SB3, TF_AGENTS))
            rows.append((workload_title(workload), title(name), *shown, *map(number, reached)))
    caption = (
        "Where the time of a vector step goes, in ms (the rest: the whole training minus the "
        "stages alone, which may be negative; updates at the peak: the products and convolutions "
        "of the updates at the machine's matrix peak; floor: updates at the peak plus the "
        "environment alone)"
    )
    return _table(caption, columns, rows)


def _return(side: Side) -> str:
    """Returns the mean return in the last round, which is related to the length of episodes."""
    rounds = side["stages"].get("training", {}).get("rounds", [{}])
    value = rounds[-1].get("return_mean")
    return "" if value is None else f"{value:,.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _milliseconds(workload: str, side: Side, stage: str) -> str:
    """Returns the milliseconds of a batch, of an update, or of a vector step."""
    speed = speed_of(side, stage)
    if not speed:
        return ""
    name = parse(workload)
    is_counted_in_steps = side["stages"][stage]["rounds"][0]["unit"] == "environment steps"
    units = name.num_envs if name and is_counted_in_steps else 1
    return number(1000 * units / speed)


def _others(results: Results) -> str:
    columns = ("workload", "side", "measured", "per second", "seconds each", "unit", "also")
    rows = [
        (
            workload_title(workload),
            title(name),
            escaped(stage),
            number(measured["per_second"]),
            number(1 / measured["per_second"]),
            measured["rounds"][0]["unit"],
            _facts(measured["rounds"][-1]),
        )
        for workload, name, side in sides_of(results)
        for stage, measured in side["stages"].items()
        if stage not in STAGES
    ]
    return _table("The machine, memory, checkpoints", columns, rows)


def _facts(answer: dict[str, Any]) -> str:
    known = ("stage", "seconds", "count", "unit", "return_mean")
    facts = {name: value for name, value in answer.items() if name not in known}
    return escaped(
        ", ".join(
            f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in facts.items()
        )
    )


def _differences(results: Results) -> Iterator[str]:
    """Yields the known differences of each peer from this pipeline, with the affected workloads."""
    differences: dict[str, dict[str, list[str]]] = {}
    for workload, name, side in sides_of(results):
        for difference in side["facts"].get("differences", []):
            differences.setdefault(name, {}).setdefault(difference, []).append(
                workload_title(workload)
            )
    if differences:
        yield "## What differs\n"
    for name, workloads_of in differences.items():
        points = [
            f"{escaped(text)} ({'; '.join(workloads)})" for text, workloads in workloads_of.items()
        ]
        yield notice(f"{title(name)}, in addition to its own loop and networks", points)
