"""Tests that the program of docs/gradient-accumulation.md does what the page says."""

import re

import numpy as np
import tensorflow as tf
from conftest import ROOT

PAGE = ROOT / "docs/gradient-accumulation.md"


def test_the_program_makes_the_update_of_all_rows_together():
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(program, names)  # noqa: S102
    weights, train = names["weights"], names["train"]
    assert train.experimental_get_tracing_count() == 1
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(4, 16, 2)).astype(np.float32)
    targets = rng.normal(size=(4, 16, 1)).astype(np.float32)
    before = weights.numpy()
    for i in range(4):
        np.testing.assert_array_equal(weights, before)
        train(tf.constant(inputs[i]), tf.constant(targets[i]))
    x, y = inputs.reshape(-1, 2), targets.reshape(-1, 1)
    gradient = 2 * x.T @ (x @ before - y) / len(x)
    np.testing.assert_allclose(weights, before - 0.1 * gradient, rtol=1e-5, atol=1e-6)
