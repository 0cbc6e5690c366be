"""Small gymnasium environments whose behaviour is completely known."""

import copy
import os
import pathlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.vectors import GymnasiumVector

OPENAI = {
    "repeat_action_probability": 0.0, "noop_max": 30, "use_fire_reset": True,
    "zero_discount_on_life_loss": True,
}  # fmt: skip
MASKED_ACTIONS = 12
_KINDS_OF_END = ("terminated", "truncated")


class PlainEnv(gymnasium.Env):
    """Plays episodes of `length` steps with random observations and rewards of 1."""

    observation_space: Box = Box(-1, 1, (3,), np.float32)
    action_space = Discrete(2)
    length = 5

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert options is None
        self.time = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action):
        self.time += 1
        return self.observe(), 1.0, self.time >= self.length, False, {}


class ScriptedEnv(gymnasium.Env):
    """Environment that plays (length, ending) in turn: "terminated", "truncated" or "both".

    The observation is (episode, step), the reward the step; `seeds` and `actions` are kept.
    """

    def __init__(self, episodes, action_space=None):
        self.observation_space = Box(0, 100, (2,), np.float32)
        self.action_space = action_space or Discrete(2)
        self.episodes, self.episode = episodes, -1
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.episode, self.time = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action):
        self.actions.append(np.copy(action))
        if isinstance(action, np.ndarray):
            action *= 0
        self.time += 1
        length, ending = self.episodes[self.episode % len(self.episodes)]
        over = self.time == length
        observation = np.array([self.episode, self.time], np.float32)
        terminated, truncated = (over and ending in (kind, "both") for kind in _KINDS_OF_END)
        return observation, self.time, terminated, truncated, {"a": 1}


class EchoEnv(gymnasium.Env):
    """Environment whose seeded generator draws observations from the space."""

    def __init__(self, observation_space, action_space=None):
        self.observation_space = observation_space
        self.action_space = action_space or Discrete(2)
        self.sent: list[Any] = []

    def _observation(self):
        low, high = (0, 2) if self.observation_space.dtype == bool else (0, 100)
        drawn = self.np_random.integers(low, high, self.observation_space.shape)
        self.sent.append(np.asarray(drawn, self.observation_space.dtype))
        return self.sent[-1], {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation()

    def step(self, action):
        return self._observation()[0], 0.0, False, False, {}


class SamplingEnv(gymnasium.Env):
    """Plays episodes of 5 steps whose observations are samples of the space.

    The reward counts the actions that are not in the action space: 1 minus 9 for each.
    """

    def __init__(self, observation_space, action_space=None):
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space or Discrete(2)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self.observe(), {}

    def observe(self):
        return self.observation_space.sample()

    def step(self, action):
        self.time += 1
        reward = 1.0 if self.action_space.contains(action) else -9.0
        return self.observe(), reward, self.time >= 5, False, {}


class RaisingEnv(ScriptedEnv):
    def step(self, action):
        raise KeyError("no such room")


def environment(*envs, vector_class=SyncVector, seed=1, **kwargs):
    makes = [lambda env=env: env for env in envs]
    return VectorEnvironment(lambda: vector_class(makes), name="scripted", seed=seed, **kwargs)


def gymnasium_vector(vector_class):
    """Returns a class of vectors that adapts a vector class of gymnasium."""
    return lambda makes: GymnasiumVector(vector_class(makes))


def run(env, actions):
    """Returns arrays [T, N] of the fields of a reset's time step and those that follow."""
    steps = [env.reset()] + [env.step(action) for action in actions]
    return [np.stack([getattr(step, field) for step in steps]) for field in steps[0]._fields]


def drawn_actions(env, num_steps, seed=0):
    generator = np.random.default_rng(seed)
    spec = env.action_spec()
    shape = (num_steps, env.batch_size, *spec.shape)
    if spec.dtype.is_integer:
        return generator.integers(0, spec.maximum + 1, shape).astype(spec.dtype.as_numpy_dtype)
    return generator.uniform(spec.minimum, spec.maximum, shape).astype(np.float32)


class MaskedGame(gymnasium.Env):
    """Allows two actions of twelve in each step, and raises if another is taken.

    The lower one of the two earns a reward of 1.
    """

    observation_space = Dict(
        observation=Box(0, 1, (2,), np.float32), action_mask=MultiBinary(MASKED_ACTIONS)
    )
    action_space = Discrete(MASKED_ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def _observe(self):
        self.mask = np.zeros(MASKED_ACTIONS, np.int8)
        if self.time < 10:
            self.mask[self.np_random.choice(MASKED_ACTIONS, 2, replace=False)] = 1
        numbers = self.np_random.uniform(0, 1, 2).astype(np.float32)
        return {"observation": numbers, "action_mask": self.mask}

    def step(self, action):
        assert self.mask[action], f"action {action} is forbidden by {self.mask}"
        reward = float(action == np.argmax(self.mask))
        self.time += 1
        return self._observe(), reward, self.time == 10, False, {}


class ClosingEnv(PlainEnv):
    """Leaves a file in `folder` when it is closed."""

    def __init__(self, folder, render_mode=None):
        super().__init__(render_mode)
        self.folder = pathlib.Path(folder)

    def close(self):
        (self.folder / f"closed by {os.getpid()}").touch()


gymnasium.register("Closing-v0", f"{__name__}:ClosingEnv")
gymnasium.register("MaskedGame-v0", f"{__name__}:MaskedGame")
