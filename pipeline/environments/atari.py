"""Runs Atari 2600 games through the ALE's C++ vector environment.

`atari_environment` has the defaults of Machado et al. (2018), but with minimal action sets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import gin
import numpy as np
from ale_py import AtariVectorEnv, roms
from gymnasium.vector import AutoresetMode

from pipeline.configuration.statements import suggest
from pipeline.environments.atari_rendering import RenderingAtariVectorEnv
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.vectors import GymnasiumVector
from pipeline.utils.constraints import Probability, Range, check_arguments
from pipeline.utils.errors import UserError

# ROMs for two or more players. The ALE's vector environment ends the process on loading them.
_MULTIPLAYER_ONLY = frozenset({"combat", "joust", "maze_craze", "warlords"})


# Numbers that the emulator keeps in 32 bits.
NonNegativeInt32 = Annotated[int, Range(0, 2**31 - 1)]
PositiveInt32 = Annotated[int, Range(1, 2**31 - 1)]

# In vector steps. A seeded reset reloads the ROM, which takes as long as about 200 steps.
ANCHOR_INTERVAL = 5_000

_FIXED_SETTINGS: dict[str, Any] = {
    "autoreset_mode": AutoresetMode.NEXT_STEP,
    # The emulator's own options for lost lives reset the game, or hide where it ends.
    "episodic_life": False,
    "life_loss_info": False,
    "reward_clipping": False,
}


class AtariVector(GymnasiumVector):
    """Adapts AtariVectorEnv, which takes its seeds as an array.

    AtariVectorEnv frees its threads when it is destroyed.
    """

    copies_observations = False

    def close(self) -> None:
        """Frees the emulators. A traced graph keeps this object alive, so nothing else would."""
        super().close()
        vars(self.vector_env).pop("ale", None)

    def _seeds(self, seeds: Sequence[int], mask: np.ndarray | None) -> np.ndarray:
        return np.array(seeds) if mask is None else np.array(seeds)[mask]


class LifeLossAtariVector(AtariVector):
    """Cuts the return at a lost life (discount 0), while the game continues.

    A life is lost by the rule of OpenAI Baselines' EpisodicLifeEnv: there are fewer lives than
    before, but not none, because some games show zero lives for a while before they are over.
    """

    def _on_reset(self, info: dict[str, Any], mask: np.ndarray | None) -> None:
        self._lives = info["lives"]
        none = np.zeros(self.num_envs, np.bool_)
        self._was_last: np.ndarray = none if mask is None else self._was_last & ~mask

    def _discount(
        self, terminated: np.ndarray, is_last: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        lives = info["lives"]
        lost = (lives < self._lives) & (lives > 0) & ~is_last & ~self._was_last
        self._lives, self._was_last = lives, is_last
        return np.subtract(1, terminated | lost, dtype=np.float32)


@gin.configurable(denylist=["seed", "render"])
def atari_environment(
    seed: int,
    *,
    game: str = "",
    num_envs: PositiveInt32 = 8,
    repeat_action_probability: Probability = 0.25,
    full_action_space: bool = False,
    noop_max: NonNegativeInt32 = 0,
    use_fire_reset: bool = False,
    zero_discount_on_life_loss: bool = False,
    frame_skip: PositiveInt32 = 4,
    stack_size: PositiveInt32 = 4,
    continuous: bool = False,
    continuous_action_threshold: Probability = 0.5,
    max_episode_frames: PositiveInt32 = 108_000,
    num_threads: NonNegativeInt32 = 0,
    render: bool = False,
) -> VectorEnvironment:
    """Creates a vector environment of one Atari game, with whole games and unclipped rewards.

    Observations are uint8 [N, stack_size, 84, 84], with the newest frame last.

    Args:
      seed: Seed of everything that the environments draw; `num_threads` does not change results.
      game: Name of the ROM in snake case, for example `"space_invaders"`.
      num_envs: Number of environments that are stepped together.
      repeat_action_probability: Probability that the emulator repeats the last action in a frame.
      full_action_space: Whether to use all 18 actions instead of those that the game uses.
      noop_max: An episode starts with 0 to `noop_max - 1` no-op frames.
      use_fire_reset: Whether an episode starts with a FIRE frame, in games that have FIRE.
      zero_discount_on_life_loss: Whether the loss of a life ends the return: the discount is 0, and
        the game goes on.
      frame_skip: Frames in an environment step; the last two are pooled by their maximum.
      stack_size: Frames in an observation.
      continuous: Whether actions are a joystick's radius, angle, fire (Farebrother & Castro 2024).
      continuous_action_threshold: Smallest deflection of the joystick that counts.
      max_episode_frames: Frames after which an episode is truncated.
      num_threads: Threads that emulate; 0 for the smaller number of processors and environments.
      render: Whether `render()` can be used; there is then only one environment.

    Raises:
      UserError: If there is no such game or a value is out of its range.
    """
    check_arguments(atari_environment, locals())
    check_game(game, "atari_environment")
    make = functools.partial(
        RenderingAtariVectorEnv if render else AtariVectorEnv,
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
    adapt = LifeLossAtariVector if zero_discount_on_life_loss else AtariVector
    return VectorEnvironment(
        lambda: adapt(make()),
        name=f"Atari {game}",
        seed=seed,
        anchor_interval=ANCHOR_INTERVAL,
    )


def check_game(game: str, factory: str) -> None:
    """Checks that the ALE can load the game, because it ends the process if it cannot.

    Raises:
      UserError: If the game is unknown or its ROM cannot be loaded.
    """
    if not game:
        raise UserError(
            f"{factory}.game is not bound: name the game, for example"
            f" --gin_bindings=\"{factory}.game='pong'\"."
        )
    if game in _MULTIPLAYER_ONLY:
        raise UserError(
            f"{factory}.game = {game!r}: the game is for several players. Choose another game."
        )
    games = roms.get_all_rom_ids()
    if game not in games:
        raise UserError(
            f"{factory}.game = {game!r}: there is no such game. Names are in snake case, for"
            f" example 'space_invaders'.{suggest(game.lower(), games)}"
        )
    try:
        roms.get_rom_path(game)
    except OSError as error:
        raise UserError(
            f"{factory}.game = {game!r}: its ROM cannot be loaded: {error}.\n"
            "ale-py contains all ROMs: unset ALE_ROMS_DIR, or set it to a folder that holds them as"
            " NAME.bin."
        ) from error
