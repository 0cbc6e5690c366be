import pathlib
import threading

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.vector import AutoresetMode
from numpy_references import assert_same
from scripted_environments import drawn_actions, run

from pipeline.environments.atari import LifeLossAtariVector, atari_environment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.utils.errors import UserError

FIRST, MID, LAST = 0, 1, 2


def test_specs_of_the_protocols():
    env = atari_environment(1, game="pong", num_envs=2)
    assert env.observation_spec().shape == (4, 84, 84)
    assert env.observation_spec().dtype == tf.uint8
    assert (env.action_spec().dtype, env.action_spec().maximum) == (tf.int32, 5)
    full = atari_environment(1, game="pong", num_envs=1, full_action_space=True)
    assert full.action_spec().maximum == 17
    single = atari_environment(1, game="pong", num_envs=1, stack_size=1, frame_skip=1)
    assert single.reset().observation.shape == (1, 1, 84, 84)


def test_rows_depend_on_the_seed_and_not_on_threads_or_other_rows():
    actions = np.random.default_rng(0).integers(0, 4, (25, 2)).astype(np.int32)

    def rows(seed, num_threads, num_envs=2):
        env = atari_environment(
            seed, game="breakout", num_envs=num_envs, num_threads=num_threads, noop_max=30
        )
        return run(env, actions[:, :num_envs])

    threaded = rows(1, 2)
    assert_same(threaded, rows(1, 1))
    assert_same([row[:, :1] for row in threaded], rows(1, 1, num_envs=1))
    observations, others = threaded[-1], rows(2, 2)[-1]
    assert not np.array_equal(observations, others)
    assert not np.array_equal(observations[:, 0], observations[:, 1])


def test_each_environment_is_reset_with_a_seed_of_its_own(monkeypatch):
    vector = atari_environment(1, game="breakout", num_envs=3).episodes.vector
    given = []

    def reset(seed, options):
        given.append(seed)
        return np.zeros((3, 4, 84, 84), np.uint8), {}

    monkeypatch.setattr(vector.vector_env, "reset", reset)
    vector.reset([11, 12, 13])
    vector.reset([11, 12, 13], np.array([False, True, True]))
    assert [seeds.tolist() for seeds in given] == [[11, 12, 13], [12, 13]]


def test_truncation_keeps_the_discount_and_a_game_over_does_not():
    limit = atari_environment(1, game="pong", num_envs=2, max_episode_frames=12)
    step_type, reward, discount, _ = run(limit, tf.zeros([8, 2], tf.int32))
    assert step_type[:, 0].tolist() == [FIRST, MID, MID, LAST, FIRST, MID, MID, LAST, FIRST]
    assert (discount == 1).all()
    assert (reward[step_type == FIRST] == 0).all()


def test_a_lost_life_cuts_the_return_and_the_game_goes_on():
    def rows(zero_discount_on_life_loss):
        env = atari_environment(
            3,
            game="breakout",
            num_envs=1,
            repeat_action_probability=0.0,
            zero_discount_on_life_loss=zero_discount_on_life_loss,
        )
        return run(env, tf.ones([260, 1], tf.int32))

    cut, whole = rows(True), rows(False)
    for field in (0, 1, 3):
        np.testing.assert_array_equal(cut[field], whole[field])
    step_type, _, discount, _ = whole
    (overs,) = np.where(step_type[:, 0] == LAST)
    assert len(overs) >= 1
    np.testing.assert_array_equal(discount == 0, step_type == LAST)

    # The game has five lives: four are lost during the game, and the fifth loss ends it.
    game = slice(0, overs[0] + 1)
    losses = cut[2][game, 0] == 0
    assert losses.sum() == 5
    assert (cut[0][game, 0][losses] == [MID] * 4 + [LAST]).all()


class LivesVectorEnv(gymnasium.vector.VectorEnv):
    """Vector environment of one game that plays the rows of a script."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 1
    single_observation_space = gymnasium.spaces.Box(0, 1, (1,))
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, lives, terminations, truncations):
        self.script = iter(zip(lives, terminations, truncations, strict=True))

    def _row(self):
        lives, terminated, truncated = (np.array([value]) for value in next(self.script))
        return np.zeros((1, 1), np.float32), np.zeros(1), terminated, truncated, {"lives": lives}

    def reset(self, *, seed=None, options=None):
        row = self._row()
        return row[0], row[4]

    def step(self, actions):
        return self._row()


def test_which_steps_count_as_a_lost_life():
    script = [  # lives, terminated, truncated, expected discount
        (3, False, False, 1),
        (2, False, False, 0),
        (2, False, False, 1),
        (1, False, False, 0),
        (0, False, False, 1),  # no lives left, but not over yet
        (0, True, False, 0),
        (3, False, False, 1),
        (4, False, False, 1),  # a life is won
        (4, False, True, 1),
        (3, False, False, 1),  # fewer lives, but in the next game
        (2, False, True, 1),  # the life is lost in the step that truncates
    ]
    lives, terminations, truncations, discounts = zip(*script, strict=True)
    vector_env = LivesVectorEnv(lives, np.array(terminations), np.array(truncations))
    env = VectorEnvironment(lambda: LifeLossAtariVector(vector_env), name="lives", seed=1)
    assert run(env, tf.zeros([10, 1], tf.int32))[2][:, 0].tolist() == list(discounts)


def test_rewards_are_not_clipped():
    env = atari_environment(1, game="space_invaders", num_envs=2)
    _, reward, _, _ = run(env, drawn_actions(env, 120))
    assert reward.max() > 1


@pytest.mark.parametrize("action", [4, -1])
def test_an_action_out_of_range_is_refused_and_does_not_hang(action):
    env = atari_environment(1, game="breakout", num_envs=2)
    env.reset()
    raised: list[BaseException] = []

    def act():
        try:
            tf.function(env.step, autograph=False)(tf.constant([0, action]))
        except tf.errors.OpError as error:
            raised.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert len(raised) == 1
    assert f"action {action} for environment 1 is outside [0, 3]" in env.failure_message()
    assert env.step([0, 0]).step_type.numpy().tolist() == [MID, MID]


def test_continuous_actions():
    env = atari_environment(1, game="pong", num_envs=2, continuous=True)
    spec = env.action_spec()
    assert (spec.shape, spec.dtype) == ((3,), tf.float32)
    env.reset()
    corners = tf.constant([spec.minimum, spec.maximum])
    assert env.step(corners).step_type.numpy().tolist() == [MID, MID]
    for wrong in ([np.nan, 0.0, 0.0], [1.1, 0.0, 0.0], [0.0, 3.2, 0.0], [0.0, 0.0, -0.1]):
        with pytest.raises(ValueError, match="for environment 1 is outside"):
            env.step(tf.constant([[0.0, 0.0, 0.0], wrong]))


@pytest.mark.parametrize("threshold", [0.2, 0.8])
def test_a_joystick_moves_the_paddle_once_it_is_deflected_by_the_threshold(threshold):
    env = atari_environment(
        1,
        game="pong",
        num_envs=4,
        repeat_action_probability=0.0,
        continuous=True,
        continuous_action_threshold=threshold,
    )
    env.reset()
    # Radius, angle (right) and fire. The first two environments have no and full deflection.
    actions = [[radius, 0.0, 0.0] for radius in (0.0, 1.0, threshold - 0.1, threshold + 0.1)]
    for _ in range(20):
        rest, up, below, above = env.step(tf.constant(actions)).observation.numpy()[:, -1]
    assert np.array_equal(below, rest) and np.array_equal(above, up)
    assert not np.array_equal(rest, up)


def test_stepping_in_a_graph_gives_what_eager_steps_give():
    eager, env = (atari_environment(1, game="breakout", num_envs=2) for _ in range(2))
    actions = tf.constant(drawn_actions(eager, 30))
    traces = []

    @tf.function(autograph=False)
    def play(num_steps):
        traces.append(1)
        return tf.while_loop(
            lambda index, *_: index < num_steps,
            lambda index, _: (index + 1, env.step(actions[index])),
            (tf.constant(0), env.reset()),
            parallel_iterations=1,
        )[1]

    time_step = play(tf.constant(30))
    assert_same([row[-1] for row in run(eager, actions)], list(time_step))
    assert time_step.observation.shape == (2, 4, 84, 84)
    play(tf.constant(2))
    assert len(traces) == 1


def test_closing_frees_the_emulators_and_can_be_repeated():
    env = atari_environment(1, game="breakout", num_envs=2)
    env.reset()
    # Linux lists the emulators' threads, which Python does not know.
    tasks = pathlib.Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else 0
    env.close()
    env.close()
    if tasks.exists():
        assert len(list(tasks.iterdir())) < threads
    with pytest.raises(AttributeError):
        env.step([0, 0])


def message(**kwargs):
    with pytest.raises(UserError) as error:
        atari_environment(1, **kwargs)
    return str(error.value)


def test_a_rom_that_is_not_there_is_named(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "missing"):
        monkeypatch.setenv("ALE_ROMS_DIR", str(folder))
        said = message(game="pong")
        assert said.startswith("atari_environment.game = 'pong': its ROM cannot be loaded: ")
        assert "unset ALE_ROMS_DIR" in said
    (tmp_path / "pong.bin").write_bytes(b"another program")
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    assert "hash of pong.bin does not match" in message(game="pong")


def test_messages():
    assert "atari_environment.game is not bound" in message()
    assert "Nearest: pong" in message(game="pongg")
    assert "Nearest: ms_pacman" in message(game="MsPacman")
    assert "there is no such game" in message(game="../pong")
    assert "several players" in message(game="combat")
    assert "num_envs = 0: must be a whole number, at least 1" in message(game="pong", num_envs=0)
    assert "must be a number, at least 0, at most 1" in message(
        game="pong", repeat_action_probability=1.5
    )
    for name in ("frame_skip", "stack_size", "max_episode_frames"):
        assert f"{name} = 0" in message(game="pong", **{name: 0})
        assert f"{name} = {2**31}" in message(game="pong", **{name: 2**31})
    assert "noop_max = -1" in message(game="pong", noop_max=-1)
