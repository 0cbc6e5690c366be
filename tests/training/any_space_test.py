"""Runs with every kind of space: they train, resume bit for bit, and are loaded as policies."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from host_loops import PLAN, Run
from run_processes import Records, assert_same_end
from scripted_environments import SamplingEnv

from pipeline.utils.shutdown import Stopped

NUM_ACTIONS = 12
NESTED = Dict(
    picture=Box(0, 255, (6, 6, 3), np.uint8),
    place=Tuple([Discrete(3, start=-1), MultiDiscrete([2, 3])]),
    flags=MultiBinary(2),
    clock=Box(-np.inf, np.inf, (), np.float64),
)


class MaskedGame(gymnasium.Env):
    """Allows two actions of twelve in each step, and raises if another is taken.

    The lower one of the two earns a reward of 1.
    """

    observation_space = Dict(
        observation=Box(0, 1, (2,), np.float32), action_mask=MultiBinary(NUM_ACTIONS)
    )
    action_space = Discrete(NUM_ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def _observe(self):
        self.mask = np.zeros(NUM_ACTIONS, np.int8)
        if self.time < 10:
            self.mask[self.np_random.choice(NUM_ACTIONS, 2, replace=False)] = 1
        numbers = self.np_random.uniform(0, 1, 2).astype(np.float32)
        return {"observation": numbers, "action_mask": self.mask}

    def step(self, action):
        assert self.mask[action], f"action {action} is forbidden by {self.mask}"
        reward = float(action == np.argmax(self.mask))
        self.time += 1
        return self._observe(), reward, self.time == 10, False, {}


class NestedEnv(SamplingEnv):
    def __init__(self, actions="one"):
        action_spaces = {
            "one": Discrete(3),
            "several": MultiDiscrete([2, 3]),
            "bits": MultiBinary(2),
            "integers": Box(-2, 2, (2,), np.int32),
            "continuous": Box(-5, 5, (2,), np.float32),
        }
        super().__init__(NESTED, action_spaces[actions])


gymnasium.register("MaskedGame-v0", entry_point=f"{__name__}:MaskedGame")
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


@pytest.mark.parametrize("algorithm", FAST)
def test_a_game_that_forbids_most_actions_is_learnt(tmp_path, algorithm):
    plan = PLAN._replace(num_env_steps=3_000, eval_interval=0, num_final_episodes=30)
    run = Run(tmp_path / "run", plan, algorithm, **of("MaskedGame"), **FAST[algorithm])
    result = run.train()
    run.close()
    assert result["evaluation"]["return_mean"] > 8  # 5 by chance


@pytest.mark.parametrize(
    ("algorithm", "actions"),
    [
        ("dqn", "one"),
        ("sac", "continuous"),
        ("ppo", "several"),
    ],
)
def test_a_run_with_nested_observations_ends_as_its_twin(tmp_path, algorithm, actions):
    overrides = of("Nested", actions=actions)
    runs = {}
    for name in ("twin", "run"):
        run = Run(tmp_path / name, PLAN, algorithm, **overrides)
        if name == "run":
            run.stop_at(140)
            with pytest.raises(Stopped):
                run.train()
            run.close()
            run = Run(tmp_path / name, PLAN, algorithm, **overrides)
        run.folder.write_json("result.json", run.train())
        run.close()
        runs[name] = Records(run.folder.path)
    assert_same_end(runs["run"], runs["twin"])
    assert set(runs["run"].result["evaluation"]["returns"]) == {
        5.0
    }  # every action was one of the space
