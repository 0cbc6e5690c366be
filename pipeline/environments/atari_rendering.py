"""Renders the game of an AtariVectorEnv, for videos.

The ALE's vector environment returns small grey images. Here a second one with the same seed takes
the same actions, and returns whole frames as a player sees them. The rows of the first are
unchanged, so a policy sees the same observations whether or not a video is recorded.
"""

from __future__ import annotations

from typing import Any

import ale_py
import numpy as np
from ale_py import AtariVectorEnv, roms

FRAMES_PER_SECOND = 60


class RenderingAtariVectorEnv(AtariVectorEnv):
    """Adds a `render` method to an AtariVectorEnv of one environment."""

    def __init__(self, game: str, num_envs: int, **kwargs: Any):
        """Initializes the environment with the arguments of AtariVectorEnv; `num_envs` is 1."""
        super().__init__(game, num_envs, **kwargs)
        self.render_mode = "rgb_array"
        self.metadata = self.metadata | {"render_fps": FRAMES_PER_SECOND / kwargs["frameskip"]}
        emulator = ale_py.ALEInterface()
        rom: Any = roms.get_rom_path(game)
        emulator.loadROM(rom)
        height, width = emulator.getScreenDims()
        of_screen = {"grayscale": False, "maxpool": False, "stack_num": 1}
        of_screen |= {"img_height": height, "img_width": width}
        self.screen = AtariVectorEnv(game, num_envs, **kwargs | of_screen)

    def reset(self, **kwargs: Any) -> Any:
        """Resets both environments."""
        return self._checked(super().reset(**kwargs), self.screen.reset(**kwargs))

    def step(self, actions: np.ndarray) -> Any:
        """Steps both environments."""
        return self._checked(super().step(actions), self.screen.step(actions))

    def render(self) -> tuple[np.ndarray]:
        """Returns (frame,), the screen after the last step, uint8 [height, width, 3].

        At the end of an episode, it may be the frame before.
        """
        return (self._frame,)

    def close_extras(self, **kwargs: Any) -> None:
        """Ends the emulator of the frames."""
        vars(self.screen).pop("ale", None)

    def _checked(self, results: Any, of_screen: Any) -> Any:
        """Keeps the frame, and checks that both environments have returned the same otherwise."""
        (_, *numbers, info), (frames, *others, screen_info) = results, of_screen
        self._frame = frames[0, 0]
        if numbers != others or any((info[name] != screen_info[name]).any() for name in info):
            raise RuntimeError(
                f"the rendering emulator differs from the game: {screen_info} instead of {info}"
            )
        return results
