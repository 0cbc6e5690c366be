from typing import Any

import gin
import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from scripted_environments import PlainEnv, RaisingEnv, ScriptedEnv, environment
from tf_agents.policies import tf_policy
from tf_agents.trajectories import policy_step

from pipeline.acting.evaluation import EpisodeTally, Evaluator, record_video, summarize
from pipeline.acting.policies import RandomPolicy
from pipeline.utils.errors import UserError, WriteError

FIRST, MID, LAST = 0, 1, 2


class ConstantPolicy(tf_policy.TFPolicy):
    def __init__(self, time_step_spec, action_spec, action):
        super().__init__(time_step_spec, action_spec, clip=False)
        self._value = action

    def _variables(self):
        return []

    def _distribution(self, time_step, policy_state):
        action = tf.fill(time_step.step_type.shape, tf.constant(self._value, tf.int32))
        return policy_step.PolicyStep(tfp.distributions.Deterministic(action), policy_state, ())

    def _action(self, time_step, policy_state, seed):
        step = self._distribution(time_step, policy_state)
        return step._replace(action=step.action.mode())


class LuckyEnv(ScriptedEnv):
    """Environment whose seeded generator draws the rewards and the lengths of episodes."""

    def __init__(self):
        super().__init__([(None, None)])

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        return super().reset(seed=seed)

    def step(self, action):
        observation, *_ = super().step(action)
        return observation, self.np_random.random(), self.np_random.random() < 0.1, False, {}


class VisibleEnv(ScriptedEnv):
    """Environment whose frames have a red value of 20 times the step."""

    render_mode = "rgb_array"
    metadata = {"render_fps": 10}

    def render(self):
        frame = np.zeros((64, 64, 3), np.uint8)
        frame[..., 0] = 20 * self.time
        return frame


def random_policy(env):
    return RandomPolicy(env.time_step_spec(), env.action_spec())


def constant_policy(env, action):
    return ConstantPolicy(env.time_step_spec(), env.action_spec(), action)


def evaluator(env, seed=1, **kwargs):
    return Evaluator(env, constant_policy(env, 0), random_policy(env), seed=seed, **kwargs)


def short_and_long():
    """Returns two environments, whose episodes have returns of 1 + 2 = 3 and 1 + ... + 40 = 820."""
    return environment(ScriptedEnv([(2, "terminated")]), ScriptedEnv([(40, "truncated")]))


# Which episodes count.


@pytest.mark.parametrize(
    ("num_episodes", "returns"),
    [
        (6, [3, 3, 3, 820, 820, 820]),
        (5, [3, 3, 3, 820, 820]),
        (1, [3]),
    ],
)
def test_short_episodes_are_not_favoured(num_episodes, returns):
    result = evaluator(short_and_long()).run(num_episodes, index=0)
    assert result["returns"] == returns
    assert result["return_mean"] == pytest.approx(np.mean(returns))
    assert result["return_std"] == pytest.approx(np.std(returns))


def test_rewards_are_not_clipped():
    with gin.unlock_config():
        gin.bind_parameter("CollectDriver.reward_range", (-1.0, 1.0))
    try:
        assert evaluator(short_and_long()).run(2, index=0)["returns"] == [3, 820]
    finally:
        gin.clear_config()


def test_tally_counts_no_boundary_rows():
    tally = EpisodeTally(np.array([2, 1]))
    step_type = np.array([[FIRST, FIRST], [LAST, MID], [FIRST, MID], [LAST, LAST]])
    next_step_type = np.array([[LAST, MID], [FIRST, MID], [LAST, LAST], [FIRST, FIRST]])
    reward = np.array([[1, 10], [500, 20], [2, 30], [500, 500]], np.float32)
    tally.add(step_type[:2], next_step_type[:2], reward[:2])
    assert (tally.returns(), tally.complete) == ([1], False)
    tally.add(step_type[2:], next_step_type[2:], reward[2:])
    assert (tally.returns(), tally.complete) == ([1, 2, 60], True)


def test_tally_forgets_what_is_beyond_the_quota():
    tally = EpisodeTally(np.array([1, 0]))
    step_type = np.array([[FIRST, FIRST]])
    for reward in ([1, 10], [2, 20]):
        tally.add(step_type, step_type + LAST, np.array([reward], np.float32))
    assert (tally.returns(), tally.complete) == ([1], True)


def test_tally_knows_how_long_the_longest_unfinished_episode_is():
    tally = EpisodeTally(np.array([1, 1]))
    rows = np.array([[FIRST, FIRST], [MID, MID], [LAST, MID], [FIRST, LAST], [MID, FIRST]])
    for row, following, longest in zip(rows[:-1], rows[1:], [1, 2, 0, 1], strict=True):
        tally.add(row[None], following[None], np.zeros((1, 2), np.float32))
        assert tally.longest == longest


def test_tally_adds_in_double_precision():
    tally = EpisodeTally(np.array([1]))
    rows = np.full((1000, 1), MID)
    ends = rows.copy()
    ends[-1] = LAST
    tally.add(rows, ends, np.full((1000, 1), 2.0**24 + 2, np.float32))
    assert tally.returns() == [1000 * (2.0**24 + 2)]


def test_summary():
    assert summarize([1.0, 3.0]) == {"return_mean": 2.0, "return_std": 1.0, "returns": [1.0, 3.0]}


# What the episodes depend on.


def test_same_index_same_episodes():
    env = environment(LuckyEnv(), LuckyEnv())
    evaluation = evaluator(env)
    first, other, again = (evaluation.run(6, index) for index in (3, 4, 3))
    assert first == again
    assert first["returns"] != other["returns"]
    fresh = evaluator(environment(LuckyEnv(), LuckyEnv())).run(6, 3)
    assert fresh == first


def test_episodes_of_one_environment_differ():
    returns = evaluator(environment(LuckyEnv(), LuckyEnv())).run(10, 0)["returns"]
    assert len(set(returns)) == 10


def test_episodes_after_a_truncated_one_have_seeds_of_their_own():
    returns = evaluator(environment(LuckyEnv()), max_episode_steps=1).run(10, 0)["returns"]
    assert len(set(returns)) == 10


def test_the_limit_of_steps_counts_from_the_start_of_every_evaluation():
    evaluation = evaluator(environment(ScriptedEnv([(50, "terminated")])), max_episode_steps=30)
    for index in range(2):  # the first call plays two steps more than an episode
        assert evaluation.run(1, index)["returns"] == [sum(range(1, 31))]


def test_draws_of_the_policy_depend_on_index_and_seed():
    scripted = ScriptedEnv([(20, "terminated")])
    env = environment(scripted)

    def actions(seed, index):
        scripted.actions.clear()
        evaluator(env, seed, greedy=False).run(1, index)
        return [int(action) for action in scripted.actions[:20]]

    drawn = actions(1, 0)
    assert drawn == actions(1, 0)
    assert drawn != actions(2, 0)
    of_other_index = actions(1, 1)
    assert drawn != of_other_index
    assert drawn[1:] != of_other_index[:-1]  # not the same draws a step later


def test_greedy_says_which_policy_plays():
    scripted = ScriptedEnv([(50, "terminated")])
    env = environment(scripted)
    policies = constant_policy(env, 1), random_policy(env)
    for greedy, played in ((True, {1}), (False, {0, 1})):
        scripted.actions.clear()
        evaluation = Evaluator(env, *policies, seed=1, greedy=greedy)
        assert evaluation.policy is policies[not greedy]
        evaluation.run(1, 0)
        assert {int(action) for action in scripted.actions[:50]} == played


def test_epsilon_mixes_random_actions_into_the_greedy_ones():
    scripted = ScriptedEnv([(1_000, "terminated")])
    env = environment(scripted)
    evaluation = evaluator(env, epsilon=0.3)
    evaluation.run(1, 0)
    # In half of the cases a random action equals the greedy one, 0.
    assert 0.1 < np.mean([int(action) for action in scripted.actions[:1_000]]) < 0.2
    once = list(scripted.actions)
    scripted.actions.clear()
    evaluation.run(1, 0)
    assert once == scripted.actions


@pytest.mark.parametrize("value", [-1, 0, 100.0])
def test_a_number_of_steps_is_a_whole_number(value):
    env = environment(ScriptedEnv([(5, "terminated")]))
    with pytest.raises(UserError, match=f"num_env_steps = {value}: must be a whole number, at le"):
        evaluator(env, num_env_steps=value)


def test_epsilon_needs_a_greedy_choice():
    env = environment(ScriptedEnv([(5, "terminated")]))
    with pytest.raises(UserError, match="Evaluator.epsilon = 1.5: must be a number, at least 0"):
        evaluator(env, epsilon=1.5)
    with pytest.raises(UserError, match="Evaluator.greedy = True"):
        evaluator(env, epsilon=0.5, greedy=False)
    continuous = environment(ScriptedEnv([(5, "terminated")], gymnasium.spaces.Box(-1, 1, (1,))))
    with pytest.raises(UserError, match="needs a single discrete action"):
        Evaluator(
            continuous, random_policy(continuous), random_policy(continuous), seed=1, epsilon=0.5
        )


def test_truncated_episodes_are_counted_if_they_count():
    env = environment(*[ScriptedEnv([(50, "terminated")]) for _ in range(4)])
    assert evaluator(env, max_episode_steps=5).run(2, 0)["truncated"] == 2
    env = environment(ScriptedEnv([(3, "terminated"), (50, "terminated")]))
    assert evaluator(env, max_episode_steps=5).run(3, 0)["truncated"] == 1
    env = environment(ScriptedEnv([(3, "terminated"), (50, "terminated")]))
    assert "truncated" not in evaluator(env, max_episode_steps=5).run(1, 0)


# A budget of steps instead of episodes.


@pytest.mark.parametrize(
    ("num_env_steps", "returns"),
    [
        (200, [3] * 50 + [820] * 2),  # 100 steps each; the third long episode is unfinished
        (80, [3] * 20 + [820]),  # the last step ends the long episode
        (79, [3] * 20),  # 40 and 39 steps; the long episode is unfinished
        (3, [3]),
    ],
)
def test_a_budget_of_steps_drops_what_is_unfinished(num_env_steps, returns):
    result = evaluator(short_and_long(), num_env_steps=num_env_steps).run(5, index=0)
    assert result["returns"] == returns
    assert result["return_mean"] == pytest.approx(np.mean(returns))


def test_a_return_that_is_not_finite_ends_an_evaluation():
    class EndlessReward(PlainEnv):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float("inf") if self.time == 3 else 1.0, *rest

    with pytest.raises(UserError, match="returned inf, because a reward is NaN or infinite"):
        evaluator(environment(EndlessReward())).run(2, 0)


def test_no_episode_has_no_mean():
    result = evaluator(environment(ScriptedEnv([(40, "terminated")])), num_env_steps=39).run(5, 0)
    assert result == {"return_mean": None, "return_std": None, "returns": []}


def test_a_budget_of_steps_can_be_interrupted():
    evaluation = evaluator(environment(ScriptedEnv([(7, "terminated")])), num_env_steps=10_000)
    seen = []

    def on_progress(steps, *others):
        seen.append((steps, *others))
        return steps > 60

    assert evaluation.run(5, 0, on_progress) is None
    # 32 vector steps per call, 4 of them boundaries
    assert seen == [(steps, 10_000, 0) for steps in (0, 28, 56, 84)]


# Interruption.


def test_on_progress_sees_episodes_and_interrupts():
    seen = []

    def on_progress(episodes, *others):
        seen.append((episodes, *others))
        return episodes >= 12

    env = environment(ScriptedEnv([(7, "terminated")]))
    assert evaluator(env).run(1000, 0, on_progress) is None
    # A call takes 32 vector steps: four episodes of 7 steps, each with a boundary row.
    assert seen == [(episodes, 1000, 0) for episodes in (0, 4, 8, 12)]


def test_interrupted_before_it_begins():
    scripted = ScriptedEnv([(7, "terminated")])
    assert evaluator(environment(scripted)).run(3, 0, lambda *_: True) is None
    assert scripted.actions == []


def test_an_interrupted_evaluation_leaves_nothing_behind():
    evaluation = evaluator(environment(LuckyEnv()))
    undisturbed = evaluation.run(3, 0)
    counts = iter([False, True])
    evaluation.run(1000, 1, lambda *_: next(counts))
    assert evaluation.run(3, 0) == undisturbed


# Video.


def test_video_shows_every_step_of_one_episode(tmp_path):
    env = environment(VisibleEnv([(9, "truncated"), (3, "terminated")]))
    path = tmp_path / "episode.mp4"
    assert record_video(env, random_policy(env), path, seed=1) == sum(range(10))
    reader: Any
    with imageio.get_reader(path) as reader:
        about = reader.get_meta_data()
        red = [float(frame[..., 0].mean()) for frame in reader]
    np.testing.assert_allclose(red, 20 * np.arange(10), atol=6)
    assert (about["codec"], about["fps"]) == ("h264", 10)
    assert [file.name for file in tmp_path.iterdir()] == ["episode.mp4"]


def test_the_return_of_a_video_is_that_of_the_environment(tmp_path):
    scripted = VisibleEnv([(3, "terminated")])
    recorded = gymnasium.wrappers.RecordEpisodeStatistics(scripted)
    env = environment(gymnasium.wrappers.TransformReward(recorded, lambda reward: 0.0))
    assert record_video(env, random_policy(env), tmp_path / "episode.mp4", seed=1) == 1 + 2 + 3


def test_a_video_ends_at_the_limit_of_steps(tmp_path):
    env = environment(VisibleEnv([(9, "terminated")]))
    path = tmp_path / "episode.mp4"
    returned = record_video(env, random_policy(env), path, seed=1, max_episode_steps=5)
    assert returned == sum(range(1, 6))


@pytest.mark.parametrize("frames", [0, 3])
def test_a_video_of_which_frames_are_missing_is_no_video(tmp_path, monkeypatch, frames):
    def cut(writer):  # as on a disk that fills up, of which ffmpeg's exit code tells
        monkeypatch.undo()
        writer.close()
        path = tmp_path / ".tmp-episode.mp4"
        path.unlink()
        path.write_bytes(b"")
        if frames:
            imageio.mimwrite(path, [np.zeros([16, 16, 3], np.uint8)] * frames)

    env = environment(VisibleEnv([(5, "terminated")]))
    path = tmp_path / "episode.mp4"
    path.write_text("an older one")
    monkeypatch.setattr("imageio.core.format.Format.Writer.__exit__", lambda self, *_: cut(self))
    with pytest.raises(UserError, match=f"cannot write {path}: only {frames} of 6 frames"):
        record_video(env, random_policy(env), path, seed=1)
    assert path.read_text() == "an older one"


def test_interrupted_video_is_not_written(tmp_path):
    path = tmp_path / "episode.mp4"
    path.write_text("an older one")
    env = environment(VisibleEnv([(100, "terminated")]))
    assert record_video(env, random_policy(env), path, 1, lambda step: step == 5) is None
    assert path.read_text() == "an older one"
    assert [file.name for file in tmp_path.iterdir()] == ["episode.mp4"]


def test_failing_environment_leaves_no_video(tmp_path):
    class RaisingVisibleEnv(RaisingEnv):
        render = VisibleEnv.render
        render_mode = VisibleEnv.render_mode

    env = environment(RaisingVisibleEnv([(5, "terminated")]))
    with pytest.raises(UserError, match="scripted raised KeyError"):
        record_video(env, random_policy(env), tmp_path / "episode.mp4", seed=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("no OpenGL"), "RuntimeError: no OpenGL"),
        (FileNotFoundError(2, "no font"), "FileNotFoundError: .*no font"),
        (SystemExit(), r"render\(\) called sys.exit\(\). Change the environment's class"),
    ],
)
def test_an_environment_that_raises_when_it_renders_is_named(tmp_path, error, message):
    class RaisingVisibleEnv(VisibleEnv):
        def render(self):
            raise error

    env = environment(RaisingVisibleEnv([(5, "terminated")]))
    with pytest.raises(UserError, match=f"scripted cannot render: {message}"):
        record_video(env, random_policy(env), tmp_path / "episode.mp4", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_cannot_be_written_is_named(tmp_path):
    env = environment(VisibleEnv([(5, "terminated")]))
    path = tmp_path / "episode.mp4"
    path.mkdir()
    with pytest.raises(UserError, match=f"cannot write {path}: .*Is a directory"):
        record_video(env, random_policy(env), path, seed=1)
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/no/x.mp4"):
        record_video(env, random_policy(env), tmp_path / "no" / "x.mp4", seed=1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_video_for_which_ffmpeg_fails_can_be_written_later(tmp_path, monkeypatch):
    def fail(self, frame):
        raise OSError("[Errno 32] Broken pipe\n\nFFMPEG COMMAND:\nffmpeg -y -f rawvideo")

    env = environment(VisibleEnv([(5, "terminated")]))
    monkeypatch.setattr("imageio.core.format.Format.Writer.append_data", fail)
    with pytest.raises(WriteError, match="^cannot write .*: ffmpeg ended; is the disk full?"):
        record_video(env, random_policy(env), tmp_path / "episode.mp4", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_environment_without_frames_is_refused(tmp_path):
    env = environment(ScriptedEnv([(5, "terminated")]))
    with pytest.raises(UserError, match="scripted cannot render"):
        record_video(env, random_policy(env), tmp_path / "episode.mp4", seed=1)
    assert list(tmp_path.iterdir()) == []
