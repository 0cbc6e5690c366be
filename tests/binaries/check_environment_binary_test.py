"""Tests of python -m pipeline.check_environment."""

import itertools
import os
import re
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import TESTS, run_binary, user_environment
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Space, Text


class FaultyEnv(gymnasium.Env):
    """Has a clock of its own, no end, large rewards, and a text."""

    observation_space: Space = Dict(clock=Box(0, np.inf, (), np.float64), mission=Text(9))
    action_space: Space = Box(-np.inf, np.inf, (2,), np.float32)
    clock = itertools.count(1_700_000_000)  # goes on from reset to reset

    def observe(self):
        return {"clock": np.float64(next(self.clock)), "mission": "go"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), -1e6, False, False, {}


class SaneEnv(FaultyEnv):
    """Ends after 50 steps."""

    observation_space: Space = Discrete(50)
    action_space = Discrete(2)

    def observe(self):
        return self.time

    def reset(self, **kwargs):
        self.time = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.time += 1
        return min(self.time, 49), 0.5, self.time == 50, False, {}


class MaskedEnv(SaneEnv):
    """Allows one action, and at most one instance at a time."""

    observation_space: Space = Dict(observation=Discrete(50), action_mask=MultiBinary(2))
    number = 0

    def __init__(self):
        if MaskedEnv.number:
            raise RuntimeError("the licence is in use")
        MaskedEnv.number += 1

    def observe(self):
        return {"observation": self.time, "action_mask": np.array([1, 0], np.int8)}

    def step(self, action):
        assert action == 0
        self.time += 1
        return self.observe(), 0.5, self.time == 49, False, {}

    def close(self):
        MaskedEnv.number -= 1


class HugeEnv(SaneEnv):
    """Returns numbers that float32 does not hold, and cannot be closed."""

    observation_space: Space = Box(-np.inf, np.inf, (), np.float64)
    viewer: Any = None

    def close(self):
        self.viewer.close()

    def step(self, action):
        _, _, *rest = super().step(action)
        return np.float64(1e39), 1e39, *rest


class BrokenEnv(SaneEnv):
    """Fails in `reset`."""

    def reset(self, **kwargs):
        raise ValueError("no map is loaded")


class GrowingEnv(SaneEnv):
    """Pays more after every episode that it has ended."""

    level = 0

    def step(self, action):
        observation, _, terminated, *rest = super().step(action)
        self.level += terminated
        return observation, float(self.level), terminated, *rest


class ReseededEnv(SaneEnv):
    """Draws from a generator that only a reset with a seed determines."""

    def reset(self, **kwargs):
        self.rng = np.random.default_rng(kwargs.get("seed"))
        return super().reset(**kwargs)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.rng.random(), *rest


class StuckEnv(SaneEnv):
    """Never returns from `step`."""

    def step(self, action):
        while True:
            time.sleep(1)


class SlowEnv(SaneEnv):
    """Takes three seconds for the first resets of the process, and two milliseconds for a step."""

    resets = itertools.count()

    def reset(self, **kwargs):
        time.sleep(3 * (next(self.resets) < 2))
        return super().reset(**kwargs)

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


class PinnedEnv(SlowEnv):
    """Leaves its process one processor."""

    def __init__(self):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


gymnasium.register("Slow-v0", entry_point=f"{__name__}:SlowEnv")
gymnasium.register("Pinned-v0", entry_point=f"{__name__}:PinnedEnv")
gymnasium.register("Huge-v0", entry_point=f"{__name__}:HugeEnv")
gymnasium.register("Broken-v0", entry_point=f"{__name__}:BrokenEnv")
gymnasium.register("Growing-v0", entry_point=f"{__name__}:GrowingEnv")
gymnasium.register("Reseeded-v0", entry_point=f"{__name__}:ReseededEnv")
gymnasium.register("Stuck-v0", entry_point=f"{__name__}:StuckEnv")
gymnasium.register("Masked-v0", entry_point=f"{__name__}:MaskedEnv")
gymnasium.register("Faulty-v0", entry_point=f"{__name__}:FaultyEnv")
gymnasium.register("Sane-v0", entry_point=f"{__name__}:SaneEnv")


def check(name, *bindings, steps=None):
    binding = f"gymnasium_environment.name = '{__name__}:{name}-v0'"
    path = os.pathsep.join([str(TESTS / "binaries"), str(TESTS)])
    environment = user_environment(PYTHONPATH=path)
    flags = [f"--gin_bindings={text}" for text in (binding, *bindings)]
    flags += [f"--num_steps={steps}"] if steps else []
    ended = run_binary("check_environment", *flags, env=environment)
    return ended, " ".join(ended.stdout.split())


TIME_LIMIT = '(("gymnasium.wrappers:TimeLimit", {"max_episode_steps": 90}),)'


@pytest.mark.parametrize(
    ("name", "bindings", "texts"),
    [
        (
            "Sane",
            [f"gymnasium_environment.wrappers = {TIME_LIMIT}", "mlp_encoder.units = (16,)"],
            [
                "observation Discrete(50)",
                "OneHot (50,)",
                "agents DQN, n-step Q-learning, PPO, A2C, A3C, IMPALA, TRPO",
                "episodes 19 in 981 random steps (19 terminated), 50 steps on average",
                "rewards from 0.5 to 0.5",
                "Dense (16,)",
                "exact resume yes",
                "gymnasium no problems found",
                "advice",
            ],
        ),
        (
            "Faulty",
            [],
            [
                "agents PPO, A2C, A3C, IMPALA, TRPO",
                "exact resume no",
                "observation['clock'] reaches 1.7e+09. Bind ActorCritic.normalize_observations",
                "agents do not see observation['mission']",
                "rewards reach 1e+06",
                "no episode ended",
                "the actions have no finite bounds",
            ],
        ),
        ("Growing", [], ["exact resume no"]),
        ("Reseeded", [], ["exact resume no"]),
        (
            "Huge",
            [],
            [
                "observation contains NaN, infinity or a number too large for float32",
                "rewards contain NaN, infinity or a number too large for float32",
            ],
        ),
        (
            "Masked",
            [],
            [
                "gymnasium not checked: its checker does not know action masks",
                "exact resume unknown: a second environment cannot be built",
                "the licence is in use",
                "build_evaluator.share_environment = True",
            ],
        ),
    ],
)
def test_what_is_said_of_an_environment(name, bindings, texts):
    ended, said = check(name, *bindings)
    assert ended.returncode == 0, ended.stderr
    for text in texts:
        assert text in said, said


@pytest.mark.parametrize("name", ["Slow", "Pinned"])
def test_the_speed_is_that_of_steps_and_as_many_are_taken_as_are_asked_for(name):
    ended, said = check(name, steps=200)
    assert ended.returncode == 0, ended.stderr
    has_several = name == "Slow" and len(os.sched_getaffinity(0)) > 1
    assert ("steps are slow" in said) == has_several  # processes need processors
    assert "in 197 random steps" in said  # 3 of 200 rows are boundary rows
    speed = float(re.findall(r"speed ([\d,]+) environment steps", said)[0].replace(",", ""))
    assert 60 < speed < 500  # with one of the slow resets, it would be below 59


@pytest.mark.parametrize(
    ("name", "bindings", "texts"),
    [
        ("Absent", [], ["Absent-v0"]),
        ("Broken", [], ["Broken-v0", "reset", "ValueError: no map is loaded"]),
        ("Stuck", ["Watchdog.timeout = 2"], ["Stuck-v0", "step", "Watchdog.timeout"]),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(name, bindings, texts):
    ended, _ = check(name, *bindings)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for text in texts:
        assert text in ended.stderr
