"""Reads throughput.json and computes the numbers and names that its tables show."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.workers.protocol import STAGES
from pipeline.benchmarks.formatting import agent, count

OURS, OURS_IN_BFLOAT16 = "ours", "ours:bfloat16"
OURS_ASYNCHRONOUS, OURS_IN_TURNS = "ours:asynchronous", "ours:in_turns"
SB3, TF_AGENTS = "sb3", "tf_agents"
_TITLES = {
    OURS: "ours, float32",
    OURS_IN_BFLOAT16: "ours, bfloat16",
    OURS_ASYNCHRONOUS: "ours, asynchronous actors",
    OURS_IN_TURNS: "ours, actors in turns",
    SB3: "Stable-Baselines3",
    TF_AGENTS: "TF-Agents' examples",
    "pong": "Pong",
    "cartpole": "CartPole",
    "pendulum": "Pendulum",
}
_NAME = re.compile(r"(?P<algorithm>\w+)_(?P<environment>[a-z]+)_(?P<num_envs>\d+)")


class NamedTraining(NamedTuple):
    """Parts of the name of a workload that is a training.

    Attributes:
      algorithm: Name of the algorithm, for example "dqn".
      environment: Name of the environment, for example "pong".
      num_envs: Number of environments.
    """

    algorithm: str
    environment: str
    num_envs: int


def parse(workload: str) -> NamedTraining | None:
    """Parses a name such as dqn_pong_8; returns None for names of another form."""
    match = _NAME.fullmatch(workload)
    if not match:
        return None
    return NamedTraining(match["algorithm"], match["environment"], int(match["num_envs"]))


def title(name: str) -> str:
    """Returns the title of a side or an environment; an unknown name is returned as it is."""
    return _TITLES.get(name, name)


def workload_title(workload: str) -> str:
    """Returns "DQN Pong, 8 environments" for dqn_pong_8; other names are returned as they are."""
    training = parse(workload)
    if not training:
        return workload
    words = f"{agent(training.algorithm)} {title(training.environment)}"
    return f"{words}, {count(training.num_envs, 'environment')}"


def number(value: float | None) -> str:
    """Formats a number with three digits, or as a whole number from 100 on; None as ""."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


Results = dict[str, Any]
Side = dict[str, Any]


def sides_of(results: Results) -> Iterator[tuple[str, str, Side]]:
    """Yields the workload, the name and the measurements of each side of each workload.

    Args:
      results: Contents of throughput.json, here and below.
    """
    for workload, measured in results["workloads"].items():
        for name, side in measured["sides"].items():
            yield workload, name, side


def speed_of(side: Side | None, stage: str) -> float | None:
    """Returns the speed of a stage in units per second; None if it was not measured."""
    measured = side["stages"].get(stage) if side else None
    return measured["per_second"] if measured else None


def steps_per_update(side: Side) -> float | None:
    """Returns the environment steps per update while training, as counted by the worker.

    Returns None if no updates were counted.
    """
    rounds = side["stages"].get("training", {}).get("rounds", [])
    updates = sum(answer.get("updates", 0) for answer in rounds)
    return sum(answer["count"] for answer in rounds) / updates if updates else None


def share_of_peak(results: Results, name: str, side: Side) -> float | None:
    """Returns the share of the matrix peak that an update's products and convolutions reach.

    1 is the peak. Returns None if the number of operations, the peak or the speed of updates is
    unknown.
    """
    speed, least = speed_of(side, "update"), _seconds_at_peak(results, name, side)
    return least * speed if least and speed else None


class VectorStep(NamedTuple):
    """Times of a vector step, in seconds.

    Attributes:
      stages: Times of the parts of a vector step, each measured alone: environment, acting and
        storing, sampling, updates. The last time is the rest, `training` minus the others.
      training: Time of the whole vector step.
      updates_at_peak: Time of the updates' products and convolutions at the matrix peak. None if
        their number or the peak is unknown.
    """

    stages: tuple[float, ...]
    training: float
    updates_at_peak: float | None

    @property
    def floor(self) -> float | None:
        """Returns the seconds of the environment alone and of the updates at the matrix peak."""
        return None if self.updates_at_peak is None else self.stages[0] + self.updates_at_peak


def vector_step(results: Results, workload: str, name: str) -> VectorStep | None:
    """Returns the times of the side `name` of `workload`; None if a stage was not measured."""
    side = results["workloads"][workload]["sides"].get(name)
    parsed = parse(workload)
    speeds = [speed_of(side, stage) for stage in STAGES]
    if not parsed or not all(speeds) or not (steps := steps_per_update(side)):
        return None
    environment, collect, sample, update, training = (1 / speed for speed in speeds if speed)
    num_envs = parsed.num_envs
    updates = num_envs / steps
    stages = (
        num_envs * environment,
        num_envs * (collect - environment),
        updates * sample,
        updates * update,
    )
    least = _seconds_at_peak(results, name, side)
    rest = num_envs * training - sum(stages)
    return VectorStep((*stages, rest), num_envs * training, updates * least if least else None)


def ratio_at_floor(results: Results, workload: str, name: str, peer: str) -> float | None:
    """Returns how many times as fast as `peer` the side `name` would train at its floor.

    Returns None if a time of either side is unknown.
    """
    ours, theirs = (vector_step(results, workload, side) for side in (name, peer))
    return theirs.training / ours.floor if ours and theirs and ours.floor else None


def _seconds_at_peak(results: Results, name: str, side: Side) -> float | None:
    """Returns the seconds of an update's products and convolutions at the matrix peak."""
    stage = f"matmul_{name.partition(':')[2] or 'float32'}"
    speeds = (speed_of(measured, stage) for _, _, measured in sides_of(results))
    peak = max((speed for speed in speeds if speed), default=None)  # GFLOP/s
    update = side["stages"].get("update")
    flops = update["rounds"][0].get("flops_per_count") if update else None
    return flops / (1e9 * peak) if flops and peak else None


def ratios(ours: Sequence[Side | None], peer: Side | None) -> str:
    """Formats the ratios of our speeds to a peer's: "2.10 (2.05 to 2.20) / 2.32 (2.30 to 2.41)".

    Each ratio is the median over the rounds, with the range if there is more than one round. The
    two speeds of a round were measured shortly after each other, so what slows the machine for a
    while slows both. A side that was not measured is shown as "–" if a ratio follows, so that it
    is clear to which side that ratio belongs.

    Args:
      ours: Measurements of each of our sides; None if a side was not measured.
      peer: Measurements of the peer; None if it was not measured, which results in "".
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
