"""Compares the returns of finished graph runs with those of eager or exact-graph runs by seed."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

from pipeline.runs.run_folder import RunFolder
from pipeline.utils.errors import UserError
from pipeline.utils.execution import Execution
from pipeline.utils.files import error_kind

# Keys of run.json that affect results, besides the configuration.
_ALIKE = (
    *("cpu_model", "device", "encoder_precision", "onednn", "own_modules", "source_sha256"),
    *("threads", "versions"),
)


class SeedPair(NamedTuple):
    """Mean evaluation returns of the final weights of two runs with the same seed.

    Attributes:
      seed: Seed of both runs.
      graph: Mean return of the graph run.
      exact: Mean return of the eager or exact-graph run.
    """

    seed: int
    graph: float
    exact: float


def read_pairs(folder: str) -> list[SeedPair]:
    """Reads the pairs of runs in `folder`, in the order of their seeds.

    Runs with `--eager` and with `--exact_graph` are treated alike.

    Raises:
      UserError: If there is no run, if a run is not finished or has no return, if the
        configurations of the runs differ, if two runs have the same seed and kind, if a run has no
        counterpart, or if that was trained by another program or on another machine.
    """
    runs = [RunFolder(path.parent) for path in sorted(pathlib.Path(folder).glob("*/run.json"))]
    if not runs:
        is_there = pathlib.Path(folder).is_dir()
        what = "the folder contains no run folders" if is_there else "there is no such folder"
        raise UserError(f"--paired_runs={folder}: {what}.")
    configuration = _configuration(runs[0])
    graph: dict[int, float] = {}
    exact: dict[int, float] = {}
    first: dict[int, dict[str, Any]] = {}
    for run in runs:
        if _configuration(run) != configuration:
            raise UserError(
                f"{run.path} has another configuration than {runs[0].path}: compare runs of one "
                "configuration only."
            )
        start = run.read_json("run.json")
        if not {"execution", "seed"} <= start.keys():
            raise UserError(f"{run.path / 'run.json'} lacks the execution or the seed of the run.")
        group = graph if start["execution"] == Execution.GRAPH.value else exact
        if start["seed"] in group:
            raise UserError(
                f"{run.path} has the same seed and kind as another run in --paired_runs={folder}: "
                "move one of them away."
            )
        group[start["seed"]] = _final_return(run)
        other = first.setdefault(start["seed"], start)
        if differing := [name for name in _ALIKE if start.get(name) != other.get(name)]:
            raise UserError(
                f"{run.path} and the other run of seed {start['seed']} differ in more than the "
                f"kind of execution ({', '.join(differing)} in run.json): train both with one "
                "program on one machine."
            )
    if alone := sorted(graph.keys() ^ exact.keys()):
        raise UserError(
            f"--paired_runs={folder}: seed {alone[0]} has only one of its two runs. Train the "
            "other one, with or without --exact_graph."
        )
    return [SeedPair(seed, graph[seed], exact[seed]) for seed in sorted(graph)]


def _final_return(run: RunFolder) -> float:
    result = run.read_json("result.json")
    if not result:
        raise UserError(f"{run.path} is not finished: run its command again to finish it.")
    evaluation = result.get("evaluation", {})
    if "return_mean" not in evaluation:
        raise UserError(f"{run.path / 'result.json'} lacks the final evaluation.")
    mean = evaluation["return_mean"]
    if mean is None:
        raise UserError(
            f"{run.path} has no mean return, because no episode ended in its final evaluation: "
            "train the pairs anew with a larger Evaluator.num_env_steps."
        )
    return float(mean)


def _configuration(run: RunFolder) -> str:
    try:
        return run.config.read_text()
    except OSError as error:
        message = f"cannot read {error.filename}: {error.strerror}"
        raise error_kind(error)(message) from error
