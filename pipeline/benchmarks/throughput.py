"""Times this pipeline and its peers on the same works, in turns: A B C, A B C.

Every side is a worker process (`workers/protocol.py`) that is built and warm before the first
stage; only one measures at a time, the others wait without using the processor. Written to the
output folder:

    throughput.json     every number of every round, and what produced it
    throughput.md       the tables of `throughput_tables`, and what differs between the sides
    logs/               what each worker printed
    .throughput.lock    held by the measurement that writes there
    .throughput-scratch-*/  of its workers, gone when it ends, or when the next one begins
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence

import gin

from pipeline import configuration, revision
from pipeline.benchmarks import contenders, peer_environment
from pipeline.benchmarks.contenders import Contender
from pipeline.benchmarks.throughput_numbers import Results, sides_of
from pipeline.benchmarks.throughput_tables import document
from pipeline.benchmarks.worker_process import Worker, WorkerError
from pipeline.circumstances import machine
from pipeline.durable import write_text
from pipeline.errors import UserError, check_number, check_whole
from pipeline.folders import lock, named_errors, read_json
from pipeline.jsonl import plain

_JSON, _TABLES, _LOCK = "throughput.json", "throughput.md", ".throughput.lock"
_SCRATCH = ".throughput-scratch-"


def measure(
    output_dir: pathlib.Path, with_peers: bool, gin_bindings: Sequence[str] = ()
) -> list[str]:
    """Measures all works and writes the results, after each work what there is.

    The same command again goes on with the works that it has not measured yet, or not on all sides.

    Args:
        output_dir: made if missing.
        with_peers: measures them too; makes their virtual environment in the current folder.
        gin_bindings: of `throughput`: works, seconds, rounds.

    Returns:
        The works and sides whose workers have failed; throughput.json says why.

    Raises:
        UserError: a binding is wrong, the folder is not writable, has what another command,
            revision or machine measured or is being measured into, or the peers' environment cannot
            be made.
    """
    configuration.load([], gin_bindings)
    return throughput(output_dir, with_peers)


@gin.configurable(denylist=["output_dir", "with_peers"])
def throughput(
    output_dir: pathlib.Path,
    with_peers: bool,
    *,
    works: Sequence[str] = contenders.DEFAULT_WORKS,
    seconds: float = 3.0,
    rounds: int = 7,
) -> list[str]:
    """See `measure`.

    Args:
        works: names as in dqn_pong_8, for 8 environments; dqn_pong_8:bfloat16 measures this
            pipeline in that precision, a2c_pong_8:asynchronous and :in_turns 8 actors.
        seconds: that a stage takes in a round, at least.
        rounds: of turns through stages and sides; works that cannot be repeated (`start_pong`,
            `replay_pong`) are measured once, for as long as all rounds take.
    """
    contenders.check(works)
    check_number("throughput.seconds", seconds, 0)
    check_whole("throughput.rounds", rounds)
    with lock(output_dir / _LOCK, "another measurement writes to", "--output_dir"):
        with named_errors(output_dir, "--output_dir"):
            for left_by_a_killed_one in output_dir.glob(f"{_SCRATCH}*"):
                shutil.rmtree(left_by_a_killed_one)
            (output_dir / "logs").mkdir(exist_ok=True)
        circumstances = {**_circumstances(), "seconds": seconds, "rounds": rounds}
        measured = _measured_before(output_dir, circumstances)
        python = {"tf_agents": sys.executable}
        if with_peers:
            python["sb3"] = str(peer_environment.ensure())
        variants_of = contenders.grouped(works)
        for work, variants in variants_of.items():
            if work in measured:
                print(f"{work}  measured before", flush=True)
            else:
                sides = contenders.ours(work, variants)
                sides += contenders.peers(work, python) if with_peers else []
                measured[work] = {
                    "load_average_before": os.getloadavg()[0],
                    "sides": measure_work(work, sides, output_dir, seconds, rounds),
                }
            in_order = {work: measured[work] for work in variants_of if work in measured}
            results = {**circumstances, "works": in_order}
            write(output_dir, results)
        return [f"{work}: {name}" for work, name, side in sides_of(results) if side["error"]]


def _measured_before(output_dir: pathlib.Path, circumstances: Results) -> Results:
    """The works that earlier calls of the same command have measured on all sides."""
    earlier = read_json(output_dir / _JSON, {"works": dict})
    here = plain(circumstances)
    differing = [name for name in here if earlier and earlier.get(name) != here[name]]
    if differing:
        raise UserError(
            f"{output_dir / _JSON} has measurements of another {', '.join(differing)}, which a new "
            "one would replace: choose another --output_dir, or delete it."
        )
    return {
        work: measured
        for work, measured in earlier.get("works", {}).items()
        if not any(side["error"] for side in measured["sides"].values())
    }


def _circumstances() -> Results:
    return {
        "command": shlex.join(["python", "-m", "pipeline.benchmark", *sys.argv[1:]]),
        "git_revision": revision.git_revision(),
        "source_sha256": revision.source_sha256(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        **machine(),
    }


def measure_work(
    work: str, sides: Sequence[Contender], output_dir: pathlib.Path, seconds: float, rounds: int
) -> dict[str, Results]:
    """Starts the sides' workers one after the other and measures their stages in turns.

    A side whose worker fails keeps what it has measured until then, and its `error`.

    Returns:
        For each side `facts`, what its worker said when it was ready; `stages`, for each the
        answers of all `rounds` and their median `per_second`; and `error`, which is None or a
        message.
    """
    results: dict[str, Results] = {
        side.name: {"facts": {}, "stages": {}, "error": None} for side in sides
    }
    with contextlib.ExitStack() as stack:
        workers = _started(work, sides, results, output_dir, stack)
        stages = dict.fromkeys(s for name in workers for s in results[name]["facts"]["stages"])
        if not all(results[name]["facts"].get("takes_rounds", True) for name in workers):
            seconds, rounds = seconds * rounds, 1
        for _ in range(rounds):
            for stage in stages:
                _take_turns(work, stage, seconds, workers, results)
    return results


def _started(
    work: str,
    sides: Sequence[Contender],
    results: dict[str, Results],
    output_dir: pathlib.Path,
    stack: contextlib.ExitStack,
) -> dict[str, Worker]:
    """The workers that are ready."""
    with named_errors(output_dir, "--output_dir"):
        scratch = tempfile.TemporaryDirectory(dir=output_dir, prefix=_SCRATCH)
    of_workers = pathlib.Path(stack.enter_context(scratch))
    workers = {}
    for side in sides:
        label = f"{work}-{side.name}".replace(":", "-")
        folder = of_workers / label
        folder.mkdir(parents=True)
        flags = (f"--work={side.work}", f"--output_dir={folder.absolute()}")
        log = output_dir / "logs" / f"{label}.log"
        print(f"{work}  {side.name}  starting", flush=True)
        worker = Worker(f"{side.name}'s worker for {side.work}", (*side.command, *flags), log)
        stack.callback(worker.close)
        try:
            results[side.name]["facts"] = worker.ready()
            workers[side.name] = worker
        except WorkerError as error:
            _drop(worker, error, results[side.name])
    return workers


def _take_turns(
    work: str, stage: str, seconds: float, workers: dict[str, Worker], results: dict[str, Results]
) -> None:
    """Measures a stage once on every side that has it; takes failed workers out of `workers`."""
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
        print(f"{work}  {name}  {stage}  {speeds[-1]:,.1f} {answer['unit']}/s", flush=True)


def _drop(worker: Worker, error: WorkerError, result: Results) -> None:
    worker.kill()
    result["error"] = str(error)
    print(error, file=sys.stderr, flush=True)


def write(output_dir: pathlib.Path, results: Results) -> None:
    """Replaces throughput.json and throughput.md.

    Raises:
        UserError: the disk is full or not writable.
    """
    results = plain(results)
    write_text(output_dir / _JSON, json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(output_dir / _TABLES, document(results))


def rewrite_tables(output_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes throughput.md anew from throughput.json, if that is there; the files written.

    Raises:
        UserError: throughput.json is damaged, or the disk is full or not writable.
    """
    if not (results := read_json(output_dir / _JSON, {"works": dict})):
        return []
    try:
        text = document(results)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{output_dir / _JSON} is damaged, or no measurement's ({error!r}); remove it."
        ) from error
    write_text(output_dir / _TABLES, text)
    return [output_dir / _TABLES]
