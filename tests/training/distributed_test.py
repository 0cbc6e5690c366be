"""Tests of collectors with one learner."""

import functools
import json
import pathlib
import shutil
from collections.abc import Collection
from typing import NamedTuple
from unittest.mock import Mock

import gin
import numpy as np
import pytest
import tensorflow as tf
from host_loops import PLAN, Run, check_streams, saved_components
from run_processes import Records, without_times
from tf_agents.trajectories import StepType, Trajectory
from tiny_runs import assert_same, saved

from pipeline import configuration
from pipeline.acting.episode_statistics import initial_statistics
from pipeline.agents.dqn import DqnAgent
from pipeline.training import collector, distributed
from pipeline.training.collector import Collector, Identity
from pipeline.training.collector_places import CollectorLost, InProcess
from pipeline.training.train_loop import bound
from pipeline.utils.errors import UserError
from pipeline.utils.progress import WARMING_UP
from pipeline.utils.shutdown import Stopped

pytestmark = pytest.mark.usefixtures("collect_loops")


class Distributed(Run):
    """Run whose environments are those of two collectors."""

    def build(self, path, algorithm, **overrides):
        overrides = {"distributed_runner__message_steps": 4} | overrides
        return super().build(path, algorithm, files=("runners/distributed",), **overrides)


# Resumed runs have PLAN: a checkpoint that changed what is trained would make a difference.
ODD_PLAN = PLAN._replace(checkpoint_interval=70)


def orders_noted(patch):
    """Returns a list that tells of every message that is asked for whether it is random."""
    noted: list[bool] = []
    submit = InProcess.submit

    def noting(self, number, order):
        noted.append(order.is_random)
        submit(self, number, order)

    patch.setattr(InProcess, "submit", noting)
    return noted


class Trained(NamedTuple):
    """Run that was never interrupted, which tests share and must not change.

    Attributes:
      run: The run, at its end.
      result: What it returned.
      killed: Copy of its folder as it was after 150 environment steps, between checkpoints.
      are_random: Whether each message that was asked for was random.
    """

    run: Distributed
    result: dict
    killed: pathlib.Path
    are_random: list[bool]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function that trains a run to its end, once for the same arguments."""
    runs: list[Distributed] = []

    @functools.cache
    def train(algorithm, **overrides):
        path = tmp_path_factory.mktemp("trained")
        killed = path / "killed"
        run = Distributed(path / "run", ODD_PLAN, algorithm, **overrides)
        runs.append(run)
        run.copy_at(150, killed)
        with pytest.MonkeyPatch.context() as patch:
            are_random = orders_noted(patch)
            return Trained(run, run.train(), killed, are_random)

    yield train
    for run in runs:
        run.close()


NORMALIZED = {"create_dqn_agent__normalize_observations": True, "distributed_runner__in_flight": 3}


def assert_ends_as(resumed, twin):
    ended = resumed.train()
    assert ended["weights_sha256"] == twin.result["weights_sha256"]
    assert ended["evaluation"] == twin.result["evaluation"]
    assert resumed.evaluations == twin.run.evaluations
    assert list(map(without_times, resumed.metrics)) == list(map(without_times, twin.run.metrics))
    assert_same(saved_components(resumed.parts), saved_components(twin.run.parts))
    resumed.close()


def test_a_run_that_is_stopped_in_its_warm_up_ends_as_its_twin(tmp_path, trained):
    twin = trained("dqn", **NORMALIZED)
    cut = Distributed(tmp_path / "run", **NORMALIZED)
    cut.train_until(1, WARMING_UP)
    cut.close()
    resumed = Distributed(tmp_path / "run", **NORMALIZED)
    assert_ends_as(resumed, twin)


@pytest.mark.parametrize(
    "algorithm",
    [
        "impala",
        *(
            pytest.param(name, marks=pytest.mark.crash)
            for name in ("dqn", "ppo", "sac", "trpo", "a2c", "nstep_q")
        ),
    ],
)
def test_a_killed_run_ends_as_its_twin(tmp_path, trained, algorithm):
    twin = trained(algorithm)
    killed = Records(shutil.copytree(twin.killed, tmp_path / "run"))
    assert 70 <= killed.env_steps < 200
    assert_ends_as(Distributed(killed.path, algorithm=algorithm), twin)


def test_collectors_have_random_numbers_of_their_own_and_rows_are_as_old_as_planned(trained):
    run = trained("dqn", **NORMALIZED).run
    first, second = run.parts.runner.environments
    assert not np.array_equal(
        first.current_time_step().observation, second.current_time_step().observation
    )
    # Every observation ends with a random number.
    streams = [set(rows[:, 2].tolist()) for rows in stored_observations(run.parts.experience)]
    assert sum(map(len, streams)) == len(set.union(*streams)) > 200
    # Three messages of each of two collectors are under way; one of them is being learnt from.
    assert 4 < run.metrics[-1]["staleness_mean"] <= 3 * 2 - 1
    assert run.loop.state.carry.time_step.observation.shape[0] == 4
    assert run.metrics[-1]["episodes"] > 10


def test_a_message_makes_the_updates_that_its_rows_ask_for_and_all_rows_are_observed(trained):
    twin = trained("dqn", **NORMALIZED)
    rows = 2 * int(tf.reduce_sum(twin.run.loop.state.carry.vector_steps))  # 2 environments each
    random_rows = 2 * 4 * sum(twin.are_random)
    assert 4 * twin.result["updates"] == rows - random_rows > 0  # ReplayBuffer.env_steps_per_update
    agent = twin.run.parts.agent
    assert float(agent.normalizer.moments[0].count) == twin.result["env_steps"]


def stored_observations(buffer):
    """Returns the stored observations [rows, 3] of each stream."""
    files = sorted(saved(buffer).items())
    return [rows.view(np.float32).reshape(-1, 3) for name, rows in files if "observation" in name]


@pytest.mark.parametrize("in_flight", [1, pytest.param(2, marks=pytest.mark.crash)])
def test_an_environment_that_fails_ends_the_run_and_episodes_that_cannot_be_continued_begin_anew(
    tmp_path, in_flight
):
    run = Distributed(tmp_path / "run", distributed_runner__in_flight=in_flight)
    run.at(150, lambda: (tmp_path / "fail").touch())
    with pytest.raises(UserError, match="Walk-v0 raised KeyError.*no such room"):
        run.train()
    run.close()
    (tmp_path / "fail").unlink()
    (tmp_path / "drift").touch()
    again = Distributed(tmp_path / "run", distributed_runner__in_flight=in_flight)
    assert again.train()["env_steps"] >= 300
    assert "did not reach its saved state" in again.parts.environment.divergence
    check_streams(again.parts.experience, min_truncated=1)
    again.close()


def spoil_rows(folder, patch):
    (folder / "nan").touch()


def spoil_time_steps(folder, patch):
    take = InProcess.take

    def spoiled(self, number):
        message = take(self, number)
        reward = np.full_like(message.time_step.reward, np.nan)
        return message._replace(time_step=message.time_step._replace(reward=reward))

    patch.setattr(InProcess, "take", spoiled)


@pytest.mark.parametrize("spoil", [spoil_rows, spoil_time_steps])
def test_messages_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, spoil):
    run = Distributed(tmp_path / "run")

    def spoil_and_stop(record, phase):
        if run.loop.env_steps >= 150:
            spoil(tmp_path, monkeypatch)
            run.stop.requested = True

    run.progress.hook = spoil_and_stop
    with pytest.raises(UserError, match="message of a collector holds NaN"):
        run.train()
    run.close()


def test_messages_fit_the_replay_buffer(tmp_path):
    with pytest.raises(UserError, match="A message of 100 vector steps does not fit"):
        Distributed(tmp_path / "run", distributed_runner__message_steps=100)


def test_a_warm_up_that_ends_after_the_run_is_refused(tmp_path):
    plan, lengths = PLAN._replace(num_env_steps=61), {"distributed_runner__message_steps": 20}
    run = Distributed(tmp_path / "run", plan, **lengths)
    with pytest.raises(UserError, match="warm-up took .*num_env_steps = 61 leaves nothing"):
        run.train()
    run.close()


def test_environments_are_reset_once_watched_and_no_needless_random_message_is_asked_for(
    tmp_path, monkeypatch
):
    first_reset = Mock(wraps=collector.initial_carry)
    monkeypatch.setattr(collector, "initial_carry", first_reset)
    are_random = orders_noted(monkeypatch)
    taken: list[int] = []
    take = InProcess.take

    def noting_message(self, number):
        taken.append(number)
        return take(self, number)

    monkeypatch.setattr(InProcess, "take", noting_message)
    overrides = {"distributed_runner__num_collectors": 3, "distributed_runner__in_flight": 4}
    run = Distributed(tmp_path / "run", **overrides)
    first_reset.assert_not_called()
    run.loop.collect_randomly(run.warm_up)
    reset = [call.args[0] for call in first_reset.call_args_list]
    assert reset == list(run.parts.runner.environments)
    assert all(are_random) and len(are_random) == len(taken) >= 3
    assert taken == [n % 3 for n in range(len(taken))]
    run.close()


def test_no_random_message_is_asked_for_after_the_warm_up(trained):
    are_random = trained("dqn", **NORMALIZED).are_random
    num_random = are_random.index(False)
    assert num_random > 0 and not any(are_random[num_random:])


def test_what_drivers_of_a_cluster_s_collectors_read_is_part_of_the_configuration(
    tmp_path, monkeypatch
):
    def no_place(*_):
        raise UserError("no cluster")

    monkeypatch.setattr(distributed, "InProcess", no_place)
    with pytest.raises(UserError, match="no cluster"):
        Distributed(tmp_path / "run", CollectDriver__reward_range=(-1.0, 1.0))
    assert "CollectDriver.reward_range = (-1.0, 1.0)" in configuration.operative_config()


class Losing(InProcess):
    """Loses collectors while the messages with these numbers are taken."""

    losses: Collection[int] = ()
    once = False  # whether each collector is lost once at most
    begun = 0  # collectors that are being restored

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._taken = 0
        self._lost: set[int] = set()

    def take(self, number):
        self._taken += 1
        self._lose(number)
        return super().take(number)

    def save(self, number):
        if self.once:
            self._lose(number)
        return super().save(number)

    def begin_restore(self, number, saved):
        self.begun += 1
        super().begin_restore(number, saved)

    def restored(self, number):
        assert self.begun == len(self.watched)  # All are restored at the same time.
        self._lose(number)
        return super().restored(number)

    def _lose(self, number):
        if self._taken in self.losses and not (self.once and number in self._lost):
            self._lost.add(number)
            raise CollectorLost(number, "it was unplugged")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"next": 99}, r"state\.json names a collector that this run does not have"),
        ({"version": -1}, "non-negative integers"),
        ({"lags": None}, r"state\.json does not hold lists"),
        ({"lags": [0.5]}, "non-negative integers"),
        ({"are_messages": 5}, r"state\.json does not hold lists"),
        ({"are_messages": [1, 2]}, r"state\.json does not hold lists"),
    ],
    ids=str,
)
def test_a_damaged_state_of_collectors_is_refused(tmp_path, trained, damage, message):
    runner = trained("impala").run.parts.runner
    runner.save(tmp_path)
    path = tmp_path / "state.json"
    saved = path.read_text()
    path.write_text(json.dumps(json.loads(saved) | damage))
    with pytest.raises(ValueError, match=message):
        runner.restore(tmp_path)
    path.write_text(saved)
    runner.restore(tmp_path)


@pytest.fixture
def losing(monkeypatch):
    monkeypatch.setattr(distributed, "InProcess", Losing)
    monkeypatch.setattr(Losing, "losses", ())
    monkeypatch.setattr(Losing, "once", False)
    return Losing


@pytest.mark.parametrize("algorithm", ["impala", pytest.param("dqn", marks=pytest.mark.crash)])
def test_if_all_collectors_are_equally_fast_the_order_is_that_of_turns(
    tmp_path, trained, algorithm
):
    in_turns = trained(algorithm)
    run = Distributed(tmp_path / "run", algorithm=algorithm, distributed_runner__order="ready")
    assert run.train()["weights_sha256"] == in_turns.result["weights_sha256"]
    run.close()


@pytest.mark.parametrize(
    "algorithm",
    ["dqn", *(pytest.param(x, marks=pytest.mark.crash) for x in ("impala", "nstep_q", "sac"))],
)
def test_lost_collectors_are_replaced_and_counted_until_too_many_end_the_run(
    tmp_path, losing, capsys, monkeypatch, algorithm
):
    losing.losses = (3, 14, 15)
    run = Distributed(tmp_path / "run", algorithm=algorithm, distributed_runner__order="ready")
    result = run.train()
    assert result["env_steps"] >= 300
    last = run.metrics[-1]
    assert last["collector_restarts"] == 3
    assert last["lost_env_steps"] > 0
    assert result["env_steps"] == run.loop.env_steps
    assert capsys.readouterr().err.count("was lost: it was unplugged; a new one takes its pl") == 3
    if algorithm in ("dqn", "sac"):
        check_streams(run.parts.experience, min_truncated=2)
    losing.losses = range(10**6)
    monkeypatch.setattr(distributed, "Collector", Mock())  # never used, and long to build
    limits = tf.constant(10**6, tf.int64), tf.constant(10**6, tf.int64)
    with pytest.raises(UserError, match="It was lost 10 times in a row without a message"):
        run.parts.runner.train(run.loop.state, *limits)
    run.close()


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 1), marks=pytest.mark.crash)])
def test_a_run_that_loses_its_collectors_at_a_checkpoint_is_resumed(tmp_path, losing, sizes):
    num_collectors, in_flight = sizes
    settings = {
        "distributed_runner__order": "ready",
        "distributed_runner__num_collectors": num_collectors,
        "distributed_runner__in_flight": in_flight,
    }
    run = Distributed(tmp_path / "run", **settings)

    def lose_all(record, phase):
        if run.loop.env_steps >= 150:
            run.stop.requested = True
            losing.losses = range(10**6)  # until the checkpoint has replaced them
            losing.once = True

    run.progress.hook = lose_all
    with pytest.raises(Stopped):
        run.train()
    run.close()
    losing.losses, losing.once = (), False
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    state = json.loads((newest / "environment/state.json").read_text())
    assert state["are_messages"] == [[False]] * num_collectors
    assert state["restarts"] == [1] * num_collectors
    again = Distributed(tmp_path / "run", **settings)
    assert again.train()["env_steps"] >= 300
    assert again.metrics[-1]["collector_restarts"] == num_collectors
    check_streams(again.parts.experience, min_truncated=1)
    again.close()


@pytest.mark.parametrize("order", ["ready", "turns"])
def test_a_collector_that_is_lost_while_it_is_restored_ends_a_run_only_in_turns(
    tmp_path, losing, order
):
    run = Distributed(tmp_path / "run", distributed_runner__order=order)
    run.progress.hook = lambda record, phase: setattr(
        run.stop, "requested", run.loop.env_steps >= 150
    )
    with pytest.raises(Stopped):
        run.train()
    run.close()
    losing.losses, losing.once = (0,), True  # before any message
    again = Distributed(tmp_path / "run", distributed_runner__order=order)
    if order == "turns":
        with pytest.raises(UserError, match="^collector 0 was lost: it was unplugged"):
            again.train()
    else:
        assert again.train()["env_steps"] >= 300
        assert again.metrics[-1]["collector_restarts"] == len(again.parts.runner.watched)
        check_streams(again.parts.experience, min_truncated=1)
    again.close()


def test_a_loss_ends_a_run_in_turns(tmp_path, losing):
    losing.losses = (3,)
    run = Distributed(tmp_path / "run")
    with pytest.raises(
        UserError, match="^collector 0 was lost: it was unplugged. Run the same command"
    ):
        run.train()
    run.close()


def test_a_variable_that_is_created_with_the_graph_is_refused_before_an_update(
    tmp_path, monkeypatch
):
    def train_with_counter(self, **arguments):
        if not hasattr(self, "counter"):
            with tf.init_scope():
                self.counter = tf.Variable(0)
        return train(self, **arguments)

    train = DqnAgent._train
    monkeypatch.setattr(DqnAgent, "_train", train_with_counter)
    run = Distributed(tmp_path / "run")
    with pytest.raises(UserError, match="variables were created after the agent, such as .*counte"):
        run.train()
    assert int(run.parts.agent.train_step_counter) == 0
    run.close()


def test_an_on_policy_agent_takes_turns(tmp_path):
    with pytest.raises(UserError, match='Set distributed_runner.order = "turns"'):
        Distributed(tmp_path / "run", algorithm="ppo", distributed_runner__order="ready")


def test_messages_fit_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "available_memory", lambda: 2_000)
    with pytest.raises(UserError, match="2 collectors with 2 messages of .* bytes under way need"):
        Distributed(tmp_path / "run")


def test_a_replaced_collector_repeats_no_episode_and_explores_by_its_number(tmp_path, monkeypatch):
    built = []

    def build_agent(*arguments):
        built.append(create(*arguments))
        return built[-1]

    create = collector.build_agent
    monkeypatch.setattr(collector, "build_agent", build_agent)
    run = Distributed(tmp_path / "run")
    run.close()
    built.clear()
    gin.parse_config("create_dqn_agent.epsilon = @collector_epsilon()")
    factories = bound("create_environment"), bound("create_agent")
    observations = []
    for number, restarts in ((0, 0), (1, 0), (2, 0), (2, 1)):
        one = Collector(Identity(number, restarts, 3, seed=1), *factories, 4)
        observations.append(one.environment.current_time_step().observation.numpy())
        one.close()
    assert len({x.tobytes() for x in observations}) == 4
    epsilons = [float(agent.schedules["epsilon"](0)) for agent in built]
    np.testing.assert_allclose(epsilons, [0.4, 0.4**4.5, 0.4**8, 0.4**8], rtol=1e-6)

    one = Collector(Identity(0, 0, 1, seed=1), *factories, 4)
    sevens = [np.full(v.shape, 7, v.dtype.as_numpy_dtype) for v in collector.weights(built[-1])]
    one.collect(collector.Request(sevens, 3, 10**9, is_random=False))
    for variable, expected in zip(collector.weights(built[-1]), sevens, strict=True):
        np.testing.assert_array_equal(variable, expected)
    one.close()


def message_of_stacks(padding):
    """Returns a message of stacks of frames; those before an episode's first are `padding`."""
    rng = np.random.default_rng(0)
    stacks = rng.integers(0, 255, (40, 2, 4, 36, 36), np.uint8)
    step_type = rng.choice([StepType.MID, StepType.LAST], (40, 2), p=[0.8, 0.2])
    for t in range(1, 40):
        stacks[t, :, :-1] = stacks[t - 1, :, 1:]
        stacks[t, step_type[t - 1] == StepType.LAST, :-1] = padding
    rows = Trajectory(step_type, stacks, (), (), step_type, (), ())
    return collector.Message(rows, None, initial_statistics(2), 0)


def test_stacks_travel_as_single_frames():
    message = message_of_stacks(padding=0)
    split = collector.split_stacks(message)
    sizes = [sum(x.nbytes for x in tf.nest.flatten(m.rows.observation)) for m in (split, message)]
    assert sizes[0] < 0.3 * sizes[1]
    joined = collector.join_stacks(split)
    np.testing.assert_array_equal(joined.rows.observation, message.rows.observation)


def test_stacks_that_cannot_be_rebuilt_travel_whole():
    message = message_of_stacks(padding=1)
    assert collector.split_stacks(message) is message
