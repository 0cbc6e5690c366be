"""What the measured stages make of a training's vector step, in seconds and shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.benchmarks.throughput_names import parse
from pipeline.benchmarks.workers.protocol import STAGES

Results = dict[str, Any]
Side = dict[str, Any]


def sides_of(results: Results) -> Iterator[tuple[str, str, Side]]:
    """Work, name and measurements of each side of each work.

    Args:
        results: what throughput.json holds.
    """
    for work, measured in results["works"].items():
        for name, side in measured["sides"].items():
            yield work, name, side


def speed_of(side: Side | None, stage: str) -> float | None:
    """Units a second; None if that was not measured."""
    measured = side["stages"].get(stage) if side else None
    return measured["per_second"] if measured else None


def steps_per_update(side: Side) -> float | None:
    """Environment steps an update, while training, as counted by the worker itself."""
    rounds = side["stages"].get("training", {}).get("rounds", [])
    updates = sum(answer.get("updates", 0) for answer in rounds)
    return sum(answer["count"] for answer in rounds) / updates if updates else None


def share_of_peak(results: Results, name: str, side: Side) -> float | None:
    """How much of the matrix peak an update's products and convolutions reach, from 0 to 1."""
    speed, least = speed_of(side, "update"), _seconds_at_peak(results, name, side)
    return least * speed if least and speed else None


class VectorStep(NamedTuple):
    """Seconds of a vector step.

    Attributes:
        stages: of its parts, each as long as alone; the last is what they leave of `training`.
        training: of it all.
        updates_at_peak: of the updates' products and convolutions at the matrix peak; None where
            their number or the peak is not known.
    """

    stages: tuple[float, ...]
    training: float
    updates_at_peak: float | None

    @property
    def floor(self) -> float | None:
        """Of the environment alone, and the updates at the matrix peak."""
        return None if self.updates_at_peak is None else self.stages[0] + self.updates_at_peak


def vector_step(results: Results, work: str, name: str) -> VectorStep | None:
    """Of the side `name` of `work`; None where a stage was not measured."""
    side = results["works"][work]["sides"].get(name)
    parsed = parse(work)
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


def ratio_at_floor(results: Results, work: str, name: str, peer: str) -> float | None:
    """How many times as fast as `peer` the side `name` would train at its floor."""
    ours, theirs = (vector_step(results, work, side) for side in (name, peer))
    return theirs.training / ours.floor if ours and theirs and ours.floor else None


def _seconds_at_peak(results: Results, name: str, side: Side) -> float | None:
    """Of an update whose products and convolutions take no longer than the matrix peak allows."""
    stage = f"matmul_{name.partition(':')[2] or 'float32'}"
    speeds = (speed_of(measured, stage) for _, _, measured in sides_of(results))
    peak = max((speed for speed in speeds if speed), default=None)  # GFLOP/s
    update = side["stages"].get("update")
    flops = update["rounds"][0].get("flops_per_count") if update else None
    return flops / (1e9 * peak) if flops and peak else None
