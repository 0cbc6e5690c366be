"""A gymnasium vector environment as a batched TF-Agents environment."""

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
from pipeline.errors import UserError

_DEAD = (EOFError, ConnectionError)  # what comes of a process that is gone


class VectorEnvironment(Episodes, tf_environment.TFEnvironment):
    """Steps N environments with one crossing from the graph to Python.

    gymnasium's NEXT_STEP autoreset is TF-Agents' own convention, so that rows map one to one:

        vector environment        step_type  reward  discount
        reset, or autoreset       FIRST      0       1
        goes on                   MID        r       1
        terminated                LAST       r       0
        truncated                 LAST       r       1

    The action given at a LAST row is ignored. `step_type` is int32 [N], `reward` (not clipped)
    and `discount` are float32 [N], the observation is [N, ...] in its space's dtype.

    Before the first `reset()`, and after a `restore()` that could not continue the episodes, `step`
    ignores its action, resets all environments and returns FIRST rows. How environments are seeded,
    saved and restored: see `Episodes`.

    Works eagerly, in a `tf.function`, and in a `tf.while_loop` with `parallel_iterations=1`.
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
        """Takes over `vector_env`, which must hand out arrays that it does not write to again.

        Args:
          vector_env: autoresets in mode NEXT_STEP, and resets some environments alone.
          name: names the environment in messages.
          seed: fixes all that the environments draw.
          anchor_interval: vector steps; a resume repeats up to so many, and those of an episode.
          rebuild: gives another such vector environment, for new episodes after one has raised
            while a resume repeated its steps; None: one that has raised can be reset.

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

    def failure_message(self) -> str:
        """What the environment raised and where, in one line; empty if it raised nothing.

        A graph reports an exception of the environment as a TensorFlow error without its type.
        """
        if self.error is None:
            return ""
        frame = traceback.extract_tb(self.error.__traceback__)[-1]
        cause = "; one of its processes has died, perhaps for want of memory"
        return (
            f"environment {self.name} raised {type(self.error).__name__}: {self.error}"
            f" ({frame.filename}:{frame.lineno}, in {frame.name})"
            f"{cause if self._has_died() else ''}"
        )

    def close(self) -> None:
        """Frees what the vector environment holds (processes, windows); says what fails then."""
        self._close(self._has_died())

    def _close(self, has_died: bool) -> None:
        try:
            with contextlib.suppress(*_DEAD):
                if not has_died:
                    self._vector_env.close()
                    return
            self._vector_env.close(terminate=True)  # asking its processes would fail again
        except Exception as error:  # of whatever kind the environment's author chose
            print(f"warning: {self.name} raised when closed: {error!r}", file=sys.stderr)

    def _on_failed_repeat(self, error: Exception) -> None:
        if self._rebuild is not None:
            self._close(isinstance(error, _DEAD))
            self._vector_env = self._rebuild()

    def _has_died(self) -> bool:
        """Whether a process of the vector environment is gone."""
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
            rows = self._recorded(action) if self.is_recorded else self._advance(action)
        except Exception as error:
            self.error = error
            raise
        self.seconds += time.perf_counter() - started
        self._rows = rows
        return rows
