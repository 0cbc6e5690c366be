"""Runs a suite with several processes at a time and records how each run ended."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.benchmarks import formatting, records, results, train_process
from pipeline.benchmarks.planned_runs import Run, plan
from pipeline.benchmarks.records import FAILED, FINISHED, Record
from pipeline.benchmarks.suite_folder import SuiteFolder
from pipeline.benchmarks.suites import Suite
from pipeline.benchmarks.train_process import Losses, Machines, Process
from pipeline.runs.run_folder import RunFolder
from pipeline.utils.errors import RETRY_CODE, RetryableError, UserError
from pipeline.utils.files import PASSING
from pipeline.utils.progress import Progress, duration, score_text
from pipeline.utils.shutdown import StopSignal

_POLL_SECONDS = 0.5
_PLAIN_SECONDS = 60.0  # between lines without a terminal
_STATES = (FINISHED, "running", FAILED, "left")


class Outcome(NamedTuple):
    """Outcome of running a suite.

    Attributes:
      finished: Number of runs that have finished, in this call or before.
      failed: Runs that have failed, each with the reason in one line.
      left: Number of runs that were stopped, not started, or cannot be trained now.
    """

    finished: int
    failed: list[tuple[Run, str]]
    left: int


def run_suite(
    suite: Suite, machines: Machines, gin_bindings: Sequence[str], stop: StopSignal
) -> Outcome:
    """Runs the unfinished runs of a suite and records them in `<output_dir>/<suite>.jsonl`.

    A finished run is not repeated. A run that was stopped or killed resumes from its checkpoint,
    and a run that failed is tried again.

    Args:
      suite: The suite to run.
      machines: Machines on which the runs are trained.
      gin_bindings: Statements for every run, after those of the suite and of the machines.
      stop: Signal that stops the benchmark: all processes write a checkpoint and exit.

    Returns:
      How many runs have finished, failed or are left.

    Raises:
      UserError: If runs in the folder have other settings, or a gin file or a binding is wrong; a
        RetryableError if another benchmark uses the folder, the disk is full or not writable, or,
        after all other runs, if some cannot be trained now. All processes have then been stopped.
    """
    bindings = [*machines.bindings, *gin_bindings]
    runs = plan(suite, machines.output_dir, bindings, machines.flags)
    with SuiteFolder(machines.output_dir, suite.name) as folder:
        folder.check_settings(runs)
        total = sum(run.num_env_steps for run in runs)
        with Progress(total, plain_interval=_PLAIN_SECONDS) as display:
            return _Runner(runs, machines, folder, display, stop).run()


class _Runner:
    def __init__(
        self,
        runs: Sequence[Run],
        machines: Machines,
        folder: SuiteFolder,
        display: Progress,
        stop: StopSignal,
    ) -> None:
        self._runs = runs
        self._workers = min(machines.workers, len(runs))
        self._start = machines.start
        self._folder = folder
        self._display = display
        self._stop = stop
        self._waiting: deque[Run] = deque()
        self._running: list[Process] = []
        self._losses = Losses(display.message)
        self._most_running = 0
        self._told: set[str] = set()  # warnings of the runs
        self._postponed: dict[str, str] = {}  # why runs cannot be trained now, by their names

    def run(self) -> Outcome:
        for run in self._runs:
            self._record_if_over(run)
        left = len(self._waiting)
        over = len(self._runs) - left - len(self._postponed)
        self._display.message(
            f"runs to do: {left}, done: {over}; at most {self._workers} at a time"
        )
        try:
            while (self._waiting and not self._stop.requested) or self._running:
                self._step()
                self._most_running = max(self._most_running, len(self._running))
                self._display.update(self._progress())
                time.sleep(_POLL_SECONDS)
        finally:
            for process in self._running:
                process.stop()
            for process in self._running:
                process.wait()
        if self._postponed and not self._stop.requested:
            raise RetryableError(
                f"{formatting.count(len(self._postponed), 'run')} cannot be trained now. Run the "
                "same command again, later or elsewhere. The last one:\n"
                + list(self._postponed.values())[-1]
            )
        return self._outcome()

    def _record_if_over(self, run: Run) -> None:
        """Records the end of a run that has ended unrecorded; lets one that has not ended wait."""
        recorded = self._folder[run]
        if recorded and recorded["status"] == FINISHED:
            return
        try:
            record = self._end_of(run)
        except RetryableError as error:
            self._postpone(run, str(error))
            return
        if record:
            self._folder.add(self._with_losses(run, record))
        else:
            self._waiting.append(run)

    def _end_of(self, run: Run) -> Record | None:
        """Returns the record of a run that has ended by its folder; None if it has not ended.

        Raises:
          RetryableError: If its folder cannot be read now.
        """
        try:
            if not RunFolder(run.folder).finished(run.seed, run.num_env_steps):
                return None
            return records.finished(run, self._most_running or None)
        except RetryableError:
            raise
        except UserError as error:
            return records.failed(run, str(error))

    def _postpone(self, run: Run, reason: str) -> None:
        """Leaves a run to a later call, because of something that is not its fault."""
        text = f"{run.name} cannot be trained now:\n{reason}"
        self._display.message(text)
        self._postponed[run.name] = text

    def _step(self) -> None:
        if self._stop.requested:
            for process in self._running:
                process.stop()
        for process in [x for x in self._running if x.poll() is not None]:
            self._running.remove(process)
            try:
                record = self._end_of(process.run)
            except RetryableError as error:
                self._postpone(process.run, str(error))
                continue
            if record is None and self._losses.goes_on(process):
                self._waiting.append(process.run)
            elif record is None and process.poll() == RETRY_CODE:
                self._postpone(process.run, self._losses.error(process))
            else:
                record = record or records.failed(process.run, self._losses.error(process))
                self._note(process.run, record, time.monotonic() - process.started)
        for _ in range(len(self._waiting)):
            if len(self._running) >= self._workers or self._stop.requested:
                break
            self._start_next()

    def _start_next(self) -> None:
        """Starts the first run that waits; if there is no room for it, puts it at the end."""
        run = self._waiting.popleft()
        try:
            process = self._start(run)
        except OSError as error:
            reason = f"the process cannot be started: {error}"
            if error.errno in PASSING:
                self._postpone(run, reason)
            else:
                self._note(run, records.failed(run, reason), 0.0)
            return
        if process is None:
            self._waiting.append(run)
        else:
            self._running.append(process)

    def _with_losses(self, run: Run, record: Record) -> Record:
        losses = self._losses[run]
        return record | {"losses": losses} if losses else record

    def _note(self, run: Run, record: Record, seconds: float) -> None:
        self._folder.add(self._with_losses(run, record))
        self._display.message(f"{run.name}: {_ending(record)} after {duration(seconds)}")
        train_process.tell_warnings(run, self._told, self._display.message)

    def _state(self, run: Run) -> str:
        if any(process.run is run for process in self._running):
            return "running"
        record = self._folder[run]
        return record["status"] if record and run not in self._waiting else "left"

    def _progress(self) -> Record:
        states = [self._state(run) for run in self._runs]
        done = sum(
            run.num_env_steps
            if state == FINISHED
            else min(train_process.env_steps(run), run.num_env_steps)
            for run, state in zip(self._runs, states, strict=True)
        )
        counts = Counter(states)
        text = ", ".join(f"{counts[state]} {state}" for state in _STATES)
        return {"env_steps": done, "counts": text}

    def _outcome(self) -> Outcome:
        left = {run.name for run in self._waiting} | self._postponed.keys()
        over = [(run, self._folder[run]) for run in self._runs if run.name not in left]
        failed = [
            (run, records.last_words(record))
            for run, record in over
            if record is not None and record["status"] == FAILED
        ]
        return Outcome(len(over) - len(failed), failed, len(left))


def _ending(record: Record) -> str:
    if record["status"] == FAILED:
        return f"failed ({records.last_words(record)})"
    score = results.score_of(record)
    return "finished" if score is None else f"finished ({record['score']} {score_text(score)})"
