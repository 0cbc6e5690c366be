"""Tests of A2C and n-step Q-learning on images, with encoders shared by policy and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    GO_ON,
    LAST,
    MID,
    PIXELS,
    as_float32,
    assert_close,
    bound,
    env_steps,
    random_leaf,
    random_rollout,
    random_sequences,
    randomize,
    specs,
    tensors,
)
from tf_agents.trajectories import restart

from pipeline.agents.a2c import create_a2c_agent
from pipeline.agents.agent import Agent
from pipeline.agents.nstep_q import create_nstep_q_agent
from pipeline.networks.actor_critic import OnPolicyInfo

STEPS, ENVS, ROWS = 6, 3, 10


def create(constructor: Any, **kwargs: Any) -> Any:
    settings = {"num_envs": ENVS, "seed": 0, "env_steps": env_steps(), "discount": 0.9} | kwargs
    small = {"small_cnn_encoder.units": (5,), "small_cnn_encoder.filters": ((3, 3, 2),)}
    with bound(small):
        agent: Agent = constructor(specs(PIXELS), FOUR_ACTIONS, **settings)
    randomize(np.random.default_rng(7), tf.nest.flatten(agent.gradient_variables()))
    return agent


@pytest.mark.parametrize("one_step", [False, True])
def test_an_environment_s_targets_are_those_it_has_alone(one_step: bool) -> None:
    agent = create(create_nstep_q_agent, one_step=one_step)
    rng = np.random.default_rng(0)
    rows = random_rollout(rng, FOUR_ACTIONS, STEPS, ENVS)
    rows = rows.replace(observation=random_leaf(rng, PIXELS, (STEPS, ENVS)))
    assert np.any((rows.step_type == LAST)[1:])
    final = random_leaf(rng, PIXELS, (ENVS,))
    together = agent.prepare(tensors(rows), restart(tf.constant(final), ENVS)).policy_info
    transitions = rows.step_type != LAST
    for i in range(ENVS):
        one = slice(i, i + 1)
        alone = agent.prepare(
            tensors(tf.nest.map_structure(lambda x, one=one: x[:, one], rows)),
            restart(tf.constant(final[one]), 1),
        ).policy_info
        assert_close(together.value_target[:, i][transitions[:, i]],
                     alone.value_target[:, 0][transitions[:, i]])  # fmt: skip
    # Other pixels give other targets, so the targets above depend on the pixels.
    others = rows.replace(observation=255 - rows.observation)
    changed = agent.prepare(tensors(others), restart(tf.constant(255 - final), ENVS)).policy_info
    assert np.any(np.abs(changed.value_target - together.value_target)[transitions] > 1e-3)


def test_a2c_s_gradient_is_the_mean_of_its_transitions_own() -> None:
    agent = create(create_a2c_agent, value_coefficient=0.7, entropy_coefficient=0.05)
    actor_critic = agent.actor_critic
    assert actor_critic.value_encoder is actor_critic.encoder
    rng = np.random.default_rng(0)
    starts = rng.choice([FIRST, MID, LAST], ROWS)
    rows = random_sequences(rng, FOUR_ACTIONS, np.full((ROWS, 1), GO_ON), starts, PIXELS)
    unread, advantage, value_target = as_float32(rng.normal(size=(3, ROWS, 1)))
    info = OnPolicyInfo(unread, unread, advantage, value_target)
    gradients, _ = agent.gradients(tensors(rows.replace(policy_info=info)), tf.ones(ROWS))
    expected: list[Any] = []
    transitions = np.flatnonzero(starts != LAST)
    assert 0 < len(transitions) < ROWS
    for i in transitions:
        with tf.GradientTape() as tape:
            pixels = tf.constant(rows.observation[i])
            probabilities = tf.nn.softmax(actor_critic.distribution(pixels).logits[0])
            loss = -tf.math.log(probabilities[int(rows.action[i, 0])]) * advantage[i, 0]
            loss += 0.7 * (value_target[i, 0] - actor_critic.value(pixels)[0]) ** 2
            loss += 0.05 * tf.reduce_sum(probabilities * tf.math.log(probabilities))
        expected.append(tape.gradient(loss, agent.gradient_variables()))
    means = [np.mean(each, 0) for each in zip(*expected, strict=True)]
    assert_close(gradients, means, 1e-4)
