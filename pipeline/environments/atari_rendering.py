"""Renders the game of an AtariVectorEnv, for videos.

The ALE's vector environment does not return frames as a player sees them. Here a second emulator
with the same seed takes the same actions, frame for frame, and renders the screen. The rows of the
vector environment are unchanged, so a policy sees the same observations whether or not a video is
recorded.
"""

from __future__ import annotations

from typing import Any

import ale_py
import numpy as np
from ale_py import AtariVectorEnv, roms

FRAMES_PER_SECOND = 60

Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


class RenderingAtariVectorEnv(AtariVectorEnv):
    """Adds a `render` method to an AtariVectorEnv of one environment."""

    ale: Any

    def __init__(self, game: str, num_envs: int, **kwargs: Any):
        """Initializes the environment with the arguments of AtariVectorEnv; `num_envs` is 1."""
        super().__init__(game, num_envs, **kwargs)
        self.render_mode = "rgb_array"
        self.metadata = self.metadata | {"render_fps": FRAMES_PER_SECOND / kwargs["frameskip"]}
        self.ale = _MirroredInterface(
            self.ale,
            roms.get_rom_path(game),
            kwargs["repeat_action_probability"],
            kwargs["use_fire_reset"],
        )

    def render(self) -> tuple[np.ndarray]:
        """Returns (frame,), the screen after the last step, uint8 [height, width, 3]."""
        return (self.ale.screen.getScreenRGB(),)


class _MirroredInterface:
    """Wraps one environment's ALEVectorInterface; repeats its calls on a second emulator, `screen`.

    The frame counters in each result tell how many frames a step or a reset took. They are needed
    because the vector environment draws the number of no-ops at a reset internally.
    """

    def __init__(self, interface: Any, rom: Any, repeat_probability: float, fire_reset: bool):
        self.screen = ale_py.ALEInterface()
        self.screen.setFloat("repeat_action_probability", repeat_probability)
        self._interface = interface
        self._rom = rom
        self._actions = interface.get_action_set()
        self._fires = fire_reset and ale_py.Action.FIRE in self._actions
        self._over = False

    def get_action_set(self) -> list[ale_py.Action]:
        return self._actions

    def reset(
        self, indices: np.ndarray, seeds: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        observation, info = self._interface.reset(indices, seeds)
        if seeds[0] >= 0:
            self.screen.setInt("random_seed", int(seeds[0]))
            self.screen.loadROM(self._rom)
        self._mirror_reset(info)
        return observation, info

    def send(self, action_ids: np.ndarray, paddle_strengths: np.ndarray) -> None:
        self._action = self._actions[int(action_ids[0])]
        self._paddle_strength = float(paddle_strengths[0])
        self._interface.send(action_ids, paddle_strengths)

    def recv(self) -> Step:
        step: Step = self._interface.recv()
        _, reward, terminated, truncated, info = step
        if self._over:
            self._mirror_reset(info)
        else:
            self._mirror_step(int(reward[0]), info)
        self._over = bool(terminated[0] or truncated[0])
        return step

    def _mirror_reset(self, info: dict[str, np.ndarray]) -> None:
        self.screen.reset_game()
        action = ale_py.Action.FIRE if self._fires else ale_py.Action.NOOP
        while self.screen.getFrameNumber() < info["frame_number"][0]:
            self.screen.act(action)
            action = ale_py.Action.NOOP
            if self.screen.game_over():
                self.screen.reset_game()
        self._over = False
        self._check(info)

    def _mirror_step(self, reward: int, info: dict[str, np.ndarray]) -> None:
        while self.screen.getFrameNumber() < info["frame_number"][0] and not (
            self.screen.game_over()
        ):
            reward -= self.screen.act(self._action, self._paddle_strength)
        self._check(info, reward)

    def _check(self, info: dict[str, np.ndarray], reward_difference: int = 0) -> None:
        mirrored = {
            "frame_number": self.screen.getFrameNumber(),
            "episode_frame_number": self.screen.getEpisodeFrameNumber(),
            "lives": self.screen.lives(),
        }
        expected = {name: int(info[name][0]) for name in mirrored}
        if mirrored != expected or reward_difference:
            raise RuntimeError(
                f"the rendering emulator differs from the game: {mirrored} instead of {expected},"
                f" rewards differ by {reward_difference}"
            )
