"""Readers of small data files: whatever a file holds, they raise nothing but ValueError.

JSON and npz files are damaged in more ways than their own readers document.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np


def read_object(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """The JSON object in a file, which has these keys and maybe others.

    Raises:
        ValueError: it is missing, or holds something else.
    """
    try:
        return parse_object(path.read_bytes(), *keys)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def parse_object(text: bytes, *keys: str) -> dict[str, Any]:
    """As `read_object`, of the file's content."""
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
    """The arrays in an npz file, by name.

    Raises:
        ValueError: it is missing, or holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as bundle:
            return dict(bundle)
    # Zip, zlib and NumPy's own headers fail in a dozen ways, absurd sizes with MemoryError.
    except Exception as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def counts(value: Any, *shape: int) -> np.ndarray:
    """Whole numbers from zero on, int64 of a shape.

    Raises:
        ValueError: `value` is something else.
    """
    array = np.array(value)
    if array.dtype.kind != "i" or array.shape != shape or (array < 0).any():
        raise ValueError(f"no whole numbers of shape {shape}: {value!r:.100}")
    return array.astype(np.int64)
