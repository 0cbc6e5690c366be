"""Folders that flags name: one process at a time, and messages that name the flag."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator
from typing import IO

from pipeline.durable import make_folder
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
