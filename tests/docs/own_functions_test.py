"""Tests that the schedule and the loss that the algorithms' pages define can be bound."""

import importlib
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT

from pipeline import configuration
from pipeline.training.train_loop import train
from pipeline.utils.shutdown import StopSignal


@pytest.mark.usefixtures("any_config")
@pytest.mark.parametrize(
    ("page", "module", "config"),
    [("index", "my_schedules", "ppo_cartpole"), ("dqn", "my_losses", "dqn_cartpole")],
)
def test_a_function_of_a_page_can_be_bound(page, module, config, tmp_path, monkeypatch):
    text = (ROOT / f"docs/algorithms/{page}.md").read_text()
    (code,) = re.findall(rf"```python\n(# {module}\.py\n.*?)```", text, re.DOTALL)
    (bindings,) = re.findall(rf"```gin\n(import {module}\n.*?)```", text, re.DOTALL)
    (tmp_path / f"{module}.py").write_text(code)
    (tmp_path / "own.gin").write_text(f"include '{config}.gin'\n{bindings}")
    monkeypatch.syspath_prepend(tmp_path)
    configuration.load([str(tmp_path / "own.gin")], [], allow_imports=True)
    train(None, 1, "fail", StopSignal(), dry_run=True)
    if page == "dqn":
        errors = tf.constant([-1000.0, -2.0, 0.0, 2.0, 1000.0])
        with tf.GradientTape() as tape:
            tape.watch(errors)
            losses = importlib.import_module(module).log_cosh_loss(errors)
        log_cosh = [1000 - np.log(2), np.log(np.cosh(2)), 0.0]
        np.testing.assert_allclose(losses, [*log_cosh, *log_cosh[-2::-1]], atol=1e-6)
        np.testing.assert_allclose(tape.gradient(losses, errors), np.tanh(errors), atol=1e-6)
    else:
        schedule = importlib.import_module(module).cosine_schedule(2.0, 100)
        values = [float(schedule(tf.constant(count, tf.int64))) for count in (0, 50, 100, 200)]
        np.testing.assert_allclose(values, [2.0, 1.0, 0.0, 0.0], atol=1e-6)
