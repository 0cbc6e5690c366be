"""Tests of DQN 3.0's loss against a transcription of the Lua program's back-propagation."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    GO_ON,
    LOSE_LIFE,
    MID,
    TERMINATE,
    THREE_NUMBERS,
    assert_same,
    bound,
    env_steps,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from tf_agents.networks.network import Network
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import Trajectory

from pipeline.agents.dqn import DqnAgent, create_dqn_agent, select_action
from pipeline.networks.encoders import QNetwork
from pipeline.ops.optimizers import CenteredRMSprop

FRAMES = tensor_spec.BoundedTensorSpec((4, 84, 84), tf.uint8, 0, 255)
PAGE = ROOT / "docs/dqn3.md"
GAMMA = 0.99
Array = np.ndarray


class LuaUpdate(NamedTuple):
    """Results of `getQUpdate` in float32."""

    targets: Array  # [B, actions], the gradient given to the network's output
    delta: Array  # [B], clipped


def get_q_update(
    q2: Array, q_all: Array, a: Array, r: Array, term: Array, clip_delta: float = 1.0
) -> LuaUpdate:
    """Transcribes `NeuralQLearner:getQUpdate` with `rescale_r` and `r_max` = 1.

    Args:
      q2: Q-values of the target network in the next states, [B, actions].
      q_all: Q-values of the network in the current states, [B, actions].
      a, r, term: actions, rewards and whether the next state is terminal, [B].
    """
    one_minus_term = term.astype(np.float32) * np.float32(-1) + np.float32(1)
    q2_max = q2.max(1)
    q2_ = q2_max * np.float32(GAMMA) * one_minus_term
    delta = r.astype(np.float32)
    delta = delta / np.float32(1)
    delta = delta + q2_
    q = np.zeros(len(a), np.float32)
    for i in range(len(a)):
        q[i] = q_all[i][a[i]]
    delta = delta + np.float32(-1) * q
    delta[delta >= clip_delta] = clip_delta
    delta[delta <= -clip_delta] = -clip_delta
    targets = np.zeros_like(q_all)
    for i in range(len(a)):
        targets[i][a[i]] = delta[i]
    return LuaUpdate(targets, delta)


@pytest.fixture(autouse=True)
def small_networks() -> Iterator[None]:
    with bound({"mlp_encoder.units": (16, 8), "nature_cnn_encoder.first_padding": 1}):
        yield


def create(
    seed: int = 0,
    steps: tf.Variable | None = None,
    observation_spec: tf.TensorSpec = THREE_NUMBERS,
    **kwargs: Any,
) -> DqnAgent:
    counter = env_steps() if steps is None else steps
    agent = create_dqn_agent(
        specs(observation_spec), FOUR_ACTIONS, num_envs=1, seed=0, env_steps=counter,
        optimizer=CenteredRMSprop, learning_rate=2.5e-4, discount=GAMMA,
        target_update_period=None,
        **({"sum_losses": True, "target_update_env_steps": 10} | kwargs),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    randomize(rng, [*agent.q_network.variables, *agent.target_q_network.variables])
    return agent


@functools.cache
def the_agent() -> DqnAgent:
    return create()


def random_batch(
    seed: int, reward_scale: float = 2.0, observation_spec: tf.TensorSpec = THREE_NUMBERS
) -> Trajectory:
    """Returns 32 transitions with large rewards, lost lives and ends of games."""
    rng = np.random.default_rng(seed)
    events = rng.choice([GO_ON, LOSE_LIFE, TERMINATE], (32, 2), p=[0.7, 0.15, 0.15])
    starts = rng.choice([FIRST, MID], 32)
    batch = random_sequences(rng, FOUR_ACTIONS, events, starts, observation_spec)
    return batch.replace(reward=np.float32(reward_scale) * batch.reward)


def lua_update(agent: DqnAgent, batch: Trajectory) -> LuaUpdate:
    q2 = agent.target_q_network(batch.observation[:, 1])[0].numpy()
    q_all = agent.q_network(batch.observation[:, 0])[0].numpy()
    a, r, term = batch.action[:, 0], batch.reward[:, 0], batch.discount[:, 0] == 0
    return get_q_update(q2, q_all, a, r, term)


def back_propagate(agent: DqnAgent, batch: Trajectory) -> list[Array]:
    """Returns `network:backward(s, targets)`, which starts at the output and needs no loss."""
    targets = tf.constant(lua_update(agent, batch).targets)
    variables = agent.q_network.trainable_variables
    with tf.GradientTape() as tape:
        q, _ = agent.q_network(batch.observation[:, 0])
    return [gradient.numpy() for gradient in tape.gradient(q, variables, output_gradients=targets)]


def assert_equal_to_rounding(actual: list, expected: list) -> None:
    """Checks equality to a few units in the last place of the largest terms of a gradient."""
    for x, y in zip(actual, expected, strict=True):
        scale = np.abs(y).max() + np.finfo(np.float32).tiny
        assert np.abs(np.asarray(x) - y).max() <= 64 * np.finfo(np.float32).eps * scale


def assert_learns_as_lua_does(agent: DqnAgent, batch: Trajectory) -> list[Array]:
    """Checks that Lua's direction of ascent, which it returns, is minus our gradient."""
    by_hand = back_propagate(agent, batch)
    gradients, _ = agent.gradients(tensors(batch), tf.ones(32))
    assert_equal_to_rounding([-g for g in gradients], by_hand)
    return by_hand


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.floats(0.1, 30.0))
def test_the_summed_huber_loss_has_the_gradient_that_lua_back_propagates(
    seed: int, reward_scale: float
) -> None:
    agent, batch = the_agent(), random_batch(seed, reward_scale)
    networks = agent.q_network, agent.target_q_network
    randomize(np.random.default_rng(seed), [v for network in networks for v in network.variables])
    assert_learns_as_lua_does(agent, batch)


def test_so_it_has_with_the_network_of_2015() -> None:
    agent, batch = create(observation_spec=FRAMES), random_batch(4, observation_spec=FRAMES)
    by_hand = assert_learns_as_lua_does(agent, batch)
    assert [g.shape[0] for g in by_hand[::2]] == [8, 4, 3, 3136, 512]
    assert all(g.any() for g in by_hand)


def test_the_batches_hold_all_that_matters() -> None:
    batches = [random_batch(seed) for seed in range(5)]
    agent = create()
    clipped = np.concatenate([np.abs(lua_update(agent, b).delta) == 1 for b in batches])
    assert 0.2 < clipped.mean() < 0.8
    assert all((np.abs(b.reward[:, 0]) > 1).any() for b in batches)
    assert all((b.discount[:, 0] == 0).any() and (b.discount[:, 0] == 1).any() for b in batches)
    assert any((b.step_type[:, 1] == MID)[b.discount[:, 0] == 0].any() for b in batches)


def loss_gradients(agent: DqnAgent, batch: Trajectory, of_delta) -> list[Array]:
    """Returns the gradients of the sum of `of_delta`, with the target held constant."""
    next_q, _ = agent.target_q_network(batch.observation[:, 1])
    target = batch.reward[:, 0] + GAMMA * batch.discount[:, 0] * tf.reduce_max(next_q, -1)
    variables = agent.q_network.trainable_variables
    with tf.GradientTape() as tape:
        q, _ = agent.q_network(batch.observation[:, 0])
        delta = tf.stop_gradient(target) - select_action(q, batch.action[:, 0])
        loss = tf.reduce_sum(of_delta(delta))
    return [g.numpy() for g in tape.gradient(loss, variables)]


def test_half_the_squared_clipped_delta_does_not_have_it() -> None:
    """Checks that its gradient vanishes where delta is clipped, so large errors teach nothing."""
    agent = create()
    half_square = lambda delta: 0.5 * tf.clip_by_value(delta, -1.0, 1.0) ** 2  # noqa: E731
    batch = random_batch(0)
    by_hand = back_propagate(agent, batch)
    wrong = loss_gradients(agent, batch, half_square)
    assert max(np.abs(x + y).max() for x, y in zip(wrong, by_hand, strict=True)) > 1

    far = batch.replace(reward=np.full_like(batch.reward, 50))
    assert (lua_update(agent, far).delta == 1).all()
    assert not any(g.any() for g in loss_gradients(agent, far, half_square))
    assert all(g.any() for g in assert_learns_as_lua_does(agent, far))


class OneNetwork(DqnAgent):
    @property
    def target_q_network(self) -> QNetwork:
        return self.q_network


def test_a_target_that_is_not_held_constant_does_not_have_it() -> None:
    """Checks that with one network for both, as with `target_q` unset, the target would learn."""
    agent, batch = create(agent_class=OneNetwork), random_batch(1)
    by_hand = assert_learns_as_lua_does(agent, batch)
    variables = agent.q_network.trainable_variables
    with tf.GradientTape() as tape:
        next_q, _ = agent.q_network(batch.observation[:, 1])
        q, _ = agent.q_network(batch.observation[:, 0])
        target = batch.reward[:, 0] + GAMMA * batch.discount[:, 0] * tf.reduce_max(next_q, -1)
        delta = target - select_action(q, batch.action[:, 0])
        size = tf.abs(delta)
        loss = tf.reduce_sum(tf.where(size <= 1, 0.5 * delta**2, size - 0.5))
    wrong = tape.gradient(loss, variables)
    assert max(np.abs(x + y).max() for x, y in zip(wrong, by_hand, strict=True)) > 0.1


def test_losses_are_summed_over_transitions_only() -> None:
    summed, mean = create(sum_losses=True), create(sum_losses=False)
    batch, weights = tensors(random_batch(2)), tf.constant([1.0] * 20 + [0.0] * 12)
    first, second = (agent.gradients(batch, weights) for agent in (summed, mean))
    np.testing.assert_allclose(first[1].loss, 20 * second[1].loss, rtol=1e-5)
    for x, y in zip(first[0], second[0], strict=True):
        np.testing.assert_allclose(x, 20 * y, rtol=1e-4, atol=1e-6)


def test_an_update_moves_the_weights_as_lua_does() -> None:
    """Checks three updates (getQUpdate, backward, centred RMSProp) in double precision."""
    agent = create()
    weights = [w.astype(np.float64) for w in values_of(agent.q_network.variables)]
    start = [w.copy() for w in weights]
    g, g2 = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for seed in range(3):
        batch = random_batch(seed)
        for variable, weight in zip(agent.q_network.variables, weights, strict=True):
            variable.assign(weight.astype(np.float32))
        ascent = back_propagate(agent, batch)
        agent.train(tensors(batch), tf.ones(32))
        for i, dw in enumerate(ascent):
            g[i] = 0.95 * g[i] + 0.05 * dw
            g2[i] = 0.95 * g2[i] + 0.05 * dw.astype(np.float64) ** 2
            weights[i] += 2.5e-4 * dw / np.sqrt(g2[i] - g[i] ** 2 + 0.01)
    for moved, weight, before in zip(values_of(agent.q_network.variables), weights, start,
                                     strict=True):  # fmt: skip
        np.testing.assert_allclose(moved - before, weight - before, rtol=1e-3, atol=1e-7)
        assert np.abs(weight - before).max() > 1e-4


class WithoutState:
    """Function from observations to Q-values that wraps a TF-Agents network."""

    def __init__(self, network: Network):
        self._network = network
        self.trainable_variables = network.trainable_variables

    def __call__(self, observation: Array) -> tf.Tensor:
        return self._network(observation)[0]


def test_the_program_of_the_page_steps_as_lua_does() -> None:
    section = PAGE.read_text().split("## How to start back-propagation")[1]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    agent, batch = create(seed=3), random_batch(5)
    before = values_of(agent.q_network.trainable_variables)
    expected = back_propagate(agent, batch)
    names = {
        "tf": tf, "gamma": GAMMA, "optimizer": tf.keras.optimizers.legacy.SGD(1.0),
        "network": WithoutState(agent.q_network),
        "target_network": WithoutState(agent.target_q_network),
        "observation": batch.observation[:, 0], "next_observation": batch.observation[:, 1],
        "action": batch.action[:, 0], "reward": batch.reward[:, 0],
        "terminal": np.float32(batch.discount[:, 0] == 0),
    }  # fmt: skip
    exec(program, names)
    after = values_of(agent.q_network.trainable_variables)
    moved = [now - was for now, was in zip(after, before, strict=True)]
    assert_equal_to_rounding(moved, expected)


def test_the_target_network_follows_environment_steps() -> None:
    """Checks that the first update at or after each multiple of 10 steps starts with a copy."""
    steps = env_steps(0)
    agent = create(0, steps)
    batch = tensors(random_batch(0))
    train = tf.function(agent.train, autograph=False)
    first = values_of(agent.target_q_network.variables)
    for count in (0, 4, 8, 12, 16, 20, 24):  # environment steps at the start of an iteration
        steps.assign(count)
        online = values_of(agent.q_network.variables)
        loss = train(batch, tf.ones(32)).loss
        if count in (12, 20):
            first = online
        assert_same(values_of(agent.target_q_network.variables), first)
        if count == 12:
            fresh = create(0, env_steps(0))
            for network in (fresh.q_network, fresh.target_q_network):
                for variable, value in zip(network.variables, online, strict=True):
                    variable.assign(value)
            np.testing.assert_allclose(loss, fresh.train(batch, tf.ones(32)).loss, rtol=1e-5)
