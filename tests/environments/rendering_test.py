import cv2
import numpy as np
import pytest
import tensorflow as tf

from pipeline.environments.atari import atari_environment

LAST = 2

# Differences between the ALE's OpenCV and Python's that the ALE's own tests allow.
MAX_GREY_LEVELS = 2
MAX_PIXELS = 25


def seen(frame):
    """Returns the [84, 84] image that preprocessing makes of an RGB frame, without pooling."""
    grey = np.round(frame @ np.array([0.2989, 0.587, 0.114])).astype(np.uint8)
    return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA).astype(int)


def newest(time_step):
    return time_step.observation[0, -1].numpy().astype(int)


@pytest.mark.parametrize(
    ("sticky", "steps", "fewest_ends"),
    [pytest.param(0.0, 120, 0, marks=pytest.mark.crash), (0.25, 400, 1)],
)
def test_observations_are_the_vector_environments(sticky, steps, fewest_ends):
    settings = {
        "game": "breakout",
        "repeat_action_probability": sticky,
        "noop_max": 30,
        "use_fire_reset": True,
    }
    rendering = atari_environment(1, **settings, render=True)
    plain = atari_environment(1, **settings, num_envs=2)
    actions = np.random.default_rng(0).integers(0, 4, (steps, 2))
    ends = 0
    for step in range(len(actions) + 1):
        if step == 0:
            mine, theirs = rendering.reset(), plain.reset()
        else:
            action = tf.constant(actions[step - 1], tf.int32)
            mine, theirs = rendering.step(action[:1]), plain.step(action)
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
        # The last observation of a game does not show its last frame.
        if mine.step_type[0] == LAST:
            ends += 1
        else:
            # The observation is the maximum over two frames, including this one.
            assert (newest(mine) >= seen(rendering.render()) - MAX_GREY_LEVELS).all()
    assert ends >= fewest_ends


@pytest.mark.parametrize(
    ("game", "sticky", "limit"), [("breakout", 0.25, 200), ("seaquest", 0.0, 10**6)]
)
def test_frames_are_those_that_the_observations_are_made_of(game, sticky, limit):
    """Uses one frame per step: without pooling, an observation is a function of one frame."""
    env = atari_environment(
        1,
        game=game,
        repeat_action_probability=sticky,
        max_episode_frames=limit,
        frame_skip=1,
        stack_size=1,
        noop_max=30,
        render=True,
    )
    time_step = env.reset()
    moved = set()
    for action in np.random.default_rng(0).integers(0, 4, 500):
        frame = env.render()
        if time_step.step_type[0] != LAST:
            difference = np.abs(newest(time_step) - seen(frame))
            assert difference.max() <= MAX_GREY_LEVELS
            assert (difference > 0).sum() <= MAX_PIXELS
        moved.add(frame.tobytes())
        time_step = env.step([action])
    assert (frame.shape, frame.dtype) == ((210, 160, 3), np.uint8)
    assert len(moved) > 100
    assert env.render_fps == 60


def test_continuous_actions_reach_the_emulator_that_renders():
    env = atari_environment(1, game="pong", continuous=True, render=True, frame_skip=1)
    time_step = env.reset()
    generator = np.random.default_rng(0)
    for _ in range(200):
        np.testing.assert_allclose(newest(time_step), seen(env.render()), atol=MAX_GREY_LEVELS)
        action = generator.uniform([0, -np.pi, 0], [1, np.pi, 1]).astype(np.float32)
        time_step = env.step(tf.constant(action[np.newaxis]))


def test_an_emulator_that_leaves_the_game_is_noticed():
    env = atari_environment(1, game="breakout", render=True)
    env.reset()
    for _ in range(5):
        env.episodes.vector.vector_env.screen.step(np.zeros(1, int))
    with pytest.raises(RuntimeError, match="differs from the game"):
        env.step([0])
