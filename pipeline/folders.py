"""Folders that flags name: one process at a time, JSON files, messages that say what to mend."""

from __future__ import annotations

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

from pipeline import data_files
from pipeline.durable import make_folder, write_text
from pipeline.errors import UserError


def lock(path: pathlib.Path, busy: str, flag: str) -> IO[str]:
    """Locks `path` in a folder made if missing, until it is closed or this process ends.

    Args:
      path: of the lock file.
      busy: what another process that holds it is doing, before the folder's name.
      flag: names the folder on the command line.

    Raises:
      UserError: another process holds it, or the folder cannot be made or written to.
    """
    folder = path.parent
    with named_errors(folder, flag):
        make_folder(folder)
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{busy} {folder}. Wait for it, stop it, or choose another {flag}."
            ) from error
    return file


@contextlib.contextmanager
def named_errors(folder: pathlib.Path, flag: str = "--root_dir") -> Iterator[None]:
    """What keeps the folder that `flag` names from being written to becomes a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {flag}={folder}: {error.strerror}") from error


def read_json(path: pathlib.Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Args:
      path: of the file.
      kinds: of the values of some keys, where they are there.

    Raises:
      UserError: the file is damaged, or cannot be read.
    """
    try:
        value = data_files.parse_object(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it to go on.") from error
    wrong = [k for k, kind in kinds.items() if not isinstance(value.get(k, kind()), kind)]
    if wrong:
        raise UserError(f"{path} is damaged ({', '.join(wrong)}); remove it to go on.")
    return value


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Replaces a JSON file in one step.

    Raises:
      WriteError: the disk is full, not writable, ...
    """
    write_text(path, json.dumps(value, indent=2) + "\n")
