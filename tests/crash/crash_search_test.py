"""A search on a cluster that is killed twice ends with the trials of one that was not killed."""

import functools
import os
import pathlib
import random
import subprocess
import sys
import time

import pytest
from conftest import ROOT, process_commands
from ray_clusters import ray_cluster
from waiting import wait_for

from pipeline.utils.jsonl import read_jsonl

pytestmark = pytest.mark.crash

SEARCH = """
search.config = "dqn_cartpole"
search.num_env_steps = 3_000
search.parameters = {
    "rate/linear_schedule.initial": ("log_uniform", 1e-5, 1e-2),
    "create_dqn_agent.discount": ("uniform", 0.9, 1.0),
    "create_dqn_agent.n_step": ("choice", 1, 3),
}
search.bindings = (
    "train.eval_interval = 1_000",
    "train.checkpoint_interval = 500",
    "train.log_interval = 500",
    "train.num_final_episodes = 5",
)
search.rungs = (2_000,)
"""


def start(folder: pathlib.Path, *flags: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "pipeline.tune", f"--output_dir={folder / 'search'}",
        f"--search={folder / 'tiny.gin'}", "--trials=20", *flags,
    ]  # fmt: skip
    (folder / "tiny.gin").write_text(SEARCH)
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def trials(folder: pathlib.Path) -> list[dict]:
    return sorted(read_jsonl(folder / "search/trials.jsonl"), key=lambda trial: trial["number"])


def has_more_trials(folder: pathlib.Path, number: int) -> bool:
    return len(trials(folder)) > number


def is_training(folder: pathlib.Path) -> bool:
    return any(f"--root_dir={folder}" in command for command in process_commands().values())


def test_a_killed_search_has_the_trials_of_one_that_was_not(tmp_path):
    local, far = tmp_path / "local", tmp_path / "far"
    local.mkdir()
    far.mkdir()
    assert start(local, "--workers=2").wait(900) == 0
    chance = random.Random(1)
    with ray_cluster(1, 1) as nodes:
        flag = f"--ray_address={nodes.address}"
        for number in (4, 12):
            search = start(far, flag)
            wait_for(functools.partial(has_more_trials, far, number), 600)
            time.sleep(chance.uniform(0, 5))
            search.kill()
            search.wait()
            wait_for(lambda: not is_training(far))
        assert start(far, flag).wait(900) == 0
    assert len(trials(local)) == 20
    assert trials(far) == trials(local)
