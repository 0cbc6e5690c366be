"""Tests of DQN against plain NumPy, and of its differences from TF-Agents' agent."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.special
import tensorflow as tf
from conftest import combinations
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    GO_ON,
    LAST,
    LOSE_LIFE,
    MID,
    TERMINATE,
    THREE_NUMBERS,
    TRUNCATE,
    TWO_MOTORS,
    Array,
    as_float32,
    assert_close,
    assert_same,
    bound,
    check_epsilon,
    check_steps,
    check_train_applies_gradients,
    dense_layers,
    env_steps,
    float64,
    half_square,
    huber,
    n_step_return,
    numeric_gradients,
    random_events,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from tf_agents.agents.dqn import dqn_agent as stock_dqn
from tf_agents.trajectories import Trajectory
from tf_agents.utils import common

from pipeline.agents.dqn import DqnAgent, create_dqn_agent
from pipeline.agents.q_learning import huber_loss, select_action, squared_loss
from pipeline.networks.encoders import QNetwork, mlp_encoder
from pipeline.networks.heads import QHead
from pipeline.utils.errors import UserError

GAMMA = 0.9
SGD = tf.keras.optimizers.legacy.SGD
REFERENCE_LOSSES = {huber_loss: huber, squared_loss: half_square}


def create(**kwargs: Any) -> DqnAgent:
    settings = {"discount": GAMMA, "num_envs": 1, "seed": 0, "env_steps": env_steps()} | kwargs
    agent = create_dqn_agent(specs(), FOUR_ACTIONS, **settings)
    rng = np.random.default_rng(7)
    randomize(rng, [*agent.q_network.variables, *agent.target_q_network.variables])
    return agent


@pytest.fixture(autouse=True)
def small_networks() -> Iterator[None]:
    with bound({"mlp_encoder.units": (5,)}):
        yield


@functools.cache
def agent_of(n_step: int, double_q: bool = False, td_loss: Any = huber_loss) -> DqnAgent:
    return create(n_step=n_step, double_q=double_q, td_loss=td_loss)


def random_batch(rng: np.random.Generator, n_step: int, batch_size: int = 24) -> Trajectory:
    events = random_events(rng, (batch_size, n_step + 1))
    starts = rng.choice([FIRST, MID, LAST], batch_size)
    return random_sequences(rng, FOUR_ACTIONS, events, starts)


def bootstrap_value(agent: DqnAgent, observation: Array, double_q: bool = False) -> float:
    q_values, target_q_values = (
        dense_layers(observation, float64(network.variables))
        for network in (agent.q_network, agent.target_q_network)
    )
    return target_q_values[np.argmax(q_values)] if double_q else target_q_values.max()


def reference_targets(
    agent: DqnAgent, batch: Trajectory, n_step: int, double_q: bool = False
) -> Array:
    """Returns targets [B], which are NaN where the sequence starts with a boundary row."""
    targets = np.full(len(batch.reward), np.nan)
    for b in np.flatnonzero(batch.step_type[:, 0] != LAST):
        rows = tf.nest.map_structure(lambda x, b=b: x[b, :n_step], batch)
        values = [bootstrap_value(agent, x, double_q) for x in batch.observation[b]]
        targets[b] = n_step_return(rows, values.__getitem__, 0, GAMMA)
    return targets


def q_taken(batch: Trajectory, weights: Sequence[Array]) -> Array:
    """Returns Q-values [B] of first rows, which are NaN for boundary rows."""
    q_values = dense_layers(batch.observation[:, 0], weights)
    taken = np.take_along_axis(q_values, batch.action[:, :1], -1)[:, 0]
    return np.where(batch.step_type[:, 0] == LAST, np.nan, taken)


def reference_loss(
    td_loss: Any, targets: Array, batch: Trajectory, weights: Sequence[Array]
) -> float:
    errors = targets - q_taken(batch, weights)
    return REFERENCE_LOSSES[td_loss](errors[~np.isnan(errors)]).mean()


@pytest.mark.parametrize(
    ("n_step", "double_q", "td_loss"),
    combinations(
        (1, 3),
        (False, True),
        (huber_loss, squared_loss),
        often=[  # every pair of values
            (1, False, huber_loss),
            (1, True, squared_loss),
            (3, False, squared_loss),
            (3, True, huber_loss),
        ],
    ),
)
def test_loss_and_gradients(n_step: int, double_q: bool, td_loss: Any) -> None:
    agent = agent_of(n_step, double_q, td_loss)
    weights = float64(agent.q_network.trainable_weights)
    for seed in range(3):
        batch = random_batch(np.random.default_rng(seed), n_step)
        assert {0, 1, 2} == set(batch.step_type[:, 0])
        gradients, loss_info = agent.gradients(tensors(batch), tf.ones(24))
        targets = reference_targets(agent, batch, n_step, double_q)

        def loss(weights: list[Array], targets=targets, batch=batch) -> float:
            return reference_loss(td_loss, targets, batch, weights)

        expected = numeric_gradients(loss, weights)
        assert_close(loss_info.loss, loss(weights))
        assert_close(loss_info.extra["q_mean"], np.nanmean(q_taken(batch, weights)))
        assert_close(gradients, expected, 1e-4)
        norm = np.sqrt(sum(np.sum(g**2) for g in expected))
        assert_close(loss_info.extra["gradient_norm"], norm, 1e-4)
        assert set(agent.loss_names) <= loss_info.extra.keys()


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.5])
def test_huber_loss_of_scipy(threshold: float) -> None:
    errors = np.linspace(-6.0, 6.0, 49)
    assert_close(huber_loss(tf.constant(errors), threshold), scipy.special.huber(threshold, errors))


def test_double_q_and_plain_targets_differ() -> None:
    batch = random_batch(np.random.default_rng(0), 1)
    plain, double = (reference_targets(agent_of(1, d), batch, 1, d) for d in (False, True))
    assert np.nanmax(plain - double) > 0.01


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_nothing_after_an_episode_moves_the_loss(seed: int, n_step: int) -> None:
    """Checks also that a sequence that starts with a boundary row has no effect."""
    rng, agent = np.random.default_rng(seed), agent_of(n_step)
    batch, noise = random_batch(rng, n_step), random_batch(rng, n_step)
    over = np.cumsum(batch.step_type == LAST, axis=1) > 0
    seen = over & (np.cumsum(over, axis=1) == 1) & (batch.step_type[:, :1] != LAST)

    def change(old: Array, new: Array, where: Array) -> Array:
        return np.where(where.reshape(where.shape + (1,) * (old.ndim - 2)), new, old)

    changed = batch.replace(
        observation=change(batch.observation, noise.observation, over & ~seen),
        action=change(batch.action, noise.action, over),
        reward=change(batch.reward, 100.0 + noise.reward, over),
        discount=change(batch.discount, noise.discount, over),
    )
    losses = [agent.gradients(tensors(b), tf.ones(24)) for b in (batch, changed)]
    assert_same(losses[0][0], losses[1][0])
    assert_same(losses[0][1].loss, losses[1][1].loss)


@pytest.mark.parametrize(("event", "bootstraps"), [(TRUNCATE, True), (TERMINATE, False)])
def test_only_truncation_bootstraps_with_the_final_observation(
    event: int, bootstraps: bool
) -> None:
    agent, rng = agent_of(3), np.random.default_rng(1)
    batch = random_sequences(rng, FOUR_ACTIONS, np.array([[GO_ON, event, GO_ON, GO_ON]]), [MID])
    error = agent.gradients(tensors(batch), tf.ones(1))[1].extra["td_error"][0]
    q_taken = dense_layers(batch.observation[0, 0], float64(agent.q_network.variables))
    value = bootstrap_value(agent, batch.observation[0, 2])
    target = batch.reward[0, 0] + GAMMA * batch.reward[0, 1] + bootstraps * GAMMA**2 * value
    assert_close(error, target - q_taken[batch.action[0, 0]])


def test_a_batch_of_boundary_rows_teaches_nothing() -> None:
    rng = np.random.default_rng(2)
    batch = random_sequences(rng, FOUR_ACTIONS, np.full((4, 2), GO_ON), np.full(4, LAST))
    gradients, loss_info = agent_of(1).gradients(tensors(batch), tf.ones(4))
    assert loss_info.loss == 0.0
    assert not any(np.any(g) for g in gradients)


def test_weights_weigh_rows() -> None:
    batch = random_batch(np.random.default_rng(3), 1)
    weights = as_float32(np.random.default_rng(4).uniform(size=24))
    weights[:6] = 0.0
    agent = agent_of(1)
    loss_info = agent.gradients(tensors(batch), tf.constant(weights))[1]
    valid = batch.step_type[:, 0] != LAST
    losses = REFERENCE_LOSSES[huber_loss](loss_info.extra["td_error"].numpy())
    assert_close(loss_info.loss, np.average(losses[valid], weights=weights[valid]))


def stock_agent(agent: DqnAgent, n_step: int) -> stock_dqn.DqnAgent:
    """Returns TF-Agents' agent with the same weights."""

    q_network, target_q_network = (
        QNetwork(THREE_NUMBERS, tf.keras.Sequential(mlp_encoder()), QHead(4), name)
        for name in ("q", "target_q")
    )
    stock = stock_dqn.DqnAgent(
        specs(),
        FOUR_ACTIONS,
        q_network=q_network,
        target_q_network=target_q_network,
        optimizer=SGD(),
        gamma=GAMMA,
        n_step_update=n_step,
        td_errors_loss_fn=common.element_wise_huber_loss,
    )
    q_network.set_weights(agent.q_network.get_weights())
    target_q_network.set_weights(agent.target_q_network.get_weights())
    return stock


@pytest.mark.parametrize("n_step", [1, 3])
def test_stock_loss_is_the_same_within_an_episode(n_step: int) -> None:
    agent, rng = agent_of(n_step), np.random.default_rng(5)
    events = rng.choice([GO_ON, LOSE_LIFE], (24, n_step + 1))
    batch = random_sequences(rng, FOUR_ACTIONS, events, np.full(24, MID))
    ours = agent.gradients(tensors(batch), tf.ones(24))[1].loss
    assert_close(stock_agent(agent, n_step)._loss(tensors(batch), gamma=GAMMA).loss, ours)


def test_stock_n_step_loss_is_wrong_where_an_episode_is_truncated() -> None:
    agent, rng = agent_of(3), np.random.default_rng(7)
    events = np.tile([GO_ON, TRUNCATE, GO_ON, GO_ON], (24, 1))
    batch = random_sequences(rng, FOUR_ACTIONS, events, np.full(24, MID))
    targets = reference_targets(agent, batch, 3)
    expected = reference_loss(huber_loss, targets, batch, float64(agent.q_network.variables))
    assert_close(agent.gradients(tensors(batch), tf.ones(24))[1].loss, expected)
    stock = stock_agent(agent, 3)._loss(tensors(batch), gamma=GAMMA).loss
    assert abs(stock - expected) > 0.02


def test_target_network_is_copied_at_every_period_exactly() -> None:
    agent = create(target_update_period=3, optimizer=SGD, learning_rate=0.1)
    batch = tensors(random_batch(np.random.default_rng(0), 1))
    train = tf.function(agent.train, autograph=False)
    target = values_of(agent.target_q_network.variables)
    for update in range(1, 8):
        before = values_of(agent.q_network.variables)
        train(batch, tf.ones(24))
        online = values_of(agent.q_network.variables)
        assert any(np.any(x != y) for x, y in zip(before, online, strict=True))
        if update % 3 == 0:
            target = online
        assert_same(values_of(agent.target_q_network.variables), target)
    assert agent.train_step_counter == 7


def test_target_network_moves_by_tau() -> None:
    agent = create(target_update_period=1, target_update_tau=0.25)
    target = values_of(agent.target_q_network.variables)
    agent.train(tensors(random_batch(np.random.default_rng(0), 1)), tf.ones(24))
    online = values_of(agent.q_network.variables)
    expected = [0.75 * t + 0.25 * w for t, w in zip(target, online, strict=True)]
    assert_close(values_of(agent.target_q_network.variables), expected, 1e-6)


def test_gradients_change_nothing_and_train_applies_them() -> None:
    first, second = create(n_step=3, double_q=True), create(n_step=3, double_q=True)
    check_train_applies_gradients(first, second, random_batch(np.random.default_rng(0), 3))


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_step_follows_the_schedule_and_the_clipped_gradient(clip: float | None) -> None:
    check_steps(create, random_batch(np.random.default_rng(0), 1), clip)


def test_epsilon_follows_environment_steps() -> None:
    check_epsilon(create)


def test_select_action() -> None:
    q_values = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    assert_same(select_action(q_values, tf.constant([1, 0])), [2.0, 3.0])


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(UserError, match=r"DQN needs discrete .*float32, shape \(2,\).*agents/sac"):
        create_dqn_agent(specs(), TWO_MOTORS, num_envs=1, seed=0, env_steps=env_steps())


@pytest.mark.parametrize("periods", [(None, None), (5, 100)])
def test_it_is_clear_when_the_target_network_moves(periods) -> None:
    updates, steps = periods
    with pytest.raises(UserError, match="Bind one of create_dqn_agent.target_update_period"):
        create(target_update_period=updates, target_update_env_steps=steps)


def test_a_share_that_would_be_ignored_is_refused() -> None:
    message = "create_dqn_agent.target_update_tau = 0.01, but with target_update_env_steps"
    with pytest.raises(UserError, match=message):
        create(target_update_period=None, target_update_env_steps=9, target_update_tau=0.01)


@pytest.mark.parametrize(
    ("td_loss", "reason"),
    [
        (lambda target, prediction: target - prediction, "missing 1 required positional argument"),
        (
            lambda td_error: tf.reduce_mean(td_error**2),
            r"shape \[3\] it returned .*=\(\)",
        ),
        (lambda td_error: td_error[:, tf.newaxis] ** 2, r"returned <tf.Tensor: shape=\(3, 1\)"),
        (lambda td_error: tf.cast(td_error, tf.float64), "dtype=float64"),
        (lambda td_error: td_error.numpy(), "has no attribute 'numpy'"),
        (
            lambda td_error: td_error**2 / tf.reduce_max(tf.abs(td_error)),
            "other errors",
        ),
        (lambda td_error: tf.fill(tf.shape(td_error), tf.reduce_mean(td_error)), "other errors"),
        (lambda td_error: tf.round(tf.abs(td_error)), "no gradient"),
    ],
)
def test_a_loss_that_is_not_one_for_each_error_is_refused(td_loss: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"td_loss = @<lambda>: must be .*{reason}"):
        create(td_loss=td_loss)
