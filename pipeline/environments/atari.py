"""Atari 2600 games through the ALE's C++ vector environment."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import gin
import numpy as np
from ale_py import AtariVectorEnv, roms
from gymnasium.vector import AutoresetMode, VectorEnv
from tf_agents.trajectories import time_step as ts

from pipeline.environments.atari_rendering import RenderingAtariVectorEnv
from pipeline.environments.episodes import reset_options
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.errors import UserError

# ROMs for two players or more: the ALE's vector environment ends the process on loading them.
_MULTIPLAYER_ONLY = frozenset({"combat", "joust", "maze_craze", "warlords"})


_RANGES = {
    "num_envs": (1, math.inf),
    "repeat_action_probability": (0, 1),
    "noop_max": (0, math.inf),
    "frame_skip": (1, math.inf),
    "stack_size": (1, math.inf),
    "continuous_action_threshold": (0, 1),
    "max_episode_frames": (1, math.inf),
}

# Vector steps. A seeded reset loads the ROM anew, which takes as long as some 200 steps.
ANCHOR_INTERVAL = 5_000

_FIXED_SETTINGS: dict[str, Any] = {
    "autoreset_mode": AutoresetMode.NEXT_STEP,
    # The emulator's own kinds of life loss reset the game, or hide where it ends.
    "episodic_life": False,
    "life_loss_info": False,
    "reward_clipping": False,
}


class AtariEnvironment(VectorEnvironment):
    """AtariVectorEnv takes its seeds as an array, and frees its threads when it is destroyed."""

    def __init__(self, vector_env: VectorEnv, *, name: str, seed: int):
        super().__init__(vector_env, name=name, seed=seed, anchor_interval=ANCHOR_INTERVAL)

    def _reset_vector_env(
        self, seeds: list[int], mask: np.ndarray | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        of_mask = np.array(seeds) if mask is None else np.array(seeds)[mask]
        return self._vector_env.reset(seed=of_mask, options=reset_options(mask))

    def close(self) -> None:
        super().close()
        # A traced graph keeps this object alive; the emulators need not stay with it.
        vars(self._vector_env).pop("ale", None)


class LifeLossAtariEnvironment(AtariEnvironment):
    """A lost life cuts the return (MID row with discount 0), and the game goes on.

    The rule for a lost life is that of OpenAI Baselines' EpisodicLifeEnv: fewer lives than
    before, but not none, because some games show zero lives for a while before they are over.
    """

    def _on_reset(self, info: dict[str, Any]) -> None:
        self._lives = info["lives"]

    def _discount(
        self, step_type: np.ndarray, terminated: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        lives = info["lives"]
        lost = (lives < self._lives) & (lives > 0) & (step_type == ts.StepType.MID)
        self._lives = lives
        return np.subtract(1, terminated | lost, dtype=np.float32)


@gin.configurable(denylist=["seed", "render"])
def atari_environment(
    seed: int,
    *,
    game: str = "",
    num_envs: int = 8,
    repeat_action_probability: float = 0.25,
    full_action_space: bool = False,
    noop_max: int = 0,
    use_fire_reset: bool = False,
    zero_discount_on_life_loss: bool = False,
    frame_skip: int = 4,
    stack_size: int = 4,
    continuous: bool = False,
    continuous_action_threshold: float = 0.5,
    max_episode_frames: int = 108_000,
    num_threads: int = 0,
    render: bool = False,
) -> VectorEnvironment:
    """A vector of one Atari game; observations are uint8 [N, stack_size, 84, 84], newest last.

    Whole games, unclipped rewards; defaults of Machado et al. (2018), but minimal action sets.

    Args:
      seed: fixes all that the environments draw; results do not depend on `num_threads`.
      game: the ROM's name in snake case, as in `"space_invaders"`.
      num_envs: environments stepped together.
      repeat_action_probability: of the emulator repeating the action before, at each frame.
      full_action_space: all 18 actions instead of those that the game uses.
      noop_max: an episode starts with 0 to `noop_max - 1` frames of no-op.
      use_fire_reset: an episode starts with a frame of FIRE, in games that have it.
      zero_discount_on_life_loss: see `LifeLossAtariEnvironment`.
      frame_skip: frames in an environment step; the last two are pooled by their maximum.
      stack_size: frames in an observation.
      continuous: actions are a joystick's radius, angle, fire (Farebrother & Castro 2024).
      continuous_action_threshold: from where on the joystick's deflection counts.
      max_episode_frames: frames after which an episode is truncated.
      num_threads: that emulate; 0 for as many as there are processors or environments.
      render: whether `render()` is to work; there is then one environment.

    Raises:
      UserError: there is no such game, or a value is out of its range.
    """
    check_arguments(locals(), _RANGES, "atari_environment")
    vector_env = (RenderingAtariVectorEnv if render else AtariVectorEnv)(
        game,
        1 if render else num_envs,
        num_threads=num_threads,
        max_num_frames_per_episode=max_episode_frames,
        repeat_action_probability=repeat_action_probability,
        full_action_space=full_action_space,
        continuous=continuous,
        continuous_action_threshold=continuous_action_threshold,
        stack_num=stack_size,
        frameskip=frame_skip,
        noop_max=noop_max,
        use_fire_reset=use_fire_reset,
        **_FIXED_SETTINGS,
    )
    environment = LifeLossAtariEnvironment if zero_discount_on_life_loss else AtariEnvironment
    return environment(vector_env, name=f"Atari {game}", seed=seed)


def _check_game(game: str, factory: str) -> None:
    """The ALE ends the process when it cannot load a ROM, so nothing unknown may reach it."""
    if not game:
        raise UserError(
            f"{factory}.game is not bound: name the game, as in"
            f" --gin_bindings=\"{factory}.game='pong'\"."
        )
    if game in _MULTIPLAYER_ONLY:
        raise UserError(f"{factory}.game = {game!r}: the game is for several players only.")
    games = {name.replace("_", ""): name for name in roms.get_all_rom_ids()}
    if game in games.values():
        _check_rom(game, factory)
        return
    near = difflib.get_close_matches(game.lower().replace("_", ""), games)
    names = ", ".join(games[name] for name in near)
    raise UserError(
        f"{factory}.game = {game!r}: there is no such game; names are in snake case, as in"
        f" 'space_invaders'.{f' Nearest: {names}.' if near else ''}"
    )


def _check_rom(game: str, factory: str) -> None:
    try:
        roms.get_rom_path(game)
    except OSError as error:
        raise UserError(
            f"{factory}.game = {game!r}: its ROM cannot be loaded: {error}.\n"
            "ale-py brings all ROMs; unset ALE_ROMS_DIR, or let it name a folder that holds them as"
            " NAME.bin."
        ) from error


def check_arguments(
    arguments: dict[str, Any], ranges: Mapping[str, tuple[float, float]], factory: str
) -> None:
    """Raises UserError for an unknown `game` and for what is out of its range.

    The message names the gin configurable `factory`, whose arguments they are.
    """
    _check_game(arguments["game"], factory)
    for name, (low, high) in ranges.items():
        value = arguments[name]
        kinds = (int, float) if high == 1 or value == math.inf else (int,)
        if type(value) not in kinds or not low <= value <= high:
            kind = "a number" if high == 1 else "a whole number"
            wanted = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
            raise UserError(f"{factory}.{name} = {value!r}: must be {kind}, {wanted}.")
