"""Tests of A2C's loss and gradients against NumPy; ppo_test covers the parts shared with PPO."""

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
    THREE_NUMBERS,
    Array,
    as_float32,
    as_float64,
    assert_close,
    assert_same,
    bound,
    check_steps,
    dense_layers,
    each_action_spec,
    env_steps,
    float64,
    n_step_return,
    numeric_gradients,
    random_rollout,
    random_sequences,
    randomize,
    specs,
    tensors,
)
from tf_agents.trajectories import Trajectory, restart

from pipeline.agents.a2c import A2CAgent, create_a2c_agent
from pipeline.agents.ppo import create_ppo_agent
from pipeline.agents.trpo import create_trpo_agent
from pipeline.networks.actor_critic import OnPolicyInfo
from pipeline.utils.errors import UserError

ROWS = 12


def create(action_spec=FOUR_ACTIONS, constructor=create_a2c_agent, **kwargs: Any) -> A2CAgent:
    settings = {"num_envs": 3, "seed": 0, "env_steps": env_steps(), "discount": 0.9} | kwargs
    with bound({"mlp_encoder.units": (4,)}):
        agent = constructor(specs(THREE_NUMBERS), action_spec, **settings)
    randomize(np.random.default_rng(7), agent.actor_critic.trainable_variables)
    return agent


def batch(action_spec) -> tuple[Trajectory, Array]:
    """Returns prepared rows [ROWS, 1] and a mask of those that are transitions."""
    rng = np.random.default_rng(0)
    starts = rng.choice([FIRST, MID, LAST], ROWS)
    starts[0] = MID
    rows = random_sequences(rng, action_spec, np.full((ROWS, 1), GO_ON), starts)
    info = OnPolicyInfo(*(as_float32(rng.normal(size=(ROWS, 1))) for _ in range(4)))
    return rows.replace(policy_info=info), starts != LAST


def reference_loss(
    weights: dict[str, Any], rows: Trajectory, valid: Array, settings: dict[str, Any]
) -> float:
    """Computes the loss in float64 from the layers of policy and value."""
    policy, log_std, value = weights["policy"], weights["log_std"], weights["value"]
    observation = as_float64(rows.observation[:, 0])
    output = dense_layers(observation, policy)
    action = rows.action[:, 0]
    if log_std is None:
        shifted = output - output.max(-1, keepdims=True)
        log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        log_prob = np.take_along_axis(log_probs, action[:, None], -1)[:, 0]
        entropy = -np.sum(np.exp(log_probs) * log_probs, -1)
    else:
        half, middle = [2.0, 0.25], [1.0, 0.25]  # of the bounds [-1, 3] and [0, 0.5]
        log_std = log_std + np.log(half)
        noise = (as_float64(action) - middle - half * output) / np.exp(log_std)
        log_prob = np.sum(-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi), -1)
        entropy = np.full(ROWS, np.sum(log_std + 0.5 * np.log(2 * np.pi * np.e)))
    advantage = as_float64(rows.policy_info.advantage[:, 0])
    target = as_float64(rows.policy_info.value_target[:, 0])
    each = (
        -log_prob * advantage
        + settings["value_coefficient"] * (target - dense_layers(observation, value)[:, 0]) ** 2
        - settings["entropy_coefficient"] * entropy
    )
    return float(each[valid].mean())


def parameters(agent: A2CAgent) -> tuple[list[tf.Variable], Any]:
    """Returns the variables, and a function that sorts a list of their values into layers."""
    actor_critic = agent.actor_critic
    head = actor_critic.policy_head
    dense = head.logits if hasattr(head, "logits") else head.mean
    policy = [*actor_critic.encoder.trainable_variables, *dense.trainable_variables]
    log_std = [head.log_std] if hasattr(head, "log_std") else []
    value = [
        *actor_critic.value_encoder.trainable_variables,
        *actor_critic.value_head.trainable_variables,
    ]

    def layers(values: list[Array]) -> dict[str, Any]:
        n, m = len(policy), len(policy) + len(log_std)
        return {
            "policy": values[:n],
            "log_std": values[n] if log_std else None,
            "value": values[m:],
        }

    return [*policy, *log_std, *value], layers


@each_action_spec
def test_loss_and_gradients_equal_numpy(action_spec) -> None:
    settings = {"value_coefficient": 0.7, "entropy_coefficient": 0.05}
    agent = create(action_spec, **settings)
    rows, valid = batch(action_spec)
    assert not valid.all()
    gradients, loss_info = agent.gradients(tensors(rows), tf.ones(ROWS))
    variables, layers = parameters(agent)

    def loss(values: list[Array]) -> float:
        return reference_loss(layers(values), rows, valid, settings)

    assert_close(loss_info.loss, loss(float64(variables)))
    by_variable = {id(v): g for v, g in zip(agent.gradient_variables(), gradients, strict=True)}
    expected = numeric_gradients(loss, float64(variables))
    assert len(by_variable) == len(variables)
    assert_close([by_variable[id(v)] for v in variables], expected, 1e-4)
    assert set(agent.loss_names) <= loss_info.extra.keys()


@each_action_spec
def test_boundary_rows_never_enter(action_spec) -> None:
    agent = create(action_spec, entropy_coefficient=0.1)
    rows, valid = batch(action_spec)
    kept = tf.nest.map_structure(lambda x: x[valid], rows)
    with_them = agent.gradients(tensors(rows), tf.ones(ROWS))
    without = agent.gradients(tensors(kept), tf.ones(int(valid.sum())))
    assert_close(with_them[0], without[0])


@each_action_spec
def test_its_gradient_is_that_of_ppo_before_the_first_update(action_spec) -> None:
    """Checks PPO at a ratio of 1, where its surrogate has the gradient of the log-probability."""
    agent = create(action_spec, value_coefficient=0.5)
    ppo = create(action_spec, create_ppo_agent, value_coefficient=0.5, normalize_advantages=None)
    rows, _ = batch(action_spec)
    distribution, value = agent.actor_critic(tf.constant(rows.observation[:, 0]))
    info = rows.policy_info._replace(
        log_probability=distribution.log_prob(rows.action[:, 0]).numpy()[:, None],
        value=value.numpy()[:, None],
    )
    rows = tensors(rows.replace(policy_info=info))
    assert_close(
        agent.gradients(rows, tf.ones(ROWS))[0], ppo.gradients(rows, tf.ones(ROWS))[0], 1e-4
    )


def prepared_rollout(agent: A2CAgent, seed: int) -> tuple[Trajectory, Array, Any]:
    """Returns rows [5, 3] with any events, the values after them and the result of `prepare`."""
    rng = np.random.default_rng(seed)
    rows = random_rollout(rng, FOUR_ACTIONS, 5, 3)
    info = OnPolicyInfo(*(as_float32(rng.normal(size=(5, 3))) for _ in range(2)))
    rows = rows.replace(policy_info=info)
    final = restart(tf.constant(as_float32(rng.normal(size=(3, 3)))), 3)
    final_value = agent.actor_critic.value(final.observation).numpy()
    return rows, final_value, agent.prepare(tensors(rows), final).policy_info


@pytest.mark.parametrize(
    "constructor, plainly, standardised",
    [
        (create_a2c_agent, None, "rollout"),
        (create_ppo_agent, None, "rollout"),
        (create_ppo_agent, "minibatch", "rollout"),  # not done by `prepare`
    ],
)
def test_advantages_are_standardised_over_the_transitions_of_a_rollout(
    constructor: Any, plainly: Any, standardised: Any
) -> None:
    plain_agent = create(constructor=constructor, normalize_advantages=plainly)
    rows, _, plain = prepared_rollout(plain_agent, 3)
    agent = create(constructor=constructor, normalize_advantages=standardised)
    _, _, standard = prepared_rollout(agent, 3)
    valid = rows.step_type != LAST
    assert not valid.all()
    kept = as_float64(plain.advantage)[valid]
    assert_close(standard.advantage.numpy()[valid], (kept - kept.mean()) / kept.std())
    assert_same(standard.value_target, plain.value_target)


@pytest.mark.parametrize(
    ("constructor", "value", "choices"),
    [
        (create_ppo_agent, "batch", '"minibatch", "rollout" or None'),
        (create_a2c_agent, True, '"rollout" or None'),
    ],
)
def test_other_ways_to_normalise_advantages_are_refused(
    constructor: Any, value: Any, choices: str
) -> None:
    with pytest.raises(UserError, match=rf"normalize_advantages = {value!r}: must be {choices}\."):
        create(constructor=constructor, normalize_advantages=value)


@pytest.mark.parametrize("normalize_returns", [False, True])
def test_trpo_prepares_what_a2c_prepares_with_the_same_discount_and_lambda(
    normalize_returns: bool,
) -> None:
    shared = {"gae_lambda": 0.7, "discount": 0.8, "normalize_returns": normalize_returns}
    with bound({"ActorCritic.share_encoder": False}):
        a2c = create(normalize_advantages="rollout", **shared)
    with bound({"ActorCritic.share_encoder": False}):
        trpo = create(constructor=create_trpo_agent, **shared)
    _, _, expected = prepared_rollout(a2c, 3)
    _, _, prepared = prepared_rollout(trpo, 3)
    assert_same(prepared.advantage, expected.advantage)
    assert_same(prepared.value_target, expected.value_target)


def test_without_lambda_advantages_are_n_step_returns_minus_values() -> None:
    agent = create()
    for seed in range(8):
        rows, final_value, prepared = prepared_rollout(agent, seed)
        for t, env in np.argwhere(rows.step_type != LAST):
            one = tf.nest.map_structure(lambda x, env=env: x[:, env], rows)
            values = [*one.policy_info.value, final_value[env]]
            expected = n_step_return(one, values.__getitem__, t, 0.9)
            assert_close(prepared.value_target[t, env], expected)
            assert_close(prepared.advantage[t, env], expected - one.policy_info.value[t])


def test_a_step_follows_the_schedule_and_the_clipped_gradient() -> None:
    check_steps(create, batch(FOUR_ACTIONS)[0])
