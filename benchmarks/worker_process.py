"""A worker of `throughput`, seen from the process that asks it to measure.

`workers/protocol.py` says what is spoken.
"""

from __future__ import annotations

import json
import pathlib
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.benchmarks import die_with_parent

_START_SECONDS = 1_800.0  # a replay buffer of a million transitions takes its time to fill
_ANSWER_SECONDS = 900.0  # beyond those that the stage is to take
_END_SECONDS = 60.0
_MAX_ERROR_LINES = 10


class WorkerError(Exception):
    """A worker died, was silent, or said what is not of the protocol."""


class Worker:
    """A process that measures when it is asked to, and dies with this one.

    What it prints beside the protocol is in its log.
    """

    def __init__(self, name: str, command: Sequence[str], log: pathlib.Path) -> None:
        """Starts it.

        Args:
            name: for messages.
            command: with an absolute path to the program.
            log: file to write.
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
        """Waits until it is warm; returns what it says then.

        Raises:
            WorkerError: it does not say that it is ready.
        """
        message = self._hear(_START_SECONDS)
        if message.get("ready") is not True or not isinstance(message.get("stages"), list):
            raise self._garbage(message)
        return message

    def measure(self, stage: str, seconds: float) -> dict[str, Any]:
        """Its answer for a stage that is to take at least so long.

        Raises:
            WorkerError: there is none, or it lacks a key.
        """
        self._say({"stage": stage, "seconds": seconds})
        answer = self._hear(seconds + _ANSWER_SECONDS)
        numbers = answer.get("seconds"), answer.get("count")
        is_measured = all(isinstance(n, int | float) and n > 0 for n in numbers)
        if answer.get("stage") != stage or not is_measured or "unit" not in answer:
            raise self._garbage(answer)
        return answer

    def close(self) -> None:
        """Lets it end, and makes it end if it does not."""
        self._say({"quit": True})
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it now."""
        self._process.kill()
        self._process.wait()

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps(message)}\n".encode())
        except BrokenPipeError:
            return  # it has ended: `_hear` tells how

    def _hear(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise WorkerError(
                f"{self.name} said nothing for {seconds:.0f} s; {self._log} has its output"
            ) from None
        if line is None:
            raise WorkerError(self._obituary())
        try:
            message = json.loads(line)
        except ValueError:
            raise self._garbage(line.decode(errors="replace").strip()) from None
        if not isinstance(message, dict):
            raise self._garbage(message)
        return message

    def _garbage(self, message: object) -> WorkerError:
        return WorkerError(
            f"{self.name} said {str(message)[:200]!r}, which is not what it was asked; "
            f"{self._log} has its output"
        )

    def _obituary(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        end = "".join(f"\n  {line}" for line in lines[-_MAX_ERROR_LINES:])
        return f"{self.name} ended with exit code {code}; {self._log} ends with:{end}"
