"""Tests of whole runs in their own processes, stopped and resumed by the same command."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import preloaded
import pytest
from run_processes import (
    EVALUATING,
    TRAINING,
    WARMING_UP,
    Run,
    assert_ends_as_its_twin,
    checkpoint_order,
)
from tiny_runs import WARM_UP, read_variables

from pipeline.utils.errors import RETRY_CODE


def assert_records_go_on(run):
    for records in (run.metrics, run.evaluations):
        steps = [record["env_steps"] for record in records]
        assert steps == sorted(set(steps))
    for earlier, later in zip(run.metrics, run.metrics[1:], strict=False):
        assert later["updates"] > earlier["updates"]
        assert later["episodes"] >= earlier["episodes"]
        assert later["wall_seconds"] > earlier["wall_seconds"]


def linear(record, initial, final, num_steps):
    return initial + (final - initial) * min(record["env_steps"] / num_steps, 1)


def dqn_goes_on_wherever_it_was_stopped(tmp_path):
    run = Run(tmp_path, "dqn", ReplayBuffer__capacity=3000, train__checkpoint_interval=0)

    # Killed before the first checkpoint, the run starts over.
    assert run.stop(signal.SIGKILL, WARMING_UP) == -signal.SIGKILL
    assert not list((run.path / "checkpoints").glob("step-*"))

    assert run.stop(signal.SIGTERM, WARMING_UP) == 143
    assert "stopped; the same command resumes" in run.output
    assert "Traceback" not in run.output
    in_warm_up = run.env_steps
    assert 0 < in_warm_up < WARM_UP["dqn"]

    assert run.stop(signal.SIGINT, EVALUATING) == 130
    assert f"resuming {run.path} at environment step {in_warm_up}\n" in run.output
    in_evaluation = run.env_steps
    assert in_evaluation >= 200

    assert run.stop(signal.SIGKILL, TRAINING, env_steps=in_evaluation + 50) == -signal.SIGKILL
    killed = run.env_steps
    cut = [record for record in run.metrics if record["env_steps"] > killed]
    assert cut

    assert run.finish() == 0
    assert WARMING_UP not in run.output
    assert run.resumed_at == [0, in_warm_up, in_evaluation, killed]
    assert "the configuration has changed" not in run.output
    assert_records_go_on(run)
    for record in run.metrics:
        assert record["epsilon"] == pytest.approx(linear(record, 1.0, 0.05, 700))
        assert record["learning_rate"] == pytest.approx(linear(record, 1e-3, 1e-4, 500))
    overrides = {"ReplayBuffer__capacity": 3000, "train__checkpoint_interval": 0}
    assert_ends_as_its_twin(run, tmp_path, "dqn", **overrides)


def sac_goes_on_and_falls_back_from_a_damaged_checkpoint(tmp_path):
    run = Run(tmp_path, "sac")
    assert run.stop(signal.SIGINT, TRAINING, env_steps=300) == 130
    stopped = run.env_steps
    vector_steps = (stopped - WARM_UP["sac"]) / 2  # at least; boundary rows take some as well
    assert vector_steps - 1 <= updates_of(run) <= 1.25 * vector_steps + 2
    older, newest = run.checkpoints[-2], run.newest.name
    bundle = next((run.newest / "agent").glob("*data*"))
    damaged = bytearray(bundle.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    bundle.write_bytes(damaged)

    assert run.finish() == 0
    assert f"warning: {newest} is damaged" in run.output
    assert run.resumed_at == [checkpoint_order(older)[0]]
    assert_records_go_on(run)
    assert_ends_as_its_twin(run, tmp_path, "sac")


def updates_of(run):
    (count,) = (
        x for name, x in read_variables(run.newest / "agent").items() if "train_step" in name
    )
    return count


def a_second_process_is_refused_a_second_ctrl_c_exits_at_once_and_environments_may_drift(tmp_path):
    run = Run(tmp_path, "ppo", train__num_env_steps=200, train__checkpoint_interval=40)
    run.popen = preloaded.Popen  # no bits are compared
    with run.start_until(TRAINING, env_steps=50) as process:
        (tmp_path / "stuck").touch()
        while not (tmp_path / "is_stuck").exists():
            assert process.poll() is None
            time.sleep(0.01)
        second = run.at(run.path)
        with second.start() as other:
            said = other.communicate(timeout=120)[0]
        assert other.returncode == RETRY_CODE
        assert f"error: another process is training in {run.path}." in said
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
        assert "Ctrl-C again to exit at once" in process.stdout.read()
    (tmp_path / "stuck").unlink()

    (tmp_path / "drift").touch()
    drifts = "tiny_runs:Walk-v0 did not reach its saved state when its actions were repeated"
    assert run.finish(None, "--require_exact_resume") == 2
    assert f"error: {drifts}. To continue with new episodes, drop --require_" in run.output
    assert run.finish() == 0
    (drifted,) = json.loads((run.path / "run.json").read_text())["inexact_resumes"]
    assert drifted["why"] == [drifts]
    assert_records_go_on(run)


SCENARIOS = (
    sac_goes_on_and_falls_back_from_a_damaged_checkpoint,
    a_second_process_is_refused_a_second_ctrl_c_exits_at_once_and_environments_may_drift,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Starts the scenarios, two at a time because they mostly wait, and yields their futures."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            scenario: pool.submit(scenario, tmp_path_factory.mktemp("scenario"))
            for scenario in SCENARIOS
        }


@pytest.mark.crash
def test_a_run_that_is_stopped_at_every_stage(tmp_path):
    dqn_goes_on_wherever_it_was_stopped(tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_stopped_runs(outcomes, scenario):
    outcomes[scenario].result()
