"""Episodes of a vector environment that can be saved, and restored by repeating their actions."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from tf_agents.trajectories import time_step as ts

from pipeline.environments import saved_states, specs
from pipeline.environments.action_log import ActionLog
from pipeline.ops import randomness
from pipeline.utils import files

_STATE_FILE = "environment.json"

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""step_type int32 [N], reward float32 [N], discount float32 [N], observation [N, ...]."""


class Episodes:
    """Episodes of a vector environment that depend only on seeds and actions.

    Each reset of all environments seeds each of them from (seed, environment, number of the reset).
    An environment is seeded again at the first episode start that is `anchor_interval` or more
    vector steps later. Its last seeding is its anchor. An environment that is deterministic given
    its seed is thus a function of its anchor's seed and the actions since then: `restore` repeats
    them. If episodes are longer than two intervals and the environments offer their states (see
    `saved_states`), these states serve as anchors.

    Attributes:
      name: Name of the environment in messages.
      resets: Number of resets of all environments so far.
      divergence: Why the last `restore` could not continue the episodes, or "" if it did.
      calls: Number of calls into the vector environment so far.
      crossing: Identifier of the thread that is inside such a call now, or 0 if none is.
    """

    def __init__(
        self, vector_env: gymnasium.vector.VectorEnv, name: str, seed: int, anchor_interval: int
    ):
        self.name = name
        self.resets = 0
        self.divergence = ""
        self._is_recorded = True
        self.calls = 0
        self.crossing = 0
        # Any, because gymnasium's vector environments take different kinds of seeds.
        self._vector_env: Any = vector_env
        self._num_envs = vector_env.num_envs
        self._seed = seed
        self._log = ActionLog(vector_env.num_envs)
        self._anchor_interval = anchor_interval
        self._gives_states = saved_states.are_offered(vector_env)
        self._convert_actions = specs.action_converter(vector_env.single_action_space)
        self._pending_reset = True
        self._rows: Rows | None = None
        self._mid = np.full(vector_env.num_envs, ts.StepType.MID, np.int32)
        self._last = np.zeros(vector_env.num_envs, np.bool_)

    def choose_episodes(self, number: int) -> None:
        """Sets the number of the next reset, counted from 0, which determines its seeds."""
        self.resets = number

    def keep_no_actions(self) -> None:
        """Stops recording actions, for environments that are never saved."""
        self._is_recorded = False

    def abandon(self) -> None:
        """Abandons the current episodes, so that the next `step` or `reset` starts new ones."""
        self._pending_reset = True

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes the seed, number of resets, action log and a digest of the current rows."""
        rows = None if self._pending_reset or self._rows is None else _sha256(self._rows)
        state = {**self._identity(), "seed": self._seed, "resets": self.resets, "rows": rows}
        (folder / _STATE_FILE).write_text(json.dumps(state))
        self._log.save(folder)

    def restore(self, folder: pathlib.Path) -> None:
        """Restores the episodes that `save` wrote, by repeating their actions.

        If the rows then differ from the saved ones, or an environment raises, `divergence` says
        why. The next `step` or `reset` then starts new episodes, with seeds not used before `save`.

        Raises:
          ValueError: If `folder` holds no such state, or the state of another environment.
        """
        identity = self._identity()
        state = files.read_object(folder / _STATE_FILE, *identity, "seed", "resets", "rows")
        if type(state["seed"]) is not int:
            raise ValueError(
                f"the seed in {_STATE_FILE} is not a whole number: {state['seed']!r:.100}"
            )
        saved = {name: state[name] for name in identity}
        if saved != identity:
            raise ValueError(f"the checkpoint's environment is {saved}, but this is {identity}")
        self._log.restore(folder)
        self._check_actions()
        self._seed, self.resets = state["seed"], int(files.counts(state["resets"]))
        self._pending_reset = True
        self.divergence = "" if state["rows"] is None else self._repeat(state["rows"])

    def _check_actions(self) -> None:
        """Checks that the recorded actions are in the action space.

        An emulator may hang on actions of another space.

        Raises:
          ValueError: If an action is not in the space.
        """
        spec = specs.action_spec(self._vector_env.single_action_space, self.name)
        shape, dtype = (self._num_envs, *spec.shape), spec.dtype.as_numpy_dtype
        for action, *_ in self._log.replay():
            is_known = action.shape == shape and action.dtype == dtype
            if is_known and spec.dtype.is_integer:
                is_known = ((action >= spec.minimum) & (action <= spec.maximum)).all()
            if not is_known:
                raise ValueError(f"the saved actions are not in the action space of {self.name}")

    def _repeat(self, rows_sha256: str) -> str:
        """Repeats the recorded actions.

        Args:
          rows_sha256: Digest of the rows that were saved.

        Returns:
          Why the repetition does not end with the saved rows, or "" if it does.
        """
        try:
            rows = self._replayed_rows()
        except Exception as error:
            self._on_failed_repeat(error)
            return (
                f"{self.name} raised {type(error).__name__} when its actions were repeated: {error}"
            )
        if _sha256(rows) != rows_sha256:
            return f"{self.name} did not reach its saved state when its actions were repeated"
        self._rows = rows
        self._pending_reset = False
        return ""

    def _replayed_rows(self) -> Rows:
        rows = self._reset_all()
        if self._log.states:
            saved_states.set_all(self._vector_env, self._log.states)
        for action, live, mask in self._log.replay():
            rows = self._advance(action, live)
            if mask.any():
                rows = self._reset_some(mask, rows)
        return rows

    def _advance(self, action: np.ndarray, live: np.ndarray | None = None) -> Rows:
        """Steps the vector environment and returns its rows.

        Args:
          action: Actions [N, ...].
          live: bool [N], the environments to step (see `_step_some`); None for all.
        """
        step = self._vector_env.step
        if live is not None and not live.all():
            step = functools.partial(_step_some, self._vector_env, live)
        observation, reward, terminated, truncated, info = self.cross(
            step, self._convert_actions(action)
        )
        last = terminated | truncated
        # MID is 1. LAST is one more, where an episode ends; FIRST is one less, after such a row.
        step_type = self._mid + last - self._last
        discount = self._discount(step_type, terminated, info)
        self._last = last
        return step_type, reward.astype(np.float32), discount, observation

    def _recorded(self, action: np.ndarray) -> Rows:
        """Steps like `_advance`, and records what `restore` needs."""
        is_long = self._log.length >= 2 * self._anchor_interval
        if is_long and self._gives_states and not self._last.any():
            self._log.anchor_at(saved_states.get(self._vector_env))
        rows = self._advance(action)
        self._log.append(action)
        return self._anchor(rows) if self._log.length >= self._anchor_interval else rows

    def _anchor(self, rows: Rows) -> Rows:
        """Reseeds the environments that begin an episode and whose log is long.

        Returns:
          The `rows`, updated by the resets.
        """
        is_long = self._log.steps - self._log.anchors >= self._anchor_interval
        mask = is_long & (rows[0] == ts.StepType.FIRST)
        if not mask.any():
            return rows
        self._log.anchor(mask)
        return self._reset_some(mask, rows)

    def _reset_all(self) -> Rows:
        observation, info = self.cross(self._reset_vector_env, self._seeds(), None)
        self._on_reset(info)
        self._last = np.zeros_like(self._last)
        reward, discount = np.zeros((2, self._num_envs), np.float32)
        return np.full_like(self._mid, ts.StepType.FIRST), reward, discount + 1, observation

    def _reset_some(self, mask: np.ndarray, rows: Rows) -> Rows:
        """Resets the environments of `mask`, bool [N], and returns the updated `rows`."""
        observation, info = self.cross(self._reset_vector_env, self._seeds(), mask)
        self._on_reset(info)
        self._last = self._last & ~mask
        step_type, reward, discount, _ = rows
        return (
            np.where(mask, np.int32(ts.StepType.FIRST), step_type),
            np.where(mask, np.float32(0), reward),
            np.where(mask, np.float32(1), discount),
            observation,
        )

    def cross(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls the vector environment, and lets other threads see that the call is under way."""
        self.calls += 1
        self.crossing = threading.get_ident()
        try:
            return call(*args)
        finally:
            self.crossing = 0

    def _seeds(self) -> list[int]:
        """Returns the seed of each environment's anchor."""
        first = self.resets - 1
        numbers = ([first, number] if number > 0 else [first] for number in self._log.numbers)
        keys = [
            randomness.stream_key(self._seed, "environment", index, *names)
            for index, names in enumerate(numbers)
        ]
        # gymnasium and the ALE accept only seeds below 2**31.
        return [key % 2**31 for key in keys]

    def _reset_vector_env(
        self, seeds: list[int], mask: np.ndarray | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Resets the environments of `mask`, or all, each with its own seed.

        Args:
          seeds: Seeds of all environments.
          mask: bool [N], the environments to reset; None for all.

        Returns:
          Observations of all environments, and infos.
        """
        return self._vector_env.reset(seed=seeds, options=reset_options(mask))

    def _on_failed_repeat(self, error: Exception) -> None:
        """Handles an exception raised while actions were repeated.

        Subclasses override it if their vector environment cannot be used after an exception.
        """

    def _on_reset(self, info: dict[str, Any]) -> None:
        """Handles the infos of a reset.

        Subclasses override it to track values in `info` from step to step.
        """

    def _discount(
        self, step_type: np.ndarray, terminated: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        """Computes the discounts, float32 [N], of the rows that a step returned."""
        return np.subtract(1, terminated, dtype=np.float32)

    def _identity(self) -> dict[str, Any]:
        return {"name": self.name, "num_envs": self._num_envs}


def reset_options(mask: np.ndarray | None) -> dict[str, Any] | None:
    """Returns gymnasium's `options` for resetting the environments of `mask`, or all if None."""
    return None if mask is None else {"reset_mask": mask}


def _step_some(vector_env: Any, live: np.ndarray, actions: np.ndarray) -> tuple[Any, ...]:
    """Steps only the environments of `live` if `vector_env` can do that; else steps all.

    Environments that have not reached their anchor are in a state that their actions were not
    chosen for, and an environment that checks its actions would raise.
    """
    step_some = getattr(vector_env, "step_some", None)
    return step_some(live, actions) if step_some else vector_env.step(actions)


def _sha256(rows: Rows) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.dtype} {row.shape}".encode() + np.ascontiguousarray(row).tobytes())
    return digest.hexdigest()
