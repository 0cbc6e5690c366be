"""Runs what a suite asks for, some processes at a time, and records how each run ended."""

from __future__ import annotations

import pathlib
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.benchmarks import processes, records, results
from pipeline.benchmarks.ledger import Ledger
from pipeline.benchmarks.processes import TRAIN, RunProgress, TrainProcess
from pipeline.benchmarks.records import Record
from pipeline.benchmarks.runs import Run, plan
from pipeline.benchmarks.status import FAILED, FINISHED, LEFT, RUNNING, RunStatus, Status
from pipeline.benchmarks.suites import Suite
from pipeline.errors import UserError
from pipeline.progress import duration
from pipeline.run_folder import RunFolder
from pipeline.shutdown import StopSignal

_POLL_SECONDS = 0.1
_SHOW_SECONDS = 1.0


class Outcome(NamedTuple):
    """How the runs of a suite stand.

    Attributes:
        finished: how many have come to their end, now or before.
        failed: runs that have failed, each with the reason in a line.
        left: how many are neither, for they were stopped or not begun.
    """

    finished: int
    failed: list[tuple[Run, str]]
    left: int


def run_suite(
    suite: Suite,
    output_dir: pathlib.Path,
    workers: int,
    gin_bindings: Sequence[str],
    stop: StopSignal,
    train: Sequence[str] = TRAIN,
    flags: Sequence[str] = (),
) -> Outcome:
    """Runs what is not finished of a suite and records it in `<output_dir>/<suite>.jsonl`.

    Args:
        suite: what to run.
        output_dir: made if missing.
        workers: runs at once.
        gin_bindings: statements for every run, after those of the suite.
        stop: its request asks all processes to write a checkpoint and exit.
        train: the command that trains, without its flags.
        flags: of it, beside those that say which run it is.

    Raises:
        UserError: another benchmark runs there; runs that are there have other settings; a gin
            file or a binding is wrong; the disk is full or not writable.
    """
    runs = plan(suite, output_dir, gin_bindings, flags)
    with Ledger(output_dir, suite.name) as ledger:
        ledger.check_settings(runs)
        with Status(suite.name, workers) as shown:
            return SuiteRunner(runs, workers, ledger, shown, stop, train).run()


class SuiteRunner:
    """Takes runs to their ends; whoever calls it again goes on with what is left.

    A run whose record says that it is finished is not touched. One that was stopped or killed
    resumes from its checkpoint, which is `pipeline.train`'s doing; one that failed is tried again.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        workers: int,
        ledger: Ledger,
        shown: Status,
        stop: StopSignal,
        train: Sequence[str] = TRAIN,
    ) -> None:
        """Args:
        runs: in the order in which they are to start.
        workers: how many run at once.
        ledger: open; where runs are recorded.
        shown: the terminal.
        stop: polled; once requested, every process is asked to stop, and none is started.
        train: the command that trains, without its flags.
        """
        self._runs = runs
        self._workers = workers
        self._ledger = ledger
        self._shown = shown
        self._stop = stop
        self._train = train
        self._waiting: deque[Run] = deque()
        self._running: list[TrainProcess] = []
        self._over: set[str] = set()  # names of runs that have finished or failed
        self._seconds: dict[str, float] = {}  # by name of the run, of its process that has ended
        self._shown_at = 0.0

    def run(self) -> Outcome:
        """Returns when all runs are over, or have stopped as they were asked to.

        Raises:
            UserError: the disk is full or not writable. No process is left behind.
        """
        self._sort_out()
        try:
            while (self._waiting and not self._stop.requested) or self._running:
                self._step()
                time.sleep(_POLL_SECONDS)
        finally:
            self._stop_processes()
            for process in self._running:
                process.wait()
        return self._outcome()

    def _sort_out(self) -> None:
        """Which runs are over; some may have ended when nobody was there to record it."""
        for run in self._runs:
            record = None if self._ledger.is_finished(run) else self._end_of(run)
            if record:
                self._ledger.add(record)
            if record or self._ledger.is_finished(run):
                self._over.add(run.name)
            else:
                self._waiting.append(run)
        over, left = len(self._over), len(self._waiting)
        self._shown.message(f"{left} runs to go, {over} are over; {self._workers} at once")

    def _end_of(self, run: Run) -> Record | None:
        """The record of a run that has come to its end, by its folder; None if it has not."""
        try:
            result = RunFolder(run.folder).read_json("result.json")
            if result.get("env_steps", 0) < run.num_env_steps:
                return None
            return records.finished(run, self._workers)
        except UserError as error:
            return records.failed(run, str(error))

    def _step(self) -> None:
        if self._stop.requested:
            self._stop_processes()
        ended = [process for process in self._running if process.poll() is not None]
        for process in ended:
            self._running.remove(process)
            self._conclude(process)
        while self._waiting and len(self._running) < self._workers and not self._stop.requested:
            self._start(self._waiting.popleft())
        if ended or time.monotonic() - self._shown_at >= _SHOW_SECONDS:
            self._shown_at = time.monotonic()
            self._shown.show(self._statuses(), at_once=bool(ended))

    def _start(self, run: Run) -> None:
        try:
            self._running.append(TrainProcess(run, self._train))
        except OSError as error:
            self._note(run, records.failed(run, f"it cannot be started: {error}; mend that"), 0.0)

    def _stop_processes(self) -> None:
        for process in self._running:
            process.stop()

    def _conclude(self, process: TrainProcess) -> None:
        run = process.run
        record = self._end_of(run)
        if record is None and process.was_stopped():
            return
        self._note(run, record or records.failed(run, process.error()), process.seconds)

    def _note(self, run: Run, record: Record, seconds: float) -> None:
        self._ledger.add(record)
        self._over.add(run.name)
        self._seconds[run.name] = seconds
        self._shown.message(f"{run.name}: {_ending(record)} after {duration(seconds)}")

    def _statuses(self) -> list[RunStatus]:
        running = {process.run.name for process in self._running}
        return [self._status(run, run.name in running) for run in self._runs]

    def _status(self, run: Run, is_running: bool) -> RunStatus:
        record = self._ledger[run]
        if record is None or run.name not in self._over:
            state, done = RUNNING if is_running else LEFT, processes.progress(run)
        elif record["status"] == FINISHED:
            # With the start of the process, if we have seen it.
            seconds = max(record["wall_seconds"], self._seconds.get(run.name, 0.0))
            state, done = FINISHED, RunProgress(record["env_steps"], seconds)
        else:
            state, done = FAILED, RunProgress()
        return RunStatus(state, run.experiment.name, run.num_env_steps, *done)

    def _outcome(self) -> Outcome:
        records_of = [(run, self._ledger[run]) for run in self._runs if run.name in self._over]
        failed = [
            (run, records.last_words(record))
            for run, record in records_of
            if record is not None and record["status"] == FAILED
        ]
        over = len(records_of)
        return Outcome(over - len(failed), failed, len(self._runs) - over)


def _ending(record: Record) -> str:
    if record["status"] == FAILED:
        return f"failed ({records.last_words(record)})"
    score = results.score_of(record)
    return "finished" if score is None else f"finished ({record['score']} {score:,.1f})"
