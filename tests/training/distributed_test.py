"""Tests of collectors with one learner."""

import pytest
from host_loops import Run
from tiny_runs import assert_same, saved, variables

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


@pytest.mark.parametrize("algorithm", ["dqn", "ppo", "sac", "trpo", "a2c", "nstep_q"])
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
