"""Atari 2600 games as DeepMind's Lua program of 2015 played them, on the ALE's plain interface.

Single-frame no-ops, colours pooled before they become grey, and no-ops after every lost life cannot
be had from the ALE's vector environment. `docs/dqn3.md` compares the two programs item by item.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import gin
import gymnasium
import numpy as np
from ale_py import Action, ALEInterface, ALEState, LoggerMode, roms
from gymnasium.vector import AutoresetMode

from pipeline.environments import deepmind_screen
from pipeline.environments.atari import ANCHOR_INTERVAL, check_arguments
from pipeline.environments.atari_rendering import FRAMES_PER_SECOND
from pipeline.environments.sync_vector_env import LeanSyncVectorEnv
from pipeline.environments.vector_environment import VectorEnvironment

_SIDE = 84  # pixels

# Of xitari, the emulator of 2015 (`games/RomSettings.hpp`, `games/supported/Pong.cpp`), where Pong
# differs from all other games and from today's ALE. A game is over after so many frames.
_MAX_FRAMES, _MAX_FRAMES_OF = 8 * 60 * 60 * 60, {"pong": 65_000}
_ACTIONS_OF = {"pong": (Action.NOOP, Action.RIGHT, Action.LEFT)}

_RANGES = {
    "num_envs": (1, math.inf),
    "noop_max": (1, math.inf),
    "frame_skip": (1, math.inf),
    "stack_size": (1, math.inf),
    "max_episode_frames": (1, math.inf),
}


class DeepMindAtariEnv(gymnasium.Env):
    """One game; observations are uint8 [stack_size, 84, 84], newest last.

    Each environment step repeats its action for `frame_skip` frames, fewer if the game ends. The
    last two frames are pooled by their maximum, colour by colour. Rewards are summed, not clipped.

    A game begins with the emulator's reset and k frames of no-op, k uniform in 1 .. `noop_max`,
    rewards of which are lost; frames before are zero. With `life_loss_is_terminal` a lost life ends
    the repetition too, and the game goes on after k + 1 frames of no-op, likewise.

    Attributes:
      life_lost: whether the step before lost a life, with `life_loss_is_terminal`.
    """

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        game: str,
        *,
        life_loss_is_terminal: bool,
        noop_max: int,
        frame_skip: int,
        stack_size: int,
        max_episode_frames: float,
        render_mode: str | None,
    ):
        """See `deepmind_atari_environment`, which has checked the arguments."""
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._ale = ALEInterface()
        self._ale.setFloat("repeat_action_probability", 0.0)
        rom = roms.get_rom_path(game)
        assert rom is not None, "the game has been checked"
        self._rom = rom
        self._ale.loadROM(self._rom)
        self._actions = _ACTIONS_OF.get(game) or self._ale.getMinimalActionSet()
        self._max_frames = _MAX_FRAMES_OF.get(game, _MAX_FRAMES)
        self._life_loss_is_terminal = life_loss_is_terminal
        self._noop_max = noop_max
        self._frame_skip = frame_skip
        self._max_episode_frames = max_episode_frames
        self._painted = np.zeros((2, *self._ale.getScreenDims(), 3), np.uint8)
        self._stack = np.zeros((stack_size, _SIDE, _SIDE), np.uint8)
        self._lives = 0
        self.life_lost = False
        self.render_mode = render_mode
        self.metadata = self.metadata | {"render_fps": FRAMES_PER_SECOND / frame_skip}
        self.action_space = gymnasium.spaces.Discrete(len(self._actions))
        self.observation_space = gymnasium.spaces.Box(0, 255, self._stack.shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins a game; with a `seed`, all that follows depends on it and on the actions alone."""
        super().reset(seed=seed)
        if seed is not None:
            self._ale.setInt("random_seed", seed)
            self._ale.loadROM(self._rom)  # takes over the seed, and forgets all that was played
        over = True
        while over:
            # Takes the place of the first of k + 1 no-ops, as a game that is over answers it.
            self._ale.reset_game()
            self._paint()
            over = self._wait(self._draw_noops())
        self._stack.fill(0)
        self.life_lost = False
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """gymnasium's; terminated means that the game is over, never that only a life is lost."""
        reward, over = self._repeat(self._actions[int(action)])
        if self.life_lost and not over:
            # At least two frames: nothing of the life before is left to pool.
            over = self._wait(1 + self._draw_noops())
        frames = self._ale.getEpisodeFrameNumber()
        truncated = not over and frames >= self._max_episode_frames
        if self.life_lost and not over and not truncated:
            self._stack.fill(0)
        return self._observe(), float(reward), over, truncated, {}

    def render(self) -> np.ndarray:
        """The screen as a player sees it, uint8 [height, width, 3]."""
        return self._ale.getScreenRGB()

    def close(self) -> None:
        """Frees the emulator, which a traced graph that holds this object would keep."""
        vars(self).pop("_ale", None)

    def get_state(self) -> dict[str, np.ndarray]:
        """All that the future depends on beside actions, between steps of a game."""
        return {
            "emulator": np.frombuffer(self._ale.cloneSystemState().serialize(), np.uint8),
            "np_random": np.array(json.dumps(self.np_random.bit_generator.state)),
            "painted": self._painted.copy(),
            "stack": self._stack.copy(),
            "lives": np.array(self._lives),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Goes back to what `get_state` gave."""
        self._ale.restoreSystemState(ALEState(state["emulator"].tobytes()))
        self.np_random.bit_generator.state = json.loads(str(state["np_random"]))
        self._painted[:], self._stack[:] = state["painted"], state["stack"]
        self._lives = int(state["lives"])

    def _repeat(self, action: Action) -> tuple[int, bool]:
        """The sum of the frames' rewards, and whether the game is over."""
        total, over = 0, False
        for _ in range(self._frame_skip):
            reward, over = self._play(action)
            total += reward
            self.life_lost = self._life_loss_is_terminal and self._ale.lives() < self._lives
            if over or self.life_lost:
                break
        return total, over

    def _wait(self, num_frames: int) -> bool:
        """Frames of no-op until the game is over; whether it is."""
        return any(self._play(Action.NOOP)[1] for _ in range(num_frames))

    def _play(self, action: Action) -> tuple[int, bool]:
        reward = self._ale.act(action)
        self._paint()
        ran_out = self._ale.getEpisodeFrameNumber() >= self._max_frames
        return reward, self._ale.game_over() or ran_out

    def _draw_noops(self) -> int:
        return int(self.np_random.integers(1, self._noop_max, endpoint=True))

    def _paint(self) -> None:
        """Keeps the screen, and the one before."""
        self._painted[0] = self._painted[1]
        self._ale.getScreenRGB(self._painted[1])

    def _observe(self) -> np.ndarray:
        """The stack with the newest frame; remembers the lives that it shows."""
        self._lives = self._ale.lives()
        pooled = np.maximum(self._painted[0], self._painted[1])
        grey = deepmind_screen.downscale(deepmind_screen.luma(pooled), _SIDE, _SIDE)
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = deepmind_screen.to_bytes(grey)
        return self._stack.copy()


class DeepMindAtariEnvironment(VectorEnvironment):
    """A lost life cuts the return: a MID row with discount 0, and the game goes on."""

    def _discount(
        self, step_type: np.ndarray, terminated: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        lost = np.array([env.life_lost for env in self._vector_env.envs])
        return np.subtract(1, terminated | lost, dtype=np.float32)


@gin.configurable(denylist=["seed", "render"])
def deepmind_atari_environment(
    seed: int,
    *,
    game: str = "",
    num_envs: int = 1,
    life_loss_is_terminal: bool = True,
    noop_max: int = 30,
    frame_skip: int = 4,
    stack_size: int = 4,
    max_episode_frames: int | None = None,
    render: bool = False,
) -> VectorEnvironment:
    """Games of xitari's minimal action sets, without sticky actions; see `DeepMindAtariEnv`.

    Args:
      seed: fixes all that the environments draw.
      game: the ROM's name in snake case, as in `"space_invaders"`.
      num_envs: environments stepped together, in one thread.
      life_loss_is_terminal: bound to False for evaluation, where only the end of a game is.
      noop_max: the most frames of no-op before a game.
      frame_skip: frames in an environment step.
      stack_size: frames in an observation.
      max_episode_frames: frames after which a game is truncated; None for no limit.
      render: whether `render()` is to work; there is then one environment.

    Raises:
      UserError: there is no such game, or a value is out of its range.
    """
    limit = math.inf if max_episode_frames is None else max_episode_frames
    arguments = locals() | {"max_episode_frames": limit}
    check_arguments(arguments, _RANGES, "deepmind_atari_environment")
    make = functools.partial(
        DeepMindAtariEnv,
        game,
        life_loss_is_terminal=life_loss_is_terminal,
        noop_max=noop_max,
        frame_skip=frame_skip,
        stack_size=stack_size,
        max_episode_frames=limit,
        render_mode="rgb_array" if render else None,
    )
    vector_env = LeanSyncVectorEnv(
        [make] * (1 if render else num_envs), autoreset_mode=AutoresetMode.NEXT_STEP
    )
    return DeepMindAtariEnvironment(
        vector_env, name=f"Atari {game}", seed=seed, anchor_interval=ANCHOR_INTERVAL
    )
