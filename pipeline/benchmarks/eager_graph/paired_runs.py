"""Finished runs of the same seeds, as a graph and with eager's bits: do their returns differ?"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from pipeline.benchmarks.interval_estimates import Estimate, estimate_paired_difference
from pipeline.runs.run_folder import RunFolder
from pipeline.utils.errors import UserError
from pipeline.utils.execution import Execution


class Pair(NamedTuple):
    """Two runs of one seed: the mean returns of their final weights' evaluations."""

    seed: int
    graph: float
    exact: float


def read_pairs(folder: str) -> list[Pair]:
    """The pairs of runs in `folder`, by seed; `--eager` and `--exact_graph` count alike.

    Raises:
      UserError: there is no run, one is not finished, some differ in more than the seed and in
        how they were run, or a run has no counterpart.
    """
    runs = [RunFolder(path.parent) for path in sorted(pathlib.Path(folder).glob("*/run.json"))]
    if not runs:
        raise UserError(f"--paired_runs={folder}: there is no folder of a run in it.")
    returns = [_final_return(run) for run in runs]
    _check_configurations(runs)
    graph: dict[int, float] = {}
    exact: dict[int, float] = {}
    for run, of_run in zip(runs, returns, strict=True):
        start = run.read_json("run.json")
        group = graph if start["execution"] == Execution.GRAPH.value else exact
        if start["seed"] in group:
            raise UserError(f"{run.path} has the seed and the kind of another run beside it.")
        group[start["seed"]] = of_run
    if alone := sorted(graph.keys() ^ exact.keys()):
        raise UserError(
            f"--paired_runs={folder}: seed {alone[0]} has one of its two runs only: train the "
            "other, with or without --exact_graph."
        )
    return [Pair(seed, graph[seed], exact[seed]) for seed in sorted(graph)]


def estimate(pairs: list[Pair]) -> Estimate:
    """The IQM of the graph's returns minus that of eager's, with its 95 % bootstrap interval."""
    return estimate_paired_difference(
        [pair.graph for pair in pairs], [pair.exact for pair in pairs]
    )


def _final_return(run: RunFolder) -> float:
    result = run.read_json("result.json")
    if not result:
        raise UserError(f"{run.path} is not finished: run its command again.")
    return float(result["evaluation"]["return_mean"])


def _check_configurations(runs: list[RunFolder]) -> None:
    first = (runs[0].path / "operative_config.gin").read_text()
    for run in runs:
        if (run.path / "operative_config.gin").read_text() != first:
            raise UserError(f"{run.path} has another configuration than {runs[0].path}.")
