"""Plays Atari 2600 games as DeepMind's Lua program of 2015 did, on the plain ALE interface.

The ALE's vector environment offers neither single-frame no-ops, nor pooling of colours before they
become grey, nor no-ops after every lost life. `docs/dqn3.md` compares both programs item by item.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any, cast

import gin
import gymnasium
import numpy as np
from ale_py import Action, ALEInterface, ALEState, LoggerMode, roms

from pipeline.environments import deepmind_screen
from pipeline.environments.atari import ANCHOR_INTERVAL, check_game
from pipeline.environments.atari_rendering import FRAMES_PER_SECOND
from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.vectors import Outcome
from pipeline.utils.constraints import PositiveInt, check_arguments

_SIDE = 84  # pixels

# From xitari, the emulator of 2015 (`games/RomSettings.hpp`, `games/supported/Pong.cpp`). Its Pong
# differs from all other games and from today's ALE. A game is over after this many frames.
_MAX_FRAMES, _MAX_FRAMES_OF = 8 * 60 * 60 * 60, {"pong": 65_000}
_ACTIONS_OF = {"pong": (Action.NOOP, Action.RIGHT, Action.LEFT)}


class DeepMindAtariEnv(gymnasium.Env):
    """Plays one game; observations are uint8 [stack_size, 84, 84], newest last.

    Each environment step repeats its action for `frame_skip` frames, or fewer if the game ends. The
    last two frames are pooled by their maximum, separately for each colour. Rewards are summed, not
    clipped.

    A game begins with a reset of the emulator and k no-op frames, with k uniform in 1 ..
    `noop_max`. Their rewards are dropped, and earlier frames of the stack are zero. With
    `life_loss_is_terminal`, a lost life also ends the repetition. The game then continues after
    k + 1 no-op frames, whose rewards are also dropped, and earlier frames of the stack become zero.

    Attributes:
      life_lost: Whether the last step lost a life; always False without `life_loss_is_terminal`.
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
        """Initializes the environment.

        `deepmind_atari_environment` describes the arguments and has checked them.
        """
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
        """Begins a game.

        With a `seed`, everything that follows depends only on the seed and on the actions.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._ale.setInt("random_seed", seed)
            self._ale.loadROM(self._rom)  # applies the seed, and discards everything played before
        over = True
        while over:
            # Replaces the first of k + 1 no-ops: in the Lua program, it resets a game that is over.
            self._ale.reset_game()
            self._paint()
            over = self._wait(self._draw_noops())
        self._stack.fill(0)
        self.life_lost = False
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Steps the game as gymnasium defines it.

        `terminated` means that the game is over, never that only a life is lost.
        """
        reward, over = self._repeat(self._actions[int(action)])
        if self.life_lost and not over:
            # At least two frames, so that no frame of the previous life is left to pool.
            over = self._wait(1 + self._draw_noops())
        frames = self._ale.getEpisodeFrameNumber()
        truncated = not over and frames >= self._max_episode_frames
        if self.life_lost and not over and not truncated:
            self._stack.fill(0)
        return self._observe(), float(reward), over, truncated, {}

    def render(self) -> np.ndarray:
        """Returns the screen as a player sees it, uint8 [height, width, 3]."""
        return self._ale.getScreenRGB()

    def close(self) -> None:
        """Frees the emulator, which a traced graph that holds this object would keep alive."""
        vars(self).pop("_ale", None)

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns everything that the future depends on, except the actions.

        The state is complete between the steps of a game.
        """
        return {
            "emulator": np.frombuffer(self._ale.cloneSystemState().serialize(), np.uint8),
            "np_random": np.array(json.dumps(self.np_random.bit_generator.state)),
            "painted": self._painted.copy(),
            "stack": self._stack.copy(),
            "lives": np.array(self._lives),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores a state that `get_state` returned."""
        self._ale.restoreSystemState(ALEState(state["emulator"].tobytes()))
        self.np_random.bit_generator.state = json.loads(str(state["np_random"]))
        self._painted[:], self._stack[:] = state["painted"], state["stack"]
        self._lives = int(state["lives"])

    def _repeat(self, action: Action) -> tuple[int, bool]:
        """Repeats the action for `frame_skip` frames, or until the game or a life ends.

        Returns:
          Sum of the frames' rewards, and whether the game is over.
        """
        total, over = 0, False
        for _ in range(self._frame_skip):
            reward, over = self._play(action)
            total += reward
            self.life_lost = self._life_loss_is_terminal and self._ale.lives() < self._lives
            if over or self.life_lost:
                break
        return total, over

    def _wait(self, num_frames: int) -> bool:
        """Plays up to `num_frames` no-op frames and returns True if the game ends meanwhile."""
        return any(self._play(Action.NOOP)[1] for _ in range(num_frames))

    def _play(self, action: Action) -> tuple[int, bool]:
        reward = self._ale.act(action)
        self._paint()
        ran_out = self._ale.getEpisodeFrameNumber() >= self._max_frames
        return reward, self._ale.game_over() or ran_out

    def _draw_noops(self) -> int:
        return int(self.np_random.integers(1, self._noop_max, endpoint=True))

    def _paint(self) -> None:
        """Stores the current screen and keeps the previous one."""
        self._painted[0] = self._painted[1]
        self._ale.getScreenRGB(self._painted[1])

    def _observe(self) -> np.ndarray:
        """Adds the newest frame to the stack, stores its number of lives and returns the stack."""
        self._lives = self._ale.lives()
        pooled = np.maximum(self._painted[0], self._painted[1])
        grey = deepmind_screen.downscale(deepmind_screen.luma(pooled), _SIDE, _SIDE)
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = deepmind_screen.to_bytes(grey)
        return self._stack.copy()


class DeepMindAtariVector(SyncVector):
    """Steps games, and returns a discount of 0 when a life is lost. The game continues."""

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Outcome:
        """Steps games; see `Vector.step`."""
        outcome = super().step(actions, live)
        games = [cast(DeepMindAtariEnv, single.env) for single in self.envs]
        lost = np.array([game.life_lost for game in games]) & ~outcome.is_last
        return outcome._replace(discount=np.where(lost, np.float32(0), outcome.discount))


@gin.configurable(denylist=["seed", "render"])
def deepmind_atari_environment(
    seed: int,
    *,
    game: str = "",
    num_envs: PositiveInt = 1,
    life_loss_is_terminal: bool = True,
    noop_max: PositiveInt = 30,
    frame_skip: PositiveInt = 4,
    stack_size: PositiveInt = 4,
    max_episode_frames: PositiveInt | None = None,
    render: bool = False,
) -> VectorEnvironment:
    """Creates a vector environment with xitari's minimal action sets and no sticky actions.

    `DeepMindAtariEnv` describes the games.

    Args:
      seed: Seed of everything that the environments draw.
      game: Name of the ROM in snake case, for example `"space_invaders"`.
      num_envs: Number of environments that are stepped together, in one thread.
      life_loss_is_terminal: Whether a lost life cuts the return. Bind it to False for evaluation,
        where only the end of a game cuts the return.
      noop_max: Largest number of no-op frames before a game.
      frame_skip: Frames in an environment step.
      stack_size: Frames in an observation.
      max_episode_frames: Frames after which a game is truncated; None for no limit.
      render: Whether `render()` can be used; there is then only one environment.

    Raises:
      UserError: If there is no such game or a value is out of its range.
    """
    check_arguments(deepmind_atari_environment, locals())
    check_game(game, "deepmind_atari_environment")
    limit = math.inf if max_episode_frames is None else max_episode_frames
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
    makes = [make] * (1 if render else num_envs)
    return VectorEnvironment(
        lambda: DeepMindAtariVector(makes),
        name=f"Atari {game}",
        seed=seed,
        anchor_interval=ANCHOR_INTERVAL,
    )
