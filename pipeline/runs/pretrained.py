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


def find(root_dir: str | pathlib.Path) -> pathlib.Path:
    """Returns the folder of a run, or of the policy that "pretrained:NAME" names.

    Raises:
      UserError: If there is no such policy.
    """
    if not str(root_dir).startswith(PREFIX):
        return pathlib.Path(root_dir)
    name = str(root_dir).removeprefix(PREFIX)
    if name not in names():
        raise UserError(
            f"there is no pretrained policy {name!r}.{suggest(name, names())} "
            f"The package has {', '.join(names())}."
        )
    return _FOLDER / name
