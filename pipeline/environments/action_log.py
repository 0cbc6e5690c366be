"""What has to be repeated to bring a vector environment back to where it was."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline import data_files
from pipeline.environments.states import State

_FILE = "actions.npz"
_STATE = "state/"


class ActionLog:
    """The actions since every environment's anchor, its last reset from a seed of ours.

    An environment that is deterministic given its seed is a function of that seed and of the
    actions since. Steps are vector steps since the last reset of all environments. Where episodes
    do not end, an anchor may be a state that the environment gave out.

    Attributes:
      steps: taken.
      anchors: int64 [N], the step at which each environment's anchor lies.
      numbers: int64 [N], seeds that each environment has had; they number them.
      states: of all environments at the oldest anchor, if it is not a reset; else empty.
    """

    def __init__(self, num_envs: int):
        self.restart(num_envs)

    def restart(self, num_envs: int) -> None:
        """All environments have been reset."""
        self.steps = 0
        self.anchors = np.zeros(num_envs, np.int64)
        self.numbers = np.zeros(num_envs, np.int64)
        self.states: list[State] = []
        self._actions: list[np.ndarray] = []
        self._oldest = 0

    @property
    def length(self) -> int:
        """Steps since the oldest anchor."""
        return self.steps - self._oldest

    def append(self, action: np.ndarray) -> None:
        """Keeps a step's actions [N, ...]."""
        self._actions.append(action.copy())
        self.steps += 1

    def anchor(self, environments: np.ndarray) -> None:
        """These environments, bool [N], have been reset from seeds; drops what none needs now."""
        self.anchors[environments] = self.steps
        self.numbers[environments] += 1
        oldest = int(np.min(self.anchors))
        if oldest > self._oldest:
            self.states = []
        del self._actions[: oldest - self._oldest]
        self._oldest = oldest

    def anchor_at(self, states: list[State]) -> None:
        """All environments are in these states, before the next action."""
        self.anchors[:] = self._oldest = self.steps
        self.states = states
        self._actions = []

    def save(self, folder: pathlib.Path) -> None:
        """Writes it to a file of the folder."""
        arrays: dict[str, Any] = {
            "actions": np.stack(self._actions) if self._actions else np.zeros(0),
            "anchors": self.anchors,
            "numbers": self.numbers,
            "steps": np.int64(self.steps),
        }
        for index, state in enumerate(self.states):
            arrays |= {f"{_STATE}{index}/{name}": value for name, value in state.items()}
        np.savez(folder / _FILE, **arrays)

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote.

        Raises:
          ValueError: it is of another number of environments, or not such a log.
        """
        saved = data_files.read_arrays(folder / _FILE)
        if not saved.keys() >= {"actions", "anchors", "numbers", "steps"}:
            raise ValueError(f"{_FILE} holds no log of actions")
        steps = int(data_files.counts(saved["steps"]))
        anchors, numbers = (
            data_files.counts(saved[name], *self.anchors.shape) for name in ("anchors", "numbers")
        )
        actions, oldest = list(np.atleast_1d(saved["actions"])), int(anchors.min())
        if len(actions) != steps - oldest:
            raise ValueError(f"{_FILE} has {len(actions)} actions, not {steps - oldest}")
        self.steps, self.anchors, self.numbers = steps, anchors, numbers
        self._actions, self._oldest = actions, oldest
        prefixes = [f"{_STATE}{index}/" for index in range(anchors.size)]
        states = [
            {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
            for prefix in prefixes
        ]
        self.states = states if any(states) else []

    def replay(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What to do after resetting all environments, in order.

        Yields:
          Actions [N, ...] of a vector step; the environments, bool [N], that they are meant for,
          whose anchors lie before it; those to be reset after it.
        """
        for step, action in enumerate(self._actions, self._oldest + 1):
            yield action, self.anchors < step, self.anchors == step
