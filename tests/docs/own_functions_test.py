"""Tests that the schedule, the loss and the classes that pages define can be used."""

import importlib
import json
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from tf_agents.specs import array_spec
from tf_agents.trajectories import TimeStep

from pipeline import configuration
from pipeline.environments.gymnasium_envs import gymnasium_environment
from pipeline.ops.observations import action_mask
from pipeline.training.train_loop import train
from pipeline.utils.shutdown import StopSignal


def write_blocks(page, folder, *names):
    """Writes blocks of a page, which begin with their names, as files; returns the page."""
    text = (ROOT / "docs" / page).read_text()
    for name in names:
        (block,) = re.findall(rf"```\w+\n(# {re.escape(name)}\b.*?)```", text, re.DOTALL)
        (folder / name).write_text(block)
    return text


@pytest.mark.usefixtures("any_config")
@pytest.mark.parametrize(
    ("page", "module", "config"),
    [("index", "my_schedules", "ppo_cartpole"), ("dqn", "my_losses", "dqn_cartpole")],
)
def test_a_function_of_a_page_can_be_bound(page, module, config, tmp_path, monkeypatch):
    text = write_blocks(f"algorithms/{page}.md", tmp_path, f"{module}.py")
    (bindings,) = re.findall(rf"```gin\n(import {module}\n.*?)```", text, re.DOTALL)
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


@pytest.mark.usefixtures("any_config")
def test_the_agent_class_of_the_tutorial_trains_and_logs_its_loss(tmp_path, monkeypatch):
    write_blocks("tutorials/agent.md", tmp_path, "my_ppo.py", "penalized_ppo.gin")
    monkeypatch.syspath_prepend(tmp_path)
    bindings = ["train.num_env_steps = 256", "train.num_final_episodes = 1"]
    configuration.load([str(tmp_path / "penalized_ppo.gin")], bindings, allow_imports=True)
    train(tmp_path / "run", 1, "fail", StopSignal())
    record = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    parts = record["policy_loss"] + 0.5 * record["value_loss"] + record["penalty"]
    assert record["penalty"] != 0
    np.testing.assert_allclose(record["loss"], parts, rtol=1e-5)


def test_the_environments_of_other_interfaces_of_the_tutorial_can_be_used(tmp_path, monkeypatch):
    write_blocks("tutorials/environment.md", tmp_path, "my_py_environments.py", "my_masks.py")
    monkeypatch.syspath_prepend(tmp_path)
    countdown = gymnasium_environment(1, name="my_py_environments:Countdown-v0")
    steps = [countdown.step(np.array([action])) for action in (0, 0, 0, 0, 0, 0, 0, 1)]
    flat = {name: [float(getattr(x, name)[0]) for x in steps] for name in TimeStep._fields[:3]}
    assert flat == {
        "step_type": [0, 1, 1, 1, 1, 2, 0, 2],  # a time limit, and a terminal state
        "reward": [0, 1, 1, 1, 1, 1, 0, 0],
        "discount": [1, 1, 1, 1, 1, 1, 1, 0],
    }
    to_space = importlib.import_module("my_py_environments").to_space
    for dtype in (np.bool_, np.uint8, np.int32, np.float32):
        space = to_space(array_spec.ArraySpec([2], dtype))
        assert (space.shape, space.dtype) == ((2,), dtype)
    taxi = gymnasium_environment(1, name="Taxi-v4", wrappers=("my_masks:MaskFromInfo",))
    assert action_mask(taxi.current_time_step().observation).shape == (1, 6)
