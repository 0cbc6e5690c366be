"""Tests of the devices of operations, with a second logical CPU as the GPU, and of XLA."""

import json
import os
import subprocess
import sys
import time
from typing import cast

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from tiny_runs import build_components
from two_devices import ACCELERATOR, HOST

from pipeline.training.components import Components
from pipeline.utils import execution
from pipeline.utils.execution import Execution

BINDINGS = {
    "dqn_pong": [
        "ReplayBuffer.capacity = 1_000", "ReplayBuffer.batch_size = 4",
        "evaluation/atari_environment.num_envs = 1",
    ],
    "ppo_pong": [
        "Rollout.num_steps = 16", "Rollout.minibatch_size = 32", "Rollout.num_epochs = 1",
    ],
}  # fmt: skip
SLOW = pytest.mark.crash
# Image tensors that an iteration needs: for acting and a batch; PPO's values also need the last.
IMAGES = {"dqn_pong": 2, "ppo_pong": 3}


@pytest.mark.parametrize("config", ["dqn_pong", pytest.param("ppo_pong", marks=SLOW)])
def test_networks_and_updates_are_on_the_accelerator_and_all_else_on_the_host(config):
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "two_devices.py"), config, *BINDINGS[config]],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stderr
    run = json.loads(ended.stdout)
    for part, device in (
        *((part, ACCELERATOR) for part in ("Conv2D", "BackpropFilter", "MatMul", "ApplyAdam")),
        *((part, HOST) for part in ("PyFunc", "ResourceGather", "ResourceScatter", "LoopCond")),
    ):
        kinds = [kind for kind in run["devices"] if part in kind]  # includes _FusedConv2D
        assert kinds and all(run["devices"][kind] == [device] for kind in kinds), part
    assert run["indices"] == ([HOST] if config == "dqn_pong" else [])
    images = [source for source, dtype, name in run["sent"] if dtype == "uint8" and "body" in name]
    assert images == [HOST] * IMAGES[config]


@pytest.mark.parametrize("use_gpu, hidden", [(True, False), (False, False), (True, True)])
def test_a_gpu_that_tensorflow_cannot_use_is_no_secret(
    use_gpu, hidden, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(execution, "NVIDIA_DRIVER", [tmp_path])
    for name in ("list_physical_devices", "get_visible_devices"):
        monkeypatch.setattr(tf.config, name, lambda kind: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if hidden else "0")
    execution.configure_gpu(use_gpu)
    assert execution.device_name() == "CPU"
    assert ("`make install GPU=1`" in capsys.readouterr().err) == (use_gpu and not hidden)


@pytest.mark.parametrize("graph", [False, True])
def test_the_clock_of_a_gpu_is_as_exact_as_that_of_tensorflow(graph, monkeypatch):
    monkeypatch.setattr(execution.config, "is_op_determinism_enabled", lambda: True)
    clock = tf.function(execution.timestamp) if graph else execution.timestamp
    before = time.time()
    now = clock()
    assert now.dtype == tf.float64
    assert before <= now <= time.time()


def built(algorithm: str, jit_compile: bool) -> Components:
    return build_components(algorithm, compile_update__jit_compile=jit_compile)


def has_compiled_part(traced: tf.types.experimental.ConcreteFunction) -> bool:
    """Returns whether a graph has a function for XLA."""
    functions = traced.graph.as_graph_def().library.function
    return any("_XlaMustCompile" in function.attr for function in functions)


def compiles(parts: Components) -> bool:
    """Returns whether the graph of an update has a function for XLA."""
    batch = tf.nest.map_structure(
        lambda spec: tf.zeros([8, parts.agent.train_sequence_length, *spec.shape], spec.dtype),
        parts.agent.training_data_spec,
    )
    train = tf.function(parts.agent.train, autograph=False)
    return has_compiled_part(train.get_concrete_function(batch, tf.ones([8])))


@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(name, marks=SLOW) for name in ("dqn", "sac", "trpo"))]
)
def test_compiled_gradients_are_those_of_the_graph(algorithm, monkeypatch):
    if algorithm == "sac":  # XLA draws different numbers
        monkeypatch.setattr(tf.random, "stateless_normal", lambda shape, seed: tf.fill(shape, 0.5))

    def losses(jit_compile: bool) -> dict[str, float]:
        parts = built(algorithm, jit_compile)
        state = parts.runner.initial_state()
        forever = tf.constant(1_000_000, tf.int64)
        if parts.experience.keeps_rows:
            state = parts.runner.collect_randomly(state, tf.constant(20, tf.int64), forever)
        state = parts.runner.train(state, tf.constant(3, tf.int64), forever)
        parts.close()
        train = cast(tf.types.experimental.PolymorphicFunction, parts.runner.train)
        (traced,) = train._list_all_concrete_functions()
        assert has_compiled_part(traced) == jit_compile
        return {name: float(value) for name, value in state.loss_sums.items()}

    compiled, plain = losses(True), losses(False)
    assert compiled.keys() == plain.keys()
    for name in plain:
        np.testing.assert_allclose(compiled[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [Execution.EAGER, Execution.EXACT_GRAPH])
def test_exact_bits_do_without_xla(mode):
    mode.configure()
    try:
        assert not compiles(built("dqn", jit_compile=True))
    finally:
        Execution.GRAPH.configure()
