"""The logs of a run: every record goes to a JSONL file and, as scalars, to TensorBoard."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from pipeline.event_log import EventLog
from pipeline.failures import named_write_errors
from pipeline.jsonl import JsonlLog
from pipeline.run_folder import RunFolder


class RunLogs:
    """metrics.jsonl and eval.jsonl of one run, and its TensorBoard events.

    Records are kept until `flush` has written them. `truncate_after`, `flush` and `sync` raise
    WriteError where the disk is full or not writable.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._metrics = JsonlLog(folder.metrics)
        self._evaluations = JsonlLog(folder.evaluations)
        self._events = EventLog(folder.path)
        self._all: tuple[JsonlLog | EventLog, ...] = self._metrics, self._evaluations, self._events
        self._unwritten: collections.deque[Callable[[], None]] = collections.deque()

    def truncate_after(self, logged: int, evaluated: int, env_steps: int) -> None:
        """Removes what was written after the checkpoint that the run goes on from.

        Args:
          logged: environment steps at the last record of metrics.jsonl that is to stay.
          evaluated: the same for eval.jsonl.
          env_steps: the same for TensorBoard.
        """
        with named_write_errors(self._folder.path):
            self._metrics.truncate_after(logged)
            self._evaluations.truncate_after(evaluated)
            self._events.truncate_after(env_steps)

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Adds a record of training; it needs `env_steps`."""
        self._add(self._metrics, record, "")

    def add_evaluation(self, record: dict[str, Any]) -> None:
        """Adds the record of an evaluation; it needs `env_steps`."""
        self._add(self._evaluations, record, "evaluation/")

    def _add(self, log: JsonlLog, record: dict[str, Any], prefix: str) -> None:
        self._unwritten += partial(log.write, record), partial(self._events.write, record, prefix)

    def flush(self) -> None:
        """Writes the records that are not written yet, each once however often it fails."""
        with named_write_errors(self._folder.path):
            while self._unwritten:
                self._unwritten[0]()
                self._unwritten.popleft()

    def sync(self) -> None:
        """Flushes, and returns when all of it is on the disk, as a checkpoint's files are."""
        self.flush()
        with named_write_errors(self._folder.path):
            for log in self._all:
                log.sync()

    def close(self) -> None:
        """Closes the files."""
        for log in self._all:
            # Each record was flushed when it was written: what fails now has been reported then.
            with contextlib.suppress(OSError, tf.errors.OpError):
                log.close()
