"""Defines the interface through which a run uses its environments, and names their failures."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Protocol

import gymnasium

from pipeline.utils.errors import UserError


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


@contextlib.contextmanager
def named_failures(
    environment: TrainingEnvironment, cause: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Converts exceptions of `environment`, raised eagerly or in a graph, to a UserError.

    The message names the environment.

    Args:
      environment: Environment whose exceptions are converted.
      cause: Returns a reason outside the environment, which is added to the message, or "".

    Raises:
      UserError: If the environment raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = environment.failure_message()
        if not message:
            raise
        raise UserError(message + cause()) from error
