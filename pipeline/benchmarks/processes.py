"""The process that trains a run, seen from the benchmark that started it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.benchmarks import leash
from pipeline.benchmarks.runs import Run

TRAIN = (sys.executable, "-m", "pipeline.train")
_MAX_ERROR_LINES = 20
_TAIL_BYTES = 65_536


class RunProgress(NamedTuple):
    """How far a run has come: environment steps, and the seconds that they took."""

    env_steps: int = 0
    seconds: float = 0.0


class TrainProcess:
    """`pipeline.train` in a session of its own, so that a terminal's Ctrl-C does not reach it.

    It dies with this process. Its output is added to the run's log.
    """

    def __init__(self, run: Run, command: Sequence[str] = TRAIN) -> None:
        """Starts it.

        Args:
            run: what to train, or to go on with.
            command: takes the flags of `pipeline.train`.
        """
        self.run = run
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                leash.command([*command, *run.arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._is_stopping = False

    @property
    def seconds(self) -> float:
        """Since the start of the process."""
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended it; None while it runs."""
        return self._process.poll()

    def was_stopped(self) -> bool:
        """Whether it has ended because `stop` asked it to, its checkpoint written or none due."""
        return self._is_stopping and self.poll() in (128 + signal.SIGTERM, -signal.SIGTERM)

    def stop(self) -> None:
        """Asks it to write a checkpoint and exit; once, for a second signal would be a kill."""
        if not self._is_stopping:
            self._is_stopping = True
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()

    def error(self) -> str:
        """Why it failed, once it has ended: the signal or exit code, and its last lines."""
        code = self._process.returncode
        reason = f"exit code {code}"
        if code < 0:
            reason = f"ended by signal {-code} ({signal.strsignal(-code)})"
        output = _tail(self.run.log, self._log_start).decode(errors="replace")
        lines = [line.rstrip() for line in output.splitlines() if line.strip()]
        return "\n".join([reason, *lines[-_MAX_ERROR_LINES:]])


def progress(run: Run) -> RunProgress:
    """Of a run that is under way or was stopped, by the last record of its metrics.jsonl."""
    path = run.folder / "metrics.jsonl"
    lines = _tail(path).split(b"\n")[:-1] if path.exists() else []
    try:
        record = json.loads(lines[-1])
        return RunProgress(record["env_steps"], record["wall_seconds"])
    except (IndexError, KeyError, TypeError, ValueError):
        # None yet; or a damaged one, of which the run itself will tell.
        return RunProgress()


def _tail(path: pathlib.Path, start: int = 0) -> bytes:
    """The last bytes of a file, from `start` on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        return file.read()
