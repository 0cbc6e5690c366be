import collections
import contextlib
import itertools
import math
import pathlib
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import gin
import numpy as np
import pytest
import tensorflow as tf
from conftest import TESTS
from damages import file_sizes_limited, unreadable
from host_loops import PLAN, WARM_UP, Run, events
from run_processes import files_of
from tf_agents.trajectories import StepType
from tiny_runs import saved

from pipeline import configuration
from pipeline.acting.evaluation import summarize
from pipeline.checkpointing.checkpoints import Checkpoints, Parts
from pipeline.checkpointing.saveables import Variables
from pipeline.environments.process_vector import ProcessDied
from pipeline.runs.run_folder import RunFolder
from pipeline.training import graph_calls, host_loop
from pipeline.training.host_loop import HostLoop
from pipeline.utils import retry
from pipeline.utils.errors import UserError, WriteError
from pipeline.utils.progress import EVALUATING, TRAINING, WARMING_UP
from pipeline.utils.shutdown import Stopped


def share_components(algorithm, tmp_path_factory):
    """Returns a function that begins a run with the components of the run before.

    They are put back to the state before their first step. Building components and their graphs
    takes most of the time of tests that call `Run`.
    """
    switches, folder = (tmp_path_factory.mktemp(name) for name in ("switches", "start"))
    first = Run(switches / "run", algorithm=algorithm)
    components, state = first.parts, first.loop.state
    start = Parts(
        {
            "variables": Variables(agent=components.agent, env_steps=components.env_steps),
            "experience": components.experience,
            "environment": components.environment,
        }
    )
    start.save(folder)
    first.train_until(1)  # traces the graphs while gin's bindings are loaded

    def begin(path, plan=PLAN):
        for switch in filter(pathlib.Path.is_file, switches.iterdir()):
            switch.unlink()
        run = Run(path, plan, parts=components)
        run.switches = switches
        with pytest.MonkeyPatch.context() as patch:
            # A replay buffer that holds rows refuses to restore others.
            patch.setattr(type(components.experience), "size", 0)
            start.restore(folder)
        run.loop.state = state
        return run

    return begin


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """Returns a function that begins a run of n-step Q-learning; see `share_components`."""
    return share_components("nstep_q", tmp_path_factory)


@pytest.fixture(scope="module")
def begin_dqn(tmp_path_factory):
    """Returns a function that begins a run of DQN, with a warm-up; see `share_components`."""
    return share_components("dqn", tmp_path_factory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, begin):
    """Returns a run that nothing stopped, and its result."""
    run = begin(tmp_path_factory.mktemp("undisturbed") / "run")
    return run, run.train()


def steps_of(records):
    return [record["env_steps"] for record in records]


def first_crossings(counts, interval, start):
    """Returns the first counts at or beyond each multiple of `interval` after `start`."""
    return [
        now
        for before, now in itertools.pairwise(counts)
        if now > start and before // interval < now // interval
    ]


@pytest.mark.parametrize("env_steps", [WARM_UP // 2, 150])
def test_rows_that_cannot_be_trained_on_are_refused_before_they_are_saved(
    tmp_path, begin_dqn, monkeypatch, env_steps
):
    run = begin_dqn(tmp_path)

    def check_rows():
        if run.loop.env_steps >= env_steps:
            raise UserError("stacks cannot be rebuilt")

    monkeypatch.setattr(run.parts.experience, "check_rows", check_rows)
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)
    with pytest.raises(UserError, match="stacks cannot be rebuilt"):
        run.train()
    assert run.loop.env_steps >= env_steps
    saved_at = [int(name.split("-")[1]) for name in run.checkpoints]
    assert bool(saved_at) == (env_steps > WARM_UP)
    assert all(count < env_steps for count in saved_at)


def test_what_happens_when_depends_on_counters_alone(tmp_path, begin_dqn, monkeypatch):
    runs, results, counts = [], [], []
    for seconds in (0.5, 0.0):  # many iterations per call, and one
        monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", seconds)
        run = begin_dqn(tmp_path / str(seconds))
        counts.append([0])
        run.count_into(counts[-1])
        results.append(run.train())
        runs.append(run)
    assert len(set(counts[0])) < len(set(counts[1]))  # the calls did differ

    by_iteration = sorted(set(counts[1]))
    warmed_up = next(count for count in by_iteration if count >= WARM_UP)
    expected = first_crossings(by_iteration, 40, warmed_up) + by_iteration[-1:]
    assert steps_of(runs[1].metrics) == expected
    assert steps_of(runs[1].evaluations) == first_crossings(by_iteration, 120, warmed_up)
    clocked = ("wall_seconds", "env_steps_per_second")
    for record, same in zip(runs[0].metrics, runs[1].metrics, strict=True):
        for key in record:
            if key not in clocked and not key.endswith("_share"):
                assert record[key] == same[key], key
    assert runs[0].evaluations == runs[1].evaluations
    assert runs[0].checkpoints == runs[1].checkpoints
    for result in results:
        assert result.pop("wall_seconds") > 0
    assert results[0] == results[1]
    check_finished(runs[1], results[1])


def check_finished(run, result):
    last = run.metrics[-1]
    assert result["env_steps"] == last["env_steps"] >= PLAN.num_env_steps
    assert result["updates"] == last["updates"] == int(run.parts.agent.train_step_counter)
    assert result["episodes"] == last["episodes"]
    assert len(result["evaluation"]["returns"]) == PLAN.num_final_episodes
    assert run.checkpoints[-1].startswith(f"step-{result['env_steps']:010d}")
    for record in run.evaluations:
        assert len(record["returns"]) == PLAN.num_eval_episodes
    assert run.best.return_mean == max(record["return_mean"] for record in run.evaluations)
    assert all(math.isfinite(record["loss"]) for record in run.metrics)


def test_a_logged_loss_is_the_mean_since_the_last_log(tmp_path, begin):
    loop = begin(tmp_path / "run").loop
    sums = {name: tf.constant(6.0, tf.float64) for name in loop.state.loss_sums}
    loop.state = loop.state._replace(loss_sums=sums, loss_count=tf.constant(4, tf.int64))
    assert loop.record()["loss"] == 1.5


def test_intervals_of_logs_and_checkpoints_may_change_and_the_final_episodes_know_no_interval(
    tmp_path, begin, undisturbed
):
    begin(tmp_path / "run").train_until(140)
    plan = PLAN._replace(log_interval=70, eval_interval=30, checkpoint_interval=30)
    resumed = begin(tmp_path / "run", plan)
    result = resumed.train()
    whole, expected = undisturbed
    assert len(resumed.evaluations) > len(whole.evaluations)
    assert result | {"wall_seconds": 0} == expected | {"wall_seconds": 0}


def test_intervals_of_zero_leave_only_the_end(tmp_path, begin):
    plan = PLAN._replace(log_interval=0, eval_interval=0, checkpoint_interval=0)
    run = begin(tmp_path / "run", plan)
    result = run.train()
    assert steps_of(run.metrics) == [result["env_steps"]]
    assert run.evaluations == []
    assert run.checkpoints == [f"step-{result['env_steps']:010d}"]


def test_the_checkpoint_that_evaluates_best_is_kept(tmp_path, begin, monkeypatch):
    run = begin(tmp_path / "run", PLAN._replace(eval_interval=40))
    means = iter([1.0, 7.0, 3.0, 5.0, 4.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(
        run.parts.evaluator,
        "run",
        lambda episodes, index, on_progress: {"return_mean": next(means), "returns": [0.0]},
    )
    run.train()
    assert run.best.return_mean == 7.0
    assert run.best.path.name == f"step-{run.evaluations[1]['env_steps']:010d}"
    assert len(run.checkpoints) == 3  # the newest two, and the best


def test_only_weights_that_were_evaluated_have_a_mean_return(tmp_path, begin, monkeypatch):
    means, save = {}, Checkpoints.save

    def noted(self, env_steps, return_mean=None):
        means[env_steps] = return_mean
        return save(self, env_steps, return_mean)

    monkeypatch.setattr(Checkpoints, "save", noted)
    run = begin(tmp_path / "run")
    run.train()
    of_evaluations = {record["env_steps"]: record["return_mean"] for record in run.evaluations}
    assert means == {steps: of_evaluations.get(steps) for steps in means}
    assert 0 < len([x for x in means.values() if x is not None]) < len(means)


def test_the_best_is_kept_while_an_earlier_checkpoint_cannot_be_read(tmp_path, begin_dqn):
    run = begin_dqn(tmp_path / "run", PLAN._replace(checkpoint_interval=0))
    with contextlib.ExitStack() as stack:

        def hook(record, phase):
            if phase == EVALUATING and not run.evaluations:
                (newest,) = run.folder.checkpoints.iterdir()
                stack.enter_context(unreadable(newest / "manifest.json", "read_bytes"))

        run.progress.hook = hook
        result = run.train()
        assert not [message for message in run.progress.said if "Cannot read" in message]
    check_finished(run, result)


def test_a_worse_evaluation_is_saved_only_if_the_checkpoint_before_failed(
    tmp_path, begin, monkeypatch
):
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    run = begin(tmp_path / "run", PLAN._replace(eval_interval=40, checkpoint_interval=0))
    limits = {2: 2000, 3: None}  # the disk is full from the third evaluation to the fourth
    means, seen = iter([7.0, 1.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0]), set()
    run.progress.hook = lambda record, phase: seen.update(run.checkpoints)
    with file_sizes_limited() as set_limit:

        def evaluate(num_episodes, index, on_progress):
            if index in limits:
                set_limit(limits[index])
            return {"return_mean": next(means), "returns": [0.0]}

        monkeypatch.setattr(run.parts.evaluator, "run", evaluate)
        run.train()
    first, _, _, fourth, *_ = steps_of(run.evaluations)
    *saved, end = sorted(seen)
    assert saved == [f"step-{first:010d}", f"step-{fourth:010d}"]


def test_an_evaluation_without_episodes_is_never_the_best(tmp_path, begin, monkeypatch):
    run = begin(tmp_path / "run", PLAN._replace(eval_interval=100))
    returns = iter([[], [-5.0], [-7.0], [-6.0], [-6.0]])

    def evaluate(num_episodes, index, on_progress):
        return summarize(next(returns))

    monkeypatch.setattr(run.parts.evaluator, "run", evaluate)
    run.train()
    assert run.best.return_mean == -5.0


def test_environments_that_record_returns_count_as_many_episodes_together_as_one(
    tmp_path, begin, monkeypatch
):
    def environment(value):
        own = collections.deque([(0, 100.0)] * 50 + [(0, value)] * 50)
        episodes = SimpleNamespace(own_returns=own, own_return_sum=5_000 + 50 * value)
        return SimpleNamespace(episodes=episodes)

    run = begin(tmp_path / "run")
    monkeypatch.setattr(run.parts.runner, "environments", [environment(1.0), environment(3.0)])
    record = run.loop.record()
    assert (record["return_mean_100"], record["return_sum"]) == (2.0, 10_200.0)


def test_a_folder_that_was_moved_away_while_it_trained_is_waited_for(tmp_path, begin, monkeypatch):
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    run = begin(tmp_path / "run")
    run.folder.open("resume", 1)
    away = tmp_path / "away"

    def hook(record, phase):
        if 80 < run.loop.env_steps <= 180 and not away.exists():
            run.folder.path.rename(away)
        elif run.loop.env_steps > 180 and away.exists():
            away.rename(run.folder.path)

    run.progress.hook = hook
    run.train()
    first = next(message for message in run.progress.said if message.startswith("warning"))
    assert "was moved or deleted" in first and "checkpoint" not in first
    assert len(run.metrics) == 300 // 40 + 1 and run.best
    assert not away.exists()


def test_a_run_writes_nothing_into_another_that_took_its_folder_s_name(tmp_path, begin):
    run = begin(tmp_path / "run")
    run.folder.open("resume", 1)
    before: dict[str, bytes] = {}

    def hook(record, phase):
        if not before:
            run.folder.path.rename(tmp_path / "away")
            another = RunFolder(run.folder.path)
            another.open("fail", 2)
            another.write_json("run.json", {"seed": 2})
            before.update(files_of(another.path))

    run.progress.hook = hook
    with pytest.raises(UserError, match="another one has its name") as error:
        run.train()
    assert "checkpoint" not in str(error.value)
    with pytest.raises(UserError, match="another one has its name"):
        run.loop.cut_logs()
    (run.folder.checkpoints / ".tmp-of another").mkdir(parents=True)
    with pytest.raises(UserError, match="another one has its name"):
        HostLoop(run.parts, PLAN, run.folder, run.progress, run.stop)
    (run.folder.checkpoints / ".tmp-of another").rmdir()
    assert files_of(run.folder.path) == before


def test_a_checkpoint_that_failed_is_tried_again_where_none_else_is_due(
    tmp_path, begin_dqn, monkeypatch
):
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    run = begin_dqn(tmp_path / "run", PLAN._replace(eval_interval=0, checkpoint_interval=0))
    with file_sizes_limited() as set_limit:

        def hook(record, phase):
            set_limit(2000 if run.loop.env_steps < 90 else None)

        run.progress.hook = hook
        run.train()
    after_warm_up, at_end = run.checkpoints
    assert 90 <= int(after_warm_up.removeprefix("step-")) < 200
    assert int(at_end.removeprefix("step-")) >= 300


def test_a_checkpoint_that_failed_is_tried_again_long_before_the_next_is_due(
    tmp_path, begin, monkeypatch
):
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)  # one iteration per call
    plan = PLAN._replace(log_interval=10**6, eval_interval=0, checkpoint_interval=100)
    run = begin(tmp_path / "run", plan)
    seen: set[int] = set()
    with file_sizes_limited() as set_limit:

        def hook(record, phase):
            set_limit(2000 if 90 <= run.loop.env_steps < 120 else None)
            seen.update(int(name.removeprefix("step-")) for name in run.checkpoints)

        run.progress.hook = hook
        run.train()
    assert any("writing works again" in message for message in run.progress.said)
    assert [step for step in seen if 120 <= step < 150]
    assert not [step for step in seen if 90 <= step < 120]


def test_evaluations_change_nothing_of_what_is_trained(tmp_path, begin, undisturbed):
    run = begin(tmp_path / "run", PLAN._replace(eval_interval=0))
    whole, expected = undisturbed
    assert len(whole.evaluations) > 1
    assert run.train()["weights_sha256"] == expected["weights_sha256"]
    assert not run.evaluations


def test_a_run_stopped_in_its_last_evaluation_logs_its_end_once(tmp_path, begin, undisturbed):
    run = begin(tmp_path / "run")

    def hook(record, phase):
        run.stop.requested |= run.loop.env_steps >= 300 and phase == EVALUATING

    run.progress.hook = hook
    with pytest.raises(Stopped):
        run.train()
    resumed = begin(tmp_path / "run")
    resumed.train()
    whole, _ = undisturbed
    assert steps_of(resumed.metrics) == steps_of(whole.metrics)
    assert shown_events(resumed) == shown_events(whole)


def test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_overwritten(tmp_path, begin_dqn):
    run = begin_dqn(tmp_path / "run", PLAN._replace(eval_interval=0))
    run.at(210, (run.switches / "nan").touch)
    with pytest.raises(UserError) as error:
        run.train()
    newest = run.folder.checkpoints / run.checkpoints[-1]
    message = str(error.value)
    assert message.startswith(f"NaN or infinite after {run.loop.env_steps:_} environment steps")
    assert "updates: reward of the rows collected, then loss, gradient_norm" in message
    assert f"Check the environment's class tiny_runs.Walk in {TESTS / 'tiny_runs.py'}" in message
    assert f"The checkpoint {newest} is intact" in message
    assert steps_of(run.metrics)[-1] < run.loop.env_steps

    resumed = begin_dqn(tmp_path / "run")
    resumed.stop.ends_at_once = True
    assert resumed.loop.restore()
    assert not resumed.stop.ends_at_once  # from here on, a stop writes a checkpoint
    assert resumed.loop.env_steps == int(newest.name.removeprefix("step-").split(".")[0]) >= 200
    assert resumed.loop.train()["env_steps"] >= 300


def test_rows_that_are_not_finite_are_never_saved(tmp_path, begin_dqn, monkeypatch):
    """Otherwise no resume could get rid of them, although the environment may be corrected."""
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)  # one iteration per call
    run = begin_dqn(tmp_path / "run")
    switch = run.switches / "nan"

    def spoil(record, phase):
        switch.touch()
        if run.loop.env_steps >= 40:
            switch.unlink()

    run.progress.hook = spoil
    message = "and 0 updates: reward of the rows collected. Check the environment's class tiny_runs"
    with pytest.raises(UserError, match=message):
        run.train()
    assert run.checkpoints == []


def test_a_time_step_that_is_not_finite_is_never_saved(tmp_path, begin_dqn):
    run = begin_dqn(tmp_path / "run")
    run.train_until(100)
    saved_before, carry = run.checkpoints, run.loop.state.carry
    observation = tf.nest.map_structure(
        lambda x: tf.fill(x.shape, tf.constant(math.nan, x.dtype)), carry.time_step.observation
    )
    time_step = carry.time_step._replace(observation=observation)
    run.loop.state = run.loop.state._replace(carry=carry._replace(time_step=time_step))
    with pytest.raises(UserError, match="observation or reward of the current time step. Check"):
        run.loop.save()
    assert run.checkpoints == saved_before


def test_a_long_warm_up_is_saved(tmp_path, begin_dqn, monkeypatch):
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)  # one iteration per call
    run = begin_dqn(tmp_path / "run", PLAN._replace(checkpoint_interval=20))
    saved_so_far = set()

    def note(record, phase):
        saved_so_far.add(len(run.checkpoints))
        run.stop.requested |= run.loop.env_steps >= WARM_UP

    run.progress.hook = note
    with pytest.raises(Stopped):
        run.train()
    assert saved_so_far == {0, 1, 2}


def test_a_failed_checkpoint_of_the_warm_up_is_not_tried_again_before_its_rows_are_checked(
    tmp_path, begin_dqn, monkeypatch
):
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)  # one iteration per call
    run = begin_dqn(tmp_path / "run", PLAN._replace(checkpoint_interval=20))
    monkeypatch.setattr(run.parts.experience, "check_ready", Mock(side_effect=UserError("here")))
    with file_sizes_limited() as set_limit:
        run.progress.hook = lambda record, phase: set_limit(
            2000 if run.loop.env_steps < WARM_UP else None
        )
        with pytest.raises(UserError, match="here"):
            run.train()
    assert any("next attempt" in message for message in run.progress.said)
    assert run.checkpoints == []


def test_checkpoints_that_cannot_be_read_hide_no_failure(tmp_path, begin):
    run = begin(tmp_path / "run", PLAN._replace(eval_interval=0))
    with contextlib.ExitStack() as stack:

        def spoil():
            (run.switches / "nan").touch()
            stack.enter_context(unreadable(run.folder.checkpoints, "iterdir"))

        run.at(210, spoil)
        with pytest.raises(UserError, match="^NaN or infinite after .*reward") as error:
            run.train()
    assert "Cannot read" not in str(error.value)
    assert "intact" not in str(error.value)
    assert not str(error.value).endswith("\n")


def test_a_run_whose_environment_cannot_be_repeated_goes_on(tmp_path, begin_dqn, monkeypatch):
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 0.0)  # one iteration per call
    begin_dqn(tmp_path / "run").train_until(150)

    run = begin_dqn(tmp_path / "run")
    (run.switches / "drift").touch()
    assert run.loop.restore()
    assert "did not reach its saved state when its actions were" in run.parts.environment.divergence
    assert (run.loop.state.carry.time_step.step_type.numpy() == StepType.LAST).all()
    rows = saved(run.parts.experience)
    step_type, next_step_type = (
        np.array([rows[f"{name}_0-000{i}-000000000.rows"].view(np.int32)[-1] for i in range(2)])
        for name in ("step_type", "next_step_type")
    )
    assert (step_type != StepType.LAST).any()
    assert (next_step_type[step_type != StepType.LAST] == StepType.LAST).all()
    run.loop.cut_logs()
    assert run.loop.train()["env_steps"] >= 300


def without_last(path):
    *kept, _ = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept))


def without_first(path):
    _, *kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept))


@pytest.mark.parametrize(
    ("until", "lose", "lost"),
    [
        (250, without_last, ["metrics.jsonl", "eval.jsonl"]),
        (250, pathlib.Path.unlink, ["metrics.jsonl", "eval.jsonl"]),
        (250, without_first, ["eval.jsonl"]),
        (250, pathlib.Path.exists, []),
        (55, pathlib.Path.exists, []),  # before the first record
    ],
)
def test_records_that_a_log_has_lost_are_named(tmp_path, begin_dqn, until, lose, lost):
    before = begin_dqn(tmp_path / "run")
    before.train_until(until)
    for path in (before.folder.metrics, before.folder.evaluations):
        lose(path)
    run = begin_dqn(tmp_path / "run")
    assert run.loop.restore()
    said: list[str] = []
    run.progress.message = said.append
    run.loop.cut_logs()
    assert [text.split(" lacks records")[0] for text in said] == [
        f"warning: {name}" for name in lost
    ]


def test_a_warm_up_that_a_resume_has_made_longer_leaves_no_log_incomplete(tmp_path, begin_dqn):
    begin_dqn(tmp_path / "run").train_until(150)
    longer = begin_dqn(tmp_path / "run")
    longer.warm_up = 190
    longer.train_until(200)
    run = begin_dqn(tmp_path / "run")
    run.train()
    assert not any("lacks records" in message for message in run.progress.said)
    assert {env_steps // 120 for env_steps in steps_of(run.evaluations)} == {1, 2}


def test_every_environment_is_watched_and_patience_is_as_long_as_the_pages_say(
    tmp_path, monkeypatch
):
    watchdog = Mock(wraps=host_loop.Watchdog)
    monkeypatch.setattr(host_loop, "Watchdog", watchdog)
    parts = Run(tmp_path / "run").parts
    watched = [parts.environment.episodes, parts.evaluator.environment.episodes]
    assert watchdog.call_args.args[0] == watched
    settings = configuration.operative_config().splitlines()
    assert {"Watchdog.timeout = 300.0", "Patience.give_up_after = 600.0"} <= {*settings}


def test_a_result_that_cannot_be_written_is_written_later(tmp_path, begin, monkeypatch):
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    run, tries = begin(tmp_path / "run"), []
    write = run.folder.write_json

    def write_the_second_time(name, value):
        tries.append(name)
        if tries.count(name) == 1:
            raise WriteError(f"cannot write {name}: No space left on device")
        write(name, value)

    monkeypatch.setattr(run.folder, "write_json", write_the_second_time)
    result = run.train()
    assert tries == [*["run.json"] * 2, *["result.json"] * 2]
    assert run.folder.read_json("run.json") == {"has_checkpoint": True}
    assert run.folder.read_json("result.json") == result


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path, begin):
    run = begin(tmp_path / "run")
    run.train()
    shutil.rmtree(run.folder.checkpoints)
    before = files_of(run.folder.path)
    with pytest.raises(UserError, match="run.json says that the run has a checkpoint, but"):
        begin(tmp_path / "run").train()
    assert files_of(run.folder.path) == before


def test_weights_that_are_not_finite_are_never_saved(tmp_path, begin):
    run, saved = begin(tmp_path / "run"), []
    weights = next(iter(run.parts.agent.trained.values())).trainable_variables[0]

    def spoil():
        weights.assign(weights * float("nan"))
        saved.append(run.checkpoints)
        run.stop.requested = True

    run.at(210, spoil)
    with pytest.raises(UserError, match=f"the weights of q_network .{weights.name}"):
        run.train()
    assert run.checkpoints == saved[0]


def test_the_first_call_with_updates_is_one_iteration_whatever_fitted_into_one_before(
    tmp_path, begin_dqn, monkeypatch
):
    monkeypatch.setattr(graph_calls, "SECONDS_PER_CALL", 1e6)  # thousands of random steps fit
    run = begin_dqn(tmp_path / "run")
    counts: list[int] = []
    run.count_into(counts)
    run.train()
    after_warm_up = next(i for i, count in enumerate(counts) if count >= WARM_UP)
    per_iteration = run.parts.experience.collect_steps * run.parts.environment.batch_size
    assert counts[after_warm_up + 1] - counts[after_warm_up] <= per_iteration


def test_a_first_record_after_a_resume_tells_of_this_process_alone(
    tmp_path, begin_dqn, monkeypatch
):
    seconds = Mock(perf_counter=itertools.count().__next__)  # each call takes a second
    monkeypatch.setattr(graph_calls, "time", seconds)
    stopped = begin_dqn(tmp_path / "run")
    stopped.train_until(210)
    before = stopped.metrics[-1]["wall_seconds"]
    run, records = begin_dqn(tmp_path / "run"), []
    run.progress.hook = lambda record, phase: records.append(record)
    run.train()
    # The first call is one iteration of two vector steps, in two environments.
    assert 2 <= records[0]["env_steps_per_second"] <= 4
    assert records[0]["wall_seconds"] > before
    for record in run.metrics:
        shares = [value for key, value in record.items() if key.endswith("_share")]
        assert len(shares) == 3
        assert all(0 <= share <= 1 for share in shares)


def test_an_environment_that_raises_is_named_and_the_run_goes_on_afterwards(tmp_path, begin):
    run = begin(tmp_path / "run")
    run.at(210, (run.switches / "fail").touch)
    with pytest.raises(UserError) as error:
        run.train()
    message = str(error.value)
    assert "tiny_runs:Walk-v0 raised KeyError: 'no such room'" in message
    assert f"The checkpoint {run.folder.checkpoints / run.checkpoints[-1]} is intact" in message
    (run.switches / "fail").unlink()
    assert begin(tmp_path / "run").train()["env_steps"] >= 300


@pytest.mark.parametrize("switch", ["fail", "fail_reset"])
def test_an_environment_that_raises_in_evaluation_is_named(tmp_path, begin, switch):
    run = begin(tmp_path / "run")

    def hook(record, phase):
        if phase == EVALUATING or switch == "fail_reset" and run.loop.env_steps > 110:
            (run.switches / switch).touch()

    run.progress.hook = hook
    with pytest.raises(UserError, match=r"tiny_runs:Walk-v0 raised .*\n.*is intact"):
        run.train()


def test_an_environment_s_process_that_dies_ends_the_run_with_the_reason(
    tmp_path, begin, monkeypatch
):
    run = begin(tmp_path / "run")
    died = Mock(side_effect=ProcessDied("the process of environment 1 has died"))
    run.at(210, lambda: monkeypatch.setattr(run.parts.environment.episodes.vector, "step", died))
    with pytest.raises(UserError, match=r"Walk-v0: the process of environment 1 .*\n.*is intact"):
        run.train()


def test_weights_that_are_not_finite_are_named_with_the_environment_that_raises(tmp_path, begin):
    run = begin(tmp_path / "run")
    variable = run.parts.agent.gradient_variables()[0]

    def spoil(record, phase):
        if run.loop.env_steps > 250 and phase == TRAINING:  # no evaluation follows
            variable.assign(tf.fill(variable.shape, math.nan))
            (run.switches / "fail").touch()

    run.progress.hook = spoil
    message = "raised KeyError.* is broken: the weights of .* hold NaN or infinity. Lower the"
    with pytest.raises(UserError, match=message):
        run.train()


def test_weights_that_are_not_finite_are_not_evaluated(tmp_path, begin):
    run = begin(tmp_path / "run", PLAN._replace(eval_interval=1))
    variable = run.parts.agent.gradient_variables()[0]
    run.at(20, lambda: variable.assign(tf.fill(variable.shape, math.nan)))
    with pytest.raises(UserError, match="NaN or infinite after .* updates: the weights of"):
        run.train()
    assert steps_of(run.evaluations)[-1] < run.loop.env_steps


def test_an_environment_that_cannot_be_reset_is_named(tmp_path):
    (tmp_path / "fail_reset").touch()
    with pytest.raises(UserError, match="tiny_runs:Walk-v0 raised RuntimeError: no way back"):
        Run(tmp_path / "run")


def test_other_errors_of_the_graph_are_not_taken_for_the_environment_s(
    tmp_path, begin, monkeypatch
):
    run = begin(tmp_path / "run")
    (run.switches / "fail").touch()
    with pytest.raises(UserError, match="no such room"):
        run.train()
    run = begin(tmp_path / "another run")

    def broken(state, max_iterations, until):
        if max_iterations > 0:
            raise tf.errors.InternalError(None, None, "a defect")

    monkeypatch.setattr(run.parts.runner, "train", broken)
    with pytest.raises(tf.errors.InternalError, match="a defect"):
        run.train()


def test_a_disk_that_stays_full_ends_the_run_and_harms_no_checkpoint(tmp_path, begin):
    run = begin(tmp_path / "run")
    run.train_until(150)
    before = files_of(run.folder.checkpoints)

    gin.bind_parameter("Patience.give_up_after", 0)
    for limit in (1, 2000):  # bytes: no log fits, or no checkpoint
        full = begin(tmp_path / "run")
        with file_sizes_limited() as set_limit:
            full.at(170, lambda limit=limit, set_limit=set_limit: set_limit(limit))
            with pytest.raises(UserError, match="(?i)cannot write .*File too large") as error:
                full.train()
            full.loop.close()
        assert "intact" in str(error.value)
        assert files_of(full.folder.checkpoints) == before


@pytest.mark.parametrize("limit", [1, 2000])  # bytes: no log fits, or no checkpoint
def test_a_disk_that_is_full_for_a_while_costs_no_record_and_no_bit(
    tmp_path, begin, undisturbed, monkeypatch, limit
):
    whole, expected = undisturbed
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    run = begin(tmp_path / "run")
    with file_sizes_limited() as set_limit:

        def hook(record, phase):
            if run.loop.env_steps > 110:
                set_limit(limit if run.loop.env_steps < 250 else None)

        run.progress.hook = hook
        result = run.train()
    said = run.progress.said
    warnings = [message for message in said if "Training continues" in message]
    assert len(warnings) > 2
    assert all("File too large" in message for message in warnings)
    assert any("writing works again" in message for message in said)

    assert result | {"wall_seconds": 0} == expected | {"wall_seconds": 0}
    assert steps_of(run.metrics) == steps_of(whole.metrics)
    assert run.evaluations == whole.evaluations
    assert run.checkpoints[-1] == whole.checkpoints[-1]
    assert shown_events(run) == shown_events(whole)


def shown_events(run):
    """Returns steps by tag, from the event files of a run."""
    steps: dict[str, list[int]] = {}
    for step, value in events(run.folder.path):
        steps.setdefault(value.tag, []).append(step)
    return steps


def test_a_stop_while_the_disk_is_full_says_so(tmp_path, begin):
    run = begin(tmp_path / "run")
    with file_sizes_limited() as set_limit:

        def hook(record, phase):
            if run.loop.env_steps > 150:
                set_limit(1)
            run.stop.requested |= run.loop.env_steps > 230

        run.progress.hook = hook
        with pytest.raises(UserError, match="(?i)cannot write"):
            run.train()
    assert begin(tmp_path / "run").train()["env_steps"] >= 300


def test_stopping_in_each_phase_saves_where_the_run_stands(tmp_path, begin_dqn):
    plan = PLAN._replace(log_interval=50)
    run = begin_dqn(tmp_path / "run", plan)
    run.train_until(1, WARMING_UP)
    assert 0 < run.loop.env_steps < WARM_UP

    run = begin_dqn(tmp_path / "run", plan)
    run.train_until(120, EVALUATING)
    stopped_at = run.loop.env_steps
    assert 120 <= stopped_at < 130
    assert run.evaluations == []
    assert run.checkpoints[-1].startswith(f"step-{stopped_at:010d}")

    run = begin_dqn(tmp_path / "run", plan)
    run.train()
    assert steps_of(run.evaluations)[0] == stopped_at  # the interrupted evaluation is repeated
    for steps in (steps_of(run.metrics), steps_of(run.evaluations)):
        assert steps == sorted(set(steps))
    assert np.all(np.diff(steps_of(run.metrics)) > 40)
