"""Runs with every kind of space: they train, resume bit for bit, and are loaded as policies."""

import os

import gymnasium
import numpy as np
import pytest
from conftest import TESTS, run_binary, user_environment
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from host_loops import PLAN, Run
from run_processes import Records, assert_same_end
from scripted_environments import SamplingEnv
from tiny_runs import bindings

import pipeline
from pipeline.utils.errors import UserError

NESTED = Dict(
    picture=Box(0, 255, (6, 6, 3), np.uint8),
    place=Tuple([Discrete(3, start=-1), MultiDiscrete([2, 3])]),
    flags=MultiBinary(2),
    clock=Box(-np.inf, np.inf, (), np.float64),
)


class NestedEnv(SamplingEnv):
    def __init__(self, several_actions=False):
        super().__init__(NESTED, MultiDiscrete([2, 3]) if several_actions else Discrete(3))


class Mission(gymnasium.Space):
    """A space that agents do not see."""

    def sample(self, mask=None, probability=None):
        return "go"


class MissionEnv(SamplingEnv):
    def __init__(self, bound=1.0):
        space = Dict(numbers=Box(-bound, bound, (2,)), mission=Mission())
        super().__init__(space, Box(-bound, bound, (2,), np.float32))


gymnasium.register("Mission-v0", entry_point=f"{__name__}:MissionEnv")
gymnasium.register("Nested-v0", entry_point=f"{__name__}:NestedEnv")


def of(name, **kwargs):
    return {
        "gymnasium_environment__name": f"{__name__}:{name}-v0",
        "gymnasium_environment__kwargs": kwargs,
    }


FAST = {
    "dqn": {"create_dqn_agent__learning_rate": 0.01, "create_dqn_agent__discount": 0.0},
    "nstep_q": {"create_nstep_q_agent__learning_rate": 0.03, "create_nstep_q_agent__discount": 0.0},
    "ppo": {"create_ppo_agent__learning_rate": 0.02},
    "a3c": {"create_a2c_agent__learning_rate": 0.02},
    "trpo": {},
}


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(x, marks=[pytest.mark.learning] * (x != "dqn")) for x in FAST],
)
def test_a_game_that_forbids_most_actions_is_learnt(tmp_path, algorithm):
    intervals = {"log_interval": 0, "eval_interval": 0, "checkpoint_interval": 0}
    plan = PLAN._replace(num_env_steps=3_000, num_final_episodes=30, **intervals)
    run = Run(tmp_path / "run", plan, algorithm, **of("MaskedGame"), **FAST[algorithm])
    result = run.train()
    run.close()
    assert result["evaluation"]["return_mean"] > 8  # 5 by chance


@pytest.mark.crash  # `exact_resume_test` does the same with PPO
def test_a_run_with_nested_observations_ends_as_its_twin(tmp_path):
    copy = tmp_path / "run"
    twin = Run(tmp_path / "twin", PLAN._replace(checkpoint_interval=70), "dqn", **of("Nested"))
    twin.copy_at(150, copy)
    twin.train()
    twin.close()
    assert 140 <= Records(copy).env_steps < 160
    run = Run(copy, PLAN, "dqn", **of("Nested"))
    returns = run.train()["evaluation"]["returns"]
    run.close()
    assert_same_end(Records(copy), Records(tmp_path / "twin"))
    assert set(returns) == {5.0}  # every action was one of the space


def test_an_evaluation_environment_with_other_spaces_is_refused(tmp_path):
    other = {"evaluation/gymnasium_environment__kwargs": {"bound": 2.0}}
    with pytest.raises(UserError, match="has the action space .* but the agent is trained"):
        Run(tmp_path / "run", PLAN, "ppo", **of("Mission"), **other)


def test_a_run_with_a_part_that_agents_do_not_see_is_loaded_and_evaluated(tmp_path):
    flags = [f"--gin_bindings={line}" for line in bindings("ppo", **of("Mission"))]
    flags += ["--gin_bindings=train.num_env_steps = 100", "--gin_file=agents/ppo"]
    path = os.pathsep.join([str(TESTS / "training"), str(TESTS)])
    environment = user_environment(PYTHONPATH=path)
    root_dir = f"--root_dir={tmp_path / 'run'}"
    trained = run_binary(
        "train", root_dir, "--gin_file=environments/gymnasium", *flags, env=environment
    )
    assert trained.returncode == 0, trained.stderr
    said = " ".join(trained.stdout.split())
    assert "agents do not see observation['mission']: its space (Mission) is not an array" in said
    evaluated = run_binary("evaluate", root_dir, "--num_episodes=2", env=environment)
    assert evaluated.returncode == 0, evaluated.stderr
    policy = pipeline.load_policy(tmp_path / "run")
    action = policy.predict({"numbers": np.zeros(2, np.float32), "mission": "go"})
    assert policy.action_space.contains(action)
