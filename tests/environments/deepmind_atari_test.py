"""Tests of the environment against a transcription of the Lua program with its own emulator."""

import itertools
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from ale_py import Action, ALEInterface, roms
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.environments import deepmind_atari
from pipeline.environments.deepmind_atari import DeepMindAtariEnv, deepmind_atari_environment
from pipeline.environments.deepmind_screen import downscale, luma, to_bytes
from pipeline.utils.errors import UserError

FIRST, MID, LAST = 0, 1, 2
f32 = np.float32


# Pixels.


def scale_line(source, length):
    """Transcribes the branch of `Main_scaleLinear_rowcol` that shortens lines, in C's `float`."""
    scale, line = f32(len(source)) / f32(length), []
    si0_i, si0_f = 0, f32(0)
    for di in range(length):
        si1_f = f32(di + 1) * scale
        si1_i = int(si1_f)
        si1_f = f32(si1_f - f32(si1_i))
        acc = f32(1 - si0_f) * source[si0_i]
        n = f32(1 - si0_f)
        for si in range(si0_i + 1, si1_i):
            acc = f32(acc + source[si])
            n = f32(n + 1)
        if si1_i < len(source):
            acc = f32(acc + f32(si1_f * source[si1_i]))
            n = f32(n + si1_f)
        line.append(f32(acc / n))
        si0_i, si0_f = si1_i, si1_f
    return line


def scale(image, height, width):
    rows = np.array([scale_line(row, width) for row in image], f32)
    return np.array([scale_line(column, height) for column in rows.T], f32).T


def grey(rgb):
    """Transcribes `image.rgb2y` of the screen / 255, with double constants and float pixels."""
    r, g, b = np.moveaxis(rgb.astype(f32) / f32(255), -1, 0).astype(np.float64)
    return (0.299 * r + 0.587 * g + 0.114 * b).astype(f32)


@pytest.mark.parametrize("height", [210, 250])
def test_a_screen_becomes_bytes_as_in_lua(height):
    rng = np.random.default_rng(height)
    blocks = rng.integers(0, 256, (height // 10, 20, 3), np.uint8).repeat(10, 0).repeat(8, 1)
    noise = rng.integers(0, 256, (height, 160, 3), np.uint8)
    for rgb in (blocks, noise):
        np.testing.assert_array_equal(luma(rgb), grey(rgb))
        small = downscale(luma(rgb), 84, 84)
        assert (small.shape, small.dtype) == ((84, 84), f32)
        np.testing.assert_array_equal(small, scale(grey(rgb), 84, 84))
        expected = [[int(y * f32(255)) for y in row] for row in small]
        np.testing.assert_array_equal(to_bytes(small), expected)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=60)
def test_other_sizes_shrink_as_in_lua_too(source, length, seed):
    source, length = max(source, length), min(source, length)
    image = np.random.default_rng(seed).random((source, 3), f32)
    expected = image
    if source != length:
        expected = np.array([scale_line(column, length) for column in image.T], f32).T
    np.testing.assert_array_equal(downscale(image, length, 3), expected)


def test_bytes_are_truncated_and_not_rounded():
    assert to_bytes(np.array([0, 0.999 / 255, 254.9 / 255, 1], f32)).tolist() == [0, 0, 254, 255]


def test_boxes_are_areas_and_not_points():
    """Checks that a line of one pixel is not lost between sampling points."""
    image = np.zeros((210, 160), f32)
    image[::5] = 1
    np.testing.assert_allclose(downscale(image, 84, 84).mean(), 0.2, rtol=1e-5)


# The game.

# `isMinimal` in xitari's `games/supported/*.cpp`, as numbers in `getMinimalActionSet`'s order.
XITARI_ACTIONS = {
    "breakout": (0, 1, 3, 4),
    "pong": (0, 3, 4),
    "seaquest": tuple(range(18)),
    "space_invaders": (0, 1, 3, 4, 11, 12),
}


class LuaGame:
    """Transcription of `alewrap.GameEnvironment` with its screen, frame stack and driver loop."""

    def __init__(self, game, seed, training, noop_max=30, actrep=4):
        self.ale = ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.setInt("random_seed", seed)
        rom = roms.get_rom_path(game)
        assert rom is not None
        self.ale.loadROM(rom)
        self.actions = XITARI_ACTIONS[game]
        self.training, self.noop_max, self.actrep = training, noop_max, actrep
        self.generator = gymnasium.utils.seeding.np_random(seed)[0]
        self.over, self.waited = True, []

    def _step(self, action):
        """Returns reward, terminal and lives; a game that is over is reset instead of played."""
        if self.over:
            self.ale.reset_game()
            reward = 0
        else:
            reward = self.ale.act(action)
        self.over = self.ale.game_over()
        self.screens.append(self.ale.getScreenRGB())
        return reward, self.over, self.ale.lives()

    def screen(self):
        pooled = np.max(self.screens[-2:], axis=0)
        return to_bytes(downscale(luma(pooled), 84, 84))

    def next_random_game(self):
        """Returns the first observation of a game; the frames before it are zero."""
        self.screens = []
        k = int(self.generator.integers(1, self.noop_max + 1))
        for _ in range(k + 1):
            _, _, self.lives = self._step(Action.NOOP)
        self.waited.append(k + 1)
        self.frames = [np.zeros((84, 84), np.uint8)] * 3 + [self.screen()]
        return np.stack(self.frames)

    def step(self, action):
        """Returns the observation, the reward and whether the state is terminal."""
        total = 0
        for _ in range(self.actrep):
            reward, terminal, lives = self._step(self.actions[action])
            total += reward
            terminal = terminal or (self.training and lives < self.lives)
            if terminal:
                break
        self.lives = lives
        self.frames = [*self.frames[1:], self.screen()]
        return np.stack(self.frames), total, terminal


def create(game="breakout", num_envs=1, seed=3, **kwargs):
    return deepmind_atari_environment(seed, game=game, num_envs=num_envs, **kwargs)


def single(game="breakout", training=True, **kwargs):
    settings = {
        "noop_max": 30, "frame_skip": 4, "stack_size": 4, "max_episode_frames": np.inf,
        "render_mode": None,
    }  # fmt: skip
    return DeepMindAtariEnv(game, life_loss_is_terminal=training, **(settings | kwargs))


@pytest.mark.parametrize(
    ("game", "num_steps", "training"),
    [
        pytest.param("breakout", 340, True, id="breakout-training"),
        pytest.param("breakout", 340, False, id="breakout-evaluation"),
        pytest.param("space_invaders", 200, True, id="space_invaders-training"),
        pytest.param(
            "space_invaders", 200, False, id="space_invaders-evaluation", marks=pytest.mark.crash
        ),
    ],
)
def test_it_plays_as_the_lua_program_does(game, num_steps, training):
    """Checks every observation, reward and end, across lost lives, ended games and no-ops."""
    env, lua = single(game, training), LuaGame(game, 11, training)
    np.testing.assert_array_equal(env.reset(seed=11)[0], lua.next_random_game())
    generator, losses, overs, total = np.random.default_rng(5), 0, 0, 0.0
    for _ in range(num_steps):
        action = int(generator.integers(len(lua.actions)))
        observation, reward, over, truncated, _ = env.step(action)
        expected, expected_reward, terminal = lua.step(action)
        assert (reward, over or env.life_lost) == (expected_reward, terminal)
        assert not truncated
        total += reward
        if not terminal:
            np.testing.assert_array_equal(observation, expected)
            continue
        losses, overs = losses + (not over), overs + over
        expected = lua.next_random_game()
        if over:
            observation, _ = env.reset()
        np.testing.assert_array_equal(observation, expected)
        assert not observation[:3].any()
    assert total > 0
    assert (overs >= 1) == (game == "breakout")
    assert (losses > 0) == training
    assert len(set(lua.waited)) > training  # the number of no-ops is drawn anew


LOSES_A_LIFE = {"lives": np.array(99)}  # as part of a state: a life is lost in the next frame


def test_a_lost_life_cuts_the_return_and_the_game_goes_on():
    env = create()
    env.reset()
    rows = [env.step([1]) for _ in range(260)]
    step_type, discount = (np.stack([getattr(row, name) for row in rows])[:, 0]
                           for name in ("step_type", "discount"))  # fmt: skip
    game = slice(0, int(np.argmax(step_type == LAST)) + 1)
    losses = discount[game] == 0
    assert losses.sum() == 5
    assert step_type[game][losses].tolist() == [MID] * 4 + [LAST]
    assert step_type[game.stop] == FIRST and discount[game.stop] == 1
    assert set(discount) == {0, 1}


def noted(monkeypatch, reward):
    """Makes emulators append their actions to the returned list instead of playing them."""
    played: list[Action] = []

    def act(ale, action):
        played.append(action)
        return reward

    monkeypatch.setattr(ALEInterface, "act", act)
    return played


def test_a_game_may_end_during_no_ops(monkeypatch):
    env = single()
    env.reset(seed=1)
    env.set_state(env.get_state() | LOSES_A_LIFE)
    played = noted(monkeypatch, reward=1)
    monkeypatch.setattr(ALEInterface, "game_over", lambda ale: played[-1] == Action.NOOP)
    observation, reward, over, truncated, _ = env.step(1)
    assert (reward, over, truncated, env.life_lost) == (1, True, False, True)
    assert observation[:3].any()  # the last of an episode, not the first after a lost life

    # If a game ends during its no-ops, another one begins with its own number of no-ops.
    played.clear()
    monkeypatch.setattr(ALEInterface, "game_over", lambda ale: len(played) == 1)
    generator = gymnasium.utils.seeding.np_random(1)[0]
    first, second = (int(generator.integers(1, 31)) for _ in range(2))
    env.reset(seed=1)
    assert len(played) == 1 + second != first


def test_a_life_lost_during_no_ops_goes_unnoticed(monkeypatch):
    env = single()
    env.reset(seed=1)
    state, act = env.get_state(), ALEInterface.act
    env.set_state(state | LOSES_A_LIFE)

    def lose_one(ale, action):
        if action == Action.NOOP:
            ale.setRAM(57, int(state["lives"]) - 1)
        return act(ale, action)

    monkeypatch.setattr(ALEInterface, "act", lose_one)
    for life_lost in (True, False):
        env.step(1)
        assert (env.life_lost, env.get_state()["lives"]) == (life_lost, state["lives"] - 1)


def test_in_evaluation_only_the_end_of_a_game_is_terminal():
    env = create(life_loss_is_terminal=False)
    env.reset()
    rows = [env.step([1]) for _ in range(260)]
    assert any(row.step_type == LAST for row in rows)
    assert all((row.discount == 0) == (row.step_type == LAST) for row in rows)
    assert all(row.observation[0, 0].numpy().any() for row in rows[5:40])


def test_colours_are_pooled_before_they_become_grey(monkeypatch):
    """Checks that red in one frame and green in the other become yellow, brighter than either."""
    colours = itertools.cycle(np.array([[255, 0, 0], [0, 255, 0]]))
    paint = Mock(side_effect=lambda screen: np.copyto(screen, next(colours), "unsafe"))
    monkeypatch.setattr(ALEInterface, "getScreenRGB", paint)
    observation, _ = single().reset(seed=1)
    assert observation[-1, 40, 40] == int((0.299 + 0.587) * 255)


def test_rows_depend_on_the_seed_and_not_on_other_rows():
    actions = np.random.default_rng(0).integers(0, 4, (25, 2)).astype(np.int32)

    def play(seed, num_envs):
        env = create(num_envs=num_envs, seed=seed)
        rows = [env.reset(), *(env.step(tf.constant(action[:num_envs])) for action in actions)]
        return np.stack([row.observation for row in rows])

    two = play(1, 2)
    np.testing.assert_array_equal(two[:, :1], play(1, 1))
    assert not np.array_equal(two[:, 0], two[:, 1])
    assert not np.array_equal(two[:, :1], play(2, 1))


@pytest.mark.parametrize("game", XITARI_ACTIONS)
def test_actions_are_those_of_xitari(game, monkeypatch):
    env, played = single(game), noted(monkeypatch, reward=0)
    assert env.action_space.n == len(XITARI_ACTIONS[game])
    for action in range(env.action_space.n):
        env.step(action)
    assert [action.value for action in played] == list(np.repeat(XITARI_ACTIONS[game], 4))


@pytest.mark.parametrize(("game", "num_frames"), [("pong", 65_000), ("breakout", 1_728_000)])
def test_a_game_is_over_after_as_many_frames_as_in_xitari(game, num_frames, monkeypatch):
    number = ALEInterface.getEpisodeFrameNumber
    monkeypatch.setattr(
        ALEInterface, "getEpisodeFrameNumber", lambda ale: num_frames - 120 + number(ale)
    )
    env = create(game, noop_max=1)
    env.reset()
    rows = [env.step([0]) for _ in range(40)]
    (lasts,) = np.nonzero([row.step_type.numpy()[0] == LAST for row in rows])
    assert lasts[0] == 29  # the first step after frame 1 ends with frame 5
    assert rows[29].discount == 0


def test_the_limit_truncates():
    env = create("pong", max_episode_frames=120, noop_max=1)
    env.reset()
    rows = [env.step([0]) for _ in range(40)]
    (lasts,) = np.nonzero([row.step_type.numpy()[0] == LAST for row in rows])
    assert 27 <= lasts[0] <= 30
    assert all(row.discount == 1 for row in rows)


def test_a_life_lost_at_the_limit_leaves_the_last_observation_whole():
    env = single(max_episode_frames=1)
    env.reset(seed=1)
    env.set_state(env.get_state() | LOSES_A_LIFE)
    observation, _, over, truncated, _ = env.step(1)
    assert (over, truncated, env.life_lost) == (False, True, True)
    assert observation[:3].any()
    games = create(max_episode_frames=1)
    games.reset()
    (game,) = games.episodes.vector.envs
    game.env.set_state(game.env.get_state() | LOSES_A_LIFE)
    row = games.step([1])
    assert (row.step_type, row.discount) == (LAST, 1)  # truncated, not terminated


@pytest.mark.parametrize("game", ["breakout", pytest.param("seaquest", marks=pytest.mark.crash)])
def test_a_state_brings_back_everything(game):
    env, again = single(game), single(game)
    env.reset(seed=1)
    again.reset(seed=2)
    actions = np.random.default_rng(0).integers(0, 4, 150)
    for action in actions[:50]:
        env.step(action)
    again.set_state(env.get_state())

    def play(env, action):
        observation, *rest = env.step(action)
        if rest[1]:
            observation = env.reset()[0]
        return observation.tobytes(), rest, env.life_lost

    for action in actions[50:]:
        assert play(env, action) == play(again, action)


def test_the_emulator_is_set_as_xitari_was(monkeypatch):
    ale = ALEInterface()
    create_emulator = Mock(wraps=ALEInterface, return_value=ale)
    monkeypatch.setattr(deepmind_atari, "ALEInterface", create_emulator)
    single()
    assert not ale.getBool("color_averaging")
    assert ale.getFloat("repeat_action_probability") == 0
    assert (ale.getInt("frame_skip"), ale.getInt("max_num_frames_per_episode")) == (1, 0)


def test_specs_and_rendering():
    env = create("pong", num_envs=2, stack_size=2)
    assert (env.observation_spec().shape, env.observation_spec().dtype) == ((2, 84, 84), tf.uint8)
    assert env.action_spec().maximum == 2
    shown = create("pong", num_envs=2, render=True)
    shown.reset()
    assert (shown.batch_size, shown.render_fps) == (1, 15)
    assert shown.render().shape == (210, 160, 3)
    with pytest.raises(UserError, match="built without render=True"):
        env.render()


def test_closing_frees_the_emulators_and_can_be_repeated():
    env = create("pong", num_envs=2)
    env.reset()
    env.close()
    env.close()
    with pytest.raises(IndexError):
        env.step([0, 0])


def test_messages():
    def message(**kwargs):
        with pytest.raises(UserError) as error:
            deepmind_atari_environment(1, **kwargs)
        return str(error.value)

    assert "deepmind_atari_environment.game is not bound" in message()
    assert "deepmind_atari_environment.game = 'pongg'" in message(game="pongg")
    for name in ("num_envs", "noop_max", "frame_skip", "stack_size", "max_episode_frames"):
        assert f"deepmind_atari_environment.{name} = 0: must be" in message(
            game="pong", **{name: 0}
        )


def test_the_anchors_are_far_apart_for_loading_a_rom_takes_long(monkeypatch):
    assert deepmind_atari.ANCHOR_INTERVAL >= 1_000
    monkeypatch.setattr(deepmind_atari, "ANCHOR_INTERVAL", 3)
    env = create()
    env.reset()
    lengths = [env.step([0]) and env.episodes.log.length for _ in range(8)]
    assert lengths == [1, 2, 3, 4, 5, 6, 1, 2]  # a state is an anchor after two intervals
