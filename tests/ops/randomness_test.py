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
from graph_operations import draws_from_state, operations, stateful_draws, stateless_draws
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import FOUR_ACTIONS, THREE_NUMBERS, TWO_MOTORS, bound, env_steps, specs
from scripted_environments import ScriptedEnv, environment
from tensorflow.python.framework import op_def_registry
from tf_agents.agents.ddpg import critic_network
from tf_agents.agents.sac import sac_agent, tanh_normal_projection_network
from tf_agents.networks import actor_distribution_network, q_network
from tf_agents.policies import epsilon_greedy_policy, q_policy
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import StepType, restart, trajectory

from pipeline.acting.collect_driver import CollectDriver
from pipeline.agents.a2c import create_a2c_agent
from pipeline.agents.agent import Agent
from pipeline.agents.dqn import create_dqn_agent
from pipeline.agents.nstep_q import create_nstep_q_agent
from pipeline.agents.ppo import create_ppo_agent
from pipeline.agents.sac import create_sac_agent
from pipeline.agents.trpo import create_trpo_agent
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.ops.randomness import stateless_seed, stream_key
from pipeline.replay.block_replay_buffer import BlockReplayBuffer
from pipeline.replay.replay_buffer import ReplayBuffer
from pipeline.replay.rollout import Rollout
from pipeline.training.components import build_agent
from pipeline.training.iteration import Iterations

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


AGENTS = {
    "dqn": (create_dqn_agent, Discrete(4)),
    "ppo discrete": (create_ppo_agent, Discrete(4)),
    "ppo continuous": (create_ppo_agent, Box(-1.0, 1.0, (2,), np.float32)),
    "a2c": (create_a2c_agent, Discrete(4)),
    "trpo": (create_trpo_agent, Discrete(4)),
    "n-step Q": (create_nstep_q_agent, Discrete(4)),
    "sac": (create_sac_agent, Box(-1.0, 1.0, (2,), np.float32)),
}


class Run:
    """Agent on a tiny scripted environment, and the iterations that collect with it."""

    def __init__(self, create_agent: Callable[..., Agent], action_space: Any):
        episodes = [(3, "terminated"), (5, "truncated")]
        envs = [ScriptedEnv(episodes, action_space) for _ in range(2)]
        self.environment: VectorEnvironment = environment(*envs)
        steps = env_steps()
        specs = self.environment.time_step_spec(), self.environment.action_spec()
        self.agent = build_agent(*specs, 2, 0, create_agent, steps)
        self.driver = CollectDriver(self.environment, seed=0)
        self.iterations = Iterations(self.agent, self._experience(), self.driver, steps)
        self.state = self.iterations.initial_state()

    def _experience(self) -> Any:
        agent, common = self.agent, {"training_spec": self.agent.training_data_spec, "seed": 0}
        length = agent.train_sequence_length
        if length == 1:
            return Rollout(agent.collect_data_spec, 2, num_steps=4, minibatch_size=4, **common)
        return ReplayBuffer(
            agent.collect_data_spec, 2, sequence_length=length, capacity=40, **common
        )


# A2C shares all that draws with PPO.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.crash] * (name == "a2c")) for name in AGENTS],
)
def run(request):
    bindings = {
        "create_dqn_agent.n_step": 3,
        "ActorCritic.normalize_observations": True,
        "ActorCritic.share_encoder": False,
    }
    with bound(bindings):
        built = Run(*AGENTS[request.param])
    yield built
    built.environment.close()


def test_policies_draw_statelessly(run: Run) -> None:
    time_step = tensor_spec.add_outer_dim(run.agent.time_step_spec, 5)
    for policy in (run.agent.collect_policy, run.agent.policy):
        act = tf.function(policy.action, autograph=False)
        graph = act.get_concrete_function(time_step, (), SEED).graph
        assert not stateful_draws(graph)
        assert bool(stateless_draws(graph)) == (policy is run.agent.collect_policy)


def test_warm_ups_draw_statelessly(run: Run) -> None:  # `iteration_test` has training
    count = tf.constant(0, tf.int64)
    graph = run.iterations.collect_randomly.get_concrete_function(run.state, count, count).graph
    assert {"While", "StatelessWhile"} & operations(graph)
    assert not stateful_draws(graph)
    assert stateless_draws(graph)


def test_blocks_of_samples_are_drawn_statelessly() -> None:
    env = environment(ScriptedEnv([(3, "terminated")]))
    specs = env.time_step_spec(), env.action_spec()
    agent = build_agent(*specs, 1, 0, create_dqn_agent, env_steps())
    with bound({"ReplayBuffer.capacity": 40, "ReplayBuffer.batch_size": 8}):
        buffer = BlockReplayBuffer(agent.collect_data_spec, 1, sequence_length=2, seed=0)
    graph = tf.function(buffer.next_batch, autograph=False).get_concrete_function().graph
    assert "StatelessRandomUniformIntV2" in operations(graph)
    assert not stateful_draws(graph)


def test_stock_epsilon_greedy_policy_is_found() -> None:
    stock = epsilon_greedy_policy.EpsilonGreedyPolicy(
        q_policy.QPolicy(specs(), FOUR_ACTIONS, q_network.QNetwork(THREE_NUMBERS, FOUR_ACTIONS)),
        epsilon=0.5,
    )
    act = tf.function(stock.action, autograph=False)
    time_step = restart(tf.zeros([5, 3]), 5)
    graph = act.get_concrete_function(time_step).graph
    assert {"RandomUniform", "RandomUniformInt"} <= stateful_draws(graph)


def stock_sac() -> sac_agent.SacAgent:
    def optimizer() -> tf.keras.optimizers.legacy.Optimizer:
        return tf.keras.optimizers.legacy.SGD()

    return sac_agent.SacAgent(
        specs(),
        TWO_MOTORS,
        critic_network=critic_network.CriticNetwork((THREE_NUMBERS, TWO_MOTORS)),
        actor_network=actor_distribution_network.ActorDistributionNetwork(
            THREE_NUMBERS,
            TWO_MOTORS,
            continuous_projection_net=tanh_normal_projection_network.TanhNormalProjectionNetwork,
        ),
        actor_optimizer=optimizer(),
        critic_optimizer=optimizer(),
        alpha_optimizer=optimizer(),
    )


@pytest.mark.crash
def test_stock_sac_is_found() -> None:
    stock = stock_sac()
    spec = trajectory.Trajectory(
        StepType.FIRST, THREE_NUMBERS, TWO_MOTORS, (), StepType.MID, 0.0, 0.0
    )._replace(
        step_type=tf.TensorSpec([], tf.int32),
        next_step_type=tf.TensorSpec([], tf.int32),
        reward=tf.TensorSpec([], tf.float32),
        discount=tf.TensorSpec([], tf.float32),
    )
    train = tf.function(stock.train, autograph=False)
    graph = train.get_concrete_function(tensor_spec.add_outer_dims_nest(spec, (6, 2))).graph
    assert "RandomStandardNormal" in stateful_draws(graph)


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
