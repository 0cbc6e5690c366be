import json

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_environments import RaisingEnv, ScriptedEnv, environment, gymnasium_vector, run

from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.vectors import GymnasiumVector
from pipeline.utils.errors import UserError

FIRST, MID, LAST = 0, 1, 2


def rows(env, num_steps):
    return run(env, tf.zeros([num_steps, env.batch_size], tf.int32))


@pytest.mark.parametrize("vector_class", [SyncVector, gymnasium_vector(SyncVectorEnv)])
def test_step_types_rewards_and_discounts(vector_class):
    env = environment(
        ScriptedEnv([(2, "terminated")]),
        ScriptedEnv([(3, "truncated"), (1, "terminated")]),
        ScriptedEnv([(2, "both")]),  # like a pole that falls at the time limit
        vector_class=vector_class,
    )
    step_type, reward, discount, observation = rows(env, 6)

    first_env, second_env, third_env = step_type.T.tolist()
    assert first_env == third_env == [FIRST, MID, LAST, FIRST, MID, LAST, FIRST]
    assert second_env == [FIRST, MID, MID, LAST, FIRST, LAST, FIRST]
    twos = [0, 1, 2, 0, 1, 2, 0]
    assert reward.T.tolist() == [twos, [0, 1, 2, 3, 0, 1, 0], twos]
    until_an_end = [1, 1, 0, 1, 1, 0, 1]
    assert discount.T.tolist() == [until_an_end, [1, 1, 1, 1, 1, 0, 1], until_an_end]
    assert observation[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]


def test_a_reset_after_a_last_row_starts_an_episode_like_any_other():
    env = environment(ScriptedEnv([(2, "terminated")]))
    rows(env, 2)
    assert rows(env, 3)[0].T.tolist() == [[FIRST, MID, LAST, FIRST]]


def test_the_action_at_a_last_row_is_ignored():
    scripted = ScriptedEnv([(1, "terminated")])
    env = environment(scripted)
    env.reset()
    env.step([0])
    env.step([1])
    assert scripted.actions == [0]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("the window is open"), "RuntimeError('the window is open')"),
        (SystemExit(), "close() called sys.exit()"),
    ],
)
def test_an_environment_that_raises_when_closed_is_named_and_hides_nothing_else(
    capsys, error, said
):
    class Clinging(ScriptedEnv):
        is_open = True

        def close(self):  # gymnasium calls this again if it fails
            if self.is_open:
                self.is_open = False
                raise error

    environment(Clinging([(1, "terminated")])).close()
    warning = capsys.readouterr().err
    assert warning.startswith("warning: scripted raised when closed: ") and said in warning


def test_other_autoreset_modes_are_refused():
    vector_env = SyncVectorEnv(
        [lambda: ScriptedEnv([(1, "terminated")])], autoreset_mode=AutoresetMode.SAME_STEP
    )
    with pytest.raises(UserError, match="NEXT_STEP"):
        GymnasiumVector(vector_env)


def test_seeds_differ_between_runs_environments_and_resets():
    def seeds(run_seed):
        envs = [ScriptedEnv([(9, "terminated")]) for _ in range(3)]
        env = environment(*envs, seed=run_seed)
        env.reset()
        env.reset()
        return [seed for scripted in envs for seed in scripted.seeds]

    assert seeds(1) == seeds(1)
    drawn = seeds(1) + seeds(2)
    assert len(set(drawn)) == 12
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in drawn)


def test_every_anchor_has_seeds_of_its_own():
    envs = [ScriptedEnv([(4, "terminated")]) for _ in range(2)]
    rows(environment(*envs, anchor_interval=10), 60)
    drawn = [seed for scripted in envs for seed in scripted.seeds if seed is not None]
    assert len(drawn) >= 2 * (1 + 60 // 15)
    assert len(set(drawn)) == len(drawn)


def test_the_number_of_a_reset_chooses_the_episodes():
    scripted = ScriptedEnv([(9, "terminated")])
    env = environment(scripted)
    for _ in range(3):
        env.reset()
    env.episodes.resets = 1
    env.reset()
    first, second, third, fourth = scripted.seeds
    assert fourth == second
    assert len({first, second, third}) == 3


def test_a_step_before_any_reset_starts_episodes():
    scripted = ScriptedEnv([(9, "terminated")])
    env = environment(scripted)
    assert env.step([1]).step_type.numpy().tolist() == [FIRST]
    assert scripted.actions == []


def test_current_time_step_is_what_reset_and_step_returned():
    env = environment(ScriptedEnv([(9, "terminated")]))
    assert env.current_time_step().step_type.numpy().tolist() == [FIRST]
    env.step([0])
    assert env.current_time_step().observation.numpy().tolist() == [[0, 1]]


def test_restoring_another_environments_state_is_refused(tmp_path):
    env = environment(ScriptedEnv([(9, "terminated")]))
    env.save(tmp_path)
    state = json.loads((tmp_path / "environment.json").read_text())
    for change in ({"num_envs": 2}, {"name": "another"}):
        (tmp_path / "environment.json").write_text(json.dumps(state | change))
        with pytest.raises(ValueError, match="the checkpoint's environment is .*but this is"):
            env.restore(tmp_path)
    for wrong in ('{"resets": 1}', "[]"):
        (tmp_path / "environment.json").write_text(wrong)
        with pytest.raises(ValueError, match="environment.json cannot be read"):
            env.restore(tmp_path)


def test_an_exception_is_kept_and_named_eagerly_and_in_a_graph():
    for wrap, raised in ((lambda step: step, KeyError), (tf.function, tf.errors.OpError)):
        env = environment(RaisingEnv([(9, "terminated")]))
        env.reset()
        assert env.failure_message() == ""
        with pytest.raises(raised):
            wrap(env.step)(tf.zeros([1], tf.int32))
        assert isinstance(env.episodes.error, KeyError)
        message = env.failure_message()
        assert "scripted raised KeyError: 'no such room'" in message
        assert "scripted_environments.py" in message
        assert "in step" in message


def test_a_loop_in_a_graph_gives_what_eager_steps_give_and_is_traced_once():
    episodes = [(2, "terminated"), (3, "truncated")]
    env, eager = (environment(*[ScriptedEnv(episodes) for _ in range(2)]) for _ in range(2))
    traces = []

    @tf.function
    def run(num_steps):
        traces.append(1)

        def body(index, total, time_step):
            time_step = env.step(tf.zeros([2], tf.int32))
            return index + 1, total + time_step.reward, time_step

        loop = (tf.constant(0), tf.zeros([2]), env.reset())
        return tf.while_loop(lambda i, *_: i < num_steps, body, loop, parallel_iterations=1)

    for num_steps in (7, 12):
        _, total, time_step = run(tf.constant(num_steps))
        step_type, reward, discount, observation = rows(eager, num_steps)
        np.testing.assert_array_equal(total, reward.sum(axis=0))
        np.testing.assert_array_equal(time_step.step_type, step_type[-1])
        np.testing.assert_array_equal(time_step.observation, observation[-1])
    assert len(traces) == 1


def test_seconds_count_the_vector_environment(monkeypatch):
    env = environment(ScriptedEnv([(9, "terminated")]))
    env.reset()
    before = env.seconds
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    env.step([0])
    assert env.seconds == before + 2.5


def test_rendering_is_refused_where_it_is_not_possible():
    env = environment(ScriptedEnv([(9, "terminated")]))
    with pytest.raises(UserError, match="render=True"):
        env.render()


@pytest.mark.parametrize("observation", [np.zeros(3), 0.0])
def test_an_observation_of_another_shape_is_an_error(observation):
    class WrongEnv(ScriptedEnv):
        def step(self, action):
            return observation, 0.0, False, False, {}

    env = environment(WrongEnv([(9, "terminated")]))
    env.reset()
    with pytest.raises(UserError, match="scripted: the observation has the shape"):
        env.step([0])


def test_rows_are_those_of_gymnasiums_vector_environment():
    make = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=20)] * 3
    ours, gymnasiums = SyncVector(make), GymnasiumVector(SyncVectorEnv(make))
    actions = np.random.default_rng(0).integers(0, 2, (100, 3))
    np.testing.assert_array_equal(ours.reset([1, 2, 3]), gymnasiums.reset([1, 2, 3]))
    ends = 0
    for action in actions:
        mine, theirs = ours.step(action), gymnasiums.step(action)
        ours_now, theirs_now = (
            [*x.observation, x.reward, x.discount, x.is_last] for x in (mine, theirs)
        )
        pairs = zip(ours_now, theirs_now, strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        ends += int(mine.is_last.sum())
    assert ends > 10
