"""Tests that trainings killed at random moments end with the same bits as undisturbed ones."""

import json
import pathlib
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import pytest
from run_processes import ENVIRONMENT, TESTS, Records, assert_same_end
from tiny_runs import bindings, gin_files, statements

_ATARI = """
    configure_tensorflow.intra_op = 1
    train.num_env_steps = 600
    train.log_interval = 40
    train.eval_interval = 120
    train.checkpoint_interval = 60
    train.num_eval_episodes = 2
    train.num_final_episodes = 2
"""
_PONG = """
    atari_environment.game = "pong"
    atari_environment.num_envs = 2
    atari_environment.num_threads = 1
    atari_environment.max_episode_frames = 400
    evaluation/atari_environment.num_envs = 2
"""
_DEEPMIND = """
    deepmind_atari_environment.game = "breakout"
    deepmind_atari_environment.max_episode_frames = 400
    BlockReplayBuffer.block_size = 24
    create_dqn_agent.target_update_env_steps = 40
    epsilon/linear_schedule.start = 60
    epsilon/linear_schedule.num_steps = 300
    Evaluator.num_env_steps = 40
"""
_REPLAY = """
    ReplayBuffer.capacity = 400
    ReplayBuffer.batch_size = 8
    initialize_replay_buffer.num_env_steps = 60
"""
_ROLLOUT = """
    Rollout.num_steps = 16
    Rollout.minibatch_size = 16
    Rollout.num_epochs = 2
"""


def flags(names, lines):
    files = [f"--gin_file={name}" for name in names]
    return [*files, *(f"--gin_bindings={line}" for line in lines)]


def gymnasium_flags(algorithm, **overrides):
    return flags(gin_files(algorithm), bindings(algorithm, **overrides))


def atari_flags(config, text):
    units = () if config == "sac_atari" else ("nature_cnn_encoder.units = (32,)",)
    return flags([config], [*statements(_ATARI + text), *units])


SMALL = {
    "train__num_env_steps": 1_200, "train__checkpoint_interval": 60, "train__eval_interval": 150,
}  # fmt: skip


class Case(NamedTuple):
    kills: int
    steps: int  # maximum of vector steps between a start and the kill
    flags: list[str]


CASES = {
    "dqn": Case(62, 100, gymnasium_flags("dqn", **SMALL)),
    "ppo": Case(62, 100, gymnasium_flags("ppo", **SMALL)),
    "sac": Case(62, 100, gymnasium_flags("sac", **SMALL)),
    "a2c": Case(20, 100, gymnasium_flags("a2c", **SMALL)),
    "trpo": Case(20, 100, gymnasium_flags("trpo", **SMALL)),
    "nstep_q": Case(20, 100, gymnasium_flags("nstep_q", **SMALL)),
    "a3c": Case(20, 100, gymnasium_flags("a3c", **SMALL)),
    "async_nstep_q": Case(20, 100, gymnasium_flags("async_nstep_q", **SMALL)),
    "dqn_pong": Case(10, 60, atari_flags("dqn_pong", _PONG + _REPLAY)),
    "ppo_pong": Case(10, 60, atari_flags("ppo_pong", _PONG + _ROLLOUT)),
    "sac_pong": Case(10, 60, atari_flags("sac_atari", _PONG + _REPLAY)),
    "dqn3": Case(10, 60, atari_flags("dqn3_atari", _DEEPMIND + _REPLAY)),
}


def kill(folder: pathlib.Path, case: Case) -> dict:
    script = str(TESTS / "killed_runs.py")
    command = [sys.executable, script, str(folder), str(case.kills), str(case.steps)]
    ended = subprocess.run(
        [*command, *case.flags], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    logs = [path.read_text()[-2_000:] for path in sorted(folder.glob("*.log"))]
    assert ended.returncode == 0, "\n".join(logs)
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.crash
@pytest.mark.parametrize("name", CASES)
def test_killed_runs_end_as_their_twins(tmp_path, capsys, name):
    outcome = kill(tmp_path, CASES[name])
    with capsys.disabled():
        kills = ", ".join(f"{count} {phase}" for phase, count in outcome["kills"].items())
        print(
            f"\n{name}: {sum(outcome['kills'].values())} kills of {len(outcome['runs'])} runs:"
            f" {kills}; {outcome['halves']} left half a checkpoint",
            end=" ",
        )
    for run, twin in outcome["runs"]:
        assert_same_end(Records(run), Records(twin))
    assert Counter(outcome["kills"]).total() == CASES[name].kills
