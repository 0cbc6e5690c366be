"""Defines a benchmark's records: `<output_dir>/<suite>.jsonl` has one record for each run.

A report reads the runs from these records only. A record has the keys below. If the run failed, the
keys marked with * are None, or [] if they are lists.

    suite, algorithm, environment, config, seed     identify the run; config names the gin file
    status                  "finished" or "failed"
    error                   None, or the exit code or signal of a failed run and its last lines
    protocol                description of how environments are made and scores are taken
    score                   which number is the score: "evaluation" (the mean of
                            evaluation_returns), "training" (the last value of the curve) or
                            "iteration" (the value of `iterations` at the budget)
    budgets                 environment steps at which scores are tabulated in addition to the
                            final one
    num_seeds               number of seeds that were requested; the seeds are 1 to num_seeds
    num_env_steps           the budget in environment steps
    env_steps *             environment steps taken; the last iteration may exceed the budget
    updates *               number of optimizer steps
    episodes *              number of episodes finished while training
    wall_seconds *          seconds of the run with its evaluations and checkpoints, without startup
    env_steps_per_second *  speed of training alone, without evaluations and checkpoints
    workers *               largest number of parallel runs in the call in which this run ended;
                            null if that call was killed before it recorded the run
    evaluation_returns *    returns of the final weights, one for each episode
    evaluation_policy *     "greedy", "sampled", or for example "0.05-greedy"
    curve *                 [environment steps, mean return of the last 100 training episodes], ...
    iterations *            [environment steps, mean return of the training episodes that ended in
                            the 250,000 steps before], ..., at each budget and at the end; empty
                            unless score is "iteration"
    evaluations *           [environment steps, mean return of an evaluation while training], ...
    weights_sha256 *        SHA-256 of the final weights
    config_sha256 *         SHA-256 of operative_config.gin, which lists every value in effect
    command                 command of the run
    git_revision *, versions *, threads *, onednn *  of the process that finished the run
    source_sha256, own_modules, device, encoder_precision  of that process; missing if the run
                            failed, or if it was made before its run.json had them
    earlier_revisions *     revisions of processes that were stopped or killed before, if different
    inexact_resumes *       number of processes that could not resume the run bit for bit
    losses                  number of times that the machine of the run was lost; missing if never
    cpu_model, cpu_count    of the process that finished the run; if the run failed, of the machine
                            that wrote the record

A later line about the same run replaces an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline import configuration
from pipeline.benchmarks.planned_runs import Run
from pipeline.configuration.statements import Binding, value_of
from pipeline.runs.run_folder import RunFolder
from pipeline.utils import jsonl
from pipeline.utils.errors import UserError, last_line
from pipeline.utils.files import error_kind, write_text
from pipeline.utils.processor import machine

FINISHED, FAILED = "finished", "failed"
MAX_CURVE_POINTS = 200
ITERATION = 250_000  # environment steps; one million frames, as in Dopamine

Record = dict[str, Any]
Key = tuple[str, str, str, int]

_FROM_RESULT = ("env_steps", "updates", "episodes", "wall_seconds", "weights_sha256")
_FROM_START = ("git_revision", "versions", "threads", "onednn")
_FROM_NEWER_START = ("source_sha256", "own_modules", "device", "encoder_precision")
_PROCESSOR = ("cpu_model", "cpu_count")
_KNOWN_AT_THE_END = (
    *_FROM_RESULT, *_FROM_START, "env_steps_per_second", "workers", "evaluation_policy",
    "config_sha256", "inexact_resumes",
)  # fmt: skip
_LISTS = ("evaluation_returns", "curve", "iterations", "evaluations", "earlier_revisions")
_ALWAYS_KNOWN = (
    "suite", "algorithm", "environment", "config", "seed", "status", "error", "protocol", "score",
    "budgets", "num_seeds", "num_env_steps", "command", *_PROCESSOR,
)  # fmt: skip


def key(record: Record) -> Key:
    """Returns the key that identifies the run of a record."""
    return record["suite"], record["algorithm"], record["environment"], record["seed"]


def read(path: pathlib.Path) -> list[Record]:
    """Reads the last record of every run in a file, in the order in which the runs first appear.

    A missing file has no records.

    Raises:
      UserError: If a line is not a record.
    """
    records: dict[Key, Record] = {}
    for record in jsonl.read_jsonl(path, *_ALWAYS_KNOWN, *_KNOWN_AT_THE_END, *_LISTS):
        records[key(record)] = record
    return list(records.values())


def are_in(path: pathlib.Path) -> bool:
    """Returns True if the first line of a file looks like a record, not like a log of a run.

    Raises:
      UserError: If the file cannot be read.
    """
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return b'"suite"' in file.readline()
    except OSError as error:
        raise error_kind(error)(f"cannot read {path}: {error.strerror}.") from error


def write(path: pathlib.Path, records: Iterable[Record]) -> None:
    """Replaces the file atomically, so that a killed process leaves no partial line.

    Raises:
      UserError: If the disk is full or not writable.
    """
    write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def failed(run: Run, error: str) -> Record:
    """Returns the record of a failed run."""
    return _identity(run, FAILED, error) | {
        **dict.fromkeys(_KNOWN_AT_THE_END, None),
        **{name: [] for name in _LISTS},
        "command": shlex.join(["python", "-m", "pipeline.train", *run.arguments]),
        **machine(),
    }


def last_words(record: Record) -> str:
    """Returns why a run failed, in one line."""
    first, last = record["error"].partition("\n")[0], last_line(record["error"])
    return first if last == first else f"{first}: {last}"


def finished(run: Run, workers: int | None) -> Record:
    """Reads the record of a finished run from its folder.

    Args:
      run: The run. Its folder must have a result.json.
      workers: Largest number of parallel runs; None if it is not known.

    Raises:
      UserError: If a file of the run is missing or damaged, or if a return is not finite.
    """
    folder = RunFolder(run.folder)
    result, start = folder.read_json("result.json"), folder.read_json("run.json")
    metrics = jsonl.read_jsonl(folder.metrics)
    config = folder.config
    try:
        return _identity(run, FINISHED, None) | {
            **{name: result[name] for name in _FROM_RESULT},
            "env_steps_per_second": _training_speed(metrics),
            "workers": workers,
            "evaluation_returns": _finite(run, result["evaluation"]["returns"]),
            "evaluation_policy": _evaluation_policy(config),
            "curve": thinned(_columns(metrics, "return_mean_100"), run.suite.budgets),
            "iterations": _iterations(run, metrics),
            "evaluations": _columns(jsonl.read_jsonl(folder.evaluations), "return_mean"),
            "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest(),
            "command": start["command"],
            **{name: start[name] for name in (*_FROM_START, *_PROCESSOR)},
            **{name: start[name] for name in _FROM_NEWER_START if name in start},
            "earlier_revisions": earlier_revisions(start),
            "inexact_resumes": len(start["inexact_resumes"]),
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{run.folder}: a file of the run is damaged, or was written by another version of the "
            f"program ({error!r}). Move the folder away and run the same command again."
        ) from error


def earlier_revisions(start: Record) -> list[str | None]:
    """Returns the revisions of the processes before the last one, from the run's run.json."""
    revisions = dict.fromkeys(earlier["git_revision"] for earlier in start["earlier_starts"])
    return [revision for revision in revisions if revision != start["git_revision"]]


def _finite(run: Run, returns: list[float]) -> list[float]:
    if not np.isfinite(returns).all():
        raise UserError(f"{run.folder}: a return of the final evaluation is not finite.")
    return returns


def _identity(run: Run, status: str, error: str | None) -> Record:
    suite, experiment = run.suite, run.experiment
    return {
        "suite": suite.name,
        "algorithm": experiment.algorithm,
        "environment": experiment.environment,
        "config": experiment.config,
        "seed": run.seed,
        "status": status,
        "error": error,
        "protocol": suite.protocol_of(experiment),
        "score": suite.score_of(experiment),
        "budgets": list(suite.budgets),
        "num_seeds": suite.num_seeds,
        "num_env_steps": run.num_env_steps,
    }


def _columns(records: Sequence[Record], name: str) -> list[list[float]]:
    """Returns [environment steps, value] of each record that has a value."""
    return [[r["env_steps"], r[name]] for r in records if r.get(name) is not None]


def _iterations(run: Run, metrics: Sequence[Record]) -> list[list[float]]:
    """Returns [environment steps, mean return] of the iteration before each budget and the end.

    The mean is computed from the running sums of returns in two records: the first at or after the
    beginning of the iteration, and the first at or after its end. There is no mean if one of them
    is more than a twentieth of an iteration late, because train.log_interval is too long.
    """
    if run.suite.score_of(run.experiment) != "iteration":
        return []
    counts = [(r["env_steps"], r["episodes"], r["return_sum"]) for r in metrics]
    counts = [(0, 0, 0.0), *counts]
    means = []
    for end in sorted({*run.suite.budgets, run.num_env_steps}):
        bounds = (max(end - ITERATION, 0), end)
        begun, ended = (next((c for c in counts if c[0] >= x), counts[0]) for x in bounds)
        lateness = max(begun[0] - bounds[0], ended[0] - bounds[1])
        if ended[1] > begun[1] and lateness <= ITERATION / 20:
            means.append([end, (ended[2] - begun[2]) / (ended[1] - begun[1])])
    return means


def thinned(points: list[list[float]], budgets: Sequence[int]) -> list[list[float]]:
    """Returns about `MAX_CURVE_POINTS` of the points, evenly spaced.

    The first point, the last point, and the first point at or after each of `budgets` (environment
    steps) are always kept.
    """
    spaced = np.linspace(0, len(points) - 1, min(len(points), MAX_CURVE_POINTS)).round()
    steps = [env_steps for env_steps, _ in points]
    kept = {int(index) for index in spaced} | {int(np.searchsorted(steps, b)) for b in budgets}
    return [points[index] for index in sorted(kept) if index < len(points)]


def _training_speed(metrics: Sequence[Record]) -> float | None:
    """Computes environment steps per second over all log intervals except the first.

    The first interval is left out because it includes the tracing of every graph.
    """
    known = [record for record in metrics if record.get("env_steps_per_second")]
    rates = np.array([record["env_steps_per_second"] for record in known])
    if len(known) < 2:
        return float(rates[0]) if known else None
    steps = np.diff([record["env_steps"] for record in known])
    return float(steps.sum() / (steps / rates[1:]).sum())


def _evaluation_policy(config: pathlib.Path) -> str:
    """Returns which policy played the final evaluation, according to the run's configuration."""
    statements = configuration.read([str(config)], allow_imports=True)
    values = {s.name: s.value for s in statements if isinstance(s, Binding)}
    if (epsilon := value_of(values.get("Evaluator.epsilon"), values)) is not None:
        return f"{epsilon}-greedy"
    return "greedy" if value_of(values["Evaluator.greedy"], values) else "sampled"
