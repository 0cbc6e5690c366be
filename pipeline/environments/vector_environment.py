"""Adapts a gymnasium vector environment to a batched TF-Agents environment."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable

import gymnasium
import numpy as np
import tensorflow as tf
from gymnasium.vector import AutoresetMode
from tf_agents.environments import tf_environment
from tf_agents.trajectories import time_step as ts

from pipeline.environments import specs
from pipeline.environments.episodes import Episodes, Rows
from pipeline.environments.thread_state import keep_thread_state
from pipeline.utils.errors import UserError

_DEAD = (EOFError, ConnectionError)  # raised when a process is gone


class VectorEnvironment(Episodes, tf_environment.TFEnvironment):
    """Steps N environments with one call from the graph into Python per step.

    gymnasium's NEXT_STEP autoreset is TF-Agents' own convention, so rows map one to one:

        vector environment        step_type  reward  discount
        reset, or autoreset       FIRST      0       1
        goes on                   MID        r       1
        terminated                LAST       r       0
        truncated                 LAST       r       1

    The action given at a LAST row is ignored. `step_type` is int32 [N], `reward` (not clipped)
    and `discount` are float32 [N], and the observation is [N, ...] in its space's dtype.

    Before the first `reset()`, and after a `restore()` that could not continue the episodes, `step`
    ignores its action, resets all environments and returns FIRST rows. `Episodes` describes how
    environments are seeded, saved and restored.

    It works eagerly, in a `tf.function`, and in a `tf.while_loop` with `parallel_iterations=1`.
    """

    def __init__(
        self,
        vector_env: gymnasium.vector.VectorEnv,
        *,
        name: str,
        seed: int,
        anchor_interval: int = 1_000,
        rebuild: Callable[[], gymnasium.vector.VectorEnv] | None = None,
    ):
        """Initializes the environment and takes ownership of `vector_env`.

        Args:
          vector_env: Vector environment with autoreset mode NEXT_STEP that can reset some of its
            environments alone. It must not write again to arrays that it has returned.
          name: Name of the environment in messages.
          seed: Seed of everything that the environments draw.
          anchor_interval: Vector steps between anchors. A resume repeats at most this many steps,
            plus those of one episode.
          rebuild: Creates another such vector environment, for new episodes after the current one
            raised while a resume repeated its steps. None if it can be reset after it raised.

        Raises:
          UserError: If the autoreset mode or one of the spaces is not supported.
        """
        mode = vector_env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(
                f"{name}: the vector environment's autoreset mode is {mode}. Use"
                " AutoresetMode.NEXT_STEP, the only mode that maps onto TF-Agents' time steps."
            )
        action_space = vector_env.single_action_space
        observation_spec = specs.observation_spec(vector_env.single_observation_space, name)
        tf_environment.TFEnvironment.__init__(
            self,
            ts.time_step_spec(observation_spec),
            specs.action_spec(action_space, name),
            vector_env.num_envs,
        )
        Episodes.__init__(self, vector_env, name, seed, anchor_interval)
        self.seconds = 0.0
        self.error: Exception | None = None
        self._rebuild = rebuild
        self._action_shape = [self._batch_size, *self._action_spec.shape]
        self._dtypes = [tf.int32, tf.float32, tf.float32, observation_spec.dtype]

    @property
    def action_space(self) -> gymnasium.Space:
        """Returns the gymnasium action space of one environment."""
        return self._vector_env.single_action_space

    @property
    def render_fps(self) -> float:
        """Returns the frames per second at which one frame for each step shows natural speed."""
        return float(self._vector_env.metadata.get("render_fps", 30))

    def render(self) -> np.ndarray:
        """Returns the first environment's current frame, uint8 [height, width, 3].

        Raises:
          UserError: If the environment renders no frames, or was built without `render=True`.
        """
        if self._vector_env.render_mode != "rgb_array":
            raise UserError(f"{self.name} cannot render: it was built without render=True.")
        try:
            frames = self._vector_env.render()
        except (gymnasium.error.DependencyNotInstalled, NotImplementedError) as error:
            reason = str(error) or "it has no render method"
            raise UserError(f"{self.name} cannot render: {reason}.") from error
        if frames[0] is None:
            raise UserError(f"{self.name} cannot render: it returns no frames as 'rgb_array'.")
        return np.asarray(frames[0], np.uint8)

    def failure_message(self) -> str:
        """Returns what the environment raised and where, in one line, or "" if it did not raise.

        A graph reports an exception of the environment as a TensorFlow error without its type.
        """
        if self.error is None:
            return ""
        frame = traceback.extract_tb(self.error.__traceback__)[-1]
        cause = "; one of its processes has died, perhaps because it ran out of memory"
        return (
            f"environment {self.name} raised {type(self.error).__name__}: {self.error}"
            f" ({frame.filename}:{frame.lineno}, in {frame.name})"
            f"{cause if self._has_died() else ''}"
        )

    def close(self) -> None:
        """Frees what the vector environment holds (processes, windows); warns if that fails."""
        self._close(self._has_died())

    def _close(self, has_died: bool) -> None:
        try:
            with contextlib.suppress(*_DEAD):
                if not has_died:
                    self._vector_env.close()
                    return
            # Without `terminate`, `close` would ask dead processes to end, which fails again.
            self._vector_env.close(terminate=True)
        except Exception as error:  # the environment's author chose its type
            print(f"warning: {self.name} raised when closed: {error!r}", file=sys.stderr)

    def _on_failed_repeat(self, error: Exception) -> None:
        if self._rebuild is not None:
            self._close(isinstance(error, _DEAD))
            self._vector_env = self._rebuild()

    def _has_died(self) -> bool:
        """Returns True if a process of the vector environment is gone."""
        return isinstance(self.error, _DEAD)

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
        started = time.perf_counter()
        self._log.restart(self._batch_size)
        self.resets += 1
        try:
            self._rows = self._reset_all()
        except Exception as error:
            self.error = error
            raise
        self.seconds += time.perf_counter() - started
        self._pending_reset = False
        return self._rows

    def _step_rows(self, action: np.ndarray) -> Rows:
        keep_thread_state()
        if self._pending_reset:
            return self._reset_rows()
        started = time.perf_counter()
        try:
            rows = self._recorded(action) if self._is_recorded else self._advance(action)
        except Exception as error:
            self.error = error
            raise
        self.seconds += time.perf_counter() - started
        self._rows = rows
        return rows
