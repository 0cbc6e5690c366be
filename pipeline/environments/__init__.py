"""Adapters from gymnasium and the Arcade Learning Environment to TF-Agents."""

from __future__ import annotations

import pathlib
from typing import Protocol


class TrainingEnvironment(Protocol):
    """What the host asks of a run's environments: a `VectorEnvironment`, or several of them."""

    @property
    def seconds(self) -> float:
        """Spent in steps and resets."""

    @property
    def divergence(self) -> str:
        """Why the last `restore` could not continue the episodes, "" if it did."""

    @property
    def batch_size(self) -> int:
        """Environments, N."""

    def failure_message(self) -> str:
        """What an environment raised, in one line; empty if none did."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes what `restore` needs into the empty `folder`."""

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote; raises ValueError for what is not that."""
