"""Episodes of a vector environment that can be saved, and continued by repeating their actions."""

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

from pipeline import data_files, randomness
from pipeline.environments import specs, states
from pipeline.environments.action_log import ActionLog

_STATE_FILE = "environment.json"

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""step_type int32 [N], reward float32 [N], discount float32 [N], observation [N, ...]."""


class Episodes:
    """The rows of a vector environment, from seeds and actions alone.

    Each environment is seeded on every reset of all from (seed, environment, number of the reset),
    and again at the first episode's start that is `anchor_interval` vector steps or more after, its
    anchor. An environment that is deterministic given its seed is thus a function of its anchor's
    seed and the actions since: `restore` repeats them. Where episodes are longer than two intervals
    and the environments give out their states (see `states`), those serve as anchors.

    Attributes:
      name: names the environment in messages.
      resets: of all environments, so far; the next one draws its seeds with that number, so that
        whoever sets it chooses the episodes.
      divergence: why the last `restore` could not continue the episodes, "" if it did.
      is_recorded: whether actions are kept, without which there is nothing to `save`.
      calls: into the vector environment, so far.
      crossing: identifies the thread that is inside one now; 0 if none is.
    """

    def __init__(
        self, vector_env: gymnasium.vector.VectorEnv, name: str, seed: int, anchor_interval: int
    ):
        self.name = name
        self.resets = 0
        self.divergence = ""
        self.is_recorded = True
        self.calls = 0
        self.crossing = 0
        # Any: gymnasium's vector environments differ in the seeds that they take.
        self._vector_env: Any = vector_env
        self._num_envs = vector_env.num_envs
        self._seed = seed
        self._log = ActionLog(vector_env.num_envs)
        self._anchor_interval = anchor_interval
        self._gives_states = states.are_offered(vector_env)
        self._convert_actions = specs.action_converter(vector_env.single_action_space)
        self._pending_reset = True
        self._rows: Rows | None = None
        self._mid = np.full(vector_env.num_envs, ts.StepType.MID, np.int32)
        self._last = np.zeros(vector_env.num_envs, np.bool_)

    def abandon(self) -> None:
        """Gives up the episodes in flight: the next `step` or `reset` starts new ones."""
        self._pending_reset = True

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes the number of the reset, the actions since, and a digest of the current rows."""
        rows = None if self._pending_reset or self._rows is None else _sha256(self._rows)
        state = {**self._identity(), "seed": self._seed, "resets": self.resets, "rows": rows}
        (folder / _STATE_FILE).write_text(json.dumps(state))
        self._log.save(folder)

    def restore(self, folder: pathlib.Path) -> None:
        """Brings the environments to where `save` found them, by repeating the actions.

        If the rows then differ from the saved ones, or an environment raises, `divergence` says so,
        and the next `step` or `reset` starts new episodes, with seeds not used before `save`.

        Raises:
          ValueError: the state is another environment's, or not such a state.
        """
        identity = self._identity()
        state = data_files.read_object(folder / _STATE_FILE, *identity, "seed", "resets", "rows")
        if type(state["seed"]) is not int:
            raise ValueError(f"{_STATE_FILE} has no seed: {state['seed']!r:.100}")
        saved = {name: state[name] for name in identity}
        if saved != identity:
            raise ValueError(f"the checkpoint's environment is {saved}, this is {identity}")
        self._log.restore(folder)
        self._check_actions()
        self._seed, self.resets = state["seed"], int(data_files.counts(state["resets"]))
        self._pending_reset = True
        self.divergence = "" if state["rows"] is None else self._repeat(state["rows"])

    def _check_actions(self) -> None:
        """Raises ValueError for actions of another space: an emulator may hang on them."""
        spec = specs.action_spec(self._vector_env.single_action_space, self.name)
        shape, dtype = (self._num_envs, *spec.shape), spec.dtype.as_numpy_dtype
        for action, *_ in self._log.replay():
            is_known = action.shape == shape and action.dtype == dtype
            if is_known and spec.dtype.is_integer:
                is_known = ((action >= spec.minimum) & (action <= spec.maximum)).all()
            if not is_known:
                raise ValueError(f"the actions saved are not those of {self.name}")

    def _repeat(self, rows_sha256: str) -> str:
        """Repeats what the log holds; why that does not end where it did, or ""."""
        try:
            rows = self._replayed_rows()
        except Exception as error:
            self._on_failed_repeat(error)
            return (
                f"{self.name} raised {type(error).__name__} when its actions were repeated: {error}"
            )
        if _sha256(rows) != rows_sha256:
            return f"{self.name} is not the same when its actions are repeated from its seed"
        self._rows = rows
        self._pending_reset = False
        return ""

    def _replayed_rows(self) -> Rows:
        rows = self._reset_all()
        if self._log.states:
            states.set_all(self._vector_env, self._log.states)
        for action, live, mask in self._log.replay():
            rows = self._advance(action, live)
            if mask.any():
                rows = self._reset_some(mask, rows)
        return rows

    def _advance(self, action: np.ndarray, live: np.ndarray | None = None) -> Rows:
        """The rows that a vector step gives; see `_step_some` for `live`, bool [N]."""
        step = self._vector_env.step
        if live is not None and not live.all():
            step = functools.partial(_step_some, self._vector_env, live)
        observation, reward, terminated, truncated, info = self.cross(
            step, self._convert_actions(action)
        )
        last = terminated | truncated
        # MID is 1: one more where an episode ends, one less where the one before had ended.
        step_type = self._mid + last - self._last
        discount = self._discount(step_type, terminated, info)
        self._last = last
        return step_type, reward.astype(np.float32), discount, observation

    def _recorded(self, action: np.ndarray) -> Rows:
        """As `_advance`, and keeps what `restore` needs."""
        is_long = self._log.length >= 2 * self._anchor_interval
        if is_long and self._gives_states and not self._last.any():
            self._log.anchor_at(states.get(self._vector_env))
        rows = self._advance(action)
        self._log.append(action)
        return self._anchor(rows) if self._log.length >= self._anchor_interval else rows

    def _anchor(self, rows: Rows) -> Rows:
        """The `rows`, after new seeds for those that begin an episode and whose log is long."""
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
        """The `rows`, after resetting the environments of `mask`, bool [N]."""
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
        """Calls the vector environment in such a way that others see that it is under way."""
        self.calls += 1
        self.crossing = threading.get_ident()
        try:
            return call(*args)
        finally:
            self.crossing = 0

    def _seeds(self) -> list[int]:
        """Of each environment's anchor."""
        first = self.resets - 1
        numbers = ([first, number] if number > 0 else [first] for number in self._log.numbers)
        keys = [
            randomness.stream_key(self._seed, "environment", index, *names)
            for index, names in enumerate(numbers)
        ]
        # gymnasium and the ALE take seeds below 2**31 only.
        return [key % 2**31 for key in keys]

    def _reset_vector_env(
        self, seeds: list[int], mask: np.ndarray | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Resets the environments of `mask`, or all, each with its own seed.

        Returns:
          All environments' observations, and infos.
        """
        return self._vector_env.reset(seed=seeds, options=reset_options(mask))

    def _on_failed_repeat(self, error: Exception) -> None:
        """For subclasses whose vector environment does not outlive an exception."""

    def _on_reset(self, info: dict[str, Any]) -> None:
        """For subclasses that follow something in `info` from step to step."""

    def _discount(
        self, step_type: np.ndarray, terminated: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        """Discounts, float32 [N], of the rows that a step gave."""
        return np.subtract(1, terminated, dtype=np.float32)

    def _identity(self) -> dict[str, Any]:
        return {"name": self.name, "num_envs": self._num_envs}


def reset_options(mask: np.ndarray | None) -> dict[str, Any] | None:
    """gymnasium's `options` for resetting some environments, or all."""
    return None if mask is None else {"reset_mask": mask}


def _step_some(vector_env: Any, live: np.ndarray, actions: np.ndarray) -> tuple[Any, ...]:
    """Steps the environments of `live` alone if `vector_env` can do that; else all.

    Environments that have not reached their anchor are in no state that their actions were chosen
    for, and one that checks its actions would raise.
    """
    step_some = getattr(vector_env, "step_some", None)
    return step_some(live, actions) if step_some else vector_env.step(actions)


def _sha256(rows: Rows) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.dtype} {row.shape}".encode() + np.ascontiguousarray(row).tobytes())
    return digest.hexdigest()
