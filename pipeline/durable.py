"""Files and folders that are there whole after a crash, or after a power failure."""

from __future__ import annotations

import contextlib
import os
import pathlib

from pipeline.errors import WriteError


def sync(path: pathlib.Path) -> None:
    """Returns when the file's contents, or the folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: pathlib.Path) -> None:
    """Makes the folder, and those above it, where they are missing.

    Raises:
        OSError: there is a file of that name, it must not be made, ...
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # what may be written to and not read
        sync(path.parent)


def replace(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a file its final name: a reader, and a crash, leaves either the old one or the new.

    Raises:
        OSError: the disk is full, not writable, ...
    """
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step.

    Raises:
        WriteError: the disk is full, not writable, ...
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise WriteError(f"cannot write {path}: {error.strerror}") from error
