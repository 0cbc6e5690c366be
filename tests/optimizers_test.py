"""Optimizers against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from pipeline.optimizers import RMSprop, build_slots


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
