"""Returns that gymnasium's RecordEpisodeStatistics records below a wrapper of rewards."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TransformReward
from host_loops import PLAN, Run
from run_processes import Records, assert_same_end
from scripted_environments import PlainEnv
from tiny_runs import Walk

from pipeline.environments.process_vector import ProcessVector
from pipeline.environments.sync_vector import SyncVector
from pipeline.utils.shutdown import Stopped


def scaled(env):
    """Divides rewards by 100, after they were recorded."""
    return TransformReward(RecordEpisodeStatistics(env), lambda reward: float(reward) / 100)


gymnasium.register("ScaledWalk-v0", entry_point=lambda **kwargs: scaled(Walk(**kwargs)))
SCALED = {"gymnasium_environment__name": "ScaledWalk-v0"}


@pytest.mark.parametrize("vector_class", [SyncVector, ProcessVector])
def test_a_vector_gives_the_returns_at_the_end_of_episodes(vector_class):
    vector = vector_class([lambda: scaled(PlainEnv()), PlainEnv])
    vector.reset([1, 2])
    outcomes = [vector.step(np.zeros(2, np.int64)) for _ in range(12)]
    vector.close()
    ends = [outcome.is_last[0] for outcome in outcomes]
    assert sum(ends) == 2
    for outcome, is_last in zip(outcomes, ends, strict=True):
        assert list(outcome.own_returns) == ([(0, 5.0)] if is_last else [])
        assert outcome.reward[0] in (np.float32(0.01), 0)


def test_logs_and_evaluations_have_the_returns_of_the_environment(tmp_path):
    runs = {}
    for name in ("twin", "run"):
        run = Run(tmp_path / name, PLAN, "ppo", **SCALED)
        if name == "run":
            run.stop_at(140)
            with pytest.raises(Stopped):
                run.train()
            run.close()
            run = Run(tmp_path / name, PLAN, "ppo", **SCALED)
        run.folder.write_json("result.json", run.train())
        run.close()
        runs[name] = Records(run.folder.path)
    assert_same_end(runs["run"], runs["twin"])
    twin = runs["twin"]
    assert set(twin.result["evaluation"]["returns"]) == {21.0, 33.0}  # 3 for each of 7 or 11 steps
    last = twin.metrics[-1]
    assert 21 < last["return_mean_100"] < 33
    assert last["return_mean_100"] == pytest.approx(3 * last["episode_length_mean_100"])
