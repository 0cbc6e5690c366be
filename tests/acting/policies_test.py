"""Tests of the distributions that policies draw from, and of their reproducibility."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import (
    FOUR_ACTIONS,
    THREE_NUMBERS,
    TWO_MOTORS,
    Array,
    as_float32,
    as_float64,
    specs,
)
from tf_agents.policies import tf_policy
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, policy_step, restart

from pipeline.acting.policies import (
    EpsilonGreedyPolicy,
    GreedyPolicy,
    RandomPolicy,
    SampledPolicy,
    clip_action,
)
from pipeline.ops.randomness import stateless_seed

MANY = 20_000
UNBOUNDED = tensor_spec.BoundedTensorSpec((2,), tf.float32, -np.inf, np.inf)
LOGITS = [0.5, -1.0, 2.0, 0.0]


class FixedPolicy(tf_policy.TFPolicy):
    """Policy with the same distribution for every observation."""

    def __init__(self, action_spec=FOUR_ACTIONS, logits=LOGITS):
        super().__init__(specs(), action_spec)
        self._logits = logits

    def _distribution(self, time_step, policy_state):
        logits = tf.tile(tf.constant([self._logits]), [tf.shape(time_step.step_type)[0], 1])
        distribution = tfp.distributions.Categorical(logits, dtype=tf.int32)
        return policy_step.PolicyStep(distribution, policy_state, ())

    def _variables(self):
        return []


def time_step(batch_size: int = MANY) -> TimeStep:
    return restart(tf.zeros([batch_size, *THREE_NUMBERS.shape]), batch_size)


def actions(policy: tf_policy.TFPolicy, counter: int = 0, batch_size: int = MANY) -> Array:
    seed = stateless_seed(12345, tf.constant(counter, tf.int64))
    return policy.action(time_step(batch_size), (), seed).action.numpy()


def assert_frequencies(drawn: Array, probabilities: Array) -> None:
    """Checks frequencies by a chi-square test that fails once in 10,000 times with four actions."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    expected = probabilities * drawn.size
    assert np.sum((counts - expected) ** 2 / expected) < 21.1


@pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0])
def test_epsilon_greedy_frequencies(epsilon: float) -> None:
    drawn = actions(EpsilonGreedyPolicy(FixedPolicy(), lambda: tf.constant(epsilon)))
    assert_frequencies(drawn, as_float64([0, 0, 1 - epsilon, 0]) + epsilon / 4)


def test_no_epsilon_is_greedy() -> None:
    drawn = actions(EpsilonGreedyPolicy(FixedPolicy(), lambda: tf.constant(0.0)))
    assert set(drawn) == {2}


def test_exploring_and_the_random_action_are_independent() -> None:
    """Checks that there are two draws; one would leave out actions when epsilon is small."""
    drawn = actions(EpsilonGreedyPolicy(FixedPolicy(), lambda: tf.constant(0.1)))
    others = drawn[drawn != 2]
    assert_frequencies(np.array([0, 1, -1, 2])[others], np.full(3, 1 / 3))


def test_sampled_policy_frequencies() -> None:
    odds = np.exp(as_float64(LOGITS))
    assert_frequencies(actions(SampledPolicy(FixedPolicy())), odds / odds.sum())


def test_greedy_policy_is_the_mode() -> None:
    greedy = GreedyPolicy(FixedPolicy())
    assert set(greedy.action(time_step()).action.numpy()) == {2}
    assert greedy.action(time_step()).action.dtype == tf.int32


def test_of_equal_values_the_first_action_is_greedy() -> None:
    tied = FixedPolicy(logits=[0.5, 2.0, 2.0, 2.0])
    assert set(actions(GreedyPolicy(tied))) == {1}
    assert set(actions(EpsilonGreedyPolicy(tied, lambda: tf.constant(0.0)))) == {1}


@pytest.mark.parametrize(
    "policy",
    [
        EpsilonGreedyPolicy(FixedPolicy(), lambda: tf.constant(0.5)),
        SampledPolicy(FixedPolicy()),
        RandomPolicy(specs(), FOUR_ACTIONS),
        RandomPolicy(specs(), TWO_MOTORS),
        RandomPolicy(specs(), UNBOUNDED),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_draws_depend_on_the_seed_alone(policy: tf_policy.TFPolicy) -> None:
    drawn = [actions(policy, counter, 500) for counter in (0, 1, 0)]
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert np.mean(drawn[0] == drawn[1]) < 0.9
    traced = tf.function(
        lambda counter: policy.action(time_step(500), (), stateless_seed(12345, counter)).action,
        autograph=False,
    )
    np.testing.assert_array_equal(traced(tf.constant(0, tf.int64)), drawn[0])


def test_environments_of_one_step_draw_different_numbers() -> None:
    drawn = actions(RandomPolicy(specs(), TWO_MOTORS), batch_size=100)
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("count", [1, 2, 18])
def test_random_policy_covers_all_discrete_actions_evenly(count: int) -> None:
    spec = tensor_spec.BoundedTensorSpec((), tf.int32, 0, count - 1)
    drawn = actions(RandomPolicy(specs(), spec))
    assert drawn.dtype == np.int32 and drawn.shape == (MANY,)
    counts = np.bincount(drawn, minlength=count)
    assert counts.size == count
    assert np.all(np.abs(counts - MANY / count) < 4.5 * np.sqrt(MANY / count) + 1e-9)


def test_random_policy_is_uniform_within_bounds() -> None:
    drawn = actions(RandomPolicy(specs(), TWO_MOTORS))
    low, high = TWO_MOTORS.minimum, TWO_MOTORS.maximum
    assert drawn.shape == (MANY, 2) and drawn.dtype == np.float32
    assert np.all((drawn >= low) & (drawn <= high))
    unit = np.sort((drawn - low) / (high - low), axis=0)
    ranks = (np.arange(MANY) + 0.5) / MANY
    kolmogorov_smirnov = np.abs(unit - ranks[:, None]).max()
    assert kolmogorov_smirnov < 2.2 / np.sqrt(MANY)


def test_random_policy_with_bounds_too_far_apart_for_their_dtype_stays_within_them() -> None:
    far = np.float32(3e38)
    spec = tensor_spec.BoundedTensorSpec((2,), tf.float32, -far, far)
    assert np.all(np.isfinite(actions(RandomPolicy(specs(), spec))))


@pytest.mark.parametrize(
    ("low", "high"), [(-np.inf, np.inf), (0.0, np.inf), ([-np.inf, -1.0], [np.inf, 1.0])]
)
def test_random_policy_with_infinite_bounds_is_normal_and_clipped(low, high) -> None:
    spec = tensor_spec.BoundedTensorSpec((2,), tf.float32, as_float32(low), as_float32(high))
    drawn = actions(RandomPolicy(specs(), spec))
    assert np.all(np.isfinite(drawn)) and np.all((drawn >= low) & (drawn <= high))
    free = drawn[:, 0]
    assert abs(np.quantile(free, 0.84) - 1.0) < 0.05
    assert np.std(free) > 0.5


def test_random_policy_explores_beside_a_bound_that_is_far_from_0() -> None:
    low, high = as_float32([10.0, -np.inf]), as_float32([np.inf, -5.0])
    spec = tensor_spec.BoundedTensorSpec((2,), tf.float32, low, high)
    drawn = actions(RandomPolicy(specs(), spec))
    assert np.all((drawn >= low) & (drawn <= high))
    is_at_bound = np.mean((drawn == low) | (drawn == high), axis=0)
    assert np.all(np.abs(is_at_bound - 0.5) < 0.05)


def test_random_policy_gives_info_of_the_spec() -> None:
    info_spec = {"value": tf.TensorSpec((), tf.float32), "logits": tf.TensorSpec((4,), tf.float32)}
    policy = RandomPolicy(specs(), FOUR_ACTIONS, info_spec)
    step = policy.action(time_step(3), (), tf.constant([1, 2]))
    assert step.info["value"].shape == [3] and step.info["logits"].shape == [3, 4]


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=2, max_size=2))
def test_clip_action_is_the_nearest_allowed(action: list[float]) -> None:
    clipped = clip_action(tf.constant([action]), TWO_MOTORS).numpy()[0]
    expected = [min(max(action[0], -1.0), 3.0), min(max(action[1], 0.0), 0.5)]
    np.testing.assert_array_equal(clipped, as_float32(expected))


def test_discrete_and_unbounded_actions_are_not_clipped() -> None:
    discrete = tf.constant([0, 3])
    assert clip_action(discrete, FOUR_ACTIONS) is discrete
    np.testing.assert_array_equal(
        clip_action(tf.constant([[1e30, 0]]), UNBOUNDED), as_float32([[1e30, 0]])
    )
