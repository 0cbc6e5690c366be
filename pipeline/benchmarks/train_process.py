"""Starts, stops and observes the process that trains a run of a suite or a search."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pipeline.benchmarks.planned_runs import Run
from pipeline.utils import die_with_parent
from pipeline.utils.errors import RETRY_CODE, UserError
from pipeline.utils.files import read_json, write_json

_MAX_ERROR_LINES = 20
_TAIL_BYTES = 65_536
_MOST_LOSSES = 3  # without a new checkpoint between them
_LOSSES = "losses.json"
#: Exit codes of a run that SIGTERM has stopped.
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)


class Process(Protocol):
    """Process that trains a run, on this machine or elsewhere."""

    run: Run  # that the process trains
    started: float  # time (`time.monotonic`) of its start
    is_lost: bool  # whether its machine was lost, or cannot start processes

    def poll(self) -> int | None:
        """Returns the exit code, negative if a signal ended the process; None while it runs."""

    def was_stopped(self) -> bool:
        """Returns True if the process has ended because `stop` asked it to."""

    def stop(self) -> None:
        """Asks the process to write a checkpoint and exit.

        Further calls have no effect, because a second signal would kill the process.
        """

    def wait(self) -> None:
        """Waits until the process has ended."""

    def error(self) -> str:
        """Returns why the process failed: its signal or exit code, and its last lines of output."""


#: Starts a process that trains a run; returns None if there is no room for it now.
Start = Callable[[Run], Process | None]


class LocalProcess:
    """Process on this machine in its own session, which a terminal's Ctrl-C does not reach.

    It ends when the thread that starts it, or the current process, ends. Its output is appended to
    a log.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: pathlib.Path,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        """Starts the process.

        Args:
          command: Program and its arguments.
          log: File to which the output is appended. Its folder is created if missing.
          environment: Environment variables; None for those of the current process.
          folder: Working directory; None for that of the current process.
        """
        self._path = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._log_start = file.tell()
            self._process = subprocess.Popen(
                die_with_parent.command(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                cwd=folder,
            )
        self._is_stopping = False

    def poll(self) -> int | None:
        """Returns the exit code; see `Process.poll`."""
        return self._process.poll()

    def was_stopped(self) -> bool:
        """Returns True if the process has ended because `stop` asked it to."""
        return self._is_stopping and self.poll() in STOPPED

    def stop(self) -> None:
        """Asks the process to write a checkpoint and exit; see `Process.stop`."""
        if not self._is_stopping:
            self._is_stopping = True
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.wait()

    def error(self) -> str:
        """Returns why the process failed; see `Process.error`."""
        code = self._process.returncode
        reason = f"exit code {code}"
        if code < 0:
            reason = f"ended by signal {-code} ({signal.strsignal(-code)})"
        try:
            output = _tail(self._path, self._log_start).decode(errors="replace")
        except OSError as error:
            output = f"{self._path} cannot be read: {error.strerror}"
        lines = [line.rstrip() for line in output.splitlines() if line.strip()]
        return "\n".join([reason, *lines[-_MAX_ERROR_LINES:]])


class TrainProcess(LocalProcess):
    """Implements `Process` on this machine."""

    is_lost = False

    def __init__(self, run: Run, command: Sequence[str] | None = None) -> None:
        """Starts the process.

        Args:
          run: The run to train or to resume.
          command: Command that accepts the flags of `pipeline.train`; None for that program.
        """
        command = command or [*die_with_parent.python(), "-m", "pipeline.train"]
        super().__init__([*command, *run.arguments], run.log)
        self.run = run
        self.started = time.monotonic()


class Machines(NamedTuple):
    """Machines on which runs are trained, and how the runs are started there.

    Attributes:
      output_dir: Folder of the runs, as all machines name it; created if missing.
      workers: Number of parallel runs.
      start: Starts the process that trains a run.
      bindings: Gin statements that every run needs there.
      flags: Flags of every run, in addition to those that identify the run.
    """

    output_dir: pathlib.Path
    workers: int
    start: Start = TrainProcess
    bindings: Sequence[str] = ()
    flags: Sequence[str] = ()


def was_interrupted(process: Process) -> bool:
    """Returns True if a process that has ended without a result can be expected to go on.

    Its machine was lost, or a signal ended it: the kernel's when memory ran out, an operator's, or
    that of a crash, which may not happen again. Exit code 0 counts too, because a shared file
    system may show a result late.
    """
    code = process.poll() or 0
    # Shells and `StopSignal` give signals the codes from 129 on.
    return process.is_lost or code <= 0 or 128 < code < 128 + signal.NSIG


class Losses:
    """Counts how often the processes of runs were interrupted.

    The counts are kept in the runs' folders. How many losses in a row had no new checkpoint between
    them is counted from 0 again by every command, which gives a failed run another chance.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Initializes the object without reading anything.

        Args:
          say: Prints a message to the user.
        """
        self._say = say
        self._counts: dict[pathlib.Path, int] = {}
        self._since_checkpoint: Counter[tuple[pathlib.Path, tuple[str, ...]]] = Counter()

    def __getitem__(self, run: Run) -> int:
        """Returns how often a run was lost; a count that cannot be read is taken for 0."""
        if run.folder not in self._counts:
            stored: Mapping[str, int] = {}
            with contextlib.suppress(UserError):  # a damaged count need not end a suite
                stored = read_json(run.folder / _LOSSES, {"losses": int})
            self._counts[run.folder] = stored.get("losses", 0)
        return self._counts[run.folder]

    def goes_on(self, process: Process) -> bool:
        """Returns True if the run of a process that has ended without a result is to be resumed.

        An interruption is counted. The restart is announced, unless there were too many
        interruptions without a new checkpoint.

        Raises:
          WriteError: If the count cannot be written to the run's folder.
        """
        if process.was_stopped() or not was_interrupted(process):
            return process.was_stopped()
        run = process.run
        checkpoints = (run.folder / "checkpoints").glob("step-*")
        key = run.folder, tuple(sorted(path.name for path in checkpoints))
        if process.poll() != RETRY_CODE:
            self._counts[run.folder] = self[run] + 1
        if (run.folder / "run.json").is_file():  # a run refuses a folder with other files alone
            write_json(run.folder / _LOSSES, {"losses": self[run]})
        self._since_checkpoint[key] += 1
        if self._since_checkpoint[key] > _MOST_LOSSES:
            return False
        reason = process.error().splitlines()[0]
        self._say(f"{run.name}: {reason}. The run will be restarted from its newest checkpoint.")
        return True

    def error(self, process: Process) -> str:
        """Returns why a run that does not go on has failed."""
        error = process.error()
        if was_interrupted(process) and process.poll() != RETRY_CODE:
            error += (
                f"\nThe run was lost {self[process.run]} times, the last {_MOST_LOSSES + 1} times "
                "without a new checkpoint. It may have run out of memory: let fewer runs share a "
                "machine (--workers, --cpus_per_run)."
            )
        return error


def tell_warnings(run: Run, told: set[str], say: Callable[[str], None]) -> None:
    """Prints the first line of each warning in a run's log that no other run has logged.

    Args:
      run: The run, which may have no log.
      told: Warnings of other runs, to which those of this run are added.
      say: Prints a message to the user.
    """
    with contextlib.suppress(OSError):  # It was deleted, or is on a machine that was lost.
        for line in run.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("warning: ") and line not in told:
                told.add(line)
                say(f"{run.name}: {line}")


def env_steps(run: Run) -> int:
    """Returns the environment steps in the last record of a run's metrics.jsonl; 0 if unknown."""
    try:
        lines = _tail(run.folder / "metrics.jsonl").split(b"\n")[:-1]
        return int(json.loads(lines[-1])["env_steps"])
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        return 0  # There is no record yet, or a damaged one, which the run itself reports.


def _tail(path: pathlib.Path, start: int = 0) -> bytes:
    """Returns the last `_TAIL_BYTES` bytes of a file, but none before `start`."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        return file.read()
