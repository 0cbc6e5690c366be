"""Tests of optimizers against their formulas, in double precision."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

from pipeline import configuration
from pipeline.ops.optimizers import Adam, CenteredRMSprop, RMSprop, build_slots
from pipeline.utils.errors import UserError

RATE, STEPS = 2.5e-4, 50
Array = np.ndarray


def gradients() -> Array:
    """Returns gradients [50, 300] of sizes around the root of epsilon, some of them always 0."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(STEPS, 300)) * 10.0 ** rng.uniform(-4, 1, 300)
    return np.where(np.arange(300) % 10 == 0, 0, drawn).astype(np.float32)


def lua_movement(all_gradients: Array) -> Array:
    """Transcribes `NeuralQLearner:qLearnMinibatch`; its dw is an ascent, so it is subtracted."""
    g, g2, w = (np.zeros(all_gradients.shape[1]) for _ in range(3))
    for dw in all_gradients.astype(np.float64):
        g = 0.95 * g + 0.05 * dw
        g2 = 0.95 * g2 + 0.05 * dw * dw
        tmp = np.sqrt(g2 - g * g + 0.01)
        w -= RATE * dw / tmp
    return w


def movement(optimizer, scale: float = 1.0) -> Array:
    variable = tf.Variable(tf.zeros([300]))

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    optimizer.build([variable]) if hasattr(optimizer, "build") else build_slots(
        optimizer, [variable]
    )
    for gradient in gradients():
        step(tf.constant(scale * gradient))
    return variable.numpy()


def relative_error(moved: Array, expected: Array) -> float:
    return float(np.linalg.norm(moved - expected) / np.linalg.norm(expected))


def test_it_moves_as_the_lua_program_does() -> None:
    assert relative_error(movement(CenteredRMSprop()), lua_movement(gradients())) < 1e-6


def test_it_moves_as_keras_new_class_does() -> None:
    keras = tf.keras.optimizers.RMSprop(RATE, rho=0.95, epsilon=0.01, centered=True)
    expected = movement(keras)
    assert relative_error(expected, lua_movement(gradients())) < 1e-6
    assert relative_error(movement(CenteredRMSprop(RATE)), expected) < 1e-6


def test_slots_are_built_before_the_first_update_and_are_zero() -> None:
    optimizer, variable = CenteredRMSprop(lambda: tf.constant(0.5)), tf.Variable([1.0, 2.0])
    build_slots(optimizer, [variable])
    slots = {name: optimizer.get_slot(variable, name) for name in ("mg", "rms", "momentum")}
    assert all(not np.any(slot) for slot in slots.values())
    optimizer.apply_gradients([(tf.constant([2.0, 0.0]), variable)])
    assert {id(x) for x in slots.values()} < {id(x) for x in optimizer.variables()}
    step = 0.5 * 2 / np.sqrt(0.05 * 4 - 0.1**2 + 0.01)
    np.testing.assert_allclose(variable, [1 - step, 2], rtol=1e-6)
    np.testing.assert_allclose(slots["mg"], [0.1, 0], rtol=1e-6)
    np.testing.assert_allclose(slots["rms"], [0.2, 0], rtol=1e-6)


@pytest.mark.parametrize("initial_ms", [0.0, 1.0])
def test_rmsprop_equals_its_formula(initial_ms: float) -> None:
    rng = np.random.default_rng(0)
    weights, ms = rng.normal(size=(4, 3)), np.full((4, 3), initial_ms)
    variable = tf.Variable(weights.astype(np.float32))
    optimizer = RMSprop(0.01, rho=0.9, epsilon=1e-3, initial_ms=initial_ms)
    build_slots(optimizer, [variable])
    for _ in range(50):
        gradient = rng.normal(size=(4, 3)).astype(np.float32)
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        ms = 0.9 * ms + 0.1 * gradient.astype(np.float64) ** 2
        weights -= 0.01 * gradient / np.sqrt(ms + 1e-3)
    np.testing.assert_allclose(variable, weights, rtol=1e-5, atol=1e-6)


def test_rmsprop_begins_as_tensorflow_1_did() -> None:
    ours, theirs = tf.Variable([1.0, -2.0]), tf.Variable([1.0, -2.0])
    optimizer = RMSprop(0.01, rho=0.99, epsilon=1e-5, initial_ms=1.0)
    old = tf.compat.v1.train.RMSPropOptimizer(0.01, decay=0.99, momentum=0.0, epsilon=1e-5)
    for gradient in ([0.5, -3.0], [0.1, 0.2], [-1.0, 4.0]):
        optimizer.apply_gradients([(tf.constant(gradient), ours)])
        old.apply_gradients([(tf.constant(gradient), theirs)])
    np.testing.assert_array_equal(ours, theirs)


def test_adam_s_step_of_twice_the_gradient_is_that_of_half_the_epsilon() -> None:
    """Shows why `dqn_atari` halves Dopamine's epsilon: its squared error has twice our gradient."""
    whole = movement(Adam(RATE, epsilon=1.5e-4), scale=2.0)
    assert relative_error(movement(Adam(RATE, epsilon=7.5e-5)), whole) < 1e-6
    assert relative_error(movement(Adam(RATE, epsilon=1.5e-4)), whole) > 1e-3


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_equals_its_formula(amsgrad: bool) -> None:
    m, v, largest, expected = (np.zeros(300) for _ in range(4))
    for t, g in enumerate(gradients().astype(np.float64), start=1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        rate = RATE * np.sqrt(1 - 0.95**t) / (1 - 0.8**t)
        largest = np.maximum(largest, v)
        expected -= rate * m / (np.sqrt(largest if amsgrad else v) + 1e-3)
    moved = movement(Adam(RATE, beta_1=0.8, beta_2=0.95, epsilon=1e-3, amsgrad=amsgrad))
    assert relative_error(moved, expected) < 1e-5


@pytest.mark.parametrize(
    ("optimizer", "values", "message"),
    [
        # Keras takes 0 for its default, 1e-7.
        (Adam, {"epsilon": 0.0}, "Adam.epsilon = 0.0: must be a number above 0."),
        (Adam, {"beta_1": 1.0}, "Adam.beta_1 = 1.0: must be a number, at least 0, below 1."),
        (Adam, {"beta_2": "0.9"}, "Adam.beta_2 = '0.9': must be a number"),
        (RMSprop, {"rho": 2}, "RMSprop.rho = 2: must be a number"),
        (CenteredRMSprop, {"epsilon": -1}, "CenteredRMSprop.epsilon = -1: must be a number"),
    ],
)
def test_values_out_of_range_are_named(optimizer, values, message) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        optimizer(**values)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "CenteredRMSprop"])
def test_the_learning_rate_is_not_theirs_to_bind(name: str) -> None:
    message = f"{name}.learning_rate cannot be bound: bind that of the agent, such as"
    with pytest.raises(UserError, match=message):
        configuration.load([], [f"import pipeline.ops.optimizers\n{name}.learning_rate = 0.1"])
    gin.clear_config()
