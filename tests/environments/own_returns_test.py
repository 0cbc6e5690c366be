"""Returns that gymnasium's RecordEpisodeStatistics records below a wrapper of rewards."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit, TransformReward
from host_loops import PLAN, Run
from run_processes import Records, assert_same_end
from scripted_environments import PlainEnv
from tiny_runs import Walk, build_components, read_variables

from pipeline.environments.process_vector import ProcessVector
from pipeline.environments.sync_vector import SyncVector
from pipeline.training.collector_places import InProcess


def scaled(env):
    """Divides rewards by 100, after they were recorded."""
    return TransformReward(RecordEpisodeStatistics(env), lambda reward: float(reward) / 100)


gymnasium.register("ScaledWalk-v0", entry_point=lambda **kwargs: scaled(Walk(**kwargs)))
SCALED = {"gymnasium_environment__name": "ScaledWalk-v0"}


def assert_is_sum(record):
    """Checks that the sum of returns is that of all finished episodes, of 7 or 11 steps."""
    assert record["return_sum"] % 3 == 0
    assert 0 <= record["env_steps"] - record["return_sum"] / 3 < 11 * 4
    assert 7 <= record["return_sum"] / 3 / record["episodes"] <= 11


def test_messages_of_collectors_have_the_returns_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(InProcess, "environments", ())  # as on a cluster
    files = ("runners/distributed",)
    run = Run(tmp_path, PLAN, "dqn", files=files, **SCALED, distributed_runner__message_steps=4)
    run.loop.collect_randomly(280)
    last = run.loop.record()
    assert last["episodes"] > 10
    assert last["return_mean_100"] == pytest.approx(3 * last["episode_length_mean_100"])
    assert_is_sum(last)
    run.close()


@pytest.mark.parametrize("vector_class", [SyncVector, ProcessVector])
def test_a_vector_gives_the_returns_at_the_end_of_episodes(vector_class):
    vector = vector_class([lambda: scaled(PlainEnv()), PlainEnv])
    vector.reset([1, 2])
    outcomes = [vector.step(np.zeros(2, np.int64)) for _ in range(12)]
    vector.close()
    ends = [outcome.is_last[0] for outcome in outcomes]
    assert sum(ends) == 2
    for outcome, is_last in zip(outcomes, ends, strict=True):
        indices = [index for index, _ in outcome.own_returns]
        assert set(indices) <= {0}  # the second environment records nothing
        assert not is_last or dict(outcome.own_returns)[0] == 5.0
        assert outcome.reward[0] in (np.float32(0.01), 0)


class NumpyRewards(PlainEnv):
    """Returns rewards of NumPy's type."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, np.float32(0.1), *rest


@pytest.mark.parametrize("key", ["episode", "statistics"])
def test_an_outer_wrapper_may_end_the_episode(key):
    vector = SyncVector([lambda: TimeLimit(RecordEpisodeStatistics(NumpyRewards(), 1, key), 3)])
    vector.reset([1])
    outcomes = [vector.step(np.zeros(1, np.int64)) for _ in range(7)]
    of_ends = [dict(x.own_returns)[0] for x in outcomes if x.is_last]
    assert of_ends == pytest.approx([0.3, 0.3])
    assert {type(value) for value in of_ends} == {float}  # as after a resume
    vector.close()


class EpisodicLife(gymnasium.Wrapper):
    """Ends an episode where a life is lost, after three steps, and goes on with a step at reset."""

    is_over = True

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.is_over = terminated or truncated
        return (
            observation,
            reward,
            terminated or self.env.get_wrapper_attr("time") == 3,
            truncated,
            info,
        )

    def reset(self, **kwargs):
        if self.is_over:
            return self.env.reset(**kwargs)
        observation, *_, info = self.env.step(0)
        return observation, info


def test_a_wrapper_may_divide_the_episodes_that_are_recorded():
    vector = SyncVector([lambda: EpisodicLife(RecordEpisodeStatistics(PlainEnv()))])
    vector.reset([1])
    outcomes = [vector.step(np.zeros(1, np.int64)) for _ in range(12)]
    vector.close()
    of_ends = [dict(x.own_returns)[0] for x in outcomes if x.is_last]
    assert of_ends == [3.0, 2.0, 3.0, 2.0]  # an episode below has 5 steps


class TwoEpisodes(gymnasium.Wrapper):
    """Makes one episode of two."""

    def reset(self, **kwargs):
        self.is_second = False
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated and not self.is_second:
            self.is_second, terminated = True, False
            observation, info = self.env.reset()
        return observation, reward, terminated, truncated, info


class Endless(gymnasium.Wrapper):
    """Goes on after the end of an episode, without a reset."""

    def step(self, action):
        observation, reward, _, *rest = self.env.step(action)
        return observation, reward, False, *rest


@pytest.mark.parametrize(("wrapper", "limit"), [(TwoEpisodes, 10), (TwoEpisodes, 5), (Endless, 10)])
def test_a_wrapper_may_join_the_episodes_that_are_recorded(wrapper, limit):
    vector = SyncVector([lambda: TimeLimit(wrapper(scaled(NumpyRewards())), limit)])
    vector.reset([1])
    outcomes = [vector.step(np.zeros(1, np.int64)) for _ in range(24)]
    vector.close()
    of_ends = [dict(x.own_returns)[0] for x in outcomes if x.is_last]
    assert of_ends == pytest.approx([0.1 * limit] * (24 // (limit + 1)))


def test_truncated_episodes_of_an_evaluation_count():
    returns = []
    for name in ("ScaledWalk-v0", "tiny_runs:Walk-v0"):  # with the wrapper and without it
        parts = build_components(
            "ppo", gymnasium_environment__name=name, Evaluator__max_episode_steps=9
        )
        returns.append(parts.evaluator.run(PLAN.num_final_episodes, 0)["returns"])
        parts.close()
    assert returns[0] == returns[1]
    assert set(returns[0]) == {21.0, 27.0}


def test_logs_and_evaluations_have_the_returns_of_the_environment(tmp_path):
    copy = tmp_path / "run"
    whole = Run(tmp_path / "twin", PLAN._replace(checkpoint_interval=70), "nstep_q", **SCALED)
    whole.copy_at(150, copy)
    whole.train()
    whole.close()
    assert 140 <= Records(copy).env_steps < 160
    agent = read_variables(Records(copy).newest / "agent")
    (summed,) = (count for name, count in agent.items() if "summed" in name)
    assert 0 < summed < 5  # in the middle of an update, which takes 5 rollouts
    resumed = Run(copy, PLAN, "nstep_q", **SCALED)
    resumed.train()
    resumed.close()
    twin = Records(tmp_path / "twin")
    assert_same_end(Records(copy), twin)
    assert set(twin.result["evaluation"]["returns"]) == {21.0, 33.0}  # 3 for each of 7 or 11 steps
    last = twin.metrics[-1]
    assert 21 < last["return_mean_100"] < 33
    assert last["return_mean_100"] == pytest.approx(3 * last["episode_length_mean_100"])
    assert_is_sum(last)
