"""Whole runs in their own processes, and checks of a run against its uninterrupted twin."""

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import preloaded
from tiny_runs import assert_same, bindings, gin_files, read_files, read_variables

from pipeline.checkpointing.checkpoints import Checkpoints
from pipeline.utils.jsonl import read_jsonl

TESTS = pathlib.Path(__file__).parent
WARMING_UP, TRAINING, EVALUATING = "warming up", "training:", "evaluating:"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    "TF_ENABLE_ONEDNN_OPTS": "0",  # as in the forks of `preloaded`
}


class Records:
    """Contents of the folder of a run."""

    def __init__(self, path):
        self.path = pathlib.Path(path)

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
    def checkpoints(self):
        """Returns the checkpoints from old to new."""
        return sorted((self.path / "checkpoints").glob("step-*"), key=checkpoint_order)

    @property
    def newest(self):
        return self.checkpoints[-1]

    @property
    def best(self):
        """Returns environment steps and mean return of the best evaluated checkpoint, or None."""
        best = Checkpoints(self.path / "checkpoints", {}, writable=False).best()
        return best and (checkpoint_order(best.path)[0], best.return_mean)

    @property
    def env_steps(self):
        """Returns the environment steps of the newest checkpoint."""
        return checkpoint_order(self.newest)[0]

    @property
    def resumed_at(self):
        return json.loads((self.path / "run.json").read_text())["resumed_at_env_steps"]

    def checkpoint(self, part):
        return read_files(self.newest / part)


class Run(Records):
    """Folder of a run and the command that trains in it."""

    def __init__(self, tmp_path, algorithm, **overrides):
        super().__init__(tmp_path / "run")
        self.switches = tmp_path
        self.command = [sys.executable, "-m", "pipeline.train", f"--root_dir={self.path}"]
        self.command += [f"--gin_file={name}" for name in gin_files(algorithm)]
        lines = bindings(algorithm, tmp_path, **overrides)
        self.command += [f"--gin_bindings={line}" for line in lines]
        self.output = ""
        self.popen = subprocess.Popen

    def at(self, path):
        """Returns the same run in another folder."""
        run = copy.copy(self)
        run.path = path
        flag = f"--root_dir={self.path}"
        run.command = [f"--root_dir={path}" if x == flag else x for x in self.command]
        return run

    def copied(self, path):
        """Copies the folder and returns the same run in the copy."""
        shutil.copytree(self.path, path)
        return self.at(path)

    def start(self, *flags):
        # A resumed run has another order of sets than the run before it; forks would not.
        popen = self.popen if (self.path / "run.json").exists() else preloaded.Popen
        return popen(
            [*self.command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        )

    def finish(self, process=None, *flags):
        """Lets `process`, or a new one, run to the end at full speed; returns the exit code."""
        if process is None:
            self.output, process = "", self.start(*flags)
        (self.switches / "slow").unlink(missing_ok=True)
        self.output += process.communicate(timeout=120)[0]
        return process.returncode

    def start_until(self, phase, env_steps=0):
        """Starts a slow process and waits until it shows `phase` and has logged `env_steps`."""
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
        """Sends a signal at that moment, waits for the end and returns the exit code."""
        with self.start_until(phase, env_steps) as process:
            process.send_signal(number)
            return self.finish(process)


def checkpoint_order(path):
    steps, _, revision = path.name.removeprefix("step-").partition(".")
    return int(steps), int(revision or 0)


def assert_ends_as_its_twin(run, tmp_path, algorithm, **overrides):
    """Checks that it ends as an uninterrupted run of the same command does, bit for bit."""
    (tmp_path / "twin").mkdir()
    twin = Run(tmp_path / "twin", algorithm, **overrides)
    assert twin.finish() == 0
    assert_same_end(run, twin)


def assert_same_end(run, twin):
    """Compares results, logs without times, the best checkpoint and contents of the last one."""
    assert run.result == twin.result
    assert run.best == twin.best
    assert run.evaluations == twin.evaluations
    assert [without_times(x) for x in run.metrics] == [without_times(x) for x in twin.metrics]
    for part in ("experience", "environment"):
        assert files_of(run.newest / part) == files_of(twin.newest / part)
    loop, agent = run.checkpoint("loop"), read_variables(run.newest / "agent")
    assert_same(agent, read_variables(twin.newest / "agent"))
    assert_same(loop, twin.checkpoint("loop"), {"tensors/collect_seconds"})
    host, of_twin = (x.checkpoint("host")["state.json"] for x in (run, twin))
    assert without_times(host) == without_times(of_twin)


def files_of(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def without_times(record):
    times = ("wall_seconds", "env_steps_per_second", "environment_share", "policy_share")
    return {k: v for k, v in record.items() if k not in (*times, "update_share")}
