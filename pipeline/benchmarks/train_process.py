"""Starts, stops and observes the process that trains a run of a suite."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from pipeline.benchmarks import die_with_parent
from pipeline.benchmarks.planned_runs import Run

TRAIN = (sys.executable, "-m", "pipeline.train")
_MAX_ERROR_LINES = 20
_TAIL_BYTES = 65_536


class TrainProcess:
    """Process of `pipeline.train` in its own session, which a terminal's Ctrl-C does not reach.

    It ends when the current process ends. Its output is appended to the log of the run.
    """

    def __init__(self, run: Run, command: Sequence[str] = TRAIN) -> None:
        """Starts the process.

        Args:
          run: The run to train or to resume.
          command: Command that accepts the flags of `pipeline.train`.
        """
        self.run = run
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                die_with_parent.command([*command, *run.arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._is_stopping = False

    @property
    def seconds(self) -> float:
        """Returns the seconds since the process was started."""
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Returns the exit code, negative if a signal ended the process; None while it runs."""
        return self._process.poll()

    def was_stopped(self) -> bool:
        """Returns True if the process has ended because `stop` asked it to."""
        return self._is_stopping and self.poll() in (128 + signal.SIGTERM, -signal.SIGTERM)

    def stop(self) -> None:
        """Asks the process to write a checkpoint and exit.

        Further calls have no effect, because a second signal would kill the process.
        """
        if not self._is_stopping:
            self._is_stopping = True
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.wait()

    def error(self) -> str:
        """Returns why the process failed: its signal or exit code, and its last lines of output."""
        code = self._process.returncode
        reason = f"exit code {code}"
        if code < 0:
            reason = f"ended by signal {-code} ({signal.strsignal(-code)})"
        output = _tail(self.run.log, self._log_start).decode(errors="replace")
        lines = [line.rstrip() for line in output.splitlines() if line.strip()]
        return "\n".join([reason, *lines[-_MAX_ERROR_LINES:]])


def env_steps(run: Run) -> int:
    """Returns the environment steps in the last record of a run's metrics.jsonl; 0 if unknown."""
    path = run.folder / "metrics.jsonl"
    lines = _tail(path).split(b"\n")[:-1] if path.exists() else []
    try:
        return int(json.loads(lines[-1])["env_steps"])
    except (IndexError, KeyError, TypeError, ValueError):
        return 0  # There is no record yet, or a damaged one, which the run itself reports.


def _tail(path: pathlib.Path, start: int = 0) -> bytes:
    """Returns the last `_TAIL_BYTES` bytes of a file, but none before `start`."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        return file.read()
