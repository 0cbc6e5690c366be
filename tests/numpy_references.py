"""Helpers of the tests of agents: random rows, networks and gradients in NumPy, shared checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import numpy as np
import pytest
import scipy.special
import tensorflow as tf
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import StepType, TimeStep, Trajectory, restart, time_step_spec
from tiny_runs import variables

from pipeline import configuration
from pipeline.ops.schedules import linear_schedule

FIRST, MID, LAST = (int(x) for x in (StepType.FIRST, StepType.MID, StepType.LAST))
GO_ON, LOSE_LIFE, TERMINATE, TRUNCATE = range(4)
FOUR_ACTIONS = tensor_spec.BoundedTensorSpec((), tf.int32, 0, 3)
TWO_MOTORS = tensor_spec.BoundedTensorSpec((2,), tf.float32, [-1.0, 0.0], [3.0, 0.5])
PIXELS = tensor_spec.BoundedTensorSpec((6, 6, 2), tf.uint8, 0, 255)
THREE_NUMBERS = tensor_spec.BoundedTensorSpec((3,), tf.float32, -9.0, 9.0)
each_action_spec = pytest.mark.parametrize(
    "action_spec", [FOUR_ACTIONS, TWO_MOTORS], ids=["discrete", "continuous"]
)

Array = np.ndarray


def specs(observation_spec: tf.TensorSpec = THREE_NUMBERS) -> TimeStep:
    return time_step_spec(observation_spec)


def env_steps(value: int = 0) -> tf.Variable:
    return tf.Variable(value, dtype=tf.int64)


@contextlib.contextmanager
def bound(bindings: Mapping[str, Any]) -> Iterator[None]:
    """Binds gin parameters, and restores the configuration at the end."""
    with configuration.preserved():
        for name, value in bindings.items():
            gin.bind_parameter(name, value)
        yield


def random_events(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.choice([GO_ON, LOSE_LIFE, TERMINATE, TRUNCATE], shape, p=[0.55, 0.15, 0.15, 0.15])


def step_types_and_discounts(events: Array, starts: Sequence[int] | Array) -> tuple[Array, Array]:
    """Returns what `events` [B, T] on the rows lead to, given the first rows' step types [B]."""
    step_types = np.zeros(events.shape, np.int32)
    step_types[:, 0] = starts
    for b, t in np.ndindex(*events.shape):
        if t == 0:
            continue
        before, event = step_types[b, t - 1], events[b, t - 1]
        ends = before != LAST and event in (TERMINATE, TRUNCATE)
        step_types[b, t] = LAST if ends else FIRST if before == LAST else MID
    cut = (step_types != LAST) & np.isin(events, (LOSE_LIFE, TERMINATE))
    return step_types, np.where(cut, 0.0, 1.0).astype(np.float32)


def random_sequences(
    rng: np.random.Generator,
    action_spec: tensor_spec.BoundedTensorSpec,
    events: Array,
    starts: Sequence[int] | Array,
    observation_spec: tf.TensorSpec = THREE_NUMBERS,
    policy_info: Any = (),
) -> Trajectory:
    """Returns sequences [B, T] of NumPy arrays with these `events`; all else is random."""
    step_types, discounts = step_types_and_discounts(events, starts)
    following = np.where(
        step_types == LAST, FIRST, np.where(np.isin(events, (TERMINATE, TRUNCATE)), LAST, MID)
    )
    following[:, :-1] = step_types[:, 1:]
    return Trajectory(
        step_type=step_types,
        observation=random_leaf(rng, observation_spec, events.shape),
        action=random_leaf(rng, action_spec, events.shape),
        policy_info=policy_info,
        next_step_type=following.astype(np.int32),
        reward=as_float32(rng.normal(size=events.shape)),
        discount=discounts,
    )


def random_rollout(
    rng: np.random.Generator,
    action_spec: tensor_spec.BoundedTensorSpec,
    num_steps: int,
    num_envs: int,
) -> Trajectory:
    """Returns rows [T, N] of NumPy arrays with random events."""
    events = random_events(rng, (num_envs, num_steps))
    rows = random_sequences(rng, action_spec, events, rng.choice([FIRST, MID, LAST], num_envs))
    return tf.nest.map_structure(lambda x: np.swapaxes(x, 0, 1), rows)


def random_leaf(rng: np.random.Generator, spec: tf.TensorSpec, outer: tuple[int, ...]) -> Array:
    shape = (*outer, *spec.shape)
    if spec.dtype.is_integer:
        return rng.integers(spec.minimum, spec.maximum, shape, spec.dtype.name, endpoint=True)
    if spec is THREE_NUMBERS:
        return as_float32(rng.normal(size=shape))
    return as_float32(rng.uniform(spec.minimum, spec.maximum, shape))


def huber(error: Array) -> Array:
    return scipy.special.huber(1.0, error)


def n_step_return(
    rows: Trajectory,
    value: Callable[[int], float],
    start: int,
    gamma: float,
    one_step: bool = False,
) -> float:
    """Computes the n-step return of row `start` of rows [T], one transition after the other.

    Args:
      value: Maps t to the value of the observation of row t, where row T comes after the last one.
    """
    total, weight, t = 0.0, 1.0, start
    while True:
        total += weight * rows.reward[t]
        weight *= gamma * rows.discount[t]
        t += 1
        if one_step or weight == 0.0 or t == len(rows.reward) or rows.step_type[t] == LAST:
            return total + weight * value(t)


class VecNormalize:
    """Loop over time steps as in OpenAI Baselines, but with the scale at the rollout's end."""

    def __init__(self, num_envs: int, gamma: float):
        self.running = np.zeros(num_envs)
        self.seen: list[float] = []
        self._gamma = gamma

    def scale(self, rewards: Array, discounts: Array, step_types: Array) -> Array:
        rows = zip(as_float64(rewards), discounts, step_types, strict=True)
        for reward, discount, step_type in rows:
            self.running = np.where(step_type == LAST, 0.0, self._gamma * self.running + reward)
            self.seen.extend(self.running[step_type != LAST])
            self.running[discount == 0] = 0.0
        return rewards / np.sqrt(np.var(self.seen) + 1e-8)


def half_square(error: Array) -> Array:
    return 0.5 * error**2


def as_float32(values: Any) -> Array:
    return np.asarray(values, np.float32)


def as_float64(values: Any) -> Array:
    return np.asarray(values, np.float64)


def tensors(nest: Any) -> Any:
    return tf.nest.map_structure(tf.constant, nest)


def float64(variables: Sequence[tf.Variable]) -> list[Array]:
    return [variable.numpy().astype(np.float64) for variable in variables]


def randomize(rng: np.random.Generator, variables: Sequence[tf.Variable]) -> None:
    """Assigns random values to all weights, including biases."""
    for variable in variables:
        fan_in = int(np.prod(variable.shape[:-1])) if variable.shape.rank > 1 else 1
        values = rng.normal(scale=min(0.5, fan_in**-0.5), size=variable.shape)
        variable.assign(values.astype(variable.dtype.name))


def dense_layers(x: Array, weights: Sequence[Array], last_activation: Any = None) -> Array:
    """Applies layers of kernel and bias, with ReLU between them."""
    for i in range(0, len(weights), 2):
        x = x @ weights[i] + weights[i + 1]
        last = i == len(weights) - 2
        x = np.maximum(x, 0.0) if not last else last_activation(x) if last_activation else x
    return x


def numeric_gradients(loss: Callable[[list[Array]], float], weights: list[Array]) -> list[Array]:
    """Returns the central differences of a loss in float64."""
    gradients = [np.zeros_like(w) for w in weights]
    step = 1e-6
    for i, weight in enumerate(weights):
        for index in np.ndindex(*weight.shape):
            values = []
            for sign in (1.0, -1.0):
                moved = [w.copy() for w in weights]
                moved[i][index] += sign * step
                values.append(loss(moved))
            gradients[i][index] = (values[0] - values[1]) / (2 * step)
    return gradients


def _pairs(actual: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    if not tf.nest.is_nested(actual):
        return iter([(actual, expected)])
    return zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compares two arrays, or nests leaf by leaf."""
    for x, y in _pairs(actual, expected):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def assert_same(actual: Any, expected: Any) -> None:
    """Compares two arrays, or nests leaf by leaf, bit for bit."""
    for x, y in _pairs(actual, expected):
        np.testing.assert_array_equal(x, y)


def values_of(variables: Sequence[tf.Variable]) -> list[Array]:
    return [variable.numpy() for variable in variables]


def check_train_applies_gradients(first: Any, second: Any, batch: Trajectory) -> None:
    """Checks with two equal agents that `gradients` changes nothing and `train` applies them."""
    batch, weights = tensors(batch), tf.ones(len(batch.reward))
    before = variables(first)
    gradients, loss_info = first.gradients(batch, weights)
    assert_same(variables(first), before)
    first.apply(gradients)
    other_info = second.train(batch, weights)
    assert_same(variables(first), variables(second))
    assert_same(loss_info, other_info)
    assert first.train_step_counter == 1
    assert any(np.any(x != before[name]) for name, x in variables(first).items())


def check_steps(
    create: Callable[..., Any], batch: Trajectory, gradient_clip_norm: float | None = 0.01
) -> None:
    """Checks that an agent steps by its scheduled learning rate along its clipped gradient."""
    steps = env_steps()
    agent = create(
        env_steps=steps,
        optimizer=tf.keras.optimizers.legacy.SGD,
        learning_rate=linear_schedule(0.5, 0.0, num_steps=10),
        gradient_clip_norm=gradient_clip_norm,
    )
    batch, weights = tensors(batch), tf.ones(len(batch.reward))
    train = tf.function(agent.train, autograph=False)
    for count in (0, 4, 10):
        steps.assign(count)
        rate = 0.05 * (10 - count)
        assert_close(agent.schedules["learning_rate"](steps), rate)
        gradients, loss_info = agent.gradients(batch, weights)
        norm = loss_info.extra["gradient_norm"].numpy()
        assert gradient_clip_norm is None or norm > gradient_clip_norm
        scale = rate if gradient_clip_norm is None else rate * gradient_clip_norm / norm
        before = values_of(agent.gradient_variables())
        train(batch, weights)
        expected = [w - scale * g for w, g in zip(before, gradients, strict=True)]
        assert_close(values_of(agent.gradient_variables()), expected)
    assert agent.train_step_counter == 3


def check_epsilon(create: Callable[..., Any]) -> None:
    """Checks that an agent's share of random actions follows its schedule."""
    steps = env_steps()
    agent = create(env_steps=steps, epsilon=linear_schedule(1.0, 0.0, num_steps=100))
    observation = as_float32(np.random.default_rng(0).normal(size=(4000, 3)))
    time_step = restart(tf.constant(observation), 4000)
    greedy = agent.policy.action(time_step).action.numpy()
    q_values = dense_layers(observation, float64(agent.q_network.variables))
    np.testing.assert_array_equal(greedy, q_values.argmax(axis=-1))
    act = tf.function(
        lambda: agent.collect_policy.action(time_step, (), tf.constant([1, 2])), autograph=False
    )
    for count, epsilon in ((0, 1.0), (60, 0.4), (100, 0.0), (500, 0.0)):
        steps.assign(count)
        share = np.mean(act().action.numpy() != greedy)
        # In a quarter of the cases a random action equals the greedy one.
        assert abs(share - 0.75 * epsilon) <= 4 * np.sqrt(0.25 / 4000) * (epsilon > 0)
        assert agent.schedules["epsilon"](steps).numpy() == as_float32(epsilon)
