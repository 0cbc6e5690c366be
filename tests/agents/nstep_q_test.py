"""Tests of n-step Q-learning against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import combinations
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    LAST,
    MID,
    TWO_MOTORS,
    Array,
    as_float32,
    as_float64,
    assert_close,
    assert_same,
    bound,
    check_epsilon,
    check_steps,
    dense_layers,
    env_steps,
    float64,
    half_square,
    huber,
    n_step_return,
    numeric_gradients,
    random_events,
    random_rollout,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from tf_agents.trajectories import TimeStep, Trajectory, restart

from pipeline.agents.nstep_q import NStepQAgent, QLearningInfo, create_nstep_q_agent
from pipeline.agents.q_learning import huber_loss, squared_loss
from pipeline.utils.errors import UserError

GAMMA, STEPS, ENVS = 0.9, 6, 3
SGD = tf.keras.optimizers.legacy.SGD


def create(**kwargs: Any) -> NStepQAgent:
    settings = {"num_envs": ENVS, "seed": 0, "env_steps": env_steps(), "discount": GAMMA} | kwargs
    with bound({"mlp_encoder.units": (5,)}):
        agent = create_nstep_q_agent(specs(), FOUR_ACTIONS, **settings)
    rng = np.random.default_rng(7)
    randomize(rng, agent.q_network.variables)
    randomize(rng, agent.target_q_network.variables)
    return agent


def collected(seed: int) -> tuple[Trajectory, TimeStep]:
    """Returns rows [STEPS, ENVS] with any events, and the time step after them."""
    rng = np.random.default_rng(seed)
    rows = random_rollout(rng, FOUR_ACTIONS, STEPS, ENVS)
    return rows, restart(tf.constant(as_float32(rng.normal(size=(ENVS, 3)))), ENVS)


def greedy_values(agent: NStepQAgent, observation: Array) -> Array:
    weights = float64(agent.target_q_network.variables)
    return dense_layers(as_float64(observation), weights).max(-1)


@pytest.mark.parametrize(
    ("one_step", "in_graph"),
    combinations((False, True), (False, True), often=[(False, True), (True, False)]),
)
def test_targets_equal_numpy_in_all_that_can_happen(one_step: bool, in_graph: bool) -> None:
    agent, seen = create(one_step=one_step), set()
    prepare = tf.function(agent.prepare, autograph=False) if in_graph else agent.prepare
    for seed in range(12):
        rows, final = collected(seed)
        prepared = prepare(tensors(rows), final)
        for t, env in np.argwhere(rows.step_type != LAST):
            one = tf.nest.map_structure(lambda x, env=env: x[:, env], rows)
            observations = [*one.observation, final.observation[env].numpy()]
            values = greedy_values(agent, np.stack(observations))
            expected = n_step_return(one, values.__getitem__, t, GAMMA, one_step)
            assert_close(prepared.policy_info.value_target[t, env], expected)
        seen |= set(
            zip(rows.step_type.flat, rows.next_step_type.flat, rows.discount.flat, strict=True)
        )
        assert_same(prepared.observation, rows.observation)
    assert {(MID, LAST, 0.0), (MID, LAST, 1.0), (MID, MID, 0.0), (LAST, FIRST, 1.0)} <= seen


def training_rows(seed: int = 0, num_rows: int = 12) -> tuple[Trajectory, Array]:
    rng = np.random.default_rng(seed)
    starts = rng.choice([FIRST, MID, LAST], num_rows)
    starts[0] = MID
    rows = random_sequences(rng, FOUR_ACTIONS, random_events(rng, (num_rows, 1)), starts)
    info = QLearningInfo(as_float32(rng.normal(size=(num_rows, 1))))
    return rows.replace(policy_info=info), starts != LAST


@pytest.mark.parametrize("td_loss, reference", [(squared_loss, half_square), (huber_loss, huber)])
def test_loss_and_gradients_equal_numpy(td_loss: Any, reference: Any) -> None:
    agent = create(td_loss=td_loss)
    rows, valid = training_rows()
    assert not valid.all()

    def q_taken(weights: list[Array]) -> Array:
        q_values = dense_layers(as_float64(rows.observation[:, 0]), weights)
        return np.take_along_axis(q_values, rows.action, -1)[:, 0]

    def loss(weights: list[Array]) -> float:
        errors = as_float64(rows.policy_info.value_target[:, 0]) - q_taken(weights)
        return float(reference(errors)[valid].mean())

    gradients, loss_info = agent.gradients(tensors(rows), tf.ones(12))
    weights = float64(agent.q_network.variables)
    assert_close(loss_info.loss, loss(weights))
    assert_close(loss_info.extra["q_mean"], q_taken(weights)[valid].mean())
    assert_close(gradients, numeric_gradients(loss, weights), 1e-4)
    assert set(agent.loss_names) <= loss_info.extra.keys()


def test_the_target_network_is_copied_by_environment_steps() -> None:
    steps = env_steps()
    agent = create(env_steps=steps, target_update_env_steps=100, optimizer=SGD, learning_rate=0.1)
    rows, final = collected(0)

    @tf.function(autograph=False)
    def train(rows: Trajectory, final: TimeStep) -> None:
        prepared = agent.prepare(rows, final)
        batch = tf.nest.map_structure(
            lambda x: tf.reshape(x, [STEPS * ENVS, 1, *x.shape[2:]]), prepared
        )
        agent.train(batch, tf.ones(STEPS * ENVS))

    online, target = agent.q_network.variables, agent.target_q_network.variables
    for count, copied in ((40, False), (99, False), (104, True), (199, False), (200, True)):
        steps.assign(count)
        before, trained = values_of(target), values_of(online)
        train(tensors(rows), final)
        assert_same(values_of(target), trained if copied else before)
    assert agent.train_step_counter == 5


def test_epsilon_follows_environment_steps() -> None:
    check_epsilon(create)


def test_a_step_follows_the_schedule_and_the_clipped_gradient() -> None:
    check_steps(create, training_rows()[0])


def test_the_target_network_begins_as_a_copy() -> None:
    with bound({"mlp_encoder.units": (5,)}):
        agent = create_nstep_q_agent(
            specs(), FOUR_ACTIONS, num_envs=1, seed=0, env_steps=env_steps()
        )
    assert_same(values_of(agent.target_q_network.variables), values_of(agent.q_network.variables))


def test_a_loss_must_be_one_for_each_error() -> None:
    with pytest.raises(UserError, match="create_nstep_q_agent.td_loss = @reduce_mean: must be"):
        create(td_loss=tf.reduce_mean)


def test_actions_must_be_discrete() -> None:
    with pytest.raises(UserError, match="n-step Q-learning needs discrete actions"):
        create_nstep_q_agent(specs(), TWO_MOTORS, num_envs=1, seed=0, env_steps=env_steps())
