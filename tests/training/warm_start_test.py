"""A new run starts with the agent of another run."""

import json

import pytest
from conftest import any_threads
from tiny_runs import bindings, gin_files

from pipeline import configuration
from pipeline.training import components
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import Stopped, StopSignal

SHORT = {"train__num_env_steps": 200, "train__eval_interval": 0, "train__num_final_episodes": 1}
CONSTANT = {"rate/linear_schedule__initial": 0.0, "rate/linear_schedule__final": 0.0}

pytestmark = pytest.mark.usefixtures("any_config")


def run(root_dir, warm_start=None, algorithm="dqn", **overrides):
    configuration.load(gin_files(algorithm), bindings(algorithm, **{**SHORT, **overrides}))
    return train(
        str(root_dir), 1, "resume", StopSignal(), warm_start=warm_start and str(warm_start)
    )


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


def test_counts_of_the_agent_begin_at_0(tmp_path):
    """Otherwise a target network would wait until the new run has passed the old one."""
    every = {"create_nstep_q_agent__target_update_env_steps": 70}
    run(tmp_path / "first", algorithm="nstep_q", **every)
    parts = run_parts(tmp_path / "run", tmp_path / "first", **every)
    assert [int(v) for v in parts if "copied_at" in v.name] == [0]


def run_parts(root_dir, warm_start, **overrides):
    """Returns the variables of the agent of a new run before it trains."""
    built = []

    def runner(*arguments):
        built.append(components.build(*arguments))
        return built[0]

    configuration.load(gin_files("nstep_q"), bindings("nstep_q", **{**SHORT, **overrides}))
    stop = StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        train(str(root_dir), 1, "resume", stop, warm_start=str(warm_start), runner=runner)
    return built[0].agent.variables
