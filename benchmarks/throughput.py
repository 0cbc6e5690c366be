"""Times this pipeline and its peers on the same workloads, in turns: A B C, A B C.

    python -m benchmarks.throughput --peers --output_dir=runs/speed

Every side of a workload is a worker process (`workers/protocol.py`) that is built and warmed up
before the first stage. Only one worker measures at a time; the others wait without using the
processor. If the command is stopped or killed, the same command continues with the workloads that
it has not yet measured on all sides. It writes to the output folder:

    throughput.json     every number of every round, and the command, revision and machine
    throughput.md       the tables of `tables.py`, and the known differences between the sides
    logs/               the output of each worker
    .throughput.lock    held by the running measurement
    .throughput-scratch-*/  scratch files of the workers; removed at the end of the measurement, or
                            at the start of the next one
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence

from absl import flags

from benchmarks import peer_environment, sides
from benchmarks.measurements import Results, sides_of
from benchmarks.sides import Side
from benchmarks.tables import document
from benchmarks.worker_process import Worker, WorkerError
from pipeline import cli
from pipeline.runs import source_revision
from pipeline.utils.errors import UserError
from pipeline.utils.files import lock, named_errors, read_json, write_text
from pipeline.utils.jsonl import plain
from pipeline.utils.processor import machine

_OUTPUT_DIR = cli.define_path("output_dir", None, "Folder of the results; created if missing.")
_PEERS = flags.DEFINE_bool("peers", False, "Also measure the peers; creates .venv-peers.")
_WORKLOADS = flags.DEFINE_list(
    "workloads",
    list(sides.DEFAULT_WORKLOADS),
    "Workloads such as dqn_pong_8 (8 environments). dqn_pong_8:bfloat16 measures this pipeline in "
    "bfloat16. a2c_pong_8:asynchronous and a2c_pong_8:in_turns measure 8 actors.",
)
_SECONDS = flags.DEFINE_float(
    "seconds", 2.0, "Minimum seconds of a stage in a round.", lower_bound=1e-3
)
flags.register_validator("seconds", math.isfinite, "must be a finite number")
_ROUNDS = flags.DEFINE_integer(
    "rounds",
    5,
    "Number of rounds through all stages and sides. Workloads that cannot be repeated (start_pong, "
    "replay_pong) are measured once, for as long as all rounds take.",
    lower_bound=1,
)

_JSON, _TABLES, _LOCK = "throughput.json", "throughput.md", ".throughput.lock"
_SCRATCH = ".throughput-scratch-"
_BUSY = "another measurement writes to"


def main(_: Sequence[str]) -> int:
    if not _OUTPUT_DIR.value:
        raise UserError("say where results go: --output_dir=runs/NAME.")
    output_dir = pathlib.Path(_OUTPUT_DIR.value)
    failed = measure(output_dir, _PEERS.value, _WORKLOADS.value, _SECONDS.value, _ROUNDS.value)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries these workloads again.")
    print(f"The tables are in {output_dir / _TABLES}.")
    return int(bool(failed))


def measure(
    output_dir: pathlib.Path,
    with_peers: bool,
    workloads: Sequence[str] = sides.DEFAULT_WORKLOADS,
    seconds: float = 2.0,
    rounds: int = 5,
) -> list[str]:
    """Measures all workloads and writes the results after each workload.

    Args:
      output_dir: Folder of the results; created if missing.
      with_peers: True to also measure the peers.
      workloads: Names of the workloads; see `--workloads`.
      seconds: Minimum seconds of a stage in a round.
      rounds: Number of rounds; see `--rounds`.

    Returns:
      The workloads and sides whose workers failed. The errors are in throughput.json.

    Raises:
      UserError: If a workload is unknown, if the folder is not writable, if it has measurements of
        another command, revision or machine, or if the peers' environment cannot be created.
    """
    sides.check(workloads)
    with contextlib.closing(lock(output_dir / _LOCK, _BUSY, "--output_dir")):
        with named_errors(output_dir, "--output_dir"):
            for left_by_a_killed_one in output_dir.glob(f"{_SCRATCH}*"):
                shutil.rmtree(left_by_a_killed_one)
            (output_dir / "logs").mkdir(exist_ok=True)
        circumstances = {**_circumstances(), "seconds": seconds, "rounds": rounds}
        measured = _measured_before(output_dir, circumstances)
        python = {"tf_agents": sys.executable}
        if with_peers:
            python["sb3"] = str(peer_environment.ensure())
        variants_of = sides.grouped(workloads)
        for workload, variants in variants_of.items():
            if workload in measured:
                print(f"{workload}  already measured", flush=True)
            else:
                of_workload = sides.ours(workload, variants)
                of_workload += sides.peers(workload, python) if with_peers else []
                measured[workload] = {
                    "load_average_before": os.getloadavg()[0],
                    "sides": measure_workload(workload, of_workload, output_dir, seconds, rounds),
                }
            in_order = {
                workload: measured[workload] for workload in variants_of if workload in measured
            }
            results = {**circumstances, "workloads": in_order}
            write(output_dir, results)
        return [
            f"{workload}: {name}" for workload, name, side in sides_of(results) if side["error"]
        ]


def _measured_before(output_dir: pathlib.Path, circumstances: Results) -> Results:
    """Returns the workloads that earlier runs of the same command have measured on all sides."""
    earlier = read_json(output_dir / _JSON, {"workloads": dict})
    here = plain(circumstances)
    differing = [name for name in here if earlier and earlier.get(name) != here[name]]
    if differing:
        raise UserError(
            f"{output_dir / _JSON} has measurements with another {', '.join(differing)}, which new "
            "ones would replace: choose another --output_dir, or delete the file."
        )
    return {
        workload: measured
        for workload, measured in earlier.get("workloads", {}).items()
        if not any(side["error"] for side in measured["sides"].values())
    }


def _circumstances() -> Results:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.throughput", *sys.argv[1:]]),
        "git_revision": source_revision.git_revision(),
        "source_sha256": source_revision.source_sha256(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        **machine(),
    }


def measure_workload(
    workload: str,
    of_workload: Sequence[Side],
    output_dir: pathlib.Path,
    seconds: float,
    rounds: int,
) -> dict[str, Results]:
    """Starts the workers of all sides one after the other and measures their stages in turns.

    If the worker of a side fails, the result of the side has the measurements up to the failure,
    and the error.

    Args:
      workload: Name of the workload.
      of_workload: Sides of the workload.
      output_dir: Folder of the results.
      seconds: Minimum seconds of a stage in a round.
      rounds: Number of rounds.

    Returns:
      The results by the name of the side. `facts` is what the worker said when it was ready.
      `stages` has for each stage the answers of all `rounds` and their median `per_second`. `error`
      is None or a message.
    """
    results: dict[str, Results] = {
        side.name: {"facts": {}, "stages": {}, "error": None} for side in of_workload
    }
    with contextlib.ExitStack() as stack:
        workers = _started(workload, of_workload, results, output_dir, stack)
        stages = dict.fromkeys(s for name in workers for s in results[name]["facts"]["stages"])
        if not all(results[name]["facts"].get("takes_rounds", True) for name in workers):
            seconds, rounds = seconds * rounds, 1
        for _ in range(rounds):
            for stage in stages:
                _take_turns(workload, stage, seconds, workers, results)
    return results


def _started(
    workload: str,
    of_workload: Sequence[Side],
    results: dict[str, Results],
    output_dir: pathlib.Path,
    stack: contextlib.ExitStack,
) -> dict[str, Worker]:
    """Starts the workers and returns those that become ready."""
    with named_errors(output_dir, "--output_dir"):
        scratch = tempfile.TemporaryDirectory(dir=output_dir, prefix=_SCRATCH)
    of_workers = pathlib.Path(stack.enter_context(scratch))
    workers = {}
    for side in of_workload:
        label = f"{workload}-{side.name}".replace(":", "-")
        folder = of_workers / label
        folder.mkdir(parents=True)
        flags = (f"--workload={side.workload}", f"--output_dir={folder.absolute()}")
        log = output_dir / "logs" / f"{label}.log"
        print(f"{workload}  {side.name}  starting", flush=True)
        worker = Worker(f"{side.name}'s worker for {side.workload}", (*side.command, *flags), log)
        stack.callback(worker.close)
        try:
            results[side.name]["facts"] = worker.ready()
            workers[side.name] = worker
        except WorkerError as error:
            _drop(worker, error, results[side.name])
    return workers


def _take_turns(
    workload: str,
    stage: str,
    seconds: float,
    workers: dict[str, Worker],
    results: dict[str, Results],
) -> None:
    """Measures a stage once on every side that has it; drops failed workers from `workers`."""
    for name, worker in list(workers.items()):
        result = results[name]
        if stage not in result["facts"]["stages"]:
            continue
        try:
            answer = worker.measure(stage, seconds)
        except WorkerError as error:
            _drop(workers.pop(name), error, result)
            continue
        measured = result["stages"].setdefault(stage, {"rounds": []})
        measured["rounds"].append(answer)
        speeds = [answer["count"] / answer["seconds"] for answer in measured["rounds"]]
        measured["per_second"] = statistics.median(speeds)
        print(f"{workload}  {name}  {stage}  {speeds[-1]:,.1f} {answer['unit']}/s", flush=True)


def _drop(worker: Worker, error: WorkerError, result: Results) -> None:
    worker.kill()
    result["error"] = str(error)
    print(error, file=sys.stderr, flush=True)


def write(output_dir: pathlib.Path, results: Results) -> None:
    """Replaces throughput.json and throughput.md.

    Raises:
      UserError: If the disk is full or not writable.
    """
    results = plain(results)
    write_text(output_dir / _JSON, json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(output_dir / _TABLES, document(results))


if __name__ == "__main__":
    cli.run(main)
