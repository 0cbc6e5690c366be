"""Sides, works and numbers as the tables of `throughput` name them."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.benchmarks.wording import agent, count

OURS, OURS_IN_BFLOAT16 = "ours", "ours:bfloat16"
OURS_ASYNCHRONOUS, OURS_IN_TURNS = "ours:asynchronous", "ours:in_turns"
SB3, TF_AGENTS = "sb3", "tf_agents"
_TITLES = {
    OURS: "ours, float32",
    OURS_IN_BFLOAT16: "ours, bfloat16",
    OURS_ASYNCHRONOUS: "ours, asynchronous actors",
    OURS_IN_TURNS: "ours, actors in turns",
    SB3: "Stable-Baselines3",
    TF_AGENTS: "TF-Agents' examples",
    "pong": "Pong",
    "cartpole": "CartPole",
    "pendulum": "Pendulum",
}
_NAME = re.compile(r"(?P<algorithm>\w+)_(?P<environment>[a-z]+)_(?P<num_envs>\d+)")


class NamedTraining(NamedTuple):
    """What the name of a work that is a training says."""

    algorithm: str
    environment: str
    num_envs: int


def parse(work: str) -> NamedTraining | None:
    """Algorithm, environment and number of environments of dqn_pong_8; None for other names."""
    match = _NAME.fullmatch(work)
    if not match:
        return None
    return NamedTraining(match["algorithm"], match["environment"], int(match["num_envs"]))


def title(name: str) -> str:
    """Of a side or an environment; unknown ones as they are."""
    return _TITLES.get(name, name)


def work_title(work: str) -> str:
    """ "DQN Pong, 8 environments" for dqn_pong_8; others as they are."""
    training = parse(work)
    if not training:
        return work
    words = f"{agent(training.algorithm)} {title(training.environment)}"
    return f"{words}, {count(training.num_envs, 'environment')}"


def number(value: float | None) -> str:
    """To three digits, from a hundred on to a whole; None is ""."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
