"""Times this pipeline and its peers on the same works, in turns: A B C, A B C.

Every side is a worker process (`workers/protocol.py`) that is built and warm before the first
stage; only one measures at a time, the others wait without using the processor. Written to the
output folder:

    throughput.json     every number of every round, and what produced it
    throughput.md       the tables of `throughput_tables`, and what differs between the sides
    logs/               what each worker printed
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
from collections.abc import Sequence
from typing import Any, NamedTuple

import gin

from pipeline import configuration, run_folder
from pipeline.benchmarks import peer_environment, records
from pipeline.benchmarks.stages import has_variant
from pipeline.benchmarks.throughput_tables import document
from pipeline.benchmarks.worker_process import Worker, WorkerError
from pipeline.benchmarks.workers import works as trainings
from pipeline.errors import UserError
from pipeline.jsonl import plain

Results = dict[str, Any]

WORKS = (
    "machine",
    "dqn_pong_1", "dqn_pong_1:bfloat16", "dqn_pong_8", "dqn_pong_8:bfloat16",
    "ppo_pong_8", "ppo_pong_8:bfloat16", "sac_pong_8", "sac_pong_8:bfloat16",
    "a2c_pong_16", "a2c_pong_16:bfloat16", "nstep_q_pong_16", "trpo_pong_16", "dqn3_pong_1",
    "dqn_cartpole_1", "dqn_cartpole_8", "ppo_cartpole_8", "sac_pendulum_1",
    "a2c_cartpole_8", "trpo_cartpole_2", "nstep_q_cartpole_8",
    "start_pong", "replay_pong",
)  # fmt: skip

_SOLITARY = ("machine", "start_pong", "replay_pong")  # without peers

_WORKERS = pathlib.Path(__file__).parent / "workers"
_PEER_WORKS = {
    # Neither has n-step Q-learning or DQN 3.0; SB3's TRPO on a part of the states drops the others.
    "sb3": (
        "dqn_pong", "ppo_pong", "sac_pong", "a2c_pong", "dqn_cartpole", "ppo_cartpole",
        "sac_pendulum", "a2c_cartpole", "trpo_cartpole",
    ),
    # There is no A2C and no TRPO, and SacAgent's networks cannot share an image encoder.
    "tf_agents": ("dqn_pong", "ppo_pong", "dqn_cartpole", "ppo_cartpole", "sac_pendulum"),
}  # fmt: skip


class Contender(NamedTuple):
    """One side of a work: its name in the results, and its worker's command without the flags."""

    name: str
    command: tuple[str, ...]
    work: str


def measure(output_dir: pathlib.Path, with_peers: bool, gin_bindings: Sequence[str] = ()) -> None:
    """Measures all works and writes the results, after each work what there is.

    Args:
        output_dir: made if missing.
        with_peers: measures them too; makes their virtual environment in the current folder.
        gin_bindings: of `throughput`: works, seconds, rounds.

    Raises:
        UserError: a binding is wrong, the peers' environment cannot be made, or a worker failed;
            the others are measured and written all the same.
    """
    configuration.load([], gin_bindings)
    throughput(output_dir, with_peers)


@gin.configurable(denylist=["output_dir", "with_peers"])
def throughput(
    output_dir: pathlib.Path,
    with_peers: bool,
    *,
    works: Sequence[str] = WORKS,
    seconds: float = 10.0,
    rounds: int = 2,
) -> None:
    """See `measure`.

    Args:
        works: names as in dqn_pong_8, for 8 environments; dqn_pong_8:bfloat16 measures this
            pipeline in that precision, a2c_pong_8:asynchronous and :in_turns 8 actors.
        seconds: that a stage takes in a round, at least.
        rounds: of turns through the sides.
    """
    _check_works(works)
    if not works or seconds <= 0 or rounds < 1:
        raise UserError(
            f"throughput(works={works!r}, seconds={seconds}, rounds={rounds}): there must be a "
            "work and a round, and the seconds must be positive."
        )
    python = {"tf_agents": sys.executable}
    if with_peers:
        python["sb3"] = str(peer_environment.ensure())
    (output_dir / "logs").mkdir(parents=True, exist_ok=True)
    results: Results = {**_circumstances(), "seconds": seconds, "rounds": rounds, "works": {}}
    for work, variants in _grouped(works).items():
        sides = _ours(work, variants) + (_peers(work, python) if with_peers else [])
        results["works"][work] = {
            "load_average_before": os.getloadavg()[0],
            "sides": measure_work(work, sides, output_dir, seconds, rounds),
        }
        write(output_dir, results)
    _report_failures(results, output_dir)


def _check_works(names: Sequence[str]) -> None:
    if isinstance(names, str):
        raise UserError(f"throughput.works = {names!r}: must be a tuple of works: ({names!r},).")
    for name in names:
        if not _is_work(name):
            raise UserError(
                f"throughput.works = {names!r}: {name!r} is none. Choose from "
                f"{', '.join(_SOLITARY)} and works such as dqn_pong_8, dqn_pong_8:bfloat16, "
                "a2c_pong_8:asynchronous or a2c_pong_8:in_turns: WORK_N stands for N environments "
                f"or actors, WORK one of {', '.join(trainings.WORKS)}."
            )


def _is_work(name: str) -> bool:
    work, _, variant = name.partition(":")
    if work in _SOLITARY:
        return name == work
    try:
        return has_variant(trainings.parse(work)[0], variant) and not name.endswith(":")
    except ValueError:
        return False


def _circumstances() -> Results:
    return {
        "command": shlex.join(["python", "-m", "pipeline.benchmark", *sys.argv[1:]]),
        "git_revision": run_folder.git_revision(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        **records.machine(),
    }


def _grouped(works: Sequence[str]) -> dict[str, list[str]]:
    """The variants of each work, in order: "" for the name alone."""
    grouped: dict[str, list[str]] = {}
    for name in dict.fromkeys(works):
        work, _, variant = name.partition(":")
        grouped.setdefault(work, []).append(variant)
    return grouped


def _ours(work: str, variants: Sequence[str]) -> list[Contender]:
    command = (sys.executable, "-m", "pipeline.benchmarks.stages")
    names = [(":" + variant) if variant else "" for variant in variants]
    return [Contender(f"ours{name}", command, f"{work}{name}") for name in names]


def _peers(work: str, python: dict[str, str]) -> list[Contender]:
    if work in _SOLITARY:
        return []
    training = trainings.parse(work)[0]
    # TensorFlow for them uses the kernels that ours does; torch does not read this.
    onednn = f"TF_ENABLE_ONEDNN_OPTS={int(not training.has_small_layers)}"
    settings = (str(shutil.which("env")), onednn)
    return [
        Contender(name, (*settings, python[name], str(_WORKERS / f"{name}_worker.py")), work)
        for name, works in _PEER_WORKS.items()
        if work.rpartition("_")[0] in works
    ]


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
    scratch = output_dir / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        workers = _started(work, sides, results, output_dir, stack)
        stages = dict.fromkeys(s for name in workers for s in results[name]["facts"]["stages"])
        for stage in stages:
            once = any(stage in results[name]["facts"].get("once", ()) for name in workers)
            for _ in range(1 if once else rounds):
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
    workers = {}
    for side in sides:
        label = f"{work}-{side.name}".replace(":", "-")
        folder = output_dir / "scratch" / label
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
    text = json.dumps(plain(results), indent=1, allow_nan=False)
    run_folder.write_text(output_dir / "throughput.json", text + "\n")
    run_folder.write_text(output_dir / "throughput.md", document(results))


def rewrite_tables(output_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes throughput.md anew from throughput.json, if that is there; the files written.

    Raises:
        UserError: throughput.json is damaged, or the disk is full or not writable.
    """
    if not (results := run_folder.RunFolder(output_dir).read_json("throughput.json")):
        return []
    run_folder.write_text(output_dir / "throughput.md", document(results))
    return [output_dir / "throughput.md"]


def _report_failures(results: Results, output_dir: pathlib.Path) -> None:
    failed = [
        f"{work}: {name}"
        for work, measured in results["works"].items()
        for name, side in measured["sides"].items()
        if side["error"]
    ]
    if failed:
        raise UserError(
            f"not everything was measured; {output_dir}/throughput.json says why: "
            f"{', '.join(failed)}."
        )
    print(f"{output_dir}/throughput.md has the tables.")
