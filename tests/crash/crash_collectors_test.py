"""Collectors in turns end with the same bits in this process and over Ray, whatever is lost."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT, process_commands
from ray.cluster_utils import Cluster as RayCluster
from ray_clusters import kill, ray_cluster
from waiting import wait_for

from pipeline.utils.errors import RETRY_CODE

pytestmark = pytest.mark.crash

FLAGS = {
    "dqn": [
        "--gin_file=dqn_cartpole",
        "--gin_bindings=train.num_env_steps = 6_000",
        "--gin_bindings=train.checkpoint_interval = 1_000",
    ],
    "ppo": [
        "--gin_file=ppo_cartpole",
        "--gin_bindings=train.num_env_steps = 20_000",
        "--gin_bindings=train.checkpoint_interval = 4_000",
    ],
    "sac": ["--gin_file=sac_pendulum", "--gin_bindings=train.num_env_steps = 1_500"],
    "a2c": ["--gin_file=a2c_cartpole", "--gin_bindings=train.num_env_steps = 10_000"],
    "trpo": ["--gin_file=trpo_cartpole", "--gin_bindings=train.num_env_steps = 10_000"],
    "nstep_q": ["--gin_file=nstep_q_cartpole", "--gin_bindings=train.num_env_steps = 10_000"],
    "dqn, eagerly": [
        "--eager",
        "--gin_file=dqn_cartpole",
        "--gin_bindings=initialize_replay_buffer.num_env_steps = 200",
        "--gin_bindings=train.num_env_steps = 600",
    ],
    "dqn, frame stacks": [
        "--gin_file=dqn_pong",
        "--gin_bindings=ReplayBuffer.capacity = 5_000",
        "--gin_bindings=initialize_replay_buffer.num_env_steps = 1_000",
        "--gin_bindings=train.num_env_steps = 2_000",
    ],
}
KILLED = "dqn", "ppo"


def start(folder: pathlib.Path, algorithm: str, *flags: str, **kwargs: Any) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "pipeline.train", f"--root_dir={folder}", *FLAGS[algorithm],
        "--gin_file=runners/distributed", "--gin_bindings=train.log_interval = 500",
        "--gin_bindings=train.eval_interval = 3_000",
        "--gin_bindings=train.num_final_episodes = 2", *flags,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **kwargs)


def start_and_wait(folder: pathlib.Path, algorithm: str, *flags: str) -> subprocess.Popen:
    """Starts a run and waits until it has written a checkpoint of its own training."""
    process = start(folder, algorithm, *flags, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list((folder / "checkpoints").glob("step-*"))) > 1, 120)
    return process


def digest(folder: pathlib.Path, algorithm: str, *flags: str) -> str:
    assert start(folder, algorithm, *flags).wait(300) == 0
    return json.loads((folder / "result.json").read_text())["weights_sha256"]


@pytest.mark.parametrize("algorithm", FLAGS)
def test_the_bits_do_not_depend_on_where_collectors_are(tmp_path, algorithm):
    here = digest(tmp_path / "here", algorithm)
    with ray_cluster(1, 1) as nodes:
        flag = f"--ray_address={nodes.address}"
        assert digest(tmp_path / "ray", algorithm, flag) == here
        for what in ("learner", "node") if algorithm in KILLED else ():
            folder = tmp_path / what
            process = start_and_wait(folder, algorithm, flag)
            if what == "learner":
                process.kill()
                process.communicate()
            else:
                kill_a_node(nodes)
                _, stderr = process.communicate(timeout=120)
                assert process.returncode == RETRY_CODE
                assert "was lost" in stderr and "Run the same command again" in stderr
            assert digest(folder, algorithm, flag) == here
            assert json.loads((folder / "run.json").read_text())["resumed_at_env_steps"]


def kill_a_node(nodes: RayCluster) -> None:
    """Kills a node, and lets another join the cluster."""
    victim = nodes.worker_nodes.pop()
    kill(victim)
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()


def test_a_collector_that_hangs_ends_the_run_within_its_time(tmp_path):
    folder, seconds = tmp_path / "run", "--gin_bindings=distributed_runner.timeout = 40"
    with ray_cluster(1, 1) as nodes:
        flags = f"--ray_address={nodes.address}", seconds
        process = start_and_wait(folder, "dqn", *flags)
        hanging = [x for x, name in process_commands().items() if "ray::CollectorActor" in name]
        os.kill(hanging[0], signal.SIGSTOP)
        try:
            _, stderr = process.communicate(timeout=120)
        finally:
            os.kill(hanging[0], signal.SIGCONT)
        assert process.returncode == RETRY_CODE
        assert "has not answered for 40 s (distributed_runner.timeout)" in stderr
        assert "Run the same command again" in stderr


def test_a_cluster_with_too_few_processors_is_told_and_ends_in_time(tmp_path):
    seconds = "--gin_bindings=distributed_runner.timeout = 15"
    with ray_cluster(1) as nodes:
        flags = f"--ray_address={nodes.address}", seconds
        process = start(tmp_path / "run", "ppo", *flags, stderr=subprocess.PIPE, text=True)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == RETRY_CODE
    assert stderr.count("the Ray cluster has CPUs for 1 of 2 collectors") == 2
