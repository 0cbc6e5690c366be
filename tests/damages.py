"""Kinds of damage to files."""

import pathlib
from collections.abc import Callable


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
