"""Reads and writes logs with one JSON object per line.

This module does not import TensorFlow, so that reading a log is quick.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.utils import errors, files


def plain(value: Any) -> Any:
    """Converts `value` to the types of JSON.

    Tensors and arrays become numbers or lists. NaN and infinity become None.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return plain(np.asarray(value).tolist())


def read_jsonl(path: pathlib.Path, *keys: str) -> list[dict[str, Any]]:
    """Returns the records of a log, oldest first, or an empty list if the file is missing.

    A last line without a newline is left out, because it is incomplete: its writer is still writing
    it, or was killed.

    Raises:
      UserError: If a line is not a JSON object with these keys, or the file cannot be read; a
        WriteError if that may pass.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.error_kind(error)(f"cannot read {path}: {error.strerror}") from error
    return [_parse(path, number, line, keys) for number, line in enumerate(lines, start=1)]


def _parse(path: pathlib.Path, number: int, line: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        return files.parse_object(line, *keys)
    except ValueError as error:
        raise errors.UserError(f"{path}, line {number}: {error}; fix or delete the line") from None


class JsonlLog:
    """Appends records to a log file, one JSON object per line.

    Each record is passed to the operating system at once.
    """

    def __init__(self, path: pathlib.Path | str) -> None:
        self._path = pathlib.Path(path)
        self._file: io.FileIO | None = None
        self._synced = 0  # size of the file that is on the disk
        self._unsynced: list[bytes] = []  # lines after it
        self._is_lost = False  # whether syncing them has failed
        self._whole: int | None = None  # size without a part of a record at the end

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends `record`.

        Scalars and arrays may be TensorFlow's or NumPy's. NaN and infinity are written as null.

        Raises:
          OSError: If the record cannot be written. The next call removes what is left of it.
        """
        line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
        if self._file is not None and not files.is_at(self._file, self._path):
            self.close()  # It was deleted or moved away, or an editor has replaced it.
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._synced = os.fstat(self._file.fileno()).st_size
        self._write_lost(self._file)
        self._append(self._file, line)
        self._unsynced.append(line)

    def _append(self, file: io.FileIO, data: bytes) -> None:
        self._cut(file)
        self._whole = os.fstat(file.fileno()).st_size
        try:
            while data:  # A disk that fills up accepts a part of the data and refuses the rest.
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):  # A full disk may refuse that, too.
                self._cut(file)
            raise
        self._whole = None

    def _cut(self, file: io.FileIO) -> None:
        """Removes the part of a record that a failed write has left."""
        if self._whole is not None:
            file.truncate(self._whole)
            self._whole = None

    def _write_lost(self, file: io.FileIO) -> None:
        """Writes lines again that a failed `sync` may have dropped."""
        if self._is_lost:
            file.truncate(self._synced)
            self._append(file, b"".join(self._unsynced))
            self._is_lost = False

    def truncate_after(self, env_steps: int) -> list[dict[str, Any]]:
        """Removes the records with more than `env_steps` environment steps, and a torn last line.

        A resumed run calls it with the checkpoint's count, so that what it logs again is logged
        only once. The file is replaced in one step: a crash leaves either the old file or the new
        one.

        Returns:
          The records that are left.

        Raises:
          UserError: If a line other than the last is not a JSON object with a number `env_steps`,
            or the disk is full or not writable.
        """
        self.close()
        if not self._path.exists():
            return []
        records = read_jsonl(self._path, "env_steps")
        try:
            kept = [record for record in records if record["env_steps"] <= env_steps]
        except TypeError as error:
            raise errors.UserError(
                f"{self._path}: the env_steps of a line is not a number ({error}); fix or delete "
                "the line"
            ) from error
        files.write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        return kept

    def sync(self) -> None:
        """Blocks until everything written so far is on the disk.

        The kernel reports data that it could not write once, and drops it. The lines are therefore
        kept until they are on the disk, and written again by the next call.

        Raises:
          OSError: If it cannot be written.
        """
        if self._file is not None:
            self._cut(self._file)
            self._write_lost(self._file)
            self._is_lost = True
            os.fsync(self._file.fileno())
            files.sync(self._path.parent)
            self._is_lost = False
            self._synced = os.fstat(self._file.fileno()).st_size
            self._unsynced.clear()

    def close(self) -> None:
        """Closes the file. The next `write` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._unsynced.clear()
            self._is_lost = False
            self._whole = None
