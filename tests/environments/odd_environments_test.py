"""Whole runs with environments as people have them."""

import json
import os
import pathlib
import signal
import subprocess

import gymnasium
import numpy as np
import pytest
from conftest import ROOT, TESTS, start_binary
from gymnasium.spaces import Box
from scripted_environments import PlainEnv
from tiny_runs import gin_files
from waiting import wait_for

from pipeline import configuration
from pipeline.environments import process_vector, watchdog
from pipeline.training.train_loop import train
from pipeline.utils.shutdown import StopSignal

HERE = os.path.dirname(__file__)


class LongerEnv(PlainEnv):
    length = 20


class StrictEnv(LongerEnv):
    """Refuses to be reset before its episode is over."""

    is_over = True

    def reset(self, **kwargs):
        if not self.is_over:
            raise RuntimeError("reset() before the episode is over")
        self.is_over = False
        return super().reset(**kwargs)

    def step(self, action):
        results = super().step(action)
        self.is_over = results[2]
        return results


class EndlessEnv(LongerEnv):
    """Has no end and no limit."""

    length = 10**9


class MovingEnv(StrictEnv):
    """Is strict, and changes the working directory of its process."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        os.chdir("/")


class KerasEnv(LongerEnv):
    """Computes its observations with a Keras model."""

    def __init__(self, render_mode=None):
        import tensorflow as tf

        super().__init__(render_mode)
        # In a process of its own, it is then given up after one second in TensorFlow, not five.
        process_vector._TENSORFLOW_SECONDS = 1
        watchdog._GRAPH_SECONDS = 2  # and in a thread of its own not after 20
        self.model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(3,))])

    def observe(self):
        return self.model.predict(super().observe()[None], verbose=0)[0].clip(-1, 1)


class HangingEnv(LongerEnv):
    """Does not return from its second reset."""

    resets = 0

    def reset(self, **kwargs):
        import time

        self.resets += 1
        if self.resets == 2:
            print("hanging", flush=True)
            time.sleep(600)
        return super().reset(**kwargs)


class ClockEnv(LongerEnv):
    """Observes a clock."""

    observation_space = Box(0, np.inf, (1,), np.float64)

    def observe(self):
        return np.array([1.7e9 + self.time])


class LauncherEnv(LongerEnv):
    """Installs signal handlers of its own, like the launcher of a simulator."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.launch()

    def reset(self, **kwargs):
        self.launch()
        return super().reset(**kwargs)

    def launch(self):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


for env_class in (StrictEnv, EndlessEnv, MovingEnv, KerasEnv, HangingEnv, ClockEnv, LauncherEnv):
    name = env_class.__name__.removesuffix("Env")
    gymnasium.register(f"{name}-v0", entry_point=f"{__name__}:{env_class.__name__}")


def bound(name, *bindings):
    """Returns the gin bindings of a run in the environment `name`."""
    return [
        f"gymnasium_environment.name = 'odd_environments_test:{name}-v0'",
        "gymnasium_environment.num_envs = 2",
        "train.num_env_steps = 400",
        "train.eval_interval = 200",
        "train.num_eval_episodes = 3",
        "train.num_final_episodes = 3",
        "initialize_replay_buffer.num_env_steps = 100",
        "ReplayBuffer.capacity = 1_000",
        "mlp_encoder.units = (8,)",
        *bindings,
    ]


def start(folder, name, *bindings, root_dir="run"):
    flags = [f"--gin_file={file}" for file in gin_files("dqn")]
    flags += [f"--gin_bindings={line}" for line in bound(name, *bindings)]
    return start_in(folder, "train", f"--root_dir={root_dir}", "--allow_gin_imports", *flags)


def start_in(folder, binary, *flags):
    paths = os.pathsep.join([HERE, str(TESTS), str(ROOT)])
    env = os.environ | {"PYTHONPATH": paths}
    return start_binary(binary, *flags, cwd=folder, stderr=subprocess.STDOUT, env=env)


SHORT = ["train.num_env_steps = 40", "train.eval_interval = 0", "train.num_final_episodes = 1"]


WARM = "initialize_replay_buffer.num_env_steps = 20"
ONE = "evaluation/gymnasium_environment.num_envs = 1"


def finish(process, seconds=100):
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize(
    ("name", "bindings"),
    [
        ("Endless", ["Evaluator.max_episode_steps = 50"]),
        ("Keras", [*SHORT, WARM, ONE, "configure_tensorflow.inter_op = 2"]),
    ],
)
def test_it_trains_to_the_end(tmp_path, name, bindings):
    code, output = finish(start(tmp_path, name, *bindings))
    assert code == 0, output
    assert (tmp_path / "run" / "result.json").exists()


def test_tensorflow_that_needs_a_second_thread_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")  # as on a machine with one processor
    code, output = finish(start(tmp_path, "Keras", *SHORT, WARM))
    assert code == 2
    assert "it uses TensorFlow, which needs a second thread. Bind" in output


def test_tensorflow_in_a_process_is_named(tmp_path):
    mode = 'gymnasium_environment.vectorization_mode = "async"'
    code, output = finish(start(tmp_path, "Keras", *SHORT, WARM, mode))
    assert code == 2
    assert "uses TensorFlow, which does not work in a forked process" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_although_environments_have_handlers(tmp_path, number):
    in_processes = 'gymnasium_environment.vectorization_mode = "async"'
    steps = "train.num_env_steps = 10_000_000", "train.log_interval = 100"
    process = start(tmp_path, "Launcher", in_processes, *steps, "train.eval_interval = 0")
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, 60)
    except BaseException:
        process.kill()
        raise
    threads = pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")
    children = " ".join(path.read_text() for path in threads).split()
    for pid in (*map(int, children), process.pid):  # as from a terminal or a batch system
        os.kill(pid, number)
    code, output = finish(process)
    assert code == 128 + number, output
    logged = json.loads(metrics.read_text().splitlines()[1])["env_steps"]
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert int(newest.name.removeprefix("step-")) >= logged


@pytest.mark.parametrize(
    "others", [(), ("runners/distributed",)], ids=["one process", "collectors"]
)
def test_large_observations_are_told(tmp_path, capsys, others):
    longer = "train.num_env_steps = 200"
    configuration.load([*gin_files("dqn"), *others], bound("Clock", *SHORT, WARM, longer))
    train(str(tmp_path / "run"), 1, "fail", StopSignal())
    said = " ".join(capsys.readouterr().out.split())
    assert "observation reaches 1.7e+09" in said
    assert "Bind create_dqn_agent.normalize_observations = True" in said


def test_any_folder_can_be_resumed_although_the_environment_moves_and_is_strict(tmp_path):
    """Paths are relative to the folder in which the command was called."""
    name = "my [runs] *\\?"
    (tmp_path / "moving.py").write_text("import os; os.chdir('/')")  # so does its import
    moves = "import moving"
    code, output = finish(start(tmp_path, "Moving", moves, root_dir=name))
    assert code == 0, output
    assert (tmp_path / name / "result.json").exists()
    code, output = finish(
        start(tmp_path, "Moving", moves, "train.num_env_steps = 500", root_dir=name)
    )
    assert code == 0, output
    assert f"resuming {tmp_path / name} at environment step 400" in output
    flags = ["--num_episodes=2", "--allow_gin_imports"]
    evaluation = start_in(tmp_path, "evaluate", f"--root_dir={name}", *flags)
    code, output = finish(evaluation)
    assert code == 0, output


def test_a_mistake_ends_a_run_whose_environments_have_processes(tmp_path):
    mode = 'gymnasium_environment.vectorization_mode = "async"'
    code, output = finish(start(tmp_path, "Strict", mode, "ReplayBuffer.capacity = 1"), 30)
    assert code == 2
    assert "ReplayBuffer.capacity = 1" in output


@pytest.mark.crash
def test_sigterm_ends_a_run_whose_environment_hangs(tmp_path):
    process = start(tmp_path, "Hanging")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("hanging"):
            break
    process.terminate()
    code, output = finish(process, seconds=12)
    assert code == 143
    assert "odd_environments_test:Hanging-v0 has not returned from a step or reset" in output
