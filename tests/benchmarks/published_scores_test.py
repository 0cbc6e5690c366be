"""Tests of normalised scores and of the published numbers in the package."""

import math
import statistics as plain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.benchmarks import published_scores

DOPAMINE = "atari, sticky 0.25, minimal actions, training returns (Dopamine)"
OPENAI = "atari, no sticky, life loss, training returns (OpenAI v4)"
PROTOCOLS = {
    DOPAMINE,
    OPENAI,
    "atari, no sticky, life loss, sampled evaluation (OpenAI v4)",
    "atari, no sticky, life loss, evaluation (Nature 2015)",
    "classic control, deterministic evaluation",
    "classic control, training returns",
}
MILLIONS_OF_FRAMES = (*range(1, 11), 20, 40)

games = st.sampled_from(published_scores.atari_games())


def test_there_are_57_games():
    assert len(published_scores.atari_games()) == len(set(published_scores.atari_games())) == 57


def test_pong_by_hand():
    assert published_scores.random_score("pong") == -20.7
    assert published_scores.human_score("pong") == 14.6
    assert published_scores.human_normalized("pong", 18.9) == pytest.approx(39.6 / 35.3)


@given(games, st.floats(-5, 50))
def test_normalising_is_undone_by_hand(game, normalized):
    random, human = published_scores.random_score(game), published_scores.human_score(game)
    points = random + normalized * (human - random)
    assert published_scores.human_normalized(game, points) == pytest.approx(normalized, abs=1e-6)


def test_arrays_are_normalised_element_by_element():
    normalized = published_scores.human_normalized("breakout", np.array([1.7, 30.5]))
    assert np.allclose(normalized, [0.0, 1.0])


@pytest.mark.parametrize(
    "column, count, median, mean",
    [
        ("dqn_dopamine_sticky_200M", 55, 65.0, 294.3),
        ("a3c_ff_human_starts", 57, 112.7, 849.4),
        ("a3c_lstm_human_starts", 57, 112.3, 1126.0),
        ("a3c_noop", 57, 79.7, 536.0),
        ("dqn_nature2015", 49, 79.3, 211.9),
        ("a2c_ppo_paper_40M", 49, 21.9, 196.0),
        ("acer_ppo_paper_40M", 49, 68.1, 686.8),
        ("ppo_paper_40M", 49, 68.8, 492.9),
    ],
)
def test_columns_have_their_known_medians_and_means(column, count, median, mean):
    """Checks human-normalised per cent against independent numbers; any wrong row would show."""
    column = published_scores.atari_column(column)
    normalized = [
        100 * published_scores.human_normalized(game, score) for game, score in column.items()
    ]
    assert len(normalized) == count
    assert plain.median(normalized) == pytest.approx(median, abs=0.06)
    assert plain.fmean(normalized) == pytest.approx(mean, abs=0.06)


def test_a_column_that_is_not_there():
    with pytest.raises(KeyError):
        published_scores.atari_column("ppo_paper")


@pytest.mark.parametrize(
    "column, estimate",
    [
        ("dqn_dopamine_sticky_200M", 62.0),
        ("a3c_ff_human_starts", 91.6),
        ("a3c_lstm_human_starts", 128.2),
        ("a3c_noop", 71.2),
    ],
)
def test_atari5_estimates_of_published_agents(column, estimate):
    """Checks estimates for agents whose medians over all games are 65.0, 112.7, 112.3 and 79.7."""
    assert published_scores.atari5_median(published_scores.atari_column(column)) == pytest.approx(
        estimate, abs=0.06
    )


def in_points(normalized: dict[str, float]) -> dict[str, float]:
    """Converts human-normalised scores of the five games to points."""
    return {
        game: published_scores.random_score(game)
        + value * (published_scores.human_score(game) - published_scores.random_score(game))
        for game, value in normalized.items()
    }


@given(st.fixed_dictionaries({game: st.floats(-2, 50) for game in published_scores.ATARI5_WEIGHTS}))
def test_the_atari5_estimate_as_the_paper_writes_it(normalized):
    logarithm = sum(
        weight * math.log10(1 + max(0.0, 100 * normalized[game]))
        for game, weight in published_scores.ATARI5_WEIGHTS.items()
    )
    estimate = published_scores.atari5_median(in_points(normalized))
    assert estimate == pytest.approx(10**logarithm - 1, rel=1e-6, abs=1e-6)


def test_the_atari5_estimate_of_several_runs_at_once():
    low = in_points(dict.fromkeys(published_scores.ATARI5_WEIGHTS, 0.0))
    human = in_points(dict.fromkeys(published_scores.ATARI5_WEIGHTS, 1.0))
    both = {game: np.array([low[game], human[game]]) for game in published_scores.ATARI5_WEIGHTS}
    expected = [0.0, 101 ** sum(published_scores.ATARI5_WEIGHTS.values()) - 1]
    assert np.allclose(published_scores.atari5_median(both), expected, atol=1e-6)


def test_published_scores_are_whole():
    for row in published_scores.published():
        assert row.protocol in PROTOCOLS, row
        assert row.source and row.peer and row.algorithm.islower(), row
        assert row.env_steps >= 20_000, row
        if row.protocol.startswith("atari"):
            assert row.environment in published_scores.atari_games(), row
        assert row.spread is None or row.num_runs != 1, row
        assert math.isfinite(row.score), row


def test_no_score_is_published_twice():
    keys = [(*row[1:5], row.protocol) for row in published_scores.published()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("environment", ["LunarLander-v3", "LunarLander-v2"])
def test_versions_are_looked_up_together(environment):
    found = published_scores.published(environment)
    assert {row.environment for row in found} == {"LunarLander-v2"}
    assert {row.algorithm for row in found} == {"a2c", "dqn", "ppo", "trpo"}


def test_environments_and_algorithms_are_told_apart():
    assert {row.algorithm for row in published_scores.published("pong", "dqn")} == {"dqn"}
    assert {row.environment for row in published_scores.published("pong")} == {"pong"}
    assert {row.environment for row in published_scores.published("LunarLanderContinuous-v3")} == {
        "LunarLanderContinuous-v2"
    }
    assert not published_scores.published("NoSuchGame")


@pytest.mark.parametrize(
    "game, algorithm, curve",
    [
        (
            "pong",
            "dqn",
            (-20.2, -18.4, -16.1, -13.7, -11.2, -7.5, -4.6, -1.5, 0.1, 1.1, 14.3, 18.0),
        ),
        ("breakout", "dqn", (1.8, 7.1, 14.2, 18.5, 23.4, 29.7, 35.2, 41.5, 46.5, 51.9, 93.4, 99.8)),
        ("space_invaders", "dqn", (164, 242, 331, 416, 516, 591, 660, 683, 692, 690, 979, 1426)),
        ("qbert", "dqn", (237, 464, 607, 761, 882, 1057, 1115, 1096, 959, 1245, 4027, 8629)),
        ("pong", "rainbow", (*9 * (None,), 12.4, None, 19.6)),
        ("breakout", "rainbow", (*9 * (None,), 43.8, None, 49.7)),
        ("space_invaders", "rainbow", (*9 * (None,), 723, None, 1777)),
        ("qbert", "rainbow", (*9 * (None,), 5154, None, 15382)),
    ],
)
def test_dopamines_curves(game, algorithm, curve):
    """Compares with rounded means that were computed independently from the same files."""
    found = {
        row.env_steps: row.score
        for row in published_scores.published(game, algorithm)
        if row.peer == "Dopamine (JAX)"
    }
    whole = {*range(1, 11), 20, 40} if algorithm == "dqn" else {1, 2, 5, 10, 20, 40}
    assert list(found) == [millions * 250_000 for millions in sorted(whole)]
    for millions, expected in zip(MILLIONS_OF_FRAMES, curve, strict=True):
        if expected is not None:
            digits = 1 if isinstance(expected, float) else 0
            assert found[millions * 250_000] == pytest.approx(expected, abs=0.51 / 10**digits)


@pytest.mark.parametrize("game", published_scores.ATARI5_WEIGHTS)
def test_the_five_games_have_something_to_compare_with(game):
    protocols = {row.protocol for row in published_scores.published(game)}
    assert DOPAMINE in protocols
    # Phoenix was not among the 49 games of the paper.
    assert (OPENAI in protocols) == (game != "phoenix")


@pytest.mark.parametrize(
    "environment, algorithm, env_steps, score",
    [
        ("CartPole-v1", "dqn", 50_000, 500),
        ("CartPole-v1", "ppo", 100_000, 500),
        ("Acrobot-v1", "dqn", 100_000, -76.6),
        ("Acrobot-v1", "ppo", 1_000_000, -73.5),
        ("MountainCar-v0", "dqn", 120_000, -100.8),
        ("MountainCar-v0", "ppo", 1_000_000, -110.4),
        ("LunarLander-v3", "dqn", 100_000, 154),
        ("LunarLander-v3", "ppo", 1_000_000, 242),
        ("LunarLanderContinuous-v3", "ppo", 1_000_000, 271),
        ("LunarLanderContinuous-v3", "sac", 500_000, 260),
        ("Pendulum-v1", "ppo", 100_000, -172),
        ("Pendulum-v1", "sac", 20_000, -157),
    ],
)
def test_the_zoos_scores(environment, algorithm, env_steps, score):
    (row,) = [
        row for row in published_scores.published(environment, algorithm) if row.peer == "RL Zoo"
    ]
    assert (row.env_steps, row.num_runs, row.spread) == (env_steps, 1, None)
    assert row.score == pytest.approx(score, abs=0.5)
    assert row.protocol == "classic control, deterministic evaluation"
    assert ("gSDE" in row.note) == (environment == "Pendulum-v1" and algorithm == "ppo")
    assert ("v3" in row.note) == environment.startswith("LunarLander")
    normalises = algorithm == "ppo" and environment in ("Acrobot-v1", "MountainCar-v0")
    assert ("normalised" in row.note) == normalises
