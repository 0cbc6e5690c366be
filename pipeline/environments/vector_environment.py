"""A gymnasium vector environment as a batched TF-Agents environment."""

from __future__ import annotations

import json
import pathlib
import time
import traceback
from typing import Any

import gymnasium
import numpy as np
import tensorflow as tf
from gymnasium.vector import AutoresetMode
from tf_agents.environments import tf_environment
from tf_agents.trajectories import time_step as ts

from pipeline import randomness
from pipeline.environments import specs
from pipeline.environments.thread_state import keep_thread_state
from pipeline.errors import UserError

_STATE_FILE = "environment.json"

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class VectorEnvironment(tf_environment.TFEnvironment):
    """Steps N environments with one crossing from the graph to Python.

    gymnasium's NEXT_STEP autoreset is TF-Agents' own convention, so that rows map one to one:

        vector environment        step_type  reward  discount
        reset, or autoreset       FIRST      0       1
        goes on                   MID        r       1
        terminated                LAST       r       0
        truncated                 LAST       r       1

    The action given at a LAST row is ignored. `step_type` is int32 [N], `reward` (not clipped)
    and `discount` are float32 [N], the observation is [N, ...] in its space's dtype.

    Each environment is seeded on every `reset()` from (seed, environment, number of the reset).
    Before the first `reset()`, and after `restore()`, `step` ignores its action, resets all
    environments and returns FIRST rows.

    `resets` counts the resets; the next one draws its seeds with that number, so that whoever sets
    it chooses the episodes.

    Works eagerly, in a `tf.function`, and in a `tf.while_loop` with `parallel_iterations=1`.
    """

    def __init__(self, vector_env: gymnasium.vector.VectorEnv, *, name: str, seed: int):
        """Takes over `vector_env`, which must hand out arrays that it does not write to again.

        Args:
          vector_env: autoresets in mode NEXT_STEP.
          name: names the environment in messages.
          seed: fixes all that the environments draw.

        Raises:
          UserError: its autoreset mode or one of its spaces is not supported.
        """
        mode = vector_env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(
                f"{name}: the vector environment's autoreset mode is {mode}; only"
                " AutoresetMode.NEXT_STEP maps onto TF-Agents' time steps."
            )
        action_space = vector_env.single_action_space
        observation_spec = specs.observation_spec(vector_env.single_observation_space, name)
        super().__init__(
            ts.time_step_spec(observation_spec),
            specs.action_spec(action_space, name),
            vector_env.num_envs,
        )
        self.name = name
        self.seconds = 0.0
        self.error: Exception | None = None
        # Any: gymnasium's vector environments differ in the seeds that they take.
        self._vector_env: Any = vector_env
        self._seed = seed
        self.resets = 0
        self._pending_reset = True
        self._rows: Rows | None = None
        self._action_shape = [self._batch_size, *self._action_spec.shape]
        self._convert_actions = specs.action_converter(action_space)
        self._mid = np.full(vector_env.num_envs, ts.StepType.MID, np.int32)
        self._last = np.zeros(vector_env.num_envs, np.bool_)
        self._dtypes = [tf.int32, tf.float32, tf.float32, observation_spec.dtype]

    @property
    def action_space(self) -> gymnasium.Space:
        """One environment's space, as gymnasium has it."""
        return self._vector_env.single_action_space

    @property
    def render_fps(self) -> float:
        """Frames per second at which rendered frames, one for each step, show natural speed."""
        return float(self._vector_env.metadata.get("render_fps", 30))

    def render(self) -> np.ndarray:
        """The first environment's current frame, uint8 [height, width, 3].

        Raises:
          UserError: the environment renders no frames, or was built without `render=True`.
        """
        if self._vector_env.render_mode != "rgb_array":
            raise UserError(f"{self.name} cannot render: it was built without render=True.")
        try:
            frames = self._vector_env.render()
        except (gymnasium.error.DependencyNotInstalled, NotImplementedError) as error:
            reason = str(error) or "it has no render method"
            raise UserError(f"{self.name} cannot render: {reason}.") from error
        if frames[0] is None:
            raise UserError(f"{self.name} cannot render: it gives no frames as 'rgb_array'.")
        return np.asarray(frames[0], np.uint8)

    def save(self, folder: pathlib.Path) -> None:
        """Writes how many resets have drawn their seeds, and for what."""
        (folder / _STATE_FILE).write_text(json.dumps(self._state()))

    def restore(self, folder: pathlib.Path) -> None:
        """The next `step` or `reset` starts new episodes, with seeds not used before `save`.

        Raises:
          ValueError: the state is another environment's, or not such a state.
        """
        state = json.loads((folder / _STATE_FILE).read_text())
        resets = state.get("resets") if isinstance(state, dict) else None
        if not isinstance(resets, int) or state != self._state() | {"resets": resets}:
            raise ValueError(f"the checkpoint's environment is {state}, this is {self._state()}")
        self.resets = resets
        self._pending_reset = True

    def failure_message(self) -> str:
        """What the environment raised and where, in one line; empty if it raised nothing.

        A graph reports an exception of the environment as a TensorFlow error without its type.
        """
        if self.error is None:
            return ""
        frame = traceback.extract_tb(self.error.__traceback__)[-1]
        return (
            f"environment {self.name} raised {type(self.error).__name__}: {self.error}"
            f" ({frame.filename}:{frame.lineno}, in {frame.name})"
        )

    def close(self) -> None:
        """Frees what the vector environment holds (processes, windows)."""
        self._vector_env.close()

    def _current_time_step(self) -> ts.TimeStep:
        return self._time_step(tf.numpy_function(self._current_rows, [], self._dtypes))

    def _reset(self) -> ts.TimeStep:
        return self._time_step(tf.numpy_function(self._reset_rows, [], self._dtypes))

    def _step(self, action: tf.Tensor) -> ts.TimeStep:
        action = tf.convert_to_tensor(action, self._action_spec.dtype)
        action.shape.assert_is_compatible_with(self._action_shape)
        return self._time_step(tf.numpy_function(self._step_rows, [action], self._dtypes))

    def _time_step(self, rows: list[tf.Tensor]) -> ts.TimeStep:
        step_type, reward, discount, observation = rows
        for row in (step_type, reward, discount):
            row.set_shape([self._batch_size])
        observation.set_shape([self._batch_size, *self._time_step_spec.observation.shape])
        return ts.TimeStep(step_type, reward, discount, observation)

    def _current_rows(self) -> Rows:
        if self._pending_reset or self._rows is None:
            return self._reset_rows()
        return self._rows

    def _reset_rows(self) -> Rows:
        keys = [
            randomness.stream_key(self._seed, "environment", index, self.resets)
            for index in range(self._batch_size)
        ]
        started = time.perf_counter()
        try:
            # gymnasium and the ALE take seeds below 2**31 only.
            observation, info = self._reset_vector_env([key % 2**31 for key in keys])
            self._on_reset(info)
        except Exception as error:
            self.error = error
            raise
        self.seconds += time.perf_counter() - started
        self.resets += 1
        self._pending_reset = False
        self._last = np.zeros_like(self._last)
        step_type = np.full_like(self._mid, ts.StepType.FIRST)
        reward, discount = np.zeros((2, self._batch_size), np.float32)
        self._rows = (step_type, reward, discount + 1, observation)
        return self._rows

    def _step_rows(self, action: np.ndarray) -> Rows:
        keep_thread_state()
        if self._pending_reset:
            return self._reset_rows()
        started = time.perf_counter()
        try:
            observation, reward, terminated, truncated, info = self._vector_env.step(
                self._convert_actions(action)
            )
            self.seconds += time.perf_counter() - started
            last = terminated | truncated
            # MID is 1: one more where an episode ends, one less where the one before had ended.
            step_type = self._mid + last - self._last
            discount = self._discount(step_type, terminated, info)
        except Exception as error:
            self.error = error
            raise
        self._last = last
        self._rows = (step_type, reward.astype(np.float32), discount, observation)
        return self._rows

    def _reset_vector_env(self, seeds: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
        """Resets every environment with its own seed."""
        return self._vector_env.reset(seed=seeds)

    def _on_reset(self, info: dict[str, Any]) -> None:
        """For subclasses that follow something in `info` from step to step."""

    def _discount(
        self, step_type: np.ndarray, terminated: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        """Discounts, float32 [N], of the rows that a step gave."""
        return np.subtract(1, terminated, dtype=np.float32)

    def _state(self) -> dict[str, Any]:
        return {"name": self.name, "num_envs": self._batch_size, "resets": self.resets}
