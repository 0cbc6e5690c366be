"""Tests of running statistics against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import FIRST, LAST, MID, Array, VecNormalize, as_float32, assert_close
from tf_agents.utils import tensor_normalizer

from pipeline.ops.normalizers import RewardScaler, RunningMoments
from pipeline.ops.returns import valid_mask

GAMMA = 0.9


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, -3.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_batches_in_turn_count_as_one(sizes: list[int], offset: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = as_float32(offset + rng.normal(size=(sum(sizes), 3)))
    weights = as_float32(rng.random(sum(sizes)) < 0.7)
    weights[0] = 1.0
    moments = RunningMoments((3,), "moments")
    splits = np.cumsum(sizes)[:-1]
    for batch, mask in zip(np.split(values, splits), np.split(weights, splits), strict=True):
        moments.update(tf.constant(batch), tf.constant(mask))
    kept = values[weights > 0].astype(np.float64)
    assert moments.count.numpy() == len(kept)
    np.testing.assert_allclose(moments.mean, kept.mean(0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(moments.variance, kept.var(0), rtol=1e-7, atol=1e-9)


def test_nothing_is_known_before_the_first_batch() -> None:
    moments = RunningMoments((2,), "moments")
    assert_close(moments.normalize(tf.constant([[3.0, -2.0]]), 10.0), [[3.0, -2.0]])


def test_normalize() -> None:
    moments = RunningMoments((), "moments")
    moments.update(tf.constant([1, 3, 5, 7], tf.uint8), tf.ones(4))
    std = np.sqrt(5.0)
    normalized = moments.normalize(tf.constant([4, 9, 255], tf.uint8), 5.0)
    assert normalized.dtype == tf.float32
    assert_close(normalized, [0.0, 5 / std, 5.0])
    assert_close(moments.normalize(tf.constant([-100.0]), 5.0), [-5.0])


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32, np.uint64, np.uint32])
def test_a_clock_keeps_its_precision(dtype: type) -> None:
    clock: Array = 1_700_000_000 + np.arange(64).astype(dtype)
    moments = RunningMoments((), "moments")
    moments.update(tf.constant(clock), tf.ones(64))
    expected = (np.arange(64) - 31.5) / np.arange(64).std()
    assert_close(moments.normalize(tf.constant(clock), clip=10.0), expected)


def test_a_constant_observation_is_not_blown_up() -> None:
    moments = RunningMoments((), "moments")
    moments.update(tf.fill([100], 7.0), tf.ones(100))
    assert_close(moments.normalize(tf.constant([7.0]), 10.0), [0.0])
    assert np.isfinite(moments.normalize(tf.constant([8.0]), 10.0)).all()


def test_many_small_updates_stay_accurate() -> None:
    values = np.random.default_rng(0).normal(1e3, 1e-2, size=(2000, 1))
    moments = RunningMoments((), "moments")
    update = tf.function(moments.update, autograph=False)
    for batch in values:
        update(tf.constant(batch), tf.ones(1))
    assert_close(moments.standard_deviation(), values.std(), 1e-4)


def random_rewards(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Returns rewards, discounts and step types [T, N] of episodes of 1 to 8 transitions.

    A discount is 0 with a probability of 0.2: at lost lives, and before boundary rows. These have a
    reward, as if it had been clipped to a range without 0.
    """
    step_types = np.full(shape, MID)
    for env in range(shape[1]):
        t = 0
        while t < shape[0]:
            step_types[t, env] = FIRST
            t += int(rng.integers(1, 9))
            step_types[t : t + 1, env] = LAST
            t += 1
    rewards = as_float32(rng.normal(1, 3, shape))
    return rewards, as_float32(rng.random(shape) < 0.8), step_types


@pytest.mark.parametrize("num_steps", [1, 5, 50])
def test_reward_scaler_equals_a_plain_loop(num_steps: int) -> None:
    rewards, discounts, types = random_rewards(np.random.default_rng(num_steps), (100, 4))
    scaler, reference = RewardScaler(4, GAMMA, clip=np.inf), VecNormalize(4, GAMMA)
    scale = tf.function(scaler.scale, autograph=False)
    for start in range(0, 100, num_steps):
        rows = slice(start, start + num_steps)
        part = rewards[rows], discounts[rows], types[rows]
        scaled = scale(*map(tf.constant, part[:2]), valid_mask(tf.constant(part[2])))
        assert_close(scaled, reference.scale(*part), 1e-4)


def test_new_episodes_begin_without_returns() -> None:
    scaler, reference = RewardScaler(2, GAMMA), VecNormalize(2, GAMMA)
    ones, types = np.ones((5, 2), np.float32), np.full((5, 2), MID)
    for _ in range(2):
        scaled = scaler.scale(tf.constant(ones), tf.constant(ones), tf.constant(ones))
        assert_close(scaled, reference.scale(ones, ones, types), 1e-4)
        scaler.begin_anew()
        reference.running[:] = 0


def test_scaled_rewards_are_clipped() -> None:
    rewards = np.zeros((50, 1), np.float32)
    rewards[20], rewards[30] = 1000.0, -1000.0
    scaled = RewardScaler(1, GAMMA, clip=2.0).scale(
        tf.constant(rewards), tf.ones([50, 1]), tf.ones([50, 1])
    )
    assert (scaled.numpy().min(), scaled.numpy().max()) == (-2.0, 2.0)


def test_stock_scale_is_that_of_rewards_not_of_returns() -> None:
    """Uses a reward of 1 in every step: returns differ by up to 10, rewards not at all."""
    rewards = tf.ones([200, 1])
    ours = RewardScaler(1, GAMMA).scale(rewards, rewards, rewards)
    returns = np.cumsum(GAMMA ** np.arange(200.0))
    assert_close(ours, 1 / np.full([200, 1], returns.std()), 1e-4)
    stock = tensor_normalizer.StreamingTensorNormalizer(tf.TensorSpec([], tf.float32))
    stock.update(rewards, outer_dims=(0, 1))
    scaled = stock.normalize(rewards, center_mean=False, clip_value=1e9)
    assert scaled.numpy().min() > 10 * ours.numpy().max()
