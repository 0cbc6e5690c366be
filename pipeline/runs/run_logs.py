"""Logs a run: every record goes to a JSONL file, and its scalars go to TensorBoard."""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from pipeline.runs.run_folder import RunFolder
from pipeline.runs.tensorboard_log import EVALUATION, EventLog
from pipeline.utils.errors import DeniedError
from pipeline.utils.files import write_error
from pipeline.utils.jsonl import JsonlLog


class RunLogs:
    """Writes metrics.jsonl, eval.jsonl and the TensorBoard events of one run.

    Records are kept in memory until `flush` has written them. `truncate_after`, `flush` and `sync`
    raise WriteError if the disk is full or not writable.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._metrics = JsonlLog(folder.metrics)
        self._evaluations = JsonlLog(folder.evaluations)
        self._events = EventLog(folder.path)
        self._all: tuple[JsonlLog | EventLog, ...] = self._metrics, self._evaluations, self._events
        self._unwritten: collections.deque[Callable[[], None]] = collections.deque()

    def truncate_after(
        self, logged: int, evaluated: int, env_steps: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Removes what was written after the checkpoint from which the run continues.

        Args:
          logged: Environment steps of the last record to keep in metrics.jsonl.
          evaluated: Environment steps of the last record to keep in eval.jsonl.
          env_steps: Environment steps of the checkpoint.

        Returns:
          The records that are left in metrics.jsonl and in eval.jsonl.
        """
        with named_write_errors(self._folder.path):
            self._folder.check_held()
            metrics = self._metrics.truncate_after(logged)
            evaluations = self._evaluations.truncate_after(evaluated)
            self._events.truncate_after(logged, evaluated, env_steps)
        return metrics, evaluations

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Adds a training record, which must have the key `env_steps`."""
        self._add(self._metrics, record, "")

    def add_evaluation(self, record: dict[str, Any]) -> None:
        """Adds an evaluation record, which must have the key `env_steps`."""
        self._add(self._evaluations, record, EVALUATION)

    def _add(self, log: JsonlLog, record: dict[str, Any], prefix: str) -> None:
        self._unwritten += partial(log.write, record), partial(self._events.write, record, prefix)

    def flush(self) -> None:
        """Writes all pending records.

        After a failure, call it again: every record is written once, however often writing fails.

        Raises:
          UserError: If the folder was moved or deleted; see `Lock.check`.
        """
        with named_write_errors(self._folder.path):
            self._folder.check_held()
            while self._unwritten:
                self._unwritten[0]()
                self._unwritten.popleft()

    def sync(self) -> None:
        """Writes all pending records, and returns once they would survive a power failure."""
        self.flush()
        with named_write_errors(self._folder.path):
            for log in self._all:
                log.sync()

    def close(self) -> None:
        """Closes the files."""
        for log in self._all:
            # Records are flushed when they are written, so what fails now was reported then.
            with contextlib.suppress(OSError, tf.errors.OpError):
                log.close()


@contextlib.contextmanager
def named_write_errors(folder: pathlib.Path) -> Iterator[None]:
    """Converts errors in writing files of `folder` to a WriteError that names the folder.

    Raises:
      WriteError: If a file cannot be written.
    """
    try:
        yield
    except tf.errors.PermissionDeniedError as error:
        raise DeniedError(f"cannot write to {folder}: {error}") from error
    except (OSError, tf.errors.OpError) as error:
        raise write_error(error)(f"cannot write to {folder}: {error}") from error
