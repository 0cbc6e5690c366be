import dataclasses
import importlib.resources
import re

import numpy as np
import pytest
from benchmark_records import make_games, make_record

from pipeline import configuration
from pipeline.benchmarks import figures, published_scores, report_tables, results
from pipeline.benchmarks.results import Group


def group_of(records) -> Group:
    (group,) = results.groups(records, {})
    return group


def curves_of(records, environment="CartPole-v1") -> figures.Figure:
    drawn = figures.learning_curves(group_of(records), environment)
    assert drawn is not None
    return drawn


SHIPPED = [name for name, _ in configuration.list_configs() if name.startswith("agents/")]
AGENTS = [*(name.removeprefix("agents/") for name in SHIPPED), "dqn3"]


def series(drawing: str) -> list[tuple[int, float]]:
    """Returns the number and line width of each series that is drawn as a line."""
    pattern = r"stroke: var\(--series-(\d)\);[^\"]*stroke-width: ([\d.]+)"
    return [(int(number), float(width)) for number, width in re.findall(pattern, drawing)]


def test_every_seed_is_a_thin_line_and_their_middle_a_thick_one():
    agents = [make_record(name, seed=seed) for name in ("dqn", "sac") for seed in (1, 2, 3)]
    drawn = curves_of(agents)
    for place in (0, 2):
        widths = [width for number, width in series(drawn.svg) if number == place]
        assert widths.count(0.6) == 3
        assert widths.count(1.8) >= 1
    assert "DQN, IQM of 3 runs" in drawn.svg
    assert "RL Zoo DQN, 500.0 at 50,000" in drawn.description


def test_every_agent_has_a_colour_of_its_own():
    assert len({n for name in AGENTS for n, _ in series(curves_of([make_record(name)]).svg)}) == 10


def test_agents_keep_their_colours_whoever_else_is_there():
    assert {number for number, _ in series(curves_of([make_record("ppo")]).svg)} == {1}
    both = curves_of([make_record("ppo"), make_record("a2c")])
    assert {number for number, _ in series(both.svg)} == {1, 3}
    assert series(curves_of([make_record("mine")]).svg)


def test_agents_with_names_of_their_own_have_different_colours():
    names = ["dqn", "my_ppo", "double_dqn", "dqn_double", "ddqn"]
    group = group_of([make_record(name) for name in names])
    for draw in (figures.learning_curves, figures.environment_profiles):
        drawn = draw(group, "CartPole-v1")
        assert drawn is not None
        assert len({number for number, _ in series(drawn.svg)}) == len(names)


def test_partial_data_is_labelled():
    assert "DQN, 1 of 4 runs" in curves_of([make_record(seed=2, num_seeds=4)]).svg


def test_budgets_far_apart_need_a_logarithmic_axis():
    for budget, is_logarithmic in ((200_000, False), (1_000_000, True)):
        drawn = curves_of([make_record("dqn"), make_record("ppo", num_env_steps=budget)])
        assert ("(logarithmic)" in drawn.svg) is is_logarithmic


def test_published_scores_are_drawn_under_the_same_protocol_only():
    drawn = curves_of([make_record(protocol="by ear")])
    assert "RL Zoo" not in drawn.svg + drawn.description


def test_dopamines_curve_is_drawn_as_far_as_ours_goes():
    drawn = curves_of(make_games("dqn", {"pong": 1.0}), "pong")
    assert "Dopamine (JAX) DQN, 1.12 at 2,500,000" in drawn.description
    assert "TensorFlow" not in drawn.description


@pytest.mark.parametrize(
    ("records", "label"),
    [
        (
            make_games("dqn", {"pong": 1.0}, score="iteration", iterations=[[2_500_000, 2.0]]),
            "DQN, mean of an iteration",
        ),
        ([make_record(evaluation_returns=[7.0])], "DQN, final evaluation"),
    ],
)
def test_scores_that_are_no_points_of_the_curve_are_drawn_too(records, label):
    assert label in curves_of(records, records[0]["environment"]).svg
    training = make_games("dqn", {"pong": 1.0})
    assert label not in curves_of(training, "pong").svg


def test_no_curve_no_figure():
    group = group_of([make_record(curve=[[5, 1.0]], evaluation_returns=[])])
    assert figures.learning_curves(group, "CartPole-v1") is None
    assert figures.environment_profiles(group, "CartPole-v1") is None
    assert figures.normalized_curves(group_of(make_games("dqn", {"pong": 1.0}))) is None
    assert figures.profiles(group_of(make_games("dqn", {"pong": 1.0}, curve=[]))) is None


def test_profile_tells_how_many_runs_beat_a_human():
    human = published_scores.human_score("pong")
    ends = [human - 1, human + 1, human + 2, human - 2]
    records = [
        make_games("dqn", {"pong": 0.0}, [seed], curve=[[1, 0.0], [2_500_000, end]])[0]
        for seed, end in enumerate(ends, start=1)
    ]
    drawn = figures.profiles(group_of(records))
    assert drawn is not None
    assert drawn.description == "DQN, 4 runs: 50% above 1 after 2,500,000 environment steps."


def test_games_are_compared_after_the_steps_that_all_of_them_have():
    curve = [[1, 0.0], [500_000, 1.0], [1_000_000, 2.0]]
    human = [[1, 0.0], [500_000, published_scores.human_score("breakout") + 1]]
    records = make_games("dqn", {"pong": 0.0}, curve=curve, num_env_steps=1_000_000)
    records += make_games("dqn", {"breakout": 0.0}, curve=human, num_env_steps=500_000)
    group = group_of([record | {"budgets": [500_000, 1_000_000]} for record in records])
    drawn = figures.profiles(group)
    assert drawn is not None and "after 500,000 environment steps" in drawn.description
    table = report_tables.aggregates(group)
    assert "500,000" in table and "1,000,000" not in table


def test_profiles_of_an_environment_are_of_its_own_scores():
    of_dqn = [make_record(seed=seed, evaluation_returns=[x]) for seed, x in enumerate((1, 5, 3), 1)]
    of_ppo = [make_record("ppo", evaluation_returns=[-7.0])]
    drawn = figures.environment_profiles(group_of([*of_dqn, *of_ppo]), "CartPole-v1")
    assert drawn is not None
    assert drawn.description == "DQN, 3 runs: median 3.0; PPO, 1 run: median -7.0."


def test_normalized_curve_ends_at_the_middle_of_all_runs():
    ends = {"pong": [1.0, 3.0], "breakout": [10.0, 40.0]}
    records = [
        make_games("dqn", {game: 0.0}, [seed], curve=[[1, 0.0], [2_500_000, end]])[0]
        for game, of in ends.items()
        for seed, end in enumerate(of, start=1)
    ]
    drawn = figures.normalized_curves(group_of(records))
    assert drawn is not None
    normalized = published_scores.human_normalized
    runs = sorted(normalized(game, end) for game, of in ends.items() for end in of)
    assert f"{np.mean(runs[1:3]):.2f} at 2,500,000 steps" in drawn.description


def test_colours_are_the_pages_and_ids_differ():
    drawings = [curves_of([make_record(name)]).svg for name in ("dqn", "ppo")]
    for drawing in drawings:
        assert not re.search(r"(stroke|fill): #", drawing)
        assert "var(--ink)" in drawing and "var(--faint)" in drawing
    games = make_games("dqn", {"pong": 1.0, "breakout": 2.0})
    ids = [
        set(re.findall(r'\bid="([^"]+)"', curves_of(games, x).svg)) for x in ("pong", "breakout")
    ]
    assert ids[0] and not ids[0] & ids[1]


@pytest.mark.parametrize("paper", ["#ffffff", "#14171b"])
def test_lines_can_be_told_from_the_paper(paper):
    page = (importlib.resources.files("pipeline.benchmarks") / "page.html").read_text()
    light, dark = re.findall(r"--paper: (#\w{6});.*?(?=--paper|\* \{)", page, re.DOTALL)
    assert {light, dark} >= {paper}
    colours = re.findall(r"--series-\d: (#\w{6})", page)
    half = colours[: len(AGENTS)] if paper == light else colours[len(AGENTS) :]
    assert len(set(half)) == len(AGENTS) == len(colours) // 2
    for colour in half:
        high, low = sorted((luminance(colour), luminance(paper)), reverse=True)
        # WCAG 2.1, 1.4.11, requires a contrast of 3 to 1 for graphics.
        assert (high + 0.05) / (low + 0.05) >= 3


def luminance(colour: str) -> float:
    channels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_each_agent_is_compared_after_its_own_steps():
    records = make_games("dqn", {"pong": 1.0})
    records += make_games("ppo", {"pong": 1.0}, num_env_steps=1_000_000)
    group = group_of(records)
    assert [group.common_steps(x) for x in ("dqn", "ppo")] == [2_500_000, 1_000_000]


def test_games_that_have_not_begun_are_counted_for_their_agent_only():
    group = group_of(make_games("dqn (small)", {"pong": 1.0}))
    names = ("dqn_small_-qbert", "dqn_small_-CartPole-v1", "dqn_small_-big-qbert", "dqn-qbert")
    assert dataclasses.replace(group, not_begun=names).num_games("dqn (small)") == 2


def test_a_middle_ends_where_the_shortest_curve_does():
    curves = [[[1, 0.0], [1000, 9.0]], [[1, 0.0], [400, 1.0]]]
    drawn = curves_of([make_record(seed=n, curve=curve) for n, curve in enumerate(curves, 1)])
    at_400 = (9.0 * 399 / 999 + 1.0) / 2
    assert f"ends at {at_400:.2f}" in drawn.description


def test_the_best_of_several_comparable_scores_is_the_one_shown(monkeypatch):
    group = group_of([make_record()])
    score = group.comparable(group.pairs[0])[0]
    both = [score._replace(peer="A", score=1.0), score._replace(peer="B", score=2.0)]
    monkeypatch.setattr(published_scores, "published", lambda environment: both)
    assert "| 2.0" in report_tables.overview(group)
