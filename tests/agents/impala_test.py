"""Tests of what IMPALA adds to A2C; returns_test covers V-trace itself."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from a2c_test import create as create_small
from numpy_references import (
    FOUR_ACTIONS,
    LAST,
    as_float32,
    assert_close,
    assert_same,
    check_steps,
    each_action_spec,
    random_rollout,
    randomize,
    tensors,
)
from tf_agents.trajectories import Trajectory, restart

from pipeline.agents.impala import create_impala_agent
from pipeline.networks.actor_critic import OnPolicyInfo
from pipeline.ops.returns import v_trace, valid_mask

create = functools.partial(create_small, constructor=create_impala_agent)


def collected(agent: Any, action_spec=FOUR_ACTIONS, seed: int = 0) -> tuple[Trajectory, Any]:
    """Returns rows [6, 3] with the log-probabilities and values of `agent`, and what follows."""
    rng = np.random.default_rng(seed)
    rows = random_rollout(rng, action_spec, 6, 3)
    assert (rows.step_type == LAST).any()
    info = [
        tf.stack([distribution.log_prob(action), value])
        for distribution, value, action in (
            (*agent.actor_critic(observation), action)
            for observation, action in zip(rows.observation, rows.action, strict=True)
        )
    ]
    log_probability, value = tf.unstack(tf.stack(info), axis=1)
    rows = rows.replace(policy_info=OnPolicyInfo(log_probability, value))
    return tensors(rows), restart(tf.constant(as_float32(rng.normal(size=(3, 3)))), 3)


@each_action_spec
def test_with_the_weights_that_collected_it_is_a2c(action_spec) -> None:
    weights = {"value_coefficient": 0.7, "entropy_coefficient": 0.1}
    agent = create(action_spec, **weights)
    rows, final = collected(agent, action_spec)
    a2c = create_small(action_spec, **weights)
    expected = a2c.prepare(rows, final)
    prepared = agent.prepare(rows, final)
    assert_close(prepared.policy_info.advantage, expected.policy_info.advantage)
    assert_close(prepared.policy_info.value_target, expected.policy_info.value_target)
    batch = tf.nest.map_structure(lambda x: tf.reshape(x, [18, 1, *x.shape[2:]]), expected)
    ours, theirs = (x.gradients(batch, tf.ones(18))[0] for x in (agent, a2c))
    assert_same(ours, theirs)


def test_a_step_follows_the_schedule_and_the_clipped_gradient() -> None:
    agent = create()
    prepared = agent.prepare(*collected(agent))
    batch = tf.nest.map_structure(lambda x: x.numpy().reshape(18, 1, *x.shape[2:]), prepared)
    check_steps(create, batch)


def test_ratios_and_values_are_those_of_the_current_weights() -> None:
    agent = create(trace_lambda=0.8, rho_clip=1.3)
    rows, final = collected(agent)
    randomize(np.random.default_rng(8), agent.actor_critic.trainable_variables)
    now, _ = collected(agent)
    ratios = tf.exp(now.policy_info.log_probability - rows.policy_info.log_probability)
    assert (ratios > 1.3).numpy().any()
    assert (ratios < 1.0).numpy().any()
    final_value = agent.actor_critic.value(final.observation)
    targets, advantages = v_trace(
        rows.reward,
        0.9 * rows.discount,
        now.policy_info.value,
        final_value,
        ratios,
        0.8,
        1.3,
        valid_mask(rows.step_type),
    )
    prepared = agent.prepare(rows, final).policy_info
    assert_close(prepared.value_target, targets)
    assert_close(prepared.advantage, advantages)


def test_an_action_that_the_current_policy_forbids_has_no_weight() -> None:
    agent = create()
    rows, final = collected(agent)
    likely = tf.fill(rows.policy_info.log_probability.shape, 80.0)  # far from the current one
    rows = rows.replace(policy_info=rows.policy_info._replace(log_probability=likely))
    prepared = agent.prepare(rows, final).policy_info
    assert_close(prepared.advantage, tf.zeros_like(prepared.advantage))
