"""Computes human-normalized scores and the Atari-5 estimate, and reads published scores.

The numbers are in `data/`, with their sources in each file. Games have the names of the Arcade
Learning Environment, for example "space_invaders".
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

# A number or an array of numbers.
Scores = TypeVar("Scores", float, np.ndarray)

# Aitchison, Sweetser & Hutter, "Atari-5: Distilling the Arcade Learning Environment down to Five
# Games", ICML 2023. These weights are a least-squares fit, without intercept, to the authors'
# dataset.csv (github.com/maitchison/Atari-5): the 44 algorithms there that have all five games.
# The mean error of the estimate over those 44 is 9 %.
ATARI5_WEIGHTS = {
    "battle_zone": 0.3820,
    "double_dunk": 0.0679,
    "name_this_game": 0.3108,
    "phoenix": 0.1241,
    "qbert": 0.0805,
}


class Published(NamedTuple):
    """Published score, which is comparable only with scores of the same protocol.

    Attributes:
      source: The paper, or the file in the peer's repository.
      peer: Who published the score, for example "Dopamine (JAX)".
      algorithm: Name of the algorithm, for example "dqn".
      environment: A gymnasium id or a game, as published: "LunarLander-v2", "pong".
      env_steps: Environment steps of training. In Atari this is a quarter of the frames.
      score: Mean over the runs of a run's mean return.
      decimals: Number of decimals of the score and the spread; at least 1, because the data files
        leave out ".0".
      spread: Standard deviation over the runs. None if it is unknown, or if there is one run.
      num_runs: Number of runs. None if it is unknown.
      protocol: Description of how the score was taken. Equal texts mean equal protocols.
      note: Other known differences. "" if there are none.
    """

    source: str
    peer: str
    algorithm: str
    environment: str
    env_steps: int
    score: float
    decimals: int
    spread: float | None
    num_runs: int | None
    protocol: str
    note: str


def atari_games() -> tuple[str, ...]:
    """Returns the 57 games that have a random and a human score."""
    return tuple(_atari_rows())


def random_score(game: str) -> float:
    """Returns the score of uniformly random actions in one of `atari_games`, in its points."""
    return float(_atari_rows()[game]["random"])


def human_score(game: str) -> float:
    """Returns the score of a professional game tester in one of `atari_games`, in its points."""
    return float(_atari_rows()[game]["human"])


def human_normalized(game: str, score: Scores) -> Scores:
    """Computes (score - random) / (human - random): 0 is a random player, 1 is a human."""
    random = random_score(game)
    return (score - random) / (human_score(game) - random)


def atari5_median(scores: Mapping[str, Scores]) -> Scores:
    """Estimates the median human-normalized score over 57 games, in per cent, from five of them.

    log10(1 + median) is the weighted sum of log10(1 + max(0, normalized score)), all in per cent.

    Args:
      scores: Scores by game, in the game's points. They must include the five games of
        `ATARI5_WEIGHTS`.
    """
    # Without an intercept the base of the logarithm cancels.
    logarithm = sum(
        weight * np.log1p(np.maximum(0.0, 100 * human_normalized(game, scores[game])))
        for game, weight in ATARI5_WEIGHTS.items()
    )
    return np.expm1(logarithm)


def atari_column(column: str) -> dict[str, float]:
    """Returns a column of data/atari_scores.csv, such as "ppo_paper_40M": published scores by game.

    Games without a score are left out.

    Raises:
      KeyError: If there is no such column.
    """
    return {game: float(row[column]) for game, row in _atari_rows().items() if row[column]}


def published(environment: str | None = None, algorithm: str | None = None) -> list[Published]:
    """Returns the published scores of an environment, an algorithm, or both; None matches all.

    Versions of an environment match each other: "LunarLander-v3" also finds "LunarLander-v2". The
    `environment` of a returned score is the published version.
    """
    return [
        score
        for score in _all_published()
        if environment is None or is_same_environment(environment, score.environment)
        if algorithm in (None, score.algorithm)
    ]


def is_same_environment(name: str, other: str) -> bool:
    """Returns True if two names of environments differ in their version at most."""
    first, second = (re.sub(r"-v\d+$", "", x) for x in (name, other))
    return first == second


@functools.cache
def _all_published() -> tuple[Published, ...]:
    scores = [_published(row) for row in _read("published.csv")]
    for column in _read("atari_columns.csv"):
        for game, score in atari_column(column["column"]).items():
            row = {**column, "environment": game, "score": str(score), "spread": ""}
            scores.append(_published(row))
    return tuple(scores)


def _published(row: Mapping[str, str]) -> Published:
    return Published(
        source=row["source"],
        peer=row["peer"],
        algorithm=row["algorithm"],
        environment=row["environment"],
        env_steps=int(row["env_steps"]),
        score=float(row["score"]),
        decimals=max(1, *(len(row[x].partition(".")[2]) for x in ("score", "spread"))),
        spread=float(row["spread"]) if row["spread"] else None,
        num_runs=int(row["num_runs"]) if row["num_runs"] else None,
        protocol=row["protocol"],
        note=row["note"],
    )


@functools.cache
def _atari_rows() -> dict[str, dict[str, str]]:
    return {row["game"]: row for row in _read("atari_scores.csv")}


def _read(name: str) -> list[dict[str, str]]:
    text = (importlib.resources.files(__package__) / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
