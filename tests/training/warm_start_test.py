"""A new run starts with the agent of another run."""

import contextlib
import json
import shutil

import pytest
from conftest import any_threads
from tiny_runs import bindings, gin_files

from pipeline import configuration
from pipeline.checkpointing.exactness import DEFAULT_EXACTNESS, Exactness
from pipeline.training import components
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import Stopped, StopSignal

SHORT = {"train__num_env_steps": 200, "train__eval_interval": 0, "train__num_final_episodes": 1}
CONSTANT = {"rate/linear_schedule__initial": 0.0, "rate/linear_schedule__final": 0.0}

pytestmark = pytest.mark.usefixtures("any_config")


def run(root_dir, warm_start=None, algorithm="dqn", exactness=DEFAULT_EXACTNESS, **overrides):
    configuration.load(gin_files(algorithm), bindings(algorithm, **{**SHORT, **overrides}))
    source = warm_start and str(warm_start)
    return train(str(root_dir), 1, "resume", StopSignal(), exactness=exactness, warm_start=source)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    configuration.load(gin_files("dqn"), bindings("dqn", **SHORT))
    path = tmp_path_factory.mktemp("trained") / "run"
    with any_threads():
        return path, train(str(path), 1, "resume", StopSignal())


def test_a_run_with_other_environments_starts_with_the_weights(trained, tmp_path, capsys):
    path, result = trained
    others = {"gymnasium_environment__num_envs": 4, **CONSTANT}
    begun = run(tmp_path / "run", path, **others)
    assert f"starting with the agent that {path} has after" in capsys.readouterr().out
    assert begun["weights_sha256"] == result["weights_sha256"]
    assert 0 < begun["updates"] <= 100  # the counts are those of the new run alone
    unlike = run(tmp_path / "unlike", **others)
    assert unlike["weights_sha256"] != result["weights_sha256"]


def test_a_warm_start_is_recorded_and_repeated_by_the_same_command_only(trained, tmp_path):
    path, _ = trained
    run(tmp_path / "run", path)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["warm_start"] == str(path)
    with pytest.raises(UserError, match=f"--warm_start: {path} in the checkpoint, nothing here"):
        run(tmp_path / "run", train__num_env_steps=300)
    assert run(tmp_path / "run", path, train__num_env_steps=300)["env_steps"] >= 300


def test_a_resumed_run_does_not_need_the_run_that_it_started_with(trained, tmp_path):
    source = shutil.copytree(trained[0], tmp_path / "source")
    run(tmp_path / "run", source)
    shutil.rmtree(source)
    longer = {"train__num_env_steps": 300}
    assert run(tmp_path / "run", source, **longer)["env_steps"] >= 300
    with pytest.raises(UserError, match="there is no run"):
        run(tmp_path / "another", source)


def test_a_finished_run_with_another_warm_start_is_refused(trained, tmp_path):
    run(tmp_path / "run")
    with pytest.raises(UserError, match=f"warm_start: nothing there, {trained[0]} here"):
        run(tmp_path / "run", trained[0])


def test_a_warm_start_of_a_run_that_has_begun_is_refused(trained, tmp_path):
    run(tmp_path / "run")
    longer = {"train__num_env_steps": 300, "exactness": Exactness(allow_inexact=True)}
    with pytest.raises(UserError, match="another --warm_start has no effect"):
        run(tmp_path / "run", trained[0], **longer)
    assert run(tmp_path / "run", **longer)["env_steps"] >= 300


def test_a_run_cannot_start_with_itself(trained):
    path, _ = trained
    with pytest.raises(UserError, match="--warm_start names --root_dir itself"):
        run(path, path)


def test_an_agent_of_another_kind_is_refused(trained, tmp_path):
    path, _ = trained
    with pytest.raises(UserError, match="mlp_encoder|kernel|does not fit"):
        run(tmp_path / "run", path, mlp_encoder__units=(16,))


def test_networks_without_an_optimizer_are_refused(tmp_path):
    with pytest.raises(UserError, match="has networks alone, without an optimizer"):
        run(tmp_path / "run", "pretrained:ppo_lunarlander_tuned", "ppo")


def test_a_run_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no run"):
        run(tmp_path / "run", tmp_path / "nothing")


@pytest.mark.parametrize(
    ("algorithm", "overrides", "name"),
    [
        # Otherwise a target network would wait until the new run has passed the old one.
        ("nstep_q", {"create_nstep_q_agent__target_update_env_steps": 70}, "copied_at"),
        ("dqn", {"create_dqn_agent__target_update_period": 1_000}, "update_targets/counter"),
        ("a2c", {"create_a2c_agent__accumulate_updates": 1_000}, "summed"),
    ],
)
def test_counts_of_the_agent_begin_at_0(tmp_path, algorithm, overrides, name):
    first, second = (
        run_variables(tmp_path / folder, algorithm, warm_start, **overrides)
        for folder, warm_start in (("first", None), ("second", tmp_path / "first"))
    )
    assert [int(v) for v in first if name in v.name][0] > 0
    assert [int(v) for v in second if name in v.name] == [0]


def run_variables(root_dir, algorithm, warm_start, **overrides):
    """Returns the variables of the agent of a run: after it, or before it with a warm start."""
    built = []

    def runner(*arguments):
        built.append(components.build(*arguments))
        return built[0]

    configuration.load(gin_files(algorithm), bindings(algorithm, **{**SHORT, **overrides}))
    stop = StopSignal()
    stop.requested = bool(warm_start)
    with pytest.raises(Stopped) if warm_start else contextlib.nullcontext():
        train(str(root_dir), 1, "resume", stop, warm_start=warm_start, runner=runner)
    return built[0].agent.variables
