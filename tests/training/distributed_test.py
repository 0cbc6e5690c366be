"""Tests of collectors with one learner."""

import numpy as np
import pytest
from host_loops import Run
from tiny_runs import assert_same, saved, variables

from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import Stopped


class Distributed(Run):
    """Run whose environments are those of two collectors."""

    def build(self, path, algorithm, **overrides):
        overrides = {"distributed_runner__message_steps": 4} | overrides
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tiny_runs.gin_files", with_runner)
            return super().build(path, algorithm, **overrides)

    def snapshot(self):
        """Returns everything that a checkpoint holds, except times."""
        parts = self.parts
        return {
            **variables(parts.agent),
            **saved(parts.experience),
            **saved(parts.environment),
        }


def with_runner(algorithm):
    return [f"agents/{algorithm}", "environments/gymnasium", "runners/distributed"]


SLOW = [pytest.param(name, marks=pytest.mark.crash) for name in ("sac", "trpo", "a2c", "nstep_q")]


@pytest.mark.parametrize("algorithm", ["dqn", "ppo", *SLOW])
def test_a_stopped_run_ends_as_its_twin(tmp_path, algorithm):
    twin = Distributed(tmp_path / "twin", algorithm=algorithm)
    result = twin.train()
    cut = Distributed(tmp_path / "cut", algorithm=algorithm)
    cut.stop_at(150)
    with pytest.raises(Stopped):
        cut.train()
    cut.close()
    resumed = Distributed(tmp_path / "cut", algorithm=algorithm)
    ended = resumed.train()
    assert ended["weights_sha256"] == result["weights_sha256"]
    assert ended["evaluation"] == result["evaluation"]
    assert resumed.evaluations == twin.evaluations
    steps = [(x["env_steps"], x["return_mean_100"], x.get("loss")) for x in resumed.metrics]
    assert steps == [(x["env_steps"], x["return_mean_100"], x.get("loss")) for x in twin.metrics]
    assert_same(resumed.snapshot(), twin.snapshot())
    for run in (twin, resumed):
        run.close()


def test_collectors_have_random_numbers_of_their_own_and_rows_are_as_old_as_planned(tmp_path):
    run = Distributed(tmp_path / "run", distributed_runner__in_flight=3)
    run.train()
    first, second = (driver.environment for driver in run.parts.runner.drivers)
    assert not np.array_equal(
        first.current_time_step().observation, second.current_time_step().observation
    )
    # Three messages of each of two collectors are under way; one of them is being learnt from.
    assert 4 < run.metrics[-1]["staleness_mean"] <= 3 * 2 - 1
    assert run.loop.observation.shape[0] == 4
    assert run.metrics[-1]["episodes"] > 10
    run.close()


def test_an_environment_that_fails_ends_the_run_with_its_message(tmp_path):
    run = Distributed(tmp_path / "run")
    run.at(150, lambda: (tmp_path / "fail").touch())
    with pytest.raises(UserError, match="Walk-v0 raised KeyError.*no such room"):
        run.train()
    run.close()
    (tmp_path / "fail").unlink()
    again = Distributed(tmp_path / "run")
    assert again.train()["env_steps"] >= 300
    again.close()


def test_episodes_that_cannot_be_continued_begin_anew(tmp_path):
    run = Distributed(tmp_path / "run")
    run.stop_at(150)
    with pytest.raises(Stopped):
        run.train()
    run.close()
    (tmp_path / "drift").touch()
    again = Distributed(tmp_path / "run")
    again.loop.restore()
    assert "did not reach its saved state" in again.parts.environment.divergence
    assert again.loop.train()["env_steps"] >= 300
    again.close()


def test_messages_fit_the_replay_buffer(tmp_path):
    with pytest.raises(UserError, match="A message of 100 vector steps does not fit"):
        Distributed(tmp_path / "run", distributed_runner__message_steps=100)
