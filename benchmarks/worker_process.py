"""Starts workers of `throughput` and asks them to measure.

`workers/protocol.py` describes the protocol.
"""

from __future__ import annotations

import json
import pathlib
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.utils import die_with_parent

_START_SECONDS = 1_800.0  # long, because filling a replay buffer of a million transitions is slow
_ANSWER_SECONDS = 900.0  # in addition to the minimum seconds of the stage
_END_SECONDS = 60.0
_MAX_ERROR_LINES = 10


class WorkerError(Exception):
    """Raised if a worker ends, does not answer in time, or violates the protocol."""


class Worker:
    """Worker process that measures on request and ends when the current process ends.

    What it prints in addition to the protocol is written to its log.
    """

    def __init__(self, name: str, command: Sequence[str], log: pathlib.Path) -> None:
        """Starts the process.

        Args:
          name: Name of the worker in messages.
          command: Command of the worker, with an absolute path to the program.
          log: File for the worker's output.
        """
        self.name = name
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                die_with_parent.command(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ready(self) -> dict[str, Any]:
        """Waits until the worker is ready, and returns its message.

        Raises:
          WorkerError: If there is no message.
        """
        return self._receive(_START_SECONDS)

    def measure(self, stage: str, seconds: float) -> dict[str, Any]:
        """Measures a stage for at least `seconds`, and returns the worker's answer.

        Raises:
          WorkerError: If there is no answer.
        """
        self._send({"stage": stage, "seconds": seconds})
        return self._receive(seconds + _ANSWER_SECONDS)

    def close(self) -> None:
        """Asks the worker to end, and kills it if it does not end in time."""
        self._send({"quit": True})
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kills the worker."""
        self._process.kill()
        self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps(message)}\n".encode())
        except BrokenPipeError:
            return  # The worker has ended; `_receive` reports how.

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise WorkerError(
                f"{self.name} did not answer for {seconds:.0f} s; its output is in {self._log}"
            ) from None
        if line is None:
            raise WorkerError(self._exit_message())
        try:
            return json.loads(line)
        except ValueError:
            said = line.decode(errors="replace").strip()[:200]
            raise WorkerError(
                f"{self.name} sent an unexpected message, {said!r}; its output is in {self._log}"
            ) from None

    def _exit_message(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        end = "".join(f"\n  {line}" for line in lines[-_MAX_ERROR_LINES:])
        return f"{self.name} ended with exit code {code}; the last lines of {self._log}:{end}"
