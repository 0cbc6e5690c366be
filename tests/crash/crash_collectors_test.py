"""Collectors in this process, over Ray, and over Ray with a kill: all end with the same bits."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT
from ray_clusters import ray_cluster, wait_for

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
}


def start(folder: pathlib.Path, algorithm: str, *flags: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "pipeline.train", f"--root_dir={folder}", *FLAGS[algorithm],
        "--gin_file=runners/distributed", "--gin_bindings=train.log_interval = 500",
        "--gin_bindings=train.eval_interval = 3_000",
        "--gin_bindings=train.num_final_episodes = 5", *flags,
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def digest(folder: pathlib.Path, algorithm: str, *flags: str) -> str:
    assert start(folder, algorithm, *flags).wait(300) == 0
    return json.loads((folder / "result.json").read_text())["weights_sha256"]


@pytest.mark.parametrize("algorithm", FLAGS)
def test_the_bits_do_not_depend_on_where_collectors_are(tmp_path, algorithm):
    here = digest(tmp_path / "here", algorithm)
    with ray_cluster(1, 1) as nodes:
        flag = f"--ray_address={nodes.address}"
        assert digest(tmp_path / "ray", algorithm, flag) == here
        killed = start(tmp_path / "killed", algorithm, flag)
        checkpoints = tmp_path / "killed" / "checkpoints"
        wait_for(lambda: len(list(checkpoints.glob("step-*"))) > 1, 120)
        killed.kill()
        killed.wait()
        assert digest(tmp_path / "killed", algorithm, flag) == here
        assert json.loads((tmp_path / "killed" / "run.json").read_text())["resumed_at_env_steps"]
