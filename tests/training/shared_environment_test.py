"""Runs whose simulator allows one instance at a time."""

from typing import Any

import gymnasium
import pytest
from host_loops import PLAN, Run, check_streams
from run_processes import Records, assert_same_end
from tiny_runs import Walk, build_components

from pipeline import configuration
from pipeline.utils.errors import UserError
from pipeline.utils.progress import EVALUATING


class OnlyWalk(Walk):
    """Refuses to be built while there are `limit` others."""

    limit, number = 1, 0

    def __init__(self, **kwargs):
        if OnlyWalk.number >= OnlyWalk.limit:
            raise RuntimeError("a simulator is already active")
        OnlyWalk.number += 1
        super().__init__(**kwargs)

    def close(self):
        OnlyWalk.number -= 1


gymnasium.register("OnlyWalk-v0", entry_point=f"{__name__}:OnlyWalk")
ONE: dict[str, Any] = {
    "gymnasium_environment__name": f"{__name__}:OnlyWalk-v0",
    "gymnasium_environment__num_envs": 1,
}
SHARED = {**ONE, "build_evaluator__share_environment": True}


def test_a_stopped_run_in_a_shared_environment_ends_as_its_twin_and_repeats_no_episode(tmp_path):
    runs: dict[str, Records] = {}
    starts: list[float] = []
    for name in ("twin", "run"):
        run = Run(tmp_path / name, PLAN, **SHARED)
        if name == "twin":
            note_resets(run.parts.environment.episodes, starts)
        if name == "run":
            run.train_until(130, EVALUATING)
            run.close()
            run = Run(tmp_path / name, PLAN, **SHARED)
        run.train()
        check_streams(run.parts.experience, min_truncated=1)
        run.close()
        assert OnlyWalk.number == 0
        runs[name] = Records(run.folder.path)
    assert len(runs["twin"].evaluations) == 2
    assert_same_end(runs["run"], runs["twin"])
    # Evaluations have other episodes than training.
    assert len(starts) == len(set(starts)) >= 4


def note_resets(episodes, starts):
    """Appends the random number in the first observation of every episode to `starts`."""
    reset = episodes.reset

    def note():
        rows = reset()
        starts.append(rows[3][0, 2])
        return rows

    episodes.reset = note


def test_two_instances_are_refused_with_both_ways_out(tmp_path):
    with pytest.raises(UserError) as error:
        Run(tmp_path / "run", PLAN, "dqn", **ONE)
    message = str(configuration.explain_call_error(error.value))
    assert "a simulator is already active" in message
    assert 'gymnasium_environment.vectorization_mode = "async"' in message
    assert "build_evaluator.share_environment = True" in message
    assert OnlyWalk.number == 0


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("algorithm", ["a3c", "impala"])
def test_if_an_environment_cannot_be_built_all_others_are_closed(monkeypatch, algorithm, limit):
    monkeypatch.setattr(OnlyWalk, "limit", limit)
    with pytest.raises(UserError, match="a simulator is already active"):
        build_components(algorithm, **ONE)
    assert OnlyWalk.number == 0


def test_processes_are_one_way_out(tmp_path):
    overrides = ONE | {"gymnasium_environment__vectorization_mode": "async"}
    run = Run(tmp_path / "run", PLAN, "dqn", **overrides)
    run.loop.collect_randomly(run.warm_up)
    assert run.parts.evaluator.run(2, 0)["returns"] == [21.0, 33.0]
    run.close()


def test_what_only_evaluations_bind_is_told_where_they_share(tmp_path):
    kwargs = {"evaluation/gymnasium_environment__max_episode_steps": 9}
    run = Run(tmp_path / "run", PLAN, "dqn", **SHARED, **kwargs)
    (warning,) = configuration.warnings()
    assert warning.startswith("evaluation/gymnasium_environment.max_episode_steps has no effect")
    run.close()


def test_actors_do_not_share(tmp_path):
    with pytest.raises(UserError, match="needs the default train.runner"):
        Run(tmp_path / "run", PLAN, "a3c", build_evaluator__share_environment=True)
