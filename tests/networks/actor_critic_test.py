"""Tests of the actor-critic's two outputs, the layers that they share, and its policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy_references import (
    FOUR_ACTIONS,
    THREE_NUMBERS,
    TWO_MOTORS,
    Array,
    as_float32,
    assert_close,
    assert_same,
    bound,
    dense_layers,
    each_action_spec,
    float64,
    randomize,
    specs,
    values_of,
)
from tf_agents.trajectories import restart

from pipeline.networks.actor_critic import ActorCritic, ActorCriticPolicy
from pipeline.ops.randomness import stateless_seed

IMAGE = tf.TensorSpec((6, 6, 2), tf.uint8)


def create(spec: tf.TensorSpec = THREE_NUMBERS, action_spec=FOUR_ACTIONS, **kwargs) -> ActorCritic:
    with bound({"mlp_encoder.units": (5,)}):
        actor_critic = ActorCritic(spec, action_spec, **kwargs)
    randomize(np.random.default_rng(0), actor_critic.trainable_variables)
    return actor_critic


def observations(spec: tf.TensorSpec = THREE_NUMBERS, count: int = 6) -> Array:
    drawn = np.random.default_rng(1).normal(scale=3.0, size=(count, *spec.shape))
    return np.abs(drawn * 20).astype(np.uint8) if spec.dtype == tf.uint8 else as_float32(drawn)


def by_hand(observation: Array, encoder: Any, head: Any) -> Array:
    weights = float64([*encoder.trainable_variables, *head.trainable_variables])
    return dense_layers(observation, weights)


def test_both_outputs_equal_numpy() -> None:
    actor_critic, x = create(), observations()
    distribution, value = actor_critic(tf.constant(x))
    assert_close(
        distribution.logits_parameter(),
        by_hand(x, actor_critic.encoder, actor_critic.policy_head),
    )
    expected = by_hand(x, actor_critic.value_encoder, actor_critic.value_head)[:, 0]
    assert_close(value, expected)
    assert_close(actor_critic.value(tf.constant(x)), expected)


@pytest.mark.parametrize(
    ("spec", "share", "shared"),
    [
        (THREE_NUMBERS, None, False),
        (THREE_NUMBERS, True, True),
        (IMAGE, None, True),
        (IMAGE, False, False),
    ],
)
def test_images_share_their_encoder(spec: Any, share: bool | None, shared: bool) -> None:
    actor_critic = create(spec, share_encoder=share)
    assert (actor_critic.encoder is actor_critic.value_encoder) == shared
    x = tf.constant(observations(spec))
    with tf.GradientTape() as tape:
        value = actor_critic(x)[1]
    gradients = tape.gradient(value, actor_critic.encoder.trainable_variables)
    assert all((g is not None) == shared for g in gradients)
    assert_same(actor_critic(x)[1], actor_critic.value(x))


def test_every_weight_is_trained_once() -> None:
    for spec in (THREE_NUMBERS, IMAGE):
        variables = create(spec, TWO_MOTORS).trainable_variables
        assert len({id(v) for v in variables}) == len(variables)
        dense = 2 + 2 if spec is THREE_NUMBERS else 3 * 2
        assert len(variables) == dense + 2 + 1 + 2  # encoders, mean, log_std, value


def test_heads_take_their_initialisers() -> None:
    with bound({"Orthogonal.gain": 0.01}):
        actor_critic = ActorCritic(THREE_NUMBERS, FOUR_ACTIONS)
    kernel = actor_critic.policy_head.trainable_variables[0].numpy()
    assert_close(kernel.T @ kernel, 1e-4 * np.eye(4), 1e-8)
    hidden = actor_critic.encoder.trainable_variables[0].numpy()
    assert np.abs(hidden).max() > 0.1


def test_observations_are_normalised_and_clipped_for_both_outputs() -> None:
    plain = create()
    with bound({"ObservationNormalizer.clip": 1.5}):
        normalizing = create(normalize_observations=True)
    for ours, theirs in zip(
        normalizing.trainable_variables, plain.trainable_variables, strict=True
    ):
        ours.assign(theirs)
    x = observations()
    assert_close(normalizing(x)[1], plain(np.clip(x, -1.5, 1.5))[1])
    assert normalizing.normalizer is not None
    normalizing.normalizer.update(tf.constant(x)[tf.newaxis], tf.ones([1, 6]))
    by_numpy = np.clip((x - x.mean(0)) / x.std(0), -1.5, 1.5)
    assert np.any(abs(by_numpy) == 1.5)
    distribution, value = normalizing(tf.constant(x))
    expected_distribution, expected_value = plain(tf.constant(as_float32(by_numpy)))
    assert_close(value, expected_value)
    assert_close(normalizing.value(tf.constant(x)), expected_value)
    assert_close(distribution.logits_parameter(), expected_distribution.logits_parameter())


def test_normalised_pixels_are_not_scaled_down_again() -> None:
    actor_critic = create(IMAGE, normalize_observations=True)
    floats = create(tf.TensorSpec(IMAGE.shape, tf.float32))
    for theirs, ours in zip(
        floats.trainable_variables, actor_critic.trainable_variables, strict=True
    ):
        theirs.assign(ours)
    x = observations(IMAGE)
    assert actor_critic.normalizer is not None
    actor_critic.normalizer.update(tf.constant(x)[tf.newaxis], tf.ones([1, 6]))
    z_scores = (x - x.mean(0)) / x.std(0)
    assert_close(actor_critic(tf.constant(x))[1], floats(tf.constant(as_float32(z_scores)))[1])


def test_statistics_are_kept_but_not_trained() -> None:
    actor_critic = create(normalize_observations=True)
    assert actor_critic.normalizer is not None
    statistics = {id(v) for v in actor_critic.normalizer.variables}
    assert statistics <= {id(v) for v in actor_critic.variables}
    assert not statistics & {id(v) for v in actor_critic.trainable_variables}


@each_action_spec
def test_the_policy_samples_the_actor(action_spec) -> None:
    actor_critic = create(action_spec=action_spec)
    x = np.tile(observations(count=1), (20_000, 1))
    seed = stateless_seed(5, tf.constant(0, tf.int64))
    policy = ActorCriticPolicy(specs(), action_spec, actor_critic, collect=False)
    before = values_of(actor_critic.variables)
    step = policy.action(restart(tf.constant(x), 20_000), (), seed)
    assert step.info == () and step.action.dtype == action_spec.dtype
    distribution = policy.distribution(restart(tf.constant(x[:1]), 1)).action
    drawn = step.action.numpy()
    if action_spec is FOUR_ACTIONS:
        shares = np.bincount(drawn, minlength=4) / len(drawn)
        assert_close(shares, distribution.probs_parameter()[0], 0.02)
    else:
        std = distribution.stddev()[0].numpy()
        assert np.all(abs(drawn.mean(0) - distribution.mean()[0]) < 0.03 * std)
        assert_close(drawn.std(0) / std, np.ones(2), 0.03)
        assert np.any(drawn > action_spec.maximum), "the learner sees actions before clipping"
    assert_same(values_of(actor_critic.variables), before)
