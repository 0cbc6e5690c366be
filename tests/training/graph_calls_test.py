"""Tests of the times of graph calls."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from run_processes import Run

from pipeline.training.graph_calls import GraphCalls


def state_at(steps: int, collect_seconds: float) -> Any:
    statistics = SimpleNamespace(env_steps=tf.constant(steps))
    carry = SimpleNamespace(vector_steps=tf.constant([steps]), statistics=statistics)
    return SimpleNamespace(carry=carry, collect_seconds=tf.constant(collect_seconds, tf.float64))


def timed(environment_seconds: float, collect_seconds: float) -> tuple[GraphCalls, Any, Any]:
    """Returns calls, their environment, and a chunk of one vector step that takes 20 ms."""
    environment: Any = SimpleNamespace(seconds=0.0)
    runner: Any = SimpleNamespace(collect_steps=1, at_once=1)

    def chunk(state, max_iterations, until):
        time.sleep(0.02)
        environment.seconds += environment_seconds
        steps = int(state.carry.vector_steps[0]) + 1
        return state_at(steps, collect_seconds * steps)

    calls = GraphCalls(runner, environment)
    calls.restart_timing(state_at(0, 0.0))
    return calls, environment, chunk


def test_shares_are_of_the_calls_alone():
    """An evaluation may step the environments of training."""
    calls, environment, chunk = timed(0.005, 0.01)
    environment.seconds += 100.0
    state = calls.run(chunk, state_at(0, 0.0), 100)
    environment.seconds += 100.0
    shares = calls.shares(calls.run(chunk, state, 100))
    assert 0 < shares["environment_share"] <= 0.25
    assert shares["policy_share"] == pytest.approx(shares["environment_share"], rel=0.1)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_shares_of_environments_that_step_during_updates_add_up_to_one():
    calls, _, chunk = timed(1.0, 0.005)  # several collectors
    shares = calls.shares(calls.run(chunk, state_at(0, 0.0), 100))
    assert 0 < shares["environment_share"] <= 0.25
    assert shares["policy_share"] == 0
    assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("hours", [-1, 1])
def test_shares_are_possible_when_the_clock_is_set(hours):
    """Graphs read the time of day."""
    calls, _, chunk = timed(0.005, 3600.0 * hours)
    shares = calls.shares(calls.run(chunk, state_at(0, 0.0), 100))
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_time_of_collecting_ends_before_the_updates_begin(tmp_path):
    """On one thread, TensorFlow makes all that is ready before it reads a clock."""
    run = Run(
        tmp_path,
        "dqn",
        configure_tensorflow__inter_op=1,
        ReplayBuffer__env_steps_per_update=1,
        mlp_encoder__units=(1024, 1024),
        train__num_env_steps=160,
        train__num_final_episodes=1,
    )
    assert run.finish() == 0
    shares = [record["update_share"] for record in run.metrics if "update_share" in record]
    assert shares and min(shares) > 0.5, shares
