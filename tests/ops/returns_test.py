"""Tests of returns.py against NumPy loops over episodes, and of TF-Agents' errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy_references import (
    FIRST,
    GO_ON,
    LAST,
    LOSE_LIFE,
    MID,
    TERMINATE,
    TRUNCATE,
    step_types_and_discounts,
)
from tf_agents.agents.ppo import ppo_clip_agent
from tf_agents.networks import actor_distribution_network, value_network
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, time_step_spec

from pipeline.ops import returns

MANY_CASES = settings(max_examples=50)  # of up to 8 sequences: TensorFlow takes time by the call


@dataclasses.dataclass
class Rows:
    """Rows as float64 arrays [T, B], and final_value [B]."""

    step_types: np.ndarray
    rewards: np.ndarray
    discounts: np.ndarray
    values: np.ndarray
    final_value: np.ndarray

    @property
    def valid(self) -> np.ndarray:
        return (self.step_types != LAST).astype(np.float32)

    def columns(self) -> list[Rows]:
        fields = [np.atleast_2d(getattr(self, f.name)).T for f in dataclasses.fields(self)]
        return [Rows(*(x[b] for x in fields)) for b in range(len(self.final_value))]


def rows_of(events: np.ndarray, starts: np.ndarray, seed: int) -> Rows:
    """Returns the rows that `events` [T, B] lead to, given the first rows' step types [B]."""
    rng = np.random.default_rng(seed)
    step_types, discounts = (x.T for x in step_types_and_discounts(events.T, starts))
    rewards, values = rng.normal(size=[2, *events.shape])
    return Rows(step_types, rewards, discounts, values, rng.normal(size=len(starts)))


@st.composite
def some_rows(draw: st.DrawFn, min_rows: int = 1) -> Rows:
    num_rows, batch = draw(st.integers(min_rows, 9)), draw(st.sampled_from([1, 2, 8]))
    event = st.sampled_from([GO_ON, GO_ON, LOSE_LIFE, TERMINATE, TRUNCATE])
    columns = draw(
        st.lists(
            st.lists(event, min_size=num_rows, max_size=num_rows), min_size=batch, max_size=batch
        )
    )
    starts = draw(st.lists(st.sampled_from([FIRST, MID, LAST]), min_size=batch, max_size=batch))
    return rows_of(np.array(columns).T, np.array(starts), draw(st.integers(0, 1000)))


def column(*events: int, start: int = FIRST) -> Rows:
    return rows_of(np.array(events)[:, None], np.array([start]), seed=3)


def future(rows: Rows, t: int) -> tuple[str, float]:
    """Returns ("end" | "value" | "row", value of the future) for transition t of one column."""
    if rows.discounts[t] == 0.0:
        return "end", 0.0
    if t + 1 == len(rows.rewards):
        return "value", rows.final_value.item()
    if rows.step_types[t + 1] == LAST:
        return "value", rows.values[t + 1]
    return "row", rows.values[t + 1]


def reference_return(rows: Rows, t: int, gamma: float) -> float:
    if rows.step_types[t] == LAST:
        return rows.values[t]
    total, weight = 0.0, 1.0
    while True:
        total += weight * rows.rewards[t]
        kind, value = future(rows, t)
        weight *= gamma
        if kind != "row":
            return total + weight * value
        t += 1


def reference_advantage(rows: Rows, t: int, gamma: float, lambda_: float) -> float:
    if rows.step_types[t] == LAST:
        return 0.0
    total, weight = 0.0, 1.0
    while True:
        kind, value = future(rows, t)
        total += weight * (rows.rewards[t] + gamma * value - rows.values[t])
        weight *= gamma * lambda_
        if kind != "row":
            return total
        t += 1


def reference_v_trace(
    rows: Rows, t: int, ratios: np.ndarray, gamma: float, lambda_: float, rho_clip: float
) -> tuple[float, float]:
    """Returns target and advantage of row t of one column by the sum of the paper's equation 1."""
    first, value = t, rows.values[t]
    if rows.step_types[t] == LAST:
        return value, 0.0
    target, weight = value, 1.0
    while True:
        kind, next_value = future(rows, t)
        error = rows.rewards[t] + gamma * next_value - rows.values[t]
        target += weight * min(rho_clip, ratios[t]) * error
        weight *= gamma * lambda_ * min(1.0, ratios[t])
        if kind != "row":
            break
        t += 1
    kind, following = future(rows, first)
    if kind == "row":
        target_of_next, _ = reference_v_trace(rows, first + 1, ratios, gamma, lambda_, rho_clip)
        following = lambda_ * target_of_next + (1 - lambda_) * following
    error = rows.rewards[first] + gamma * following - value
    return target, min(rho_clip, ratios[first]) * error


def reference_n_step(rows: Rows, gamma: float, n: int) -> float:
    if rows.step_types[0] == LAST:
        return rows.values[0]
    total = 0.0
    for t in range(n):
        total += gamma**t * rows.rewards[t]
        if rows.discounts[t] == 0.0:
            return total
        if rows.step_types[t + 1] == LAST:
            break
    return total + gamma ** (t + 1) * rows.values[t + 1]


def per_row(reference, rows: Rows, *args: float) -> np.ndarray:
    num_rows = len(rows.rewards)
    return np.array([[reference(c, t, *args) for t in range(num_rows)] for c in rows.columns()]).T


def float32(*arrays: np.ndarray) -> list[tf.Tensor]:
    return [tf.constant(x, tf.float32) for x in arrays]


def our_advantages(rows: Rows, gamma: float, lambda_: float) -> np.ndarray:
    rewards, discounts, values, final_value, valid = float32(
        rows.rewards, gamma * rows.discounts, rows.values, rows.final_value, rows.valid
    )
    return returns.generalized_advantage_estimation(
        rewards, discounts, values, final_value, lambda_, valid
    ).numpy()


def our_v_trace(
    rows: Rows, ratios: np.ndarray, gamma: float, lambda_: float, rho_clip: float
) -> list[np.ndarray]:
    rewards, discounts, values, final_value, valid, ratio = float32(
        rows.rewards, gamma * rows.discounts, rows.values, rows.final_value, rows.valid, ratios
    )
    found = returns.v_trace(
        rewards, discounts, values, final_value, ratio, lambda_, rho_clip, valid
    )
    return [x.numpy() for x in found]


def our_n_step_targets(rows: Rows, gamma: float) -> np.ndarray:
    rewards, discounts, values = float32(rows.rewards, rows.discounts, rows.values)
    total, discount, index = returns.n_step_targets(rewards, discounts, rows.step_types, gamma)
    return (total + discount * returns.take_rows(tf.transpose(values), index)).numpy()


ALL_KINDS = column(
    GO_ON, LOSE_LIFE, TRUNCATE, GO_ON, TERMINATE, GO_ON, GO_ON, LOSE_LIFE, TERMINATE, GO_ON
)


@MANY_CASES
@given(some_rows(), st.sampled_from([0.0, 0.9, 1.0]))
@example(ALL_KINDS, 0.9)
def test_discounted_returns(rows: Rows, gamma: float) -> None:
    rewards, discounts, values, final_value, valid = float32(
        rows.rewards, gamma * rows.discounts, rows.values, rows.final_value, rows.valid
    )
    actual = returns.discounted_returns(rewards, discounts, final_value, valid, values)
    np.testing.assert_allclose(actual, per_row(reference_return, rows, gamma), atol=2e-5)


@MANY_CASES
@given(some_rows(), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.8, 1.0]))
@example(ALL_KINDS, 0.9, 0.8)
def test_generalized_advantage_estimation(rows: Rows, gamma: float, lambda_: float) -> None:
    expected = per_row(reference_advantage, rows, gamma, lambda_)
    np.testing.assert_allclose(our_advantages(rows, gamma, lambda_), expected, atol=2e-5)


@MANY_CASES
@given(
    some_rows(),
    st.integers(0, 99),
    st.sampled_from([0.9, 1.0]),
    st.sampled_from([0.0, 0.8, 1.0]),
    st.sampled_from([0.7, 1.0, np.inf]),
)
@example(ALL_KINDS, 0, 0.9, 0.8, 1.0)
def test_v_trace(rows: Rows, seed: int, gamma: float, lambda_: float, rho_clip: float) -> None:
    ratios = np.exp(np.random.default_rng(seed).normal(size=rows.rewards.shape))
    expected = [
        [
            reference_v_trace(c, t, ratios[:, b], gamma, lambda_, rho_clip)
            for b, c in enumerate(rows.columns())
        ]
        for t in range(len(rows.rewards))
    ]
    ratios[rows.valid == 0] = np.nan
    actual = our_v_trace(rows, ratios, gamma, lambda_, rho_clip)
    np.testing.assert_allclose(np.stack(actual, -1), expected, rtol=1e-5, atol=2e-5)


@MANY_CASES
@given(some_rows(), st.sampled_from([0.0, 0.8, 1.0]))
@example(ALL_KINDS, 0.8)
def test_v_trace_of_the_policy_that_collected_is_td_lambda(rows: Rows, lambda_: float) -> None:
    targets, advantages = our_v_trace(rows, np.ones_like(rows.rewards), 0.9, lambda_, 1.0)
    expected = per_row(reference_advantage, rows, 0.9, lambda_)
    np.testing.assert_allclose(targets - rows.values, expected, atol=2e-5)
    np.testing.assert_allclose(advantages, expected, atol=2e-5)


@MANY_CASES
@given(some_rows(min_rows=2), st.sampled_from([0.9, 1.0]))
@example(column(LOSE_LIFE, GO_ON, GO_ON), 0.9)
@example(column(GO_ON, TRUNCATE, GO_ON, GO_ON), 0.9)
@example(column(GO_ON, TERMINATE, GO_ON, GO_ON), 0.9)
@example(column(GO_ON, GO_ON, start=LAST), 0.9)
def test_n_step_targets(rows: Rows, gamma: float) -> None:
    n = len(rows.rewards) - 1
    expected = [reference_n_step(c, gamma, n) for c in rows.columns()]
    np.testing.assert_allclose(our_n_step_targets(rows, gamma), expected, atol=2e-5)


def test_the_table_in_the_module_docstring() -> None:
    step_types = tf.constant([[FIRST], [MID], [MID], [LAST], [FIRST], [LAST], [FIRST]])
    rewards = tf.constant([[1.0], [2.0], [3.0], [0.0], [4.0], [0.0], [5.0]])
    discounts = tf.constant([[1.0], [0.0], [1.0], [1.0], [0.0], [1.0], [1.0]])
    values = 10.0 * tf.range(7.0)[:, tf.newaxis]
    valid = returns.valid_mask(step_types)
    actual = returns.discounted_returns(rewards, discounts, tf.constant([70.0]), valid, values)
    assert valid[:, 0].numpy().tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert actual[:, 0].numpy().tolist() == [3, 2, 33, 30, 4, 50, 75]


def test_what_follows_a_boundary_row_changes_no_bit_of_what_precedes_it() -> None:
    rows = column(*[GO_ON] * 40, TRUNCATE, *[GO_ON] * 60)
    changed = dataclasses.replace(rows, rewards=rows.rewards.copy(), values=rows.values.copy())
    changed.rewards[42:] += 1e6
    changed.values[42:] -= 1e6
    before, after = (our_advantages(x, 0.99, 0.95) for x in (rows, changed))
    assert np.array_equal(before[:42], after[:42])
    assert not np.array_equal(before[42:], after[42:])


def test_accuracy_over_a_long_rollout() -> None:
    events = np.random.default_rng(0).choice(4, size=(1024, 1), p=[0.985, 0.005, 0.005, 0.005])
    rows = rows_of(events, np.array([MID]), seed=0)
    expected = per_row(reference_advantage, rows, 0.99, 0.95)
    np.testing.assert_allclose(our_advantages(rows, 0.99, 0.95), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 1), (2, 4), (3, 2)])
def test_arguments_that_would_broadcast_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must have size"):
        returns.discounted_returns(tf.ones([4, 2]), tf.ones(shape), tf.ones([2]))


def test_n_step_targets_need_a_bootstrap_row() -> None:
    with pytest.raises(ValueError, match="n \\+ 1 >= 2 rows"):
        returns.n_step_targets(tf.ones([1, 2]), tf.ones([1, 2]), tf.ones([1, 2], tf.int32), 0.9)


def test_take_rows_reads_the_named_row_of_each_sequence() -> None:
    images = np.random.default_rng(0).integers(0, 255, (2, 3, 4, 4), np.uint8)
    nest = {"image": tf.constant(images), "row": tf.constant([[0, 1, 2], [0, 1, 2]])}
    taken = returns.take_rows(nest, tf.constant([2, 0]))
    assert taken["row"].numpy().tolist() == [2, 0]
    assert np.array_equal(taken["image"], np.stack([images[0, 2], images[1, 0]]))


# What TF-Agents gets wrong. -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock_ppo() -> ppo_clip_agent.PPOClipAgent:
    observation_spec = tensor_spec.TensorSpec([2], tf.float32)
    action_spec = tensor_spec.BoundedTensorSpec([], tf.int32, 0, 1)
    return ppo_clip_agent.PPOClipAgent(
        time_step_spec(observation_spec),
        action_spec,
        optimizer=tf.keras.optimizers.legacy.Adam(),
        actor_net=actor_distribution_network.ActorDistributionNetwork(
            observation_spec, action_spec, fc_layer_params=()
        ),
        value_net=value_network.ValueNetwork(observation_spec, fc_layer_params=()),
        use_gae=True,
        lambda_value=0.8,
        discount_factor=0.9,
        normalize_rewards=False,
        normalize_observations=False,
    )


def stock_advantages(agent: ppo_clip_agent.PPOClipAgent, rows: Rows, next_last: int) -> np.ndarray:
    """Returns advantages [T] of one column by the calls that PPOAgent makes on collected rows."""
    step_types = np.append(rows.step_types[1:], [[next_last]], axis=0)
    rewards, discounts = float32(rows.rewards.T, rows.discounts.T)
    next_time_steps = TimeStep(tf.constant(step_types.T), rewards, discounts, ())
    (values,) = float32(np.append(rows.values, rows.final_value[None], axis=0).T)
    _, advantages = agent.compute_return_and_advantage(next_time_steps, values)
    return advantages[0].numpy()


def test_stock_ppo_bootstraps_the_last_step_with_the_wrong_value(stock_ppo) -> None:
    rows = column(GO_ON, GO_ON, GO_ON, TERMINATE, GO_ON, GO_ON, GO_ON)
    expected = per_row(reference_advantage, rows, 0.9, 0.8)[:, 0]
    np.testing.assert_allclose(our_advantages(rows, 0.9, 0.8)[:, 0], expected, atol=1e-5)
    stock = stock_advantages(stock_ppo, rows, next_last=MID)
    np.testing.assert_allclose(stock[:4], expected[:4], atol=1e-5)
    assert abs(stock[6] - expected[6]) > 0.1
    value = rows.values[6, 0]
    assert stock[6] == pytest.approx(rows.rewards[6, 0] + 0.9 * value - value, abs=1e-5)


def test_stock_ppo_treats_truncation_as_termination(stock_ppo) -> None:
    rows = column(GO_ON, GO_ON, TRUNCATE, GO_ON, TERMINATE, GO_ON)
    expected = per_row(reference_advantage, rows, 0.9, 0.8)[:, 0]
    np.testing.assert_allclose(our_advantages(rows, 0.9, 0.8)[:, 0], expected, atol=1e-5)
    stock = stock_advantages(stock_ppo, rows, next_last=LAST)
    assert (np.abs(stock[:3] - expected[:3]) > 0.05).all()
    assert stock[2] == pytest.approx(rows.rewards[2, 0] - rows.values[2, 0], abs=1e-5)
