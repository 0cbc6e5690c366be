"""A new run starts with the agent of another run."""

import json
import pathlib
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from conftest import any_threads
from damages import DAMAGES
from tiny_runs import bindings, build_components, gin_files, noting_runner

from pipeline import configuration
from pipeline.checkpointing.exactness import DEFAULT_EXACTNESS, Exactness
from pipeline.checkpointing.saveables import weights_sha256
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import Stopped, StopSignal

SHORT = {"train__num_env_steps": 200, "train__eval_interval": 0, "train__num_final_episodes": 1}
SHORT_OF = {"dqn": {**SHORT, "create_dqn_agent__target_update_period": 1_000}}
CONSTANT = {"rate/linear_schedule__initial": 0.0, "rate/linear_schedule__final": 0.0}

pytestmark = pytest.mark.usefixtures("any_config")


def run(root_dir, warm_start=None, algorithm="dqn", exactness=DEFAULT_EXACTNESS, **overrides):
    load(algorithm, **overrides)
    source = warm_start and str(warm_start)
    return train(str(root_dir), 1, "resume", StopSignal(), exactness=exactness, warm_start=source)


def load(algorithm, **overrides):
    short = SHORT_OF.get(algorithm, SHORT)
    configuration.load(gin_files(algorithm), bindings(algorithm, **{**short, **overrides}))


class Trained(NamedTuple):
    """Folder of a run, which tests must not change, its result and the variables of its agent."""

    path: pathlib.Path
    result: dict[str, Any]
    variables: list[tf.Variable]

    def copied(self, path):
        return shutil.copytree(self.path, path)


def new_run(path, algorithm):
    built, runner = noting_runner()
    load(algorithm)
    with any_threads():
        result = train(str(path), 1, "resume", StopSignal(), runner=runner)
    return Trained(path, result, built[0].agent.variables)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return new_run(tmp_path_factory.mktemp("trained") / "run", "dqn")


def test_a_run_with_other_environments_starts_with_the_weights(trained, tmp_path, capsys):
    others: dict[str, Any] = {"gymnasium_environment__num_envs": 4, **CONSTANT}
    begun = run(tmp_path / "run", trained.path, **others)
    told = capsys.readouterr().out
    assert f"starting with the agent that {trained.path} has after" in told
    assert "note: that run has another configuration:\n" in told
    assert "\n  gymnasium_environment.num_envs: 2 there, 4 here\n" in told
    assert begun["weights_sha256"] == trained.result["weights_sha256"]
    assert 0 < begun["updates"] <= 100  # the counts are those of the new run alone
    unlike = build_components("dqn", **{**SHORT_OF["dqn"], **others})
    assert weights_sha256(unlike.agent.trained) != trained.result["weights_sha256"]


def test_a_damaged_checkpoint_of_the_source_is_named(trained, tmp_path, capsys):
    source = trained.copied(tmp_path / "source")
    older, newest = sorted((source / "checkpoints").glob("step-*"))[-2:]
    DAMAGES["truncated"](newest / "agent" / "variables.index")
    variables_before_training(tmp_path / "run", "dqn", source)
    told = capsys.readouterr().out
    assert f"warning: {newest.name} is damaged: agent/variables.index has" in told
    assert f"has after {int(older.name.split('-')[1]):_} environment steps" in told


def test_a_run_keeps_the_agent_that_it_started_with_although_its_source_trains_on(
    trained, tmp_path
):
    source = trained.copied(tmp_path / "source")
    begun = variables_before_training(tmp_path / "run", "dqn", source)
    shutil.rmtree(source)
    resumed = variables_before_training(tmp_path / "run", "dqn", source)
    for before, after in zip(begun, resumed, strict=True):
        np.testing.assert_array_equal(before, after, before.name)


def test_a_warm_start_is_repeated_by_the_same_command_only_and_does_not_need_its_source_again(
    trained, tmp_path
):
    source = trained.copied(tmp_path / "source")
    run(tmp_path / "run", source)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["warm_start"] == str(source)
    shutil.rmtree(source)
    longer = {"train__num_env_steps": 300}
    with pytest.raises(UserError, match=f"--warm_start: {source} in the checkpoint, nothing here"):
        run(tmp_path / "run", **longer)
    assert run(tmp_path / "run", source, **longer)["env_steps"] >= 300
    with pytest.raises(UserError, match="there is no run"):
        run(tmp_path / "another", source)


def test_a_finished_run_with_another_warm_start_is_refused(trained, tmp_path):
    path = trained.copied(tmp_path / "run")
    with pytest.raises(UserError, match=f"warm_start: nothing there, {trained.path} here"):
        run(path, trained.path)


def test_a_warm_start_of_a_run_that_has_begun_is_refused(trained, tmp_path):
    path = trained.copied(tmp_path / "run")
    before = (path / "run.json").read_bytes()
    longer = {"train__num_env_steps": 300, "exactness": Exactness(allow_inexact=True)}
    with pytest.raises(UserError, match="another --warm_start has no effect"):
        run(path, trained.path, **longer)
    assert (path / "run.json").read_bytes() == before


def test_a_run_cannot_start_with_itself(trained):
    with pytest.raises(UserError, match="--warm_start names --root_dir itself"):
        run(trained.path, trained.path)


def test_an_agent_of_another_kind_is_refused(trained, tmp_path):
    shapes = r"does not fit.*different: .*\b8\b.* in the checkpoint, .*\b16\b.* here"
    with pytest.raises(UserError, match=rf"{shapes}(.|\n)*needs a run with the same agent and"):
        run(tmp_path / "run", trained.path, mlp_encoder__units=(16,))


def test_networks_without_an_optimizer_are_refused(tmp_path):
    with pytest.raises(UserError, match="has networks alone, without an optimizer"):
        run(tmp_path / "run", "pretrained:ppo_lunarlander_tuned", "ppo")


def counts(variables, names):
    return [int(v) for name in names for v in variables if name in v.name]


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        # Otherwise a target network would wait until the new run has passed the old one.
        ("dqn", ["update_targets/counter"]),
        ("nstep_q", ["copied_at", "summed"]),
    ],
)
def test_counts_of_the_agent_begin_at_0(trained, tmp_path, algorithm, names):
    first = trained if algorithm == "dqn" else new_run(tmp_path / "first", algorithm)
    assert min(counts(first.variables, names)) > 0
    second = variables_before_training(tmp_path / "second", algorithm, first.path)
    assert counts(second, names) == [0] * len(names)


def variables_before_training(root_dir, algorithm, warm_start, **overrides):
    """Returns the variables of the agent of a run that a signal stops before it trains."""
    built, runner = noting_runner()
    load(algorithm, **overrides)
    stop = StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        train(str(root_dir), 1, "resume", stop, warm_start=str(warm_start), runner=runner)
    return built[0].agent.variables
