"""Tests that an interrupted tiny run of dqn3_atari ends with the same bits as its twin."""

import math
import re
from typing import Any

import gin
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, TESTS
from host_loops import Run
from tiny_runs import assert_same, saved, statements, variables

from pipeline import configuration
from pipeline.ops.optimizers import CenteredRMSprop
from pipeline.training import graph_calls
from pipeline.training.components import build
from pipeline.training.intervals import Plan
from pipeline.training.train_loop import build_bound
from pipeline.utils.shutdown import Stopped

WARM_UP = 40
BINDINGS = f"""
    deepmind_atari_environment.game = "breakout"
    nature_cnn_encoder.filters = ((4, 8, 4), (4, 4, 2))
    nature_cnn_encoder.units = (8,)
    ReplayBuffer.capacity = 150
    ReplayBuffer.batch_size = 8
    BlockReplayBuffer.block_size = 24
    create_dqn_agent.target_update_env_steps = 40
    WARM_UP = {WARM_UP}
    epsilon/linear_schedule.num_steps = 100
    Evaluator.num_env_steps = 40
"""
PLAN = Plan(
    num_env_steps=160,
    log_interval=50,
    eval_interval=100,
    checkpoint_interval=70,
    num_eval_episodes=1,
    num_final_episodes=1,
)


class TinyRun(Run):
    bindings = BINDINGS

    def __init__(self, path, plan=PLAN):
        super().__init__(path, plan)
        self.warm_up = WARM_UP

    def build(self, path, algorithm, **overrides):
        configuration.load(["dqn3_atari"], statements(self.bindings))
        return build_bound(3)

    def everything(self):
        agent, experience, environment = (
            self.parts.agent, self.parts.experience, self.parts.environment,
        )  # fmt: skip
        rows = environment.current_time_step()
        return {
            **variables(agent),
            **saved(experience),
            **{f"row {i}": np.asarray(row) for i, row in enumerate(rows)},
            **{f"carry {i}": np.asarray(x) for i, x in enumerate(self.loop.state.carry.time_step)},
        }


@pytest.fixture(autouse=True)
def one_iteration_a_call(monkeypatch):
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)


def test_an_interrupted_run_ends_with_the_bits_of_its_twin(tmp_path):
    twin = TinyRun(tmp_path / "twin")
    stop_counts = []
    updates = {}  # by environment steps

    def watch(record, phase):
        updates[twin.loop.env_steps] = int(twin.parts.agent.train_step_counter)
        taken = int(twin.parts.experience._taken)
        if twin.loop.env_steps > WARM_UP and 8 <= taken <= 16:
            stop_counts.append(twin.loop.env_steps)

    twin.progress.hook = watch
    expected = twin.train()
    assert (updates[WARM_UP], updates[WARM_UP + 4], updates[WARM_UP + 8]) == (0, 1, 2)
    assert 30 <= expected["updates"] <= 32  # boundary rows are not environment steps
    assert 120 <= twin.parts.agent._periodic_target._copied_at.numpy() < 124

    # The run stops where a block was partly used, and not at a checkpoint of the plan.
    stop_at = next(count for count in stop_counts if count > 80 and count % 70 > 8)
    path = tmp_path / "resumed"
    stopped = TinyRun(path)
    stopped.stop_at(stop_at)
    with pytest.raises(Stopped):
        stopped.train()
    experience = stopped.parts.experience
    assert 8 <= int(experience._taken) <= 16
    next_step_type, _, discount = (c.numpy()[:stop_at] for c in experience._columns[-3:])
    assert ((discount == 0) & (next_step_type == 1)).any()  # lives were lost
    resumed = TinyRun(path)
    result = resumed.train()
    assert resumed.parts.environment.divergence == ""
    for of_clock in (result, expected):
        assert of_clock.pop("wall_seconds") > 0
    assert result == expected
    assert_same(resumed.everything(), twin.everything())
    assert resumed.evaluations == twin.evaluations
    for run in (twin, stopped, resumed):
        run.close()


@pytest.mark.crash
def test_evaluations_change_nothing_of_what_is_trained(tmp_path):
    unwatched = PLAN._replace(eval_interval=0)
    runs = [TinyRun(tmp_path / "evaluated"), TinyRun(tmp_path / "unwatched", unwatched)]
    for run in runs:
        run.train()
    evaluated, other = runs
    assert [len(run.evaluations) for run in runs] == [1, 0]
    assert_same(evaluated.everything(), other.everything())
    for run in runs:
        run.close()


def test_an_iteration_acts_four_times_then_stores_then_learns(tmp_path, monkeypatch):
    run = TinyRun(tmp_path / "run")
    parts = run.parts
    (driver,) = parts.runner.drivers
    called = []

    def followed(method):
        def follow(*arguments):
            called.append(method.__name__)
            return method(*arguments)

        return follow

    for owner, name in ((driver, "run"), (parts.experience, "add"), (parts.agent, "train")):
        monkeypatch.setattr(owner, name, followed(getattr(owner, name)))
    counts = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    parts.runner.train(parts.runner.initial_state(), *counts)  # traces the graph
    assert called[:3] == ["run", "add", "train"]
    assert (parts.experience.collect_steps, parts.experience.num_batches) == (4, 1)
    run.close()


def test_a_step_at_the_end_of_a_game_counts_for_the_next_update(tmp_path):
    class ShortGames(TinyRun):
        bindings = f"{BINDINGS}\ndeepmind_atari_environment.max_episode_frames = 120"

    run = ShortGames(tmp_path / "run")
    seen = []

    def watch(record, phase):
        vector_steps = int(run.loop.state.carry.vector_steps)
        updates = int(run.parts.agent.train_step_counter)
        seen.append((vector_steps, updates, run.loop.env_steps))

    run.progress.hook = watch
    run.train()
    since_the_first = np.asarray(seen) - next(counts for counts in seen if counts[1])
    vector_steps, updates, env_steps = since_the_first[-1]
    assert vector_steps == 4 * updates
    assert 0 < env_steps < vector_steps - 2  # games have ended
    run.close()


def test_the_ready_run_has_the_settings_of_the_run_script():
    configuration.load(["dqn3_pong"], [])
    names = ("create_environment", "create_agent", "create_experience")
    references = [gin.query_parameter(f"train.{name}") for name in names]
    parts = build(1, *(reference.scoped_configurable_fn for reference in references))
    agent, evaluator = parts.agent, parts.evaluator
    experience: Any = parts.experience

    epsilon = agent.schedules["epsilon"]
    at = {0: 1, 50_000: 1, 550_000: 0.55, 1_050_000: 0.1, 50_000_000: 0.1}
    for count, value in at.items():
        assert epsilon(tf.constant(count, tf.int64)).numpy() == pytest.approx(value)
        assert agent.schedules["learning_rate"](count).numpy() == pytest.approx(0.00025)
    assert gin.query_parameter("%WARM_UP") == 50_000
    for name in ("initialize_replay_buffer.num_env_steps", "epsilon/linear_schedule.start"):
        assert repr(gin.query_parameter(name)) == "%WARM_UP"
    assert (experience.collect_steps, experience.num_batches) == (4, 1)
    assert (experience._batch_size, experience._block_size) == (32, 512)
    assert experience._stream_capacity == 1_000_000
    assert parts.runner.drivers[0]._reward_range == (-1, 1)

    trained_on: Any = parts.environment
    evaluated_on: Any = evaluator.environment
    for environment, life_loss_is_terminal in ((trained_on, True), (evaluated_on, False)):
        (game,) = (single.env for single in environment.episodes.vector.envs)
        assert (game._noop_max, game._frame_skip, game._stack.shape) == (30, 4, (4, 84, 84))
        assert game._max_episode_frames == math.inf
        assert game._life_loss_is_terminal == life_loss_is_terminal

    assert (agent._gamma, agent._double_q, not agent.takes_mean) == (0.99, False, True)
    assert agent.train_sequence_length == 2  # one-step targets
    assert agent._gradient_clip_norm is None
    assert agent._td_loss_fn(tf.constant([3.0])).numpy() == 2.5  # Huber loss with threshold 1
    assert agent._periodic_target._period == 10_000
    optimizer = agent._optimizer
    assert isinstance(optimizer, CenteredRMSprop)
    constants = [optimizer.get_config()[name] for name in ("rho", "epsilon")]
    assert constants == pytest.approx([0.95, 0.01])
    assert gin.query_parameter("nature_cnn_encoder.first_padding") == 1
    shapes = [variable.shape.as_list() for variable in agent.q_network.variables]
    assert shapes[0] == [8, 8, 4, 32]
    assert shapes[-4:] == [[3136, 512], [512], [512, 3], [3]]
    assert all(variable.numpy().any() for variable in agent.q_network.variables)  # including biases

    assert evaluator._num_env_steps == 125_000
    assert evaluator.policy._epsilon().numpy() == np.float32(0.05)
    assert (parts.environment.batch_size, evaluator.environment.batch_size) == (1, 1)
    plan = {"num_env_steps": 50_000_000, "log_interval": 10_000}
    plan |= {"eval_interval": 250_000, "checkpoint_interval": 125_000}
    for name, value in plan.items():
        assert gin.query_parameter(f"train.{name}") == value


def test_every_test_that_the_table_names_is_there():
    text = (ROOT / "docs" / "dqn3.md").read_text()
    named = re.findall(r"`(?:(\w+_test\.py)::)?(test_\w+)`", text)
    assert len(named) > 50
    for file, test in named:
        files = list(TESTS.rglob(file or "*_test.py"))
        assert any(f"def {test}(" in path.read_text() for path in files), f"{file}::{test}"


def test_every_row_of_the_table_has_a_test_or_says_that_it_has_none():
    text = (ROOT / "docs" / "dqn3.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not re.match(r"\|---|\| item \|", row)]
    assert len(rows) > 45
    for row in rows:
        assert row.count("|") == 6, row
        assert "test_" in row.split("|")[4] or "not tested" in row.split("|")[5], row
