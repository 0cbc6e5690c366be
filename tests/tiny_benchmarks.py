"""Benchmarks small enough to test: two experiments that `fake_training` trains.

`python -m tiny_benchmarks FOLDER PATIENCE` runs a benchmark that tests can stop or kill.
"""

import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import fake_training
from waiting import wait_for

from pipeline.benchmarks import records, runner
from pipeline.benchmarks.planned_runs import Run
from pipeline.benchmarks.suites import Experiment, Suite
from pipeline.benchmarks.train_process import Machines, Start, TrainProcess
from pipeline.utils.shutdown import StopSignal

FAKE = (sys.executable, fake_training.__file__)
PATIENCE = "fake.patience = 0.5"


class StopWhen:
    """Signal to stop that comes once a condition is true."""

    signal = signal.SIGTERM

    def __init__(self, condition: Callable[[], Any]):
        self._condition = condition

    @property
    def requested(self) -> bool:
        return bool(self._condition())


def make_suite(num_seeds: int = 1, *bindings: str, budget: int = 100) -> Suite:
    experiments = [
        Experiment("dqn", environment, "dqn_cartpole", budget) for environment in ("A-v1", "B-v1")
    ]
    return Suite("tiny", "any", "evaluation", num_seeds, (), bindings, tuple(experiments))


def start_fake(run: Run) -> TrainProcess:
    return TrainProcess(run, FAKE)


def run(
    output_dir: pathlib.Path,
    suite: Suite,
    workers: int = 1,
    bindings=(),
    stop=None,
    start: Start = start_fake,
) -> runner.Outcome:
    on = Machines(output_dir, workers, start)
    with mock.patch.object(runner, "_POLL_SECONDS", 0.01):
        return runner.run_suite(suite, on, bindings, stop or StopSignal())


def recorded(output_dir: pathlib.Path) -> dict[tuple[str, int], dict]:
    """Returns the records by environment and seed."""
    found = records.read(output_dir / "tiny.jsonl")
    return {(record["environment"], record["seed"]): record for record in found}


def starts(output_dir: pathlib.Path) -> dict[str, int]:
    """Returns how often each run was started, according to the logs."""
    logs = output_dir.glob("tiny/*/*.log")
    return {f"{log.parent.name}/{log.stem}": log.read_text().count("started") for log in logs}


def waiting_processes(output_dir: pathlib.Path, count: int) -> list[int]:
    """Waits until `count` fake trainings wait for a signal, and returns their process ids."""
    wait_for(lambda: len(process_ids(output_dir)) == count, 30)
    return process_ids(output_dir)


def process_ids(output_dir: pathlib.Path) -> list[int]:
    """Returns the ids of the fake trainings that wait for a signal."""
    texts = [path.read_text() for path in output_dir.glob("tiny/*/*/process_id")]
    return [int(text) for text in texts if text]


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
        state = pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


if __name__ == "__main__":
    # Two seeds of each experiment, two at a time, all of which wait for a signal.
    with StopSignal("stopping") as stop:
        suite = make_suite(2, sys.argv[2])
        outcome = run(pathlib.Path(sys.argv[1]), suite, workers=2, stop=stop)
    print(f"{outcome.finished} finished, {outcome.left} left")
