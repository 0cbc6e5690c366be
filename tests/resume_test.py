"""Whole runs in processes of their own, stopped and resumed by the same command."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny_runs import WARM_UP, bindings, gin_files, read_files, read_variables

from pipeline.jsonl import read_jsonl

TESTS = pathlib.Path(__file__).parent
WARMING_UP, TRAINING, EVALUATING = "warming up", "training:", "evaluating:"


class Run:
    """One run folder and the command that trains in it."""

    def __init__(self, tmp_path, algorithm, **overrides):
        self.path = tmp_path / "run"
        self.switches = tmp_path
        self.command = [sys.executable, "-m", "pipeline.train", f"--root_dir={self.path}"]
        self.command += [f"--gin_file={name}" for name in gin_files(algorithm)]
        lines = bindings(algorithm, tmp_path, **overrides)
        self.command += [f"--gin_bindings={line}" for line in lines]
        self.output = ""

    def start(self):
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        return subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )

    def finish(self, process=None):
        """Lets it, or a new process, run to the end at full speed; returns the exit code."""
        if process is None:
            self.output, process = "", self.start()
        (self.switches / "slow").unlink(missing_ok=True)
        self.output += process.communicate(timeout=120)[0]
        return process.returncode

    def start_until(self, phase, env_steps=0):
        """A slow process that has shown a line of `phase` and logged so many environment steps."""
        (self.switches / "slow").touch()
        process = self.start()
        self.output = line = ""
        while not line.startswith(phase):
            line = process.stdout.readline()
            self.output += line
            assert line, self.output
        while self.last_step < env_steps:
            assert process.poll() is None
            time.sleep(0.01)
        return process

    def stop(self, number, phase, env_steps=0):
        """Sends a signal at that moment and waits for the end; returns the exit code."""
        with self.start_until(phase, env_steps) as process:
            process.send_signal(number)
            return self.finish(process)

    @property
    def metrics(self):
        return read_jsonl(self.path / "metrics.jsonl")

    @property
    def last_step(self):
        return self.metrics[-1]["env_steps"] if self.metrics else 0

    @property
    def evaluations(self):
        return read_jsonl(self.path / "eval.jsonl")

    @property
    def result(self):
        return json.loads((self.path / "result.json").read_text()) | {"wall_seconds": None}

    @property
    def newest(self):
        return max((self.path / "checkpoints").glob("step-*"), key=checkpoint_order)

    @property
    def env_steps(self):
        """Of the newest checkpoint."""
        return checkpoint_order(self.newest)[0]

    @property
    def resumed_at(self):
        return json.loads((self.path / "run.json").read_text())["resumed_at_env_steps"]

    def checkpoint(self, part):
        return read_files(self.newest / part)


def checkpoint_order(path):
    steps, _, revision = path.name.removeprefix("step-").partition(".")
    return int(steps), int(revision or 0)


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


def assert_ends_as_its_twin(run, tmp_path, algorithm, **overrides):
    """Bit for bit as a run of the same command that nobody stopped."""
    (tmp_path / "twin").mkdir()
    twin = Run(tmp_path / "twin", algorithm, **overrides)
    assert twin.finish() == 0
    assert run.result == twin.result
    assert run.evaluations == twin.evaluations
    assert [without_times(x) for x in run.metrics] == [without_times(x) for x in twin.metrics]
    for part in ("experience", "environment", "loop"):
        files = {path.name for path in (run.newest / part).iterdir()}
        assert files == {path.name for path in (twin.newest / part).iterdir()}
        for name in files - {"tensors.npz"}:
            assert (run.newest / part / name).read_bytes() == (
                twin.newest / part / name
            ).read_bytes(), name
    tensors, others = run.checkpoint("loop"), twin.checkpoint("loop")
    assert tensors.keys() == others.keys()
    for name in tensors.keys() - {"tensors/collect_seconds"}:
        np.testing.assert_array_equal(tensors[name], others[name], err_msg=name)


def without_times(record):
    times = ("wall_seconds", "env_steps_per_second", "environment_share", "policy_share")
    return {k: v for k, v in record.items() if k not in (*times, "update_share")}


def dqn_goes_on_wherever_it_was_stopped(tmp_path):
    run = Run(tmp_path, "dqn", ReplayBuffer__capacity=3000, train__checkpoint_interval=0)

    # Killed before the first checkpoint: starts over.
    assert run.stop(signal.SIGKILL, WARMING_UP) == -signal.SIGKILL
    assert not list((run.path / "checkpoints").glob("step-*"))

    assert run.stop(signal.SIGINT, WARMING_UP) == 130
    assert "stopped; the same command resumes" in run.output
    in_warm_up = run.env_steps
    assert 0 < in_warm_up < WARM_UP["dqn"]

    assert run.stop(signal.SIGTERM, TRAINING) == 143
    in_training = run.env_steps
    assert f"resuming {run.path} at environment step {in_warm_up}\n" in run.output
    assert WARM_UP["dqn"] <= in_training < 600

    assert run.stop(signal.SIGINT, EVALUATING) == 130
    assert WARMING_UP not in run.output
    in_evaluation = run.env_steps
    assert in_evaluation >= 200

    assert run.stop(signal.SIGKILL, TRAINING, env_steps=in_evaluation + 50) == -signal.SIGKILL
    killed = run.env_steps
    cut = [record for record in run.metrics if record["env_steps"] > killed]
    assert cut

    assert run.finish() == 0
    assert run.resumed_at == [0, in_warm_up, in_training, in_evaluation, killed]
    assert "the configuration has changed" not in run.output
    assert_records_go_on(run)
    for record in run.metrics:
        assert record["epsilon"] == pytest.approx(linear(record, 1.0, 0.05, 700))
        assert record["learning_rate"] == pytest.approx(linear(record, 1e-3, 1e-4, 500))
    overrides = {"ReplayBuffer__capacity": 3000, "train__checkpoint_interval": 0}
    assert_ends_as_its_twin(run, tmp_path, "dqn", **overrides)


def ppo_goes_on_with_its_schedule_and_its_normalisers(tmp_path):
    run = Run(tmp_path, "ppo", train__eval_interval=0)
    assert run.stop(signal.SIGTERM, TRAINING, env_steps=100) == 143
    stopped = run.env_steps
    before = read_variables(run.newest / "agent")
    assert_counts_agree(run, before)

    assert run.stop(signal.SIGKILL, TRAINING, env_steps=stopped + 130) == -signal.SIGKILL
    killed = run.env_steps
    assert run.finish() == 0
    assert run.resumed_at == [stopped, killed]
    assert_records_go_on(run)
    for record in run.metrics:
        # Updates saw the rate of the iteration's end, as the record does.
        expected = linear(record, 2.5e-4, 0.0, 600)
        assert record["learning_rate"] == pytest.approx(expected, abs=1e-9)
    assert_counts_agree(run, read_variables(run.newest / "agent"))
    assert_ends_as_its_twin(run, tmp_path, "ppo", train__eval_interval=0)


def assert_counts_agree(run, agent):
    """The normalisers have seen each environment step of the run once."""
    counts = [x for name, x in agent.items() if "moments/count" in name]
    assert len(counts) == 2
    assert all(count == run.env_steps for count in counts)


def sac_goes_on_and_falls_back_from_a_damaged_checkpoint(tmp_path):
    run = Run(tmp_path, "sac")
    assert run.stop(signal.SIGINT, TRAINING, env_steps=300) == 130
    stopped = run.env_steps
    vector_steps = (stopped - WARM_UP["sac"]) / 2  # at least: boundary rows take some as well
    assert vector_steps - 1 <= updates_of(run) <= 1.25 * vector_steps + 2
    older = sorted((run.path / "checkpoints").glob("step-*"), key=checkpoint_order)[-2]
    bundle = next((run.newest / "agent").glob("*data*"))
    damaged = bytearray(bundle.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    bundle.write_bytes(damaged)

    # Then the disk has no room for another checkpoint, only for logs.
    with run.start_until(TRAINING) as process:
        limit = (10_000, resource.RLIM_INFINITY)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limit)
        assert run.finish(process) == 2
    assert "Traceback" not in run.output
    assert f"warning: {run.newest.name} is damaged" in run.output
    assert f"resuming {run.path} at environment step {checkpoint_order(older)[0]}\n" in run.output
    assert "error: Cannot write the checkpoint of step" in run.output
    assert "the same command resumes" in run.output

    assert run.finish() == 0
    assert run.resumed_at == [checkpoint_order(older)[0]] * 2
    assert_records_go_on(run)
    assert_ends_as_its_twin(run, tmp_path, "sac")


def updates_of(run):
    (count,) = (
        x for name, x in read_variables(run.newest / "agent").items() if "train_step" in name
    )
    return count


def a_second_ctrl_c_exits_at_once_and_an_environment_that_raises_with_code_2(tmp_path):
    run = Run(tmp_path, "ppo", train__num_env_steps=200, train__checkpoint_interval=40)
    with run.start_until(TRAINING, env_steps=50) as process:
        (tmp_path / "stuck").touch()
        while not (tmp_path / "is_stuck").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
        assert "Ctrl-C again to exit at once" in process.stdout.read()
    (tmp_path / "stuck").unlink()

    (tmp_path / "fail").touch()
    assert run.finish() == 2
    assert "Traceback" not in run.output
    assert "error: environment tiny_runs:Walk-v0 raised KeyError: 'no such room'" in run.output
    assert f"The checkpoint {run.newest} is intact" in run.output

    (tmp_path / "fail").unlink()
    assert run.finish() == 0
    assert_records_go_on(run)


SCENARIOS = (
    dqn_goes_on_wherever_it_was_stopped,
    ppo_goes_on_with_its_schedule_and_its_normalisers,
    sac_goes_on_and_falls_back_from_a_damaged_checkpoint,
    a_second_ctrl_c_exits_at_once_and_an_environment_that_raises_with_code_2,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Futures of all scenarios, which wait for processes most of the time: two at once."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            scenario: pool.submit(scenario, tmp_path_factory.mktemp("scenario"))
            for scenario in SCENARIOS
        }


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_stopped_runs(outcomes, scenario):
    outcomes[scenario].result()
