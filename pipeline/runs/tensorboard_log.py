"""Writes TensorBoard event files that stay correct when a run is resumed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

from pipeline.utils import files

_OWN_NAME = re.compile(r"events\.out\.tfevents\.\d+\..+")
EVALUATION = "evaluation/"  # prefix of the tags of evaluations


class EventLog:
    """Writes scalars for TensorBoard, with environment steps as the step.

    Every process writes its own event file. The file starts with a `SessionLog.START` event, which
    makes TensorBoard discard what it has loaded from that step on. A viewer that stays open
    therefore shows the same as one that is opened afterwards.
    """

    def __init__(self, folder: pathlib.Path | str) -> None:
        self._folder = pathlib.Path(folder)
        self._writer: tf.io.TFRecordWriter | None = None
        self._path = self._folder  # of the event file, once it is open
        self._first_step = 0
        self._torn: pathlib.Path | None = None

    def write(self, record: Mapping[str, Any], prefix: str = "") -> None:
        """Writes the numbers of `record` at the step `record["env_steps"]`, and flushes.

        A list whose key ends in `_counts` holds how often each of the values 0, 1, 2, ... occurred,
        and is written as a histogram. Other values (None, text, lists) cannot be plotted and are
        left out.

        Raises:
          OSError, tf.errors.OpError: If writing fails. The next `write` then starts another file.
        """
        values = [
            tf.compat.v1.Summary.Value(tag=prefix + key, simple_value=float(value))
            for key, value in record.items()
            if key != "env_steps" and isinstance(value, int | float | np.number)
        ]
        values += [
            tf.compat.v1.Summary.Value(tag=prefix + key, histo=_histogram(value))
            for key, value in record.items()
            if key.endswith("_counts") and isinstance(value, list) and sum(value)
        ]
        step = int(record["env_steps"])
        try:
            if self._writer is not None and not self._path.exists():
                self.close()  # A file that was deleted or moved away is replaced by a new one.
            if self._writer is None:
                self._writer = self._open()
            summary = tf.compat.v1.Summary(value=values)
            self._write_event(self._writer, step=step, summary=summary)
            self._writer.flush()
        except (OSError, tf.errors.OpError):
            self._abandon(step)
            raise

    def truncate_after(self, logged: int, evaluated: int, env_steps: int) -> None:
        """Removes the events that a run that is resumed at `env_steps` writes again.

        These are evaluations of steps after `evaluated`, and other events of steps after `logged`.

        Each event file is replaced atomically. Events are removed, although a new file makes
        TensorBoard discard them, because TensorBoard's two back ends treat restarts differently.
        They agree if every step is in the files only once.
        """
        self.close()
        for path in reversed(self._files()):
            if _truncate_events(path, logged, evaluated, env_steps):
                break  # files before this one are older, and were cut when it was begun
        self._first_step = env_steps + 1

    def sync(self) -> None:
        """Returns when everything that was written is on the disk.

        Raises:
          OSError: If syncing fails.
        """
        if self._writer is not None and self._path.exists():
            files.sync(self._path)
            files.sync(self._folder)

    def close(self) -> None:
        """Closes the event file. The next `write` starts another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _abandon(self, step: int) -> None:
        """Closes the file. Its last record, whose step is `step`, may be incomplete."""
        with contextlib.suppress(OSError, tf.errors.OpError):
            self.close()
        self._writer = None
        self._torn = max(self._files(), default=None)
        self._first_step = step + 1

    def _files(self) -> list[pathlib.Path]:
        return sorted(x for x in self._folder.glob("events.*") if _OWN_NAME.fullmatch(x.name))

    def _open(self) -> tf.io.TFRecordWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._torn is not None:
            _truncate_events(self._torn, *[sys.maxsize] * 3)
            self._torn = None
        # TensorBoard reads files in the order of their names, so that of a new file must be last,
        # even if the clock was set back.
        stamps = [int(path.name.split(".")[3]) + 1 for path in self._files()]
        stamp = max([int(time.time()), *stamps])
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
        self._path = self._folder / name
        writer = tf.io.TFRecordWriter(str(self._path))
        self._write_event(writer, file_version="brain.Event:2")
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write_event(writer, step=self._first_step, session_log=start)
        return writer

    @staticmethod
    def _write_event(writer: tf.io.TFRecordWriter, **fields: Any) -> None:
        writer.write(tf.compat.v1.Event(wall_time=time.time(), **fields).SerializeToString())


def _histogram(counts: Sequence[int]) -> tf.compat.v1.HistogramProto:
    """Returns the histogram of values of which i occurs `counts[i]` times."""
    values, weights = np.arange(len(counts)), np.asarray(counts)
    counted = np.flatnonzero(weights)
    return tf.compat.v1.HistogramProto(
        min=float(counted[0]),
        max=float(counted[-1]),
        num=float(weights.sum()),
        sum=float(weights @ values),
        sum_squares=float(weights @ values**2),
        bucket_limit=values + 0.5,
        bucket=weights,
    )


def _truncate_events(path: pathlib.Path, logged: int, evaluated: int, env_steps: int) -> bool:
    """Removes events from an event file; see `EventLog.truncate_after`.

    Returns:
      True if the file was begun at or before `env_steps`.
    """
    temporary = path.with_name("truncated.tmp")  # a name that TensorBoard does not read
    is_older = False
    try:
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            # The loader leaves out a last record that a killed process left incomplete.
            for record in RawEventFileLoader(str(path)).Load():
                event = tf.compat.v1.Event.FromString(record)
                last = env_steps
                for value in event.summary.value[:1]:
                    last = evaluated if value.tag.startswith(EVALUATION) else logged
                if event.step <= last:
                    writer.write(record)
                    is_older |= event.HasField("session_log")
        files.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # A part of it would take space on a full disk.
    return is_older
