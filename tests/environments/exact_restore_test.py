"""Tests that a restored environment continues where it was saved, by repeating actions."""

import os

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_environments import OPENAI, EchoEnv, drawn_actions, environment, gymnasium_vector

from pipeline.environments import atari, deepmind_atari
from pipeline.environments.atari import atari_environment
from pipeline.environments.deepmind_atari import deepmind_atari_environment
from pipeline.environments.gymnasium_envs import gymnasium_environment
from pipeline.environments.process_vector import ProcessVector
from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.vector_environment import VectorEnvironment


class WalkEnv(gymnasium.Env):
    """Random walk of random length whose every step depends on all the previous ones."""

    observation_space: Box = Box(-1e3, 1e3, (2,), np.float32)
    action_space = Discrete(3)
    generator: np.random.Generator | None = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.np_random.normal(), 0
        return self._observation(), {}

    def _observation(self):
        return np.array([self.place, self.time], np.float32)

    def step(self, action):
        self.time += 1
        self.place += (action - 1) * (self.generator or self.np_random).uniform()
        chance = self.np_random.uniform()
        return self._observation(), self.place, chance < 0.05, chance > 0.95, {}


class DriftingEnv(WalkEnv):
    """Environment that draws from a generator that no seed reaches."""

    generator = np.random.default_rng()


class FragileEnv(WalkEnv):
    """Environment that raises an error if `fails` is set."""

    fails = False

    def step(self, action):
        if self.fails:
            raise OSError("the wheel came off")
        return super().step(action)


class DyingEnv(WalkEnv):
    """Environment that ends its process if `fails` is set."""

    fails = False

    def step(self, action):
        if self.fails:
            os._exit(1)
        return super().step(action)


class PuzzleEnv(WalkEnv):
    """Environment that refuses all actions but one, like a board game, and observes that one."""

    observation_space = Box(0, 2, (1,), np.int64)

    def _observation(self):
        self.legal = self.np_random.integers(3)
        return np.array([self.legal])

    def step(self, action):
        assert action == self.legal
        return super().step(action)


gymnasium.register("Fragile-v0", entry_point=f"{__name__}:FragileEnv")
gymnasium.register("Dying-v0", entry_point=f"{__name__}:DyingEnv")


def build(env_class=WalkEnv, vector_class=SyncVector, num_envs=3, interval=30):
    return VectorEnvironment(
        lambda: vector_class([env_class] * num_envs), name="walk", seed=5, anchor_interval=interval
    )


def play(env, actions):
    """Returns the rows that the actions lead to, as bytes."""
    # TensorFlow would take most of the time of a step.
    return [[row.tobytes() for row in env.episodes.step(action)] for action in actions]


def assert_continues(create, folder, before, after):
    env = create()
    env.reset()
    actions = drawn_actions(env, before + after)
    play(env, actions[:before])
    env.save(folder)
    current = env.current_time_step()
    expected = play(env, actions[before:])
    again = create()
    again.reset()
    again.restore(folder)
    assert again.divergence == ""
    for row, restored in zip(current, again.current_time_step(), strict=True):
        assert row.dtype == restored.dtype
        np.testing.assert_array_equal(row, restored)
    assert play(again, actions[before:]) == expected
    return env, again


@given(before=st.integers(0, 200), interval=st.integers(1, 80), num_envs=st.integers(1, 4))
@settings(max_examples=40)
def test_it_continues_from_any_moment(tmp_path_factory, before, interval, num_envs):
    folder = tmp_path_factory.mktemp("saved")
    assert_continues(lambda: build(interval=interval, num_envs=num_envs), folder, before, after=60)


@pytest.mark.parametrize("vector_class", [SyncVectorEnv, AsyncVectorEnv])
def test_gymnasiums_own_vector_environments_continue(tmp_path, vector_class):
    first, second = assert_continues(
        lambda: build(vector_class=gymnasium_vector(vector_class)), tmp_path, before=150, after=50
    )
    assert first.episodes.log.numbers.any()
    first.close()
    second.close()


def test_actions_of_every_kind_are_kept_exactly(tmp_path):
    space = Box(-1, 1, (2,), np.float32)
    assert_continues(
        lambda: environment(EchoEnv(Box(0, 100, (3,), np.float32), space)), tmp_path, 20, 20
    )


@pytest.mark.parametrize(
    "game",
    ["breakout", *(pytest.param(game, marks=pytest.mark.crash) for game in ("pong", "qbert"))],
)
@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param({}, id="sticky", marks=pytest.mark.crash),
        pytest.param(OPENAI, id="openai", marks=pytest.mark.crash),
        pytest.param(OPENAI | {"repeat_action_probability": 0.25}, id="both"),
    ],
)
def test_atari_continues(tmp_path, monkeypatch, game, protocol):
    monkeypatch.setattr(atari, "ANCHOR_INTERVAL", 150)
    first, _ = assert_continues(
        lambda: atari_environment(3, game=game, num_envs=2, max_episode_frames=800, **protocol),
        tmp_path,
        before=520,
        after=80,
    )
    assert (first.episodes.log.numbers >= 1).all()
    # In the other games all environments are truncated at once; here they are reset one by one.
    assert game != "breakout" or len(set(first.episodes.log.anchors)) > 1


# Before and after the save, and possibly at it, lives are lost, games end and no-ops follow.
@pytest.mark.parametrize(
    ("interval", "before"),
    [pytest.param(10_000, 75, marks=pytest.mark.crash), (130, 255), (30, 100)],
)
def test_games_with_no_ops_after_lost_lives_continue(tmp_path, monkeypatch, interval, before):
    monkeypatch.setattr(deepmind_atari, "ANCHOR_INTERVAL", interval)
    first, again = assert_continues(
        lambda: deepmind_atari_environment(3, game="breakout", num_envs=2),
        tmp_path,
        before=before,
        after=40,
    )
    assert first.episodes.log.numbers.any() == (interval == 130)
    assert bool(again.episodes.log.states) == (interval == 30)


def test_the_log_holds_no_more_than_it_needs():
    env = build(interval=40)
    env.reset()
    for action in drawn_actions(env, 3_000):
        env.episodes.step(action)
        assert env.episodes.log.length == len([*env.episodes.log.replay()]) <= 40 + 200
    assert (env.episodes.log.numbers > 20).all()


def test_anchors_leave_the_other_environments_alone():
    """Checks that anchors change nothing in an environment before its own first anchor."""
    with_anchors, without = build(interval=50), build(interval=10**9)
    with_anchors.reset()
    without.reset()
    for action in drawn_actions(without, 400):
        alone = with_anchors.episodes.log.numbers == 0
        row, other = (env.step(tf.constant(action)) for env in (with_anchors, without))
        alone &= with_anchors.episodes.log.numbers == 0
        observations = row.observation.numpy(), other.observation.numpy()
        np.testing.assert_array_equal(*(observation[alone] for observation in observations))
    assert not alone.any()


def test_an_environment_that_its_seed_does_not_determine_is_named(tmp_path):
    env = build(DriftingEnv)
    env.reset()
    play(env, drawn_actions(env, 20))
    env.save(tmp_path)
    again = build(DriftingEnv)
    again.restore(tmp_path)
    assert "walk did not reach its saved state when its actions were repeated" in again.divergence
    assert again.step([0, 0, 0]).step_type.numpy().tolist() == [0, 0, 0]


def test_an_environment_that_raises_when_repeated_is_named(tmp_path, monkeypatch):
    env = build(FragileEnv)
    env.reset()
    play(env, drawn_actions(env, 5))
    env.save(tmp_path)
    monkeypatch.setattr(FragileEnv, "fails", True)
    again = build(FragileEnv)
    again.restore(tmp_path)
    assert "OSError" in again.divergence and "the wheel came off" in again.divergence
    assert again.step([0, 0, 0]).step_type.numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize(("vector_class", "every"), [(SyncVector, 1), (ProcessVector, 15)])
def test_no_action_is_repeated_in_a_state_that_it_was_not_chosen_for(tmp_path, vector_class, every):
    env = build(PuzzleEnv, vector_class, interval=8)
    rows = env.reset()
    anchors_differed = 0
    for step in range(1, 121):
        rows = env.step(tf.cast(rows.observation[:, 0], tf.int32))
        if step % every:
            continue
        anchors_differed += len(set(env.episodes.log.anchors)) > 1
        (folder := tmp_path / str(step)).mkdir()
        env.save(folder)
        again = build(PuzzleEnv, vector_class, interval=8)
        again.restore(folder)
        assert again.divergence == ""
        for row, restored in zip(rows, again.current_time_step(), strict=True):
            np.testing.assert_array_equal(row, restored)
        again.close()
    assert anchors_differed
    env.close()


@pytest.mark.parametrize("vector_class", [SyncVector, ProcessVector])
def test_environments_that_are_left_out_of_a_step_stay_as_they_are(vector_class):
    def moves(live_of_step):
        vector = vector_class([WalkEnv] * 2)
        observations = [vector.reset([1, 2])[0]]
        for live in live_of_step:
            mask = None if live is None else np.array(live)
            observations.append(vector.step(np.array([2, 2]), mask).observation[0])
        vector.close()
        return np.array(observations)

    together = moves([None] * 60)
    in_turn = moves([(True, False), (False, True)] * 60)
    np.testing.assert_array_equal(in_turn[::2], together)
    np.testing.assert_array_equal(in_turn[1::2, 0], together[1:, 0])
    np.testing.assert_array_equal(in_turn[1::2, 1], together[:-1, 1])


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("env_class", [FragileEnv, DyingEnv])
def test_actions_are_repeated_once_more_if_processes_did_not_outlive_them(
    tmp_path, monkeypatch, env_class, lasts
):
    def create():
        name = f"{env_class.__name__.removesuffix('Env')}-v0"
        return gymnasium_environment(1, name=name, num_envs=2, vectorization_mode="async")

    env = create()
    env.reset()
    actions = drawn_actions(env, 8)
    play(env, actions[:5])
    env.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(env_class, "fails", True)
        again = create()
        processes = again.episodes.vector.processes
        if lasts:
            again.restore(tmp_path)
    if lasts:
        assert "raised" in again.divergence
        assert again.step([0, 0]).step_type.numpy().tolist() == [0, 0]  # of new episodes
    else:
        again.restore(tmp_path)
        assert again.divergence == ""
        assert play(again, actions[5:]) == play(env, actions[5:])
    assert not any(process.is_alive() for process in processes)
    assert not again.failure_message()
    again.close()
    env.close()


def test_saved_before_the_first_reset_it_starts_episodes(tmp_path):
    env = build()
    env.save(tmp_path)
    again = build()
    again.restore(tmp_path)
    assert again.divergence == ""
    assert again.step([0, 0, 0]).step_type.numpy().tolist() == [0, 0, 0]


def save_log(folder, action, steps):
    """Writes a log of three steps of three environments."""
    zeros, actions = np.zeros(3, np.int64), np.full((3, 3), action, np.int32)
    np.savez(
        folder / "actions.npz",
        actions=actions,
        anchors=zeros,
        numbers=zeros,
        steps=np.int64(steps),
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: (x / "actions.npz").write_bytes(b"PK nonsense"), "actions.npz cannot be read"),
        (lambda x: (x / "actions.npz").write_bytes(b""), "actions.npz cannot be read"),
        (lambda x: np.savez(x / "actions.npz", actions=np.zeros((3, 3))), "is not a log of"),
        (lambda x: save_log(x, 0, steps=9), "has 3 actions, but must have 9"),
        (lambda x: save_log(x, 7, steps=3), "are not in the action space of walk"),
        (lambda x: (x / "environment.json").write_text("[]"), "environment.json .*not a JSON obj"),
        (lambda x: (x / "environment.json").write_text("{"), "environment.json cannot be read"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, damage, message):
    env = build()
    env.reset()
    play(env, drawn_actions(env, 3))
    env.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        build().restore(tmp_path)
