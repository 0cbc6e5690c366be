"""Tests that resumed runs of agents that `resume_test` leaves out end like their twins.

A twin goes on after the same stop with what is in memory, which saves the building of its graphs.
"""

import re
import shutil

import pytest
from any_space_test import of
from host_loops import PLAN, Run
from run_processes import Records, assert_same_end
from tiny_runs import read_variables


def closed(run):
    run.close()
    return Records(run.folder.path)


NESTED = of("Nested", several_actions=True)
RARELY: list[tuple[str, dict, int]] = [  # `crash_kills_test` has all agents
    ("sac", {"create_sac_agent__accumulate_updates": 7}, 210),
    ("nstep_q", {"create_nstep_q_agent__one_step": True}, 210),
]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "env_steps"),
    [
        ("dqn", {"create_dqn_agent__accumulate_updates": 3}, 210),
        ("ppo", {"create_ppo_agent__accumulate_updates": 3} | NESTED, 210),
        ("trpo", {}, 100),
        *(pytest.param(*run, marks=pytest.mark.crash) for run in RARELY),
    ],
)
def test_a_stopped_run_ends_as_its_twin(tmp_path, algorithm, overrides, env_steps):
    twin = Run(tmp_path / "twin", PLAN, algorithm, **overrides)
    twin.train_until(env_steps)
    shutil.copytree(tmp_path / "twin", tmp_path / "run")
    accumulator = twin.parts.agent.accumulator
    assert algorithm == "trpo" or accumulator.summed > 0  # in the middle of an update
    twin.go_on()
    run = Run(tmp_path / "run", PLAN, algorithm, **overrides)
    run.train()
    resumed = closed(run)
    assert_same_end(resumed, closed(twin))
    agent = read_variables(resumed.newest / "agent")
    counts = [count for name, count in agent.items() if re.search("moments.*/count", name)]
    # One of the returns, and one of each array of the observation that is normalized.
    assert len(counts) == (4 if algorithm == "ppo" else 0)
    assert counts == [resumed.env_steps] * len(counts)  # normalizers saw each step once
    if algorithm == "ppo":  # every action was one of the space
        assert set(resumed.result["evaluation"]["returns"]) == {5.0}
