"""Tests of action masks."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ops.masks import mask_out, uniform_action

masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6)
dtypes = st.sampled_from([np.bool_, np.int8, np.int64])


def allowed(mask):
    return np.flatnonzero(mask) if np.any(mask) else np.arange(len(mask))


@given(masks, dtypes, st.integers(0, 10**6))
def test_no_forbidden_action_has_the_best_score(mask, dtype, seed):
    scores = np.random.default_rng(seed).normal(0, 100, (len(mask), 5)).astype(np.float32)
    masked = mask_out(tf.constant(scores), tf.constant(np.array(mask, dtype))).numpy()
    for row, before, of_row in zip(masked, scores, mask, strict=True):
        np.testing.assert_array_equal(row[allowed(of_row)], before[allowed(of_row)])
        assert np.argmax(row) in allowed(of_row)
        assert np.isfinite(row**2).all()


def test_no_mask_changes_nothing():
    scores = tf.constant([[1.0, 2.0]])
    assert mask_out(scores, None) is scores


@given(masks, dtypes)
def test_all_allowed_actions_have_the_same_share_of_the_draws(mask, dtype):
    draws = (np.arange(120) + 0.5) / 120  # 120 is divisible by 1, 2, 3, 4 and 5
    for row in mask:
        rows = np.tile(np.array(row, dtype), (120, 1))
        actions = uniform_action(tf.constant(draws, tf.float32), tf.constant(rows)).numpy()
        found, counts = np.unique(actions, return_counts=True)
        np.testing.assert_array_equal(found, allowed(row))
        assert set(counts) == {120 // len(found)}


@pytest.mark.parametrize("draw", [0.0, np.nextafter(np.float32(1), np.float32(0))])
@pytest.mark.parametrize("count", [1, 2, 3, 1_000])
def test_extreme_draws_choose_an_allowed_action(draw, count):
    mask = np.zeros((1, 2_000), np.int8)
    mask[0, 500 : 500 + count] = 1
    action = int(uniform_action(tf.constant([draw]), tf.constant(mask))[0])
    assert action == (500 if draw == 0 else 499 + count)
