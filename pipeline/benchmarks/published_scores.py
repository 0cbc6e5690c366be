"""What a score is worth: human-normalised scores, the Atari-5 estimate, and what others published.

The numbers are in `data/`, with their sources in each file. A game is named as the Arcade Learning
Environment names it, "space_invaders".
"""

from __future__ import annotations

import csv
import difflib
import functools
import importlib.resources
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from pipeline.utils.errors import UserError

# A number, or an array of them.
Scores = TypeVar("Scores", float, np.ndarray)

# Aitchison, Sweetser & Hutter, "Atari-5: Distilling the Arcade Learning Environment down to Five
# Games", ICML 2023. These weights are a least-squares fit, without intercept, to the authors'
# dataset.csv (github.com/maitchison/Atari-5): the 44 algorithms there that have all five games.
# The estimate is off by 9 % on average over those 44.
ATARI5_WEIGHTS = {
    "battle_zone": 0.3820,
    "double_dunk": 0.0679,
    "name_this_game": 0.3108,
    "phoenix": 0.1241,
    "qbert": 0.0805,
}


class Published(NamedTuple):
    """A score that somebody published. Compare it with scores of the same protocol only.

    Attributes:
        source: the paper, or the file in the peer's repository.
        peer: whose it is, "Dopamine (JAX)".
        algorithm: "dqn".
        environment: a gymnasium id or a game, as published: "LunarLander-v2", "pong".
        env_steps: environment steps of training; in Atari a quarter of the frames.
        score: mean over the runs of a run's mean return.
        spread: standard deviation over the runs, None if unknown or of one run.
        num_runs: None if unknown.
        protocol: how the score came about; equal text, equal protocol.
        note: what else differs, "" if nothing is known to.
    """

    source: str
    peer: str
    algorithm: str
    environment: str
    env_steps: int
    score: float
    spread: float | None
    num_runs: int | None
    protocol: str
    note: str


def atari_games() -> tuple[str, ...]:
    """The 57 games that have a random and a human score."""
    return tuple(_atari_rows())


def random_score(game: str) -> float:
    """What uniformly random actions score, in the game's points.

    Raises:
        UserError: `game` is not one of `atari_games`.
    """
    return float(_atari_row(game)["random"])


def human_score(game: str) -> float:
    """What a professional game tester scores, in the game's points.

    Raises:
        UserError: `game` is not one of `atari_games`.
    """
    return float(_atari_row(game)["human"])


def human_normalized(game: str, score: Scores) -> Scores:
    """0 for a random player's score, 1 for a human's: (score - random) / (human - random).

    Raises:
        UserError: `game` is not one of `atari_games`.
    """
    random = random_score(game)
    return (score - random) / (human_score(game) - random)


def atari5_median(scores: Mapping[str, Scores]) -> Scores:
    """Estimates the median human-normalised score over 57 games, in per cent, from five of them.

    log10(1 + median) is the weighted sum of log10(1 + max(0, normalised score)), all in per cent.

    Args:
        scores: of at least the five games of `ATARI5_WEIGHTS`, in the games' points.

    Raises:
        UserError: one of the five is missing.
    """
    missing = sorted(ATARI5_WEIGHTS.keys() - scores.keys())
    if missing:
        raise UserError(
            f"the Atari-5 estimate needs scores of {', '.join(missing)} too; run the suite atari5"
        )
    # Without an intercept the base of the logarithm cancels.
    logarithm = sum(
        weight * np.log1p(np.maximum(0.0, 100 * human_normalized(game, scores[game])))
        for game, weight in ATARI5_WEIGHTS.items()
    )
    return np.expm1(logarithm)


def atari_column(column: str) -> dict[str, float]:
    """A column of data/atari_scores.csv, "ppo_paper_40M": published scores by game.

    Games without a score are left out.

    Raises:
        KeyError: there is no such column.
    """
    return {game: float(row[column]) for game, row in _atari_rows().items() if row[column]}


def published(environment: str | None = None, algorithm: str | None = None) -> list[Published]:
    """The published scores of an environment and an algorithm, or of all.

    Versions of an environment are looked up together, "LunarLander-v3" finds "LunarLander-v2": the
    `environment` of what is found tells.
    """
    return [
        score
        for score in _all_published()
        if environment is None
        or _without_version(environment) == _without_version(score.environment)
        if algorithm in (None, score.algorithm)
    ]


def _without_version(environment: str) -> str:
    return re.sub(r"-v\d+$", "", environment)


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
        spread=float(row["spread"]) if row["spread"] else None,
        num_runs=int(row["num_runs"]) if row["num_runs"] else None,
        protocol=row["protocol"],
        note=row["note"],
    )


def _atari_row(game: str) -> dict[str, str]:
    rows = _atari_rows()
    if game not in rows:
        near = difflib.get_close_matches(game.lower(), rows, n=3) or sorted(rows)
        raise UserError(f"no human score for the game {game!r}; there is one for {', '.join(near)}")
    return rows[game]


@functools.cache
def _atari_rows() -> dict[str, dict[str, str]]:
    return {row["game"]: row for row in _read("atari_scores.csv")}


def _read(name: str) -> list[dict[str, str]]:
    text = (importlib.resources.files(__package__) / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
