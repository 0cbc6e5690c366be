"""Tests that random numbers, also those in graphs, depend on seed, stream and counter alone."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from graph_operations import draws_from_state, stateful_draws, stateless_draws
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import FOUR_ACTIONS, TWO_MOTORS, bound, env_steps, specs
from tensorflow.python.framework import op_def_registry
from tf_agents.specs import tensor_spec

from pipeline.agents.agent import Agent
from pipeline.agents.dqn import create_dqn_agent
from pipeline.agents.nstep_q import create_nstep_q_agent
from pipeline.agents.ppo import create_ppo_agent
from pipeline.agents.sac import create_sac_agent
from pipeline.ops.randomness import stateless_seed, stream_key

SEED = tf.TensorSpec([2], tf.int32)


def test_no_two_users_share_a_stream() -> None:
    names = [
        name
        for path in (ROOT / "pipeline").rglob("*.py")
        for name in re.findall(r'stream_key\((?:\w+\.)?_?seed, "(\w+)"', path.read_text())
    ]
    assert len(names) == len(set(names)) > 8


@pytest.mark.parametrize(
    "operation",
    [
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal",
        "ParameterizedTruncatedNormal", "Multinomial", "RandomShuffle", "RandomGamma",
        "RandomPoissonV2", "StatefulUniform", "StatefulUniformInt", "StatefulStandardNormalV2",
        "StatefulRandomBinomial", "NonDeterministicInts", "RngReadAndSkip",
    ],
)  # fmt: skip
def test_the_walker_knows_the_operations_that_keep_state(operation: str) -> None:
    assert op_def_registry.get(operation) is not None
    assert draws_from_state(operation)


@pytest.mark.parametrize(
    "operation",
    [
        "StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessMultinomial", "MatMul",
        "PartitionedCall", "StatefulPartitionedCall", "StatelessWhile", "While", "PyFunc",
        "AssignAddVariableOp",
    ],
)  # fmt: skip
def test_the_walker_lets_other_operations_pass(operation: str) -> None:
    assert op_def_registry.get(operation) is not None
    assert not draws_from_state(operation)


def test_the_walker_looks_into_loops_branches_and_calls() -> None:
    @tf.function(autograph=False)
    def call(x: tf.Tensor) -> tf.Tensor:
        return x + tf.random.normal([])

    def branch(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(x > 0.0, lambda: call(x), lambda: x)

    @tf.function(autograph=False)
    def loop(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda x: x < 3.0, lambda x: (branch(x),), (x,))[0]

    graph = loop.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    assert not any(draws_from_state(node.op) for node in graph.as_graph_def().node)
    assert stateful_draws(graph) == {"RandomStandardNormal"}


@pytest.mark.parametrize(
    ("create_agent", "action_spec"),
    [
        (create_dqn_agent, FOUR_ACTIONS),
        (create_nstep_q_agent, FOUR_ACTIONS),
        (create_ppo_agent, FOUR_ACTIONS),
        (create_ppo_agent, TWO_MOTORS),
        (create_sac_agent, TWO_MOTORS),
    ],
)
def test_policies_draw_statelessly(create_agent: Callable[..., Agent], action_spec: Any) -> None:
    """`iteration_test` has training and warm-ups."""
    with bound({"ActorCritic.normalize_observations": True}):
        agent = create_agent(specs(), action_spec, num_envs=1, seed=0, env_steps=env_steps())
    time_step = tensor_spec.add_outer_dim(agent.time_step_spec, 5)
    for policy in (agent.collect_policy, agent.policy):
        act = tf.function(policy.action, autograph=False)
        graph = act.get_concrete_function(time_step, (), SEED).graph
        assert not stateful_draws(graph)
        assert bool(stateless_draws(graph)) == (policy is agent.collect_policy)


@settings(max_examples=200)
@given(seed=st.integers(-(2**70), 2**70), name=st.text(max_size=9), index=st.integers(0, 99))
def test_keys_have_63_bits_and_their_own_value(seed: int, name: str, index: int) -> None:
    key = stream_key(seed, name, index)
    assert 0 <= key < 2**63
    assert key == stream_key(seed, name, index)
    assert key not in (stream_key(seed + 1, name, index), stream_key(seed, name, index + 1))


def test_the_key_of_a_stream_never_changes() -> None:
    """Checks a fixed value: if it changed, earlier runs could not be continued."""
    assert stream_key(1, "replay") == 4179155284184805726


@pytest.mark.parametrize("counter", [0, 1, 2**31 - 1, 2**31, 2**40])
def test_a_seed_is_the_sum_of_key_and_counter(counter: int) -> None:
    key = stream_key(3, "collect")
    seed = stateless_seed(key, tf.constant(counter, tf.int64))
    assert seed.shape == [2] and seed.dtype == tf.int32
    assert seed.numpy().view(np.int64)[0] == np.int64(key) + counter
    traced = tf.function(lambda c: stateless_seed(key, c), autograph=False)
    np.testing.assert_array_equal(traced(tf.constant(counter, tf.int64)), seed)


def test_neighbouring_counters_and_streams_are_uncorrelated() -> None:
    def draw(stream: str, counter: int) -> np.ndarray:
        seed = stateless_seed(stream_key(0, stream), tf.constant(counter, tf.int64))
        return tf.random.stateless_uniform([50], seed).numpy()

    table = np.array([draw(s, c) for s in ("collect", "replay") for c in range(100)])
    correlations = np.corrcoef(table)[~np.eye(200, dtype=bool)]
    assert np.abs(correlations).max() < 0.75
    assert abs(np.mean(correlations**2) - 1 / 49) < 2e-3
    across = np.corrcoef(table.T)[~np.eye(50, dtype=bool)]
    assert np.abs(across).max() < 0.4


def test_new_keys_take_no_memory() -> None:
    """Checks that TensorFlow keeps no copy of each key, which would be 0.7 KB."""

    def resident(numbers: range) -> int:
        for number in numbers:
            stateless_seed(stream_key(1, number), tf.constant(0))
        status = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])  # type: ignore[index]

    # What else the process allocates does not recur in every round.
    rounds = [resident(range(number, number + 2_000)) for number in range(0, 8_000, 2_000)]
    assert min(np.diff(rounds)) < 700
