"""Adapts a vector of environments to a batched TF-Agents environment."""

from __future__ import annotations

import ctypes
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import tensorflow as tf
from tf_agents.environments import tf_environment
from tf_agents.trajectories import time_step as ts

from pipeline.environments import specs
from pipeline.environments.episodes import Episodes, Rows
from pipeline.environments.single_env import close_with_warning, describe
from pipeline.environments.vectors import Vector
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import kept_handlers

_thread_local = threading.local()


class VectorEnvironment(tf_environment.TFEnvironment):
    """Steps N environments with one call from the graph into Python per step.

    gymnasium's NEXT_STEP autoreset is TF-Agents' own convention, so rows map one to one:

        vector                    step_type  reward  discount
        reset, or autoreset       FIRST      0       1
        goes on                   MID        r       1
        terminated                LAST       r       0
        truncated                 LAST       r       1

    The action given at a LAST row is ignored. `step_type` is int32 [N], `reward` (not clipped)
    and `discount` are float32 [N], and observations are tensors [N, ...], or nests of them, in the
    dtypes of their spaces.

    Before the first `reset()`, and after a `restore()` that could not continue the episodes, `step`
    ignores its action, resets all environments and returns FIRST rows. `Episodes` describes how
    environments are seeded, saved and restored.

    It works eagerly, in a `tf.function`, and in a `tf.while_loop` with `parallel_iterations=1`.

    Attributes:
      episodes: Episodes of the environments, on the host.
      name: Name of the environment in messages.
      observation_space: Gymnasium observation space of one environment.
      action_space: Gymnasium action space of one environment.
      source: Class of the environments and its file, or "" if they are not known.
      notes: Sentences about the environments that a user should read before training.
      render_fps: Frames per second at which one frame for each step shows natural speed.
    """

    def __init__(
        self,
        build: Callable[[], Vector],
        *,
        name: str,
        seed: int,
        anchor_interval: int = 1_000,
    ):
        """Builds the vector.

        Args:
          build: Builds the vector, also later, when its environments cannot be reset any more.
          name: Name of the environment in messages.
          seed: Seed of everything that the environments draw.
          anchor_interval: Vector steps between anchors. A resume repeats at most this many steps,
            plus those of one episode.

        Raises:
          UserError: If `build` raises it or one of the spaces is not supported.
        """
        build = kept_handlers()(build)  # `Episodes` calls it again where it has to.
        vector = build()
        described = vector.description
        self.name, self.source, self.notes = name, described.source, described.notes
        self.observation_space = described.observation_space
        self.action_space = described.action_space
        self.render_fps = described.render_fps
        try:
            observation_spec = specs.observation_spec(self.observation_space, name)
            action_spec = specs.action_spec(self.action_space, name)
            specs.check_mask(observation_spec, action_spec, name)
        except UserError:
            close_with_warning(vector, name)
            raise
        super().__init__(ts.time_step_spec(observation_spec), action_spec, vector.num_envs)
        self.episodes = Episodes(vector, build, name, seed, anchor_interval)
        self._action_shape = [self._batch_size, *self._action_spec.shape]
        arrays = tf.nest.flatten(observation_spec)
        self._dtypes = [tf.int32, tf.float32, tf.float32, *(array.dtype for array in arrays)]

    def check_spaces(
        self, observation_space: gymnasium.Space, action_space: gymnasium.Space
    ) -> None:
        """Checks that an agent for these spaces can act in this environment.

        Raises:
          UserError: If it cannot.
        """
        checks = [
            ("observation", specs.are_observed_alike, self.observation_space, observation_space),
            ("action", specs.look_the_same, self.action_space, action_space),
        ]
        for kind, are_alike, space, trained in checks:
            if not are_alike(space, trained):
                raise UserError(
                    f"{self.name} has the {kind} space {space}, but the agent is trained with "
                    f"{trained}. Bind an environment with the same spaces, wrappers included."
                )

    @property
    def seconds(self) -> float:
        """Returns the time spent in steps and resets, in seconds."""
        return self.episodes.seconds

    @property
    def divergence(self) -> str:
        """Returns why the last `restore` could not continue the episodes, or "" if it did."""
        return self.episodes.divergence

    def render(self) -> np.ndarray:
        """Returns the first environment's current frame, uint8 [height, width, 3].

        Raises:
          UserError: If the environment raises or renders no frames, or was built without
            `render=True`.
        """
        if not self.episodes.vector.description.renders:
            raise UserError(f"{self.name} cannot render: it was built without render=True.")
        try:
            frame = self.episodes.cross(self.episodes.vector.render)
        except (gymnasium.error.DependencyNotInstalled, NotImplementedError) as error:
            reason = str(error) or "it has no render method"
            raise UserError(f"{self.name} cannot render: {reason}.") from error
        except UserError as error:
            raise UserError(f"{self.name} cannot render: {error}") from error
        except Exception as error:  # the environment's author chose its type
            raise UserError(f"{self.name} cannot render: {describe(error)}") from error
        if frame is None:
            raise UserError(f"{self.name} cannot render: it returns no frames as 'rgb_array'.")
        return self._rgb(np.asarray(frame))

    def _rgb(self, frame: np.ndarray) -> np.ndarray:
        """Converts a frame, also one of grey or of floats, to uint8 [height, width, 3].

        Floats up to 1 are taken as fractions of full brightness.
        """
        is_grey = frame.ndim == 2 or frame.shape[2:] == (1,)
        if is_grey:
            frame = np.repeat(frame.reshape(*frame.shape[:2], 1), 3, axis=2)
        if frame.ndim != 3 or frame.shape[2] not in (3, 4) or frame.dtype.kind not in "uifb":
            raise UserError(
                f"{self.name} cannot render: its frame has the shape {frame.shape} and the dtype "
                f"{frame.dtype}, but a frame is uint8 [height, width, 3]."
            )
        frame = frame[..., :3]
        if frame.dtype.kind in "fb" and (frame <= 1).all():
            frame = 255.0 * frame
        return np.clip(np.nan_to_num(np.round(frame)), 0, 255).astype(np.uint8)

    def failure_message(self) -> str:
        """Returns what the environment raised and where, in one line, or "" if it did not raise.

        A graph reports an exception of the environment as a TensorFlow error without its type.
        """
        error: Any = self.episodes.error
        if error is None or isinstance(error, UserError):
            return str(error or "")
        return f"environment {self.name} raised {describe(error)}"

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes what `restore` needs into the empty `folder`."""
        self.episodes.save(folder)

    def restore(self, folder: pathlib.Path) -> None:
        """Restores the episodes that `save` wrote; see `Episodes.restore`.

        Raises:
          ValueError: If `folder` holds no such state, or the state of another environment.
        """
        self.episodes.restore(folder)

    def close(self) -> None:
        """Frees what the environments hold (processes, windows); warns if that fails."""
        self.episodes.close()

    def _current_time_step(self) -> ts.TimeStep:
        return self._time_step(self.episodes.current)

    def _reset(self) -> ts.TimeStep:
        return self._time_step(self.episodes.reset)

    def _step(self, action: tf.Tensor) -> ts.TimeStep:
        action = tf.convert_to_tensor(action, self._action_spec.dtype)
        action.shape.assert_is_compatible_with(self._action_shape)
        return self._time_step(self._step_rows, action)

    def _step_rows(self, action: np.ndarray) -> Rows:
        keep_thread_state()
        return self.episodes.step(action)

    def _time_step(self, function: Callable[..., Rows], *inputs: tf.Tensor) -> ts.TimeStep:
        rows = tf.numpy_function(function, inputs, self._dtypes)
        for row, spec in zip(rows, tf.nest.flatten(self._time_step_spec), strict=True):
            row.set_shape([self._batch_size, *spec.shape])
        return tf.nest.pack_sequence_as(self._time_step_spec, rows)


def keep_thread_state() -> None:
    """Keeps Python's state of the calling thread until the thread ends.

    Otherwise, in a thread that Python did not start, each call from a graph would create that
    state, map memory for its stack, and free both. This takes as long as a step of CartPole.
    """
    if not hasattr(_thread_local, "is_kept"):
        # Never released, so that the reference count of the thread's state does not fall to zero.
        ctypes.pythonapi.PyGILState_Ensure()
        _thread_local.is_kept = True
