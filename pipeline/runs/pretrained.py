"""Finds the trained policies that come with the package, which are small run folders."""

from __future__ import annotations

import pathlib

from pipeline.configuration.statements import suggest
from pipeline.utils.errors import UserError

PREFIX = "pretrained:"
_FOLDER = pathlib.Path(__file__).parents[1] / "pretrained"


def names() -> list[str]:
    """Returns the names of the policies."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/run.json"))


def folder(name: str) -> pathlib.Path:
    """Returns the run folder of a policy.

    Raises:
      UserError: If there is no such policy.
    """
    if name not in names():
        raise UserError(
            f"there is no pretrained policy {name!r}.{suggest(name, names())} "
            f"The package has {', '.join(names())}."
        )
    return _FOLDER / name
