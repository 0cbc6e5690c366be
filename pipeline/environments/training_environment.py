"""Defines the interface through which the host loop uses the environments of a run."""

from __future__ import annotations

import pathlib
from typing import Protocol

import gymnasium


class TrainingEnvironment(Protocol):
    """Interface of a run's environments: a `VectorEnvironment`, or several of them."""

    @property
    def seconds(self) -> float:
        """Returns the time spent in steps and resets, in seconds."""

    @property
    def divergence(self) -> str:
        """Returns why the last `restore` could not continue the episodes, or "" if it did."""

    @property
    def batch_size(self) -> int:
        """Returns the number of environments, N."""

    @property
    def observation_space(self) -> gymnasium.Space:
        """Returns the gymnasium observation space of one environment."""

    @property
    def action_space(self) -> gymnasium.Space:
        """Returns the gymnasium action space of one environment."""

    def failure_message(self) -> str:
        """Returns what environments raised, one line for each, or "" if none raised."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes what `restore` needs into the empty `folder`."""

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote.

        Raises:
          ValueError: If `folder` holds something else.
        """
