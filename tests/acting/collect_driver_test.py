from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from gymnasium.spaces import Box, Discrete
from numpy_references import assert_same
from scripted_environments import ScriptedEnv, environment
from tf_agents.policies import tf_policy
from tf_agents.trajectories.policy_step import PolicyStep

from pipeline.acting.collect_driver import CollectDriver, initial_carry, interrupt_episodes
from pipeline.acting.policies import RandomPolicy
from pipeline.ops.randomness import stateless_seed, stream_key
from pipeline.utils.errors import UserError

FIRST, MID, LAST = 0, 1, 2
EPISODES = [[(2, "terminated"), (3, "truncated")], [(1, "truncated"), (4, "terminated")]]


class Info(NamedTuple):
    count: tf.Tensor


class CountingPolicy(tf_policy.TFPolicy):
    """Recurrent policy whose state counts its calls and whose action depends on all its inputs."""

    def __init__(self, env):
        scalar = tf.TensorSpec((), tf.int32)
        super().__init__(
            env.time_step_spec(),
            env.action_spec(),
            policy_state_spec=scalar,
            info_spec=Info(scalar),
            automatic_state_reset=False,
            clip=False,
        )

    def _variables(self):
        return []

    def _action(self, time_step, policy_state, seed):
        drawn = tf.random.stateless_uniform(policy_state.shape, seed, 0, 2, tf.int32)
        sums = tf.cast(tf.reduce_sum(time_step.observation, -1), tf.int32)
        action = (drawn + sums + policy_state) % 2
        return PolicyStep(action, policy_state + 1, Info(policy_state))


def scripted():
    return environment(*(ScriptedEnv(episodes) for episodes in EPISODES))


def in_graph(driver, policy, num_steps):
    return tf.function(lambda carry: driver.run(policy, carry, num_steps), autograph=False)


def stack(rows):
    return tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *rows)


class PlainLoop:
    """Reference implementation of collecting in plain Python, one environment at a time."""

    def __init__(self, seed):
        self.key = stream_key(seed, "collect")
        self.envs = [ScriptedEnv(episodes) for episodes in EPISODES]
        self.rows: list[Any] = []
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.env_steps = 0

    def run(self, num_steps):
        # The (step type, observation) to which each environment's next action responds.
        now = [(FIRST, env.reset()[0]) for env in self.envs]
        in_flight = [(0.0, 0), (0.0, 0)]
        for step in range(num_steps):
            seed = stateless_seed(self.key, tf.constant(step, tf.int64))
            drawn = tf.random.stateless_uniform([2], seed, 0, 2, tf.int32).numpy()
            row = []
            for i, env in enumerate(self.envs):
                step_type, observation = now[i]
                action = (int(drawn[i]) + int(observation.sum()) + step) % 2
                if step_type == LAST:
                    reached = (FIRST, 0.0, 1.0, env.reset()[0])
                else:
                    following, reward, terminated, truncated, _ = env.step(action)
                    kind = LAST if terminated or truncated else MID
                    reached = (kind, reward, 0.0 if terminated else 1.0, following)
                    total, length = in_flight[i]
                    in_flight[i] = (total + reward, length + 1)
                    self.env_steps += 1
                    if kind == LAST:
                        self.returns.append(in_flight[i][0])
                        self.lengths.append(in_flight[i][1])
                        in_flight[i] = (0.0, 0)
                row.append((step_type, observation, action, step, *reached[:3]))
                now[i] = (reached[0], reached[3])
            self.rows.append(row)
        return self


def test_rows_and_statistics_are_those_of_a_plain_python_loop():
    env = scripted()
    driver, policy = CollectDriver(env, seed=3, reward_range=None), CountingPolicy(env)
    carry, rows = in_graph(driver, policy, 17)(initial_carry(env, policy))
    plain = PlainLoop(3).run(17)

    expected = [np.array([[row[k] for row in step] for step in plain.rows]) for k in range(7)]
    columns = (
        rows.step_type, rows.observation, rows.action, rows.policy_info.count,
        rows.next_step_type, rows.reward, rows.discount,
    )  # fmt: skip
    for column, reference in zip(columns, expected, strict=True):
        np.testing.assert_array_equal(column, reference)
    statistics = carry.statistics
    assert statistics.env_steps == plain.env_steps
    assert statistics.episodes == len(plain.returns) > 4
    np.testing.assert_array_equal(statistics.last_returns[-len(plain.returns) :], plain.returns)
    np.testing.assert_array_equal(statistics.last_lengths[-len(plain.lengths) :], plain.lengths)


@pytest.mark.parametrize(
    "cuts", [pytest.param([1] * 12, marks=pytest.mark.crash), [3, 1, 6, 2], [12]]
)
def test_cuts_into_calls_change_nothing(cuts):
    env, whole_env = scripted(), scripted()
    policy = CountingPolicy(env)
    whole_carry, whole = CollectDriver(whole_env, seed=3).run(
        policy, initial_carry(whole_env, policy), 12
    )

    driver, parts = CollectDriver(env, seed=3), []
    carry = initial_carry(env, policy)
    graphs = {steps: in_graph(driver, policy, steps) for steps in set(cuts)}
    for steps in cuts:
        carry, rows = graphs[steps](carry)
        assert rows.step_type.shape == [steps, 2]
        parts.append(rows)
    assert_same(stack(parts), whole)
    assert_same(carry, whole_carry)


def test_rewards_are_clipped_for_the_learner_and_not_in_statistics():
    env = scripted()
    policy = CountingPolicy(env)
    driver = CollectDriver(env, seed=3, reward_range=(-1.0, 1.5))
    for steps in (1, 9):
        carry, rows = driver.run(policy, initial_carry(env, policy), steps)
    assert rows.reward.numpy().max() == 1.5
    assert rows.reward.numpy().min() == 0
    # The episodes have 3 and 2 steps in the first environment, 4 and 1 in the second.
    returns = carry.statistics.last_returns.numpy()
    assert sorted(returns[~np.isnan(returns)]) == [1, 1 + 2, 1 + 2 + 3, 1 + 2 + 3 + 4]


class FarPolicy(CountingPolicy):
    """Policy whose actions lie outside the bounds of a Box."""

    def _action(self, time_step, policy_state, seed):
        action = tf.constant([[-7.0, 0.25], [0.5, 9.0]])
        return PolicyStep(action, policy_state, Info(policy_state))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_environment_gets_clipped_actions_and_the_learner_those_chosen(steps):
    envs = [ScriptedEnv([(9, "terminated")], Box(-1, 1, (2,), np.float32)) for _ in range(2)]
    env = environment(*envs)
    policy = FarPolicy(env)
    _, rows = CollectDriver(env, seed=3).run(policy, initial_carry(env, policy), steps)
    np.testing.assert_array_equal(rows.action, [[[-7.0, 0.25], [0.5, 9.0]]] * steps)
    np.testing.assert_array_equal(envs[0].actions, [[-1.0, 0.25]] * steps)
    np.testing.assert_array_equal(envs[1].actions, [[0.5, 1.0]] * steps)


def test_draws_depend_on_the_seed_and_the_number_of_vector_steps_alone():
    def actions(vector_steps, seed=3, steps=20, before=0):
        envs = [ScriptedEnv([(99, "terminated")], Discrete(1000)) for _ in range(2)]
        env = environment(*envs)
        policy = RandomPolicy(env.time_step_spec(), env.action_spec())
        driver = CollectDriver(env, seed=seed)
        driver.run(policy, initial_carry(env, policy), before or 1)
        carry = initial_carry(env, policy)._replace(
            vector_steps=tf.constant(vector_steps, tf.int64)
        )
        carry, rows = driver.run(policy, carry, steps)
        assert carry.vector_steps == vector_steps + steps
        return rows.action.numpy()

    from_start = actions(0)
    np.testing.assert_array_equal(actions(5, steps=15, before=8), from_start[5:])
    assert len(np.unique(from_start)) > 30
    assert (actions(0, seed=4) != from_start).mean() > 0.9
    assert (actions(1 << 32) != from_start).mean() > 0.9


def test_interrupted_episodes_end_in_an_ordinary_boundary_row():
    env = scripted()
    policy = CountingPolicy(env)
    driver = CollectDriver(env, seed=3)
    carry, _ = driver.run(policy, initial_carry(env, policy), 4)
    in_flight = carry.time_step.observation.numpy()
    assert (carry.time_step.step_type.numpy() == MID).all()
    interrupted = interrupt_episodes(carry)
    fresh = scripted()
    after_carry, rows = CollectDriver(fresh, seed=3).run(policy, interrupted, 3)

    np.testing.assert_array_equal(rows.step_type, [[LAST] * 2, [FIRST] * 2, [MID, LAST]])
    np.testing.assert_array_equal(rows.next_step_type[0], [FIRST] * 2)
    np.testing.assert_array_equal(rows.observation[0], in_flight)
    np.testing.assert_array_equal(rows.reward[0], [0, 0])
    np.testing.assert_array_equal(rows.discount[0], [1, 1])
    statistics = after_carry.statistics
    # Unfinished returns are dropped, but their steps still count.
    assert statistics.env_steps == carry.statistics.env_steps + 3
    assert statistics.episodes == carry.statistics.episodes + 2
    np.testing.assert_array_equal(statistics.last_returns[-2:], [1, 3])


@pytest.mark.parametrize("reward_range", [1.0, (1.0, -1.0), (0.0, 0.0), (1.0,), ("a", 1.0), "ab"])
def test_what_is_no_range_of_rewards_is_refused(reward_range):
    with pytest.raises(UserError, match=r"CollectDriver.reward_range = .* must be \(low, high\)"):
        CollectDriver(scripted(), seed=3, reward_range=reward_range)
