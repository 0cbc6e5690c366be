"""Where the graph of training computes, with a second logical CPU in place of a GPU; and XLA."""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from tiny_runs import build_components

from pipeline.errors import UserError
from pipeline.execution import Execution

HOST, ACCELERATOR = "CPU:0", "CPU:1"
BINDINGS = {
    "dqn_pong": ["ReplayBuffer.capacity = 1_000", "ReplayBuffer.batch_size = 4"],
    "ppo_pong": [
        "Rollout.num_steps = 16", "Rollout.minibatch_size = 32", "Rollout.num_epochs = 1",
    ],
}  # fmt: skip


def trained(config: str) -> dict[str, Any]:
    script = str(ROOT / "tests" / "two_devices.py")
    ended = subprocess.run(
        [sys.executable, script, config, *BINDINGS[config]],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("config", BINDINGS)
def test_networks_and_updates_are_on_the_accelerator_and_all_else_on_the_host(config):
    run = trained(config)
    assert run["weights"] == [ACCELERATOR]
    devices = run["devices"]
    for kind in ("Conv2D", "MatMul", "Conv2DBackpropFilter", "ResourceApplyAdam"):
        assert devices[kind] == [ACCELERATOR], kind
    for kind in ("PyFunc", "ResourceGather", "ResourceScatterUpdate", "IsFinite", "Where"):
        assert devices[kind] == [HOST], kind
    # Images cross as bytes and in one direction: to be acted on, and in a batch.
    crossings = {tuple(crossing) for crossing in run["crossings"] if "" not in crossing}
    assert crossings == {(HOST, ACCELERATOR, "uint8")}


@pytest.mark.parametrize("algorithm", ["dqn", "ppo", "sac", "trpo"])
def test_compiled_gradients_are_those_of_the_graph(algorithm):
    def losses(jit_compile: bool) -> dict[str, float]:
        parts = build_components(algorithm, compile_update__jit_compile=jit_compile)
        if algorithm == "sac":  # XLA draws other numbers
            parts.agent._noise = lambda batch_size: tf.fill([2, batch_size, 1], 0.5)
        state = parts.runner.initial_state()
        forever = tf.constant(1_000_000, tf.int64)
        if parts.experience.keeps_rows:
            state = parts.runner.collect_randomly(state, tf.constant(20, tf.int64), forever)
        state = parts.runner.train(state, tf.constant(3, tf.int64), forever)
        parts.close()
        assert (parts.agent._compiled_gradients is not None) == jit_compile
        return {name: float(value) for name, value in state.loss_sums.items()}

    compiled, plain = losses(True), losses(False)
    assert compiled.keys() == plain.keys()
    for name in plain:
        np.testing.assert_allclose(compiled[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("execution", "flag"),
    [(Execution.EAGER, "--eager"), (Execution.EXACT_GRAPH, "--exact_graph")],
)
def test_compiling_what_has_to_be_exact_is_refused(execution, flag):
    execution.configure()
    try:
        with pytest.raises(UserError, match=f"compile_update.jit_compile = True.*{flag}"):
            build_components("dqn", compile_update__jit_compile=True)
    finally:
        Execution.GRAPH.configure()
