"""Kinds of damage to files."""

import contextlib
import errno
import pathlib
import resource
from collections.abc import Callable, Iterator

import pytest


def flip(position: float) -> Callable[[pathlib.Path], None]:
    def damage(path: pathlib.Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(position * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return damage


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "first bit flipped": flip(0.0),
    "middle bit flipped": flip(0.5),
    "last bit flipped": flip(1.0),
}


@contextlib.contextmanager
def unreadable(path: pathlib.Path, method: str) -> Iterator[None]:
    """Makes a method of paths fail for `path` and what is below it, as a bad disk does."""
    work = getattr(pathlib.Path, method)

    def failing(self: pathlib.Path, *args: object, **kwargs: object) -> object:
        if self.is_relative_to(path):
            raise OSError(errno.EIO, "Input/output error")
        return work(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathlib.Path, method, failing)
        yield


@contextlib.contextmanager
def file_sizes_limited() -> Iterator[Callable[[int | None], None]]:
    """Yields a function that limits the bytes of a file, as a full disk would, or lifts that."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def set_limit(limit: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if limit is None else limit, hard))

    try:
        yield set_limit
    finally:
        set_limit(None)
