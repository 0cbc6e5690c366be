"""Reads, writes and locks the small files of a run safely.

Writers leave either the complete old file or the complete new one, even after a crash or a power
failure. Readers raise ValueError or UserError, whatever a damaged file holds: JSON and npz files
can be damaged in more ways than their own readers document. They raise OSError only if the file
cannot be read now.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from pipeline.utils.errors import DeniedError, RetryableError, UserError, WriteError

# Errors of a disk, a file server or a machine that may pass; others are mistakes, such as a wrong
# path.
PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EREMOTEIO),
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENFILE, errno.ENOMEM),
}

#: Prefix of the names of files and folders that are being written or removed. A killed process
#: leaves them behind.
UNFINISHED = ".tmp-"

_LOCK_SECONDS = 1.0


def sync(path: pathlib.Path) -> None:
    """Blocks until the file's contents, or the folder's entries, are on the disk.

    Does nothing for a folder of a file system that cannot sync folders.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # as in VirtualBox's shared folders
            raise
    finally:
        os.close(descriptor)


def make_folder(path: pathlib.Path) -> None:
    """Creates the folder and its parents where they are missing.

    Raises:
      OSError: If the folder cannot be created, for example because a file has its name.
    """
    if path.is_dir():
        return
    if path.is_symlink():
        raise OSError(errno.ENOTDIR, f"{path} is a link that leads to no folder")
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # The parent may be writable but not readable.
        sync(path.parent)


def replace(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Renames the file `temporary` to `path` in one step.

    A reader finds either the old file or the new one, even after a crash.

    Raises:
      OSError: If the file cannot be written, for example because the disk is full.
    """
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of another file to write, which replaces `path` once it is complete.

    It does not if there is an error, or if it was deleted again.

    Raises:
      OSError: If the file cannot be written, for example because the disk is full.
    """
    temporary = path.with_name(UNFINISHED + path.name)
    try:
        yield temporary
        if temporary.exists():
            replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a text file in one step.

    Raises:
      WriteError: If the file cannot be written, for example because the disk is full.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(error)(f"cannot write {path}: {error.strerror}") from error


def read_object(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """Returns the JSON object in a file, which must have these keys and may have others.

    Raises:
      ValueError: If the file is missing or holds something else.
      OSError: If it cannot be read now.
    """
    with damage_named(path):
        return parse_object(path.read_bytes(), *keys)


def parse_object(text: bytes, *keys: str) -> dict[str, Any]:
    """Returns the JSON object in `text`, which must have these keys and may have others.

    Raises:
      ValueError: If `text` is something else.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return value


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays in an npz file by name.

    Raises:
      ValueError: If the file is missing or holds something else.
      OSError: If it cannot be read now.
    """
    with damage_named(path), np.load(path, allow_pickle=False) as bundle:
        return dict(bundle)


@contextlib.contextmanager
def damage_named(path: pathlib.Path) -> Iterator[None]:
    """Converts what a missing or damaged file raises to a ValueError that names the file.

    An OSError that may pass remains what it is, because nothing is wrong with the file.
    """
    try:
        yield
    # Damaged zip, zlib and NumPy headers raise many kinds of errors, and absurd sizes MemoryError.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def counts(value: Any, *shape: int) -> np.ndarray:
    """Converts `value` to an int64 array of non-negative integers of the given shape.

    Raises:
      ValueError: If `value` is something else.
    """
    array = np.array(value)
    if array.dtype.kind != "i" or array.shape != shape or (array < 0).any():
        raise ValueError(f"expected non-negative integers of shape {shape}, got {value!r:.100}")
    return array.astype(np.int64)


def _try_lock(file: IO[str]) -> bool:
    """Tries to lock a file; returns True if this process holds the lock.

    Raises:
      UserError: If the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise UserError(
            f"{file.name} cannot be locked against other processes, because its file system has no "
            f"file locks ({error.strerror}). Mount it with them, or choose another folder."
        ) from error
    return True


def is_at(file: IO[Any], path: pathlib.Path) -> bool:
    """Returns False if the file was moved, deleted or replaced since it was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # NFS: deleted on another machine
            raise
        return False


class Lock:
    """Lock of a folder, which is held until `close` is called or this process ends.

    Processes that this process forks, for example those of an environment, do not hold it.
    """

    def __init__(self, file: IO[str], path: pathlib.Path):
        self._file, self._path, self._folder = file, path, path.parent
        # While it is open, no other folder can have its inode.
        self._descriptor = os.open(self._folder, os.O_PATH)
        _locks.add(self)

    def check(self) -> None:
        """Checks that the folder is still where it was, and locked. Call it before writing there.

        Raises:
          UserError: If another folder has its name, or another process has locked it because the
            lock file was deleted; a WriteError if nothing has its name, because the folder may be
            put back.
        """
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), self._folder.stat())
        except OSError as error:
            raise WriteError(
                f"{self._folder} was moved or deleted ({error.strerror}). Put it back by renaming "
                "it; if the program has ended, repeat its command."
            ) from error
        if not is_same:
            raise UserError(
                f"{self._folder} is no longer the folder in which this program began: it was moved "
                "or deleted, and another one has its name. Nothing more was written. Repeat the "
                "command with the folder that holds the run."
            )
        self._keep_locked()

    def _keep_locked(self) -> None:
        """Locks a new file if the lock file was deleted, because other processes make their own.

        Raises:
          UserError: If another process has done so; a WriteError if the file cannot be written.
        """
        try:
            while not is_at(self._file, self._path):
                file = self._path.open("w")
                if not _try_lock(file):
                    file.close()
                    raise UserError(
                        f"another process has begun in {self._folder}, because the lock file "
                        f"{self._path.name} was deleted while this one ran. Nothing more was "
                        "written."
                    )
                self._file.close()
                self._file = file
        except OSError as error:
            raise write_error(error)(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Releases the lock. Further calls, also those of a forked process, do nothing."""
        if self in _locks:
            _locks.remove(self)
            self._file.close()
            os.close(self._descriptor)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_locks() -> None:
    for held in list(_locks):
        held.close()


os.register_at_fork(after_in_child=_close_locks)


def lock(path: pathlib.Path, busy: str, flag: str) -> Lock:
    """Locks `path` until the returned lock is closed or this process ends.

    Creates the folder of `path` if it is missing. Waits up to a second for another process.

    Args:
      path: Path of the lock file.
      busy: Beginning of the error message, which says what another process that holds the lock is
        doing. The name of the folder follows it.
      flag: Command-line flag that names the folder.

    Raises:
      UserError: If the folder cannot be created or written to; a RetryableError if another process
        holds the lock.
    """
    folder = path.parent
    # A child that a killed process was just starting may hold its lock for a moment.
    deadline = time.monotonic() + _LOCK_SECONDS
    with named_errors(folder, flag):
        while True:
            make_folder(folder)
            file = path.open("w")
            if _try_lock(file) and is_at(file, path):
                return Lock(file, path)
            file.close()
            if time.monotonic() > deadline:
                raise RetryableError(
                    f"{busy} {folder}. Wait for it, stop it, or choose another {flag}."
                )
            time.sleep(0.02)


def error_kind(error: OSError) -> type[UserError]:
    """Returns WriteError for an error that may pass, such as a full disk, and else UserError."""
    return WriteError if error.errno in PASSING else UserError


def write_error(error: BaseException) -> type[WriteError]:
    """Returns DeniedError if the user lacks the permission to write, and WriteError otherwise."""
    is_denied = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM)
    return DeniedError if is_denied else WriteError


@contextlib.contextmanager
def named_errors(folder: pathlib.Path, flag: str = "--root_dir") -> Iterator[None]:
    """Converts an OSError within the context to a UserError that names `flag` and `folder`.

    Raises:
      UserError: If the folder cannot be written to; a WriteError if that may pass.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot write to {flag}={folder}: {error.strerror}"
        raise error_kind(error)(message) from error


def read_json(
    path: pathlib.Path, kinds: Mapping[str, type], fix: str = "delete it to continue"
) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty dictionary if there is no such file.

    Args:
      path: Path of the file.
      kinds: Required types of the values of some keys. The keys may be missing.
      fix: What to do with a damaged file, for the message.

    Raises:
      UserError: If the file is damaged or cannot be read; a WriteError if that may pass.
    """
    try:
        value = parse_object(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise error_kind(error)(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {fix}.") from error
    wrong = [k for k, kind in kinds.items() if not isinstance(value.get(k, kind()), kind)]
    if wrong:
        raise UserError(f"{path} is damaged (wrong type of {', '.join(wrong)}); {fix}.")
    return value


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Replaces a JSON file in one step.

    Raises:
      WriteError: If the file cannot be written, for example because the disk is full.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")
