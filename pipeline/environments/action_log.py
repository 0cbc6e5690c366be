"""Stores the actions that bring a vector environment back to its saved state."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.environments.saved_states import State
from pipeline.utils import files

_FILE = "actions.npz"
_STATE = "state/"


class ActionLog:
    """Logs the actions since each environment's anchor.

    An anchor is an environment's last reset from a seed that this program chose. An environment
    that is deterministic given its seed is a function of that seed and of the actions since then.
    If episodes do not end, an anchor may instead be a state that the environment returned.

    Steps are vector steps, counted from the last reset of all environments.

    Attributes:
      steps: Number of steps taken.
      anchors: int64 [N], step of each environment's anchor.
      numbers: int64 [N], number of each environment's current seed: 0 after a reset of all
        environments, then one more at each later seed.
      states: States of all environments at the oldest anchor, or empty if that is a reset.
    """

    def __init__(self, num_envs: int):
        self.restart(num_envs)

    def restart(self, num_envs: int) -> None:
        """Clears the log after a reset of all environments."""
        self.steps = 0
        self.anchors = np.zeros(num_envs, np.int64)
        self.numbers = np.zeros(num_envs, np.int64)
        self.states: list[State] = []
        self._oldest = 0
        self._rows = np.zeros(0)  # the actions of a step in each row, with room for more
        self._first = 0  # row of the first action that is kept

    @property
    def length(self) -> int:
        """Returns the number of steps since the oldest anchor."""
        return self.steps - self._oldest

    @property
    def _kept(self) -> np.ndarray:
        return self._rows[self._first : self._first + self.length]

    def append(self, action: np.ndarray) -> None:
        """Appends the actions [N, ...] of one step."""
        end = self._first + self.length
        if end == len(self._rows):
            rows = np.empty([max(64, 2 * self.length), *action.shape], action.dtype)
            if self.length:
                rows[: self.length] = self._kept
            self._rows, self._first, end = rows, 0, self.length
        self._rows[end] = action
        self.steps += 1

    def anchor(self, environments: np.ndarray) -> None:
        """Records a reset of some environments from new seeds, and drops unneeded actions.

        Args:
          environments: bool [N], the environments that have been reset.
        """
        self.anchors[environments] = self.steps
        self.numbers[environments] += 1
        oldest = int(np.min(self.anchors))
        if oldest > self._oldest:
            self.states = []
        self._first += oldest - self._oldest
        self._oldest = oldest

    def anchor_at(self, states: list[State]) -> None:
        """Makes the current states the anchor of all environments, and drops all actions.

        Args:
          states: State of each environment before the next action.
        """
        self._first += self.length
        self.anchors[:] = self._oldest = self.steps
        self.states = states

    def save(self, folder: pathlib.Path) -> None:
        """Writes the log to a file in `folder`."""
        arrays: dict[str, Any] = {
            "actions": self._kept,
            "anchors": self.anchors,
            "numbers": self.numbers,
            "steps": np.int64(self.steps),
        }
        for index, state in enumerate(self.states):
            arrays |= {f"{_STATE}{index}/{name}": value for name, value in state.items()}
        np.savez(folder / _FILE, **arrays)

    def restore(self, folder: pathlib.Path) -> None:
        """Reads the file that `save` wrote.

        Raises:
          ValueError: If the file is not such a log, or has another number of environments.
        """
        saved = files.read_arrays(folder / _FILE)
        if not saved.keys() >= {"actions", "anchors", "numbers", "steps"}:
            raise ValueError(f"{_FILE} is not a log of actions")
        steps = int(files.counts(saved["steps"]))
        anchors, numbers = (
            files.counts(saved[name], *self.anchors.shape) for name in ("anchors", "numbers")
        )
        actions, oldest = np.atleast_1d(saved["actions"]), int(anchors.min())
        if len(actions) != steps - oldest:
            raise ValueError(f"{_FILE} has {len(actions)} actions, but must have {steps - oldest}")
        self.steps, self.anchors, self.numbers = steps, anchors, numbers
        self._rows, self._first, self._oldest = actions, 0, oldest
        prefixes = [f"{_STATE}{index}/" for index in range(anchors.size)]
        states = [
            {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
            for prefix in prefixes
        ]
        self.states = states if any(states) else []

    def replay(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields the vector steps to repeat after a reset of all environments, in order.

        Yields:
          Actions [N, ...] of a vector step; bool [N], the environments that take them, because
          their anchors lie before the step; bool [N], the environments to reset after the step.
        """
        for step, action in enumerate(self._kept, self._oldest + 1):
            yield action, self.anchors < step, self.anchors == step
