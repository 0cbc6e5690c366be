"""Tests that environments whose episodes never end continue from states that they provide."""

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from exact_restore_test import WalkEnv, assert_continues, build, play
from gymnasium import wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_environments import drawn_actions

from pipeline.environments import saved_states
from pipeline.environments.process_vector import ProcessVector

INTERVAL = 10  # vector steps between anchors


class WithoutState(WalkEnv):
    """Environment that never ends and does not provide its state."""

    def step(self, action):
        observation, reward, *_, info = super().step(action)
        return observation, reward, False, False, info


class EndlessEnv(WithoutState):
    """Environment that never ends and provides its state."""

    def get_state(self):
        generator = json.dumps(self.np_random.bit_generator.state)
        return {"place": self.place, "time": self.time, "generator": generator}

    def set_state(self, state):
        self.place, self.time = float(state["place"]), int(state["time"])
        self.np_random.bit_generator.state = json.loads(str(state["generator"]))


class SometimesEnv(EndlessEnv):
    """Environment that ends sometimes, after more steps than an anchor's interval."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.np_random.uniform() < 0.02, False, info


class SecretiveEnv(EndlessEnv):
    """Environment whose state cannot be stored in a file of arrays."""

    def get_state(self):
        return {"generator": self.np_random}


class LoudEnv(gymnasium.Wrapper):
    """Wrapper that provides no state, although it may have one."""


class RandomLimit(wrappers.TimeLimit):
    """Draws its limit at each reset. Its state is more than that of a `TimeLimit`."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        self._max_episode_steps = int(self.np_random.integers(5, 75))
        return observation, info

    def get_state(self):
        return {"elapsed": self._elapsed_steps, "limit": self._max_episode_steps}

    def set_state(self, state):
        self._elapsed_steps = int(state["elapsed"])  # type: ignore[assignment]
        self._max_episode_steps = int(state["limit"])


def randomly_limited():
    return RandomLimit(EndlessEnv(), 75)


def limited():
    return wrappers.OrderEnforcing(wrappers.TimeLimit(EndlessEnv(), 75))


@pytest.mark.parametrize("env_class", [EndlessEnv, SometimesEnv, limited, randomly_limited])
@given(before=st.integers(0, 150))
@settings(max_examples=25)
def test_it_continues_from_any_moment(tmp_path_factory, env_class, before):
    folder = tmp_path_factory.mktemp("saved")
    create = lambda: build(env_class, interval=INTERVAL, num_envs=2)  # noqa: E731
    first, _ = assert_continues(create, folder, before, after=60)
    assert first.episodes.log.length <= 2 * INTERVAL + 1


def test_what_is_repeated_is_bounded_only_where_states_are_given_out(tmp_path):
    lengths = {}
    for env_class in (EndlessEnv, WithoutState):
        env = build(env_class, interval=INTERVAL, num_envs=1)
        play(env, drawn_actions(env, 100))
        lengths[env_class] = env.episodes.log.length
    assert lengths == {EndlessEnv: 19, WithoutState: 99}


def test_every_wrapper_has_to_be_known():
    assert saved_states.are_offered(EndlessEnv())
    assert saved_states.are_offered(limited())
    assert not saved_states.are_offered(WithoutState())
    assert not saved_states.are_offered(LoudEnv(EndlessEnv()))
    known: Any
    for known in wrappers.OrderEnforcing, wrappers.PassiveEnvChecker, wrappers.TimeLimit:
        heir = type("Heir", (known,), {})  # It may have more state.
        arguments = [75] if known is wrappers.TimeLimit else []
        assert saved_states.are_offered(known(EndlessEnv(), *arguments))
        assert not saved_states.are_offered(heir(EndlessEnv(), *arguments))


def test_environments_in_processes_give_their_states(tmp_path):
    first, second = assert_continues(
        lambda: build(EndlessEnv, ProcessVector, num_envs=2, interval=INTERVAL), tmp_path, 50, 20
    )
    assert first.episodes.log.states
    first.close()
    second.close()


class ArrayEnv(EndlessEnv):
    """Has a `get_state` of another form."""

    def get_state(self):
        return np.zeros(3)


class BytesEnv(EndlessEnv):
    """Has a state of bytes. NumPy drops the zeros at their end."""

    def get_state(self):
        return {"simulator": b"state\0"}


class ArgumentEnv(EndlessEnv):
    """Has a `get_state` that takes an argument."""

    def get_state(self, place):  # type: ignore[override]
        return {"place": place}


@pytest.mark.parametrize("env_class", [SecretiveEnv, ArrayEnv, ArgumentEnv, BytesEnv])
def test_a_get_state_of_another_form_is_not_used(env_class, capsys):
    env = build(env_class, interval=INTERVAL, num_envs=1)
    env.reset()
    assert "walk: its get_state is not used to resume" in capsys.readouterr().err
    play(env, drawn_actions(env, 100))
    assert env.episodes.log.length == 100


def test_what_evaluates_keeps_no_actions():
    env = build(interval=INTERVAL)
    with env.episodes.unrecorded(0, None):
        play(env, drawn_actions(env, 50))
    assert env.episodes.log.steps == 0
    np.testing.assert_array_equal(env.episodes.log.numbers, 0)


def test_a_truncation_at_the_end_of_an_evaluation_is_over_with_it():
    episodes = build(num_envs=1).episodes
    for _ in range(2):
        with episodes.unrecorded(0, 2):
            episodes.reset()
            rows = [episodes.step(np.ones(1, np.int32)) for _ in range(2)]
        assert [int(row[0][0]) for row in rows] == [1, 2]  # MID, LAST
