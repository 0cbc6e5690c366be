"""Tests that runs of agents that `resume_test` leaves out end like uninterrupted twins."""

import re

import pytest
from host_loops import PLAN, Run
from run_processes import Records, assert_same_end
from tiny_runs import read_variables

from pipeline.utils.shutdown import Stopped


def finished(run):
    run.folder.write_json("result.json", run.train())
    run.close()
    return Records(run.folder.path)


def test_intervals_of_logs_and_checkpoints_may_change_and_the_final_episodes_know_no_interval(
    tmp_path,
):
    twin = finished(Run(tmp_path / "twin"))
    stopped = Run(tmp_path / "run")
    stopped.stop_at(140)
    with pytest.raises(Stopped):
        stopped.train()
    stopped.close()
    plan = PLAN._replace(log_interval=70, eval_interval=30, checkpoint_interval=30)
    resumed = finished(Run(tmp_path / "run", plan))
    assert len(resumed.evaluations) > len(twin.evaluations)
    assert resumed.result == twin.result


def learners(run):
    """Returns the agents that compute gradients: one, or one for each actor."""
    runner = run.parts.runner
    return [actor.agent for actor in getattr(runner, "actors", [runner])]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "env_steps"),
    [
        ("dqn", {"create_dqn_agent__accumulate_updates": 3}, 210),
        ("ppo", {"create_ppo_agent__accumulate_updates": 3}, 210),
        ("sac", {"create_sac_agent__accumulate_updates": 7}, 210),
        pytest.param("a2c", {}, 210, marks=pytest.mark.crash),
        ("nstep_q", {}, 210),
        pytest.param(
            "nstep_q", {"create_nstep_q_agent__one_step": True}, 210, marks=pytest.mark.crash
        ),
        ("trpo", {}, 100),
        pytest.param("a3c", {}, 210, marks=pytest.mark.crash),
        pytest.param("async_nstep_q", {}, 210, marks=pytest.mark.crash),
    ],
)
def test_a_stopped_run_ends_as_its_twin(tmp_path, algorithm, overrides, env_steps):
    twin = finished(Run(tmp_path / "twin", PLAN, algorithm, **overrides))
    stopped = Run(tmp_path / "run", PLAN, algorithm, **overrides)
    stopped.stop_at(env_steps)
    with pytest.raises(Stopped):
        stopped.train()
    stopped.close()
    accumulators = [agent.accumulator for agent in learners(stopped) if agent.accumulator]
    assert bool(accumulators) == (algorithm not in ("trpo", "a3c"))
    assert not accumulators or any(x.summed > 0 for x in accumulators)  # in the middle of updates
    resumed = finished(Run(tmp_path / "run", PLAN, algorithm, **overrides))
    assert_same_end(resumed, twin)
    agent = read_variables(resumed.newest / "agent")
    counts = [count for name, count in agent.items() if re.search("moments.*/count", name)]
    assert len(counts) == (2 if algorithm in ("ppo", "a2c") else 0)
    assert counts == [resumed.env_steps] * len(counts)  # normalizers saw each step once
