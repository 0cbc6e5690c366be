"""Tests that an interrupted tiny run of dqn3_atari ends with the same bits as its twin."""

import re
import shutil

import gin
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, TESTS
from host_loops import Run
from tiny_runs import assert_same, saved, statements, variables

from pipeline import configuration
from pipeline.acting.collect_driver import CollectDriver
from pipeline.training import graph_calls
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
    updates = {}  # by environment steps

    def watch(record, phase):
        count = twin.loop.env_steps
        updates[count] = int(twin.parts.agent.train_step_counter)
        # A block holds three batches: the run stops where one was partly used, and not at a
        # checkpoint of the plan.
        twin.stop.requested = updates[count] % 3 > 0 and count > 80 and count % 70 > 8

    twin.progress.hook = watch
    with pytest.raises(Stopped):
        twin.train()
    assert twin.everything()["block.json"]["taken"] in (8, 16)
    game = twin.parts.environment.episodes.vector.envs[0].env
    assert game.get_state()["lives"] < 5  # lives were lost
    assert (updates[WARM_UP], updates[WARM_UP + 4], updates[WARM_UP + 8]) == (0, 1, 2)
    shutil.copytree(tmp_path / "twin", tmp_path / "resumed")

    expected = twin.go_on()
    assert 30 <= expected["updates"] <= 32  # boundary rows are not environment steps
    of_twin = twin.everything()
    (copied_at,) = (value for name, value in of_twin.items() if "copied_at" in name)
    assert 120 <= copied_at < 124
    resumed = TinyRun(tmp_path / "resumed")
    result = resumed.train()
    assert resumed.parts.environment.divergence == ""
    for of_clock in (result, expected):
        assert of_clock.pop("wall_seconds") > 0
    assert result == expected
    assert_same(resumed.everything(), of_twin)
    assert resumed.evaluations == twin.evaluations
    for run in (twin, resumed):
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


class ShortGames(TinyRun):
    bindings = f"{BINDINGS}\ndeepmind_atari_environment.max_episode_frames = 120"


@pytest.fixture(scope="module")
def short_games(tmp_path_factory):
    """Returns a trained run, its calls as they were traced, and its counts at every update."""
    run = ShortGames(tmp_path_factory.mktemp("short_games") / "run")
    parts = run.parts
    called = []
    seen = []

    def followed(method):
        def follow(*arguments):
            called.append(method.__name__)
            return method(*arguments)

        return follow

    def watch(record, phase):
        vector_steps = int(run.loop.state.carry.vector_steps)
        updates = int(parts.agent.train_step_counter)
        seen.append((vector_steps, updates, run.loop.env_steps))

    run.progress.hook = watch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)
        for owner, name in (
            (CollectDriver, "run"),
            (parts.experience, "add"),
            (parts.agent, "train"),
        ):
            patch.setattr(owner, name, followed(getattr(owner, name)))
        run.train()
    run.close()
    return run, called, seen


def test_an_iteration_acts_four_times_then_stores_then_learns(short_games):
    run, called, _ = short_games
    # The warm-up was traced before, and evaluations run the same driver.
    train = called.index("train")
    assert called[train - 2 : train + 1] == ["run", "add", "train"]
    assert (run.parts.experience.collect_steps, run.parts.experience.num_batches) == (4, 1)


def test_a_step_at_the_end_of_a_game_counts_for_the_next_update(short_games):
    _, _, seen = short_games
    since_the_first = np.asarray(seen) - next(counts for counts in seen if counts[1])
    vector_steps, updates, env_steps = since_the_first[-1]
    assert vector_steps == 4 * updates
    assert 0 < env_steps < vector_steps - 2  # games have ended


SETTINGS = """
    deepmind_atari_environment.life_loss_is_terminal = True
    evaluation/deepmind_atari_environment.life_loss_is_terminal = False
    CollectDriver.reward_range = (-1.0, 1.0)
    create_dqn_agent.discount = 0.99
    create_dqn_agent.double_q = False
    create_dqn_agent.n_step = 1
    create_dqn_agent.td_loss = @huber_loss
    huber_loss.threshold = 1.0
    create_dqn_agent.sum_losses = True
    create_dqn_agent.gradient_clip_norm = None
    create_dqn_agent.target_update_env_steps = 10000
    create_dqn_agent.optimizer = @CenteredRMSprop
    CenteredRMSprop.rho = 0.95
    CenteredRMSprop.epsilon = 0.01
    nature_cnn_encoder.first_padding = 1
    epsilon/linear_schedule.start = %WARM_UP
    BlockReplayBuffer.block_size = 512
    ReplayBuffer.batch_size = 32
    ReplayBuffer.capacity = 1000000
    Evaluator.epsilon = 0.05
    Evaluator.num_env_steps = 125000
"""
OF_BOTH_ENVIRONMENTS = """
    deepmind_atari_environment.noop_max = 30
    deepmind_atari_environment.frame_skip = 4
    deepmind_atari_environment.stack_size = 4
    deepmind_atari_environment.max_episode_frames = None
    deepmind_atari_environment.num_envs = 1
"""


def test_the_ready_run_has_the_settings_of_the_run_script():
    configuration.load(["dqn3_pong"], [])
    parts = build_bound(1)
    agent = parts.agent

    of_both = statements(OF_BOTH_ENVIRONMENTS)
    settings = statements(SETTINGS) + of_both + [f"evaluation/{line}" for line in of_both]
    operative = configuration.operative_config().splitlines()
    assert [line for line in settings if line not in operative] == []

    epsilon = agent.schedules["epsilon"]
    at = {0: 1, 50_000: 1, 550_000: 0.55, 1_050_000: 0.1, 50_000_000: 0.1}
    for count, value in at.items():
        assert epsilon(tf.constant(count, tf.int64)).numpy() == pytest.approx(value)
        assert agent.schedules["learning_rate"](count).numpy() == pytest.approx(0.00025)
    assert gin.query_parameter("%WARM_UP") == 50_000
    assert repr(gin.query_parameter("initialize_replay_buffer.num_env_steps")) == "%WARM_UP"
    assert (parts.experience.collect_steps, parts.experience.num_batches) == (4, 1)

    weights = agent.trained["q_network"].variables
    shapes = [variable.shape.as_list() for variable in weights]
    assert shapes[0] == [8, 8, 4, 32]
    assert shapes[-4:] == [[3136, 512], [512], [512, 3], [3]]
    assert all(variable.numpy().any() for variable in weights)  # including biases

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
