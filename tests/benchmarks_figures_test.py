import re

import numpy as np
import pytest
from benchmark_records import make_games, make_record

from pipeline.benchmarks import figures, results, scores, style, svg
from pipeline.benchmarks.results import Group


def group_of(records) -> Group:
    (group,) = results.groups(records)
    return group


def strokes(drawing: str) -> list[tuple[str, float]]:
    """Colour and width of everything that is drawn with a line."""
    pattern = r"stroke: (var\(--[\w-]+\));[^\"]*stroke-width: ([\d.]+)"
    return [(colour, float(width)) for colour, width in re.findall(pattern, drawing)]


def test_every_seed_is_a_thin_line_and_their_middle_a_thick_one():
    records = [make_record(seed=seed) for seed in (1, 2, 3)]
    records += [make_record("sac", seed=seed) for seed in (1, 2, 3)]
    drawn = figures.learning_curves(group_of(records), "CartPole-v1")
    assert drawn is not None
    for colour in (style.SERIES[0], style.SERIES[2]):
        widths = [width for stroke, width in strokes(drawn.svg) if stroke == colour]
        assert widths.count(0.6) == 3
        assert widths.count(1.8) >= 1
    assert "DQN, IQM of 3 runs" in drawn.svg
    assert "environment steps</text>" in drawn.svg
    assert "RL Zoo DQN, 500.0 at 50,000" in drawn.description


def test_agents_keep_their_colours_whoever_else_is_there():
    alone = figures.learning_curves(group_of([make_record("ppo")]), "CartPole-v1")
    assert alone is not None
    assert {c for c, _ in strokes(alone.svg)} & set(style.SERIES) == {style.SERIES[1]}
    strange = figures.learning_curves(
        group_of([make_record("ppo"), make_record("a2c")]), "CartPole-v1"
    )
    assert strange is not None
    assert {c for c, _ in strokes(strange.svg)} & set(style.SERIES) == set(style.SERIES[1:4:2])


def test_unusual_agents_take_colours_that_nobody_has():
    agents = [make_record(name) for name in ("dqn", "dqn3", "a3c")]
    drawn = figures.learning_curves(group_of(agents), "CartPole-v1")
    assert drawn is not None
    assert len({c for c, _ in strokes(drawn.svg)} & set(style.SERIES)) == 3


def test_partial_data_is_labelled():
    drawn = figures.learning_curves(group_of([make_record(seed=2, num_seeds=4)]), "CartPole-v1")
    assert drawn is not None
    assert "DQN, 1 of 4 runs" in drawn.svg


def test_budgets_far_apart_need_a_logarithmic_axis():
    near = [make_record("dqn"), make_record("ppo", num_env_steps=200_000)]
    far = [make_record("dqn"), make_record("ppo", num_env_steps=1_000_000)]
    for records, is_logarithmic in ((near, False), (far, True)):
        drawn = figures.learning_curves(group_of(records), "CartPole-v1")
        assert drawn is not None
        assert ("(logarithmic)" in drawn.svg) is is_logarithmic


def test_published_scores_are_drawn_under_the_same_protocol_only():
    drawn = figures.learning_curves(group_of([make_record(protocol="by ear")]), "CartPole-v1")
    assert drawn is not None
    assert "RL Zoo" not in drawn.svg + drawn.description


def test_dopamines_curve_is_drawn_as_far_as_ours_goes():
    drawn = figures.learning_curves(group_of(make_games("dqn", {"pong": 1.0})), "pong")
    assert drawn is not None
    assert "Dopamine (JAX) DQN, 1.1 at 2,500,000" in drawn.description
    assert "TensorFlow" not in drawn.description


@pytest.mark.parametrize(
    ("records", "label", "points"),
    [
        (
            make_games(
                "dqn", {"pong": 1.0}, score="iteration",
                iterations=[[250_000, -3.0], [2_500_000, 2.0]],
            ),
            "DQN, mean of an iteration",
            [[250_000, -3.0], [2_500_000, 2.0]],
        ),
        ([make_record(evaluation_returns=[7.0])], "DQN, final evaluation", [[50_000, 7.0]]),
        (make_games("dqn", {"pong": 1.0}), None, []),
    ],
)  # fmt: skip
def test_scores_that_are_no_points_of_the_curve_are_diamonds(records, label, points):
    (pair,) = group_of(records).pairs
    with svg.canvas() as (_, axes):
        figures._draw_scores(axes, pair, "red")
        drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert drawn == ({label: points} if label else {})
    figure = figures.learning_curves(group_of(records), pair.environment)
    assert figure is not None and (label is None or label in figure.svg)


def test_no_curve_no_figure():
    group = group_of([make_record(curve=[[5, 1.0]])])
    assert figures.learning_curves(group, "CartPole-v1") is None
    one_game = group_of(make_games("dqn", {"pong": 1.0}))
    assert figures.normalised_curves(one_game) is None
    assert figures.profiles(group_of(make_games("dqn", {"pong": 1.0}, curve=[]))) is None


def test_profile_tells_how_many_runs_beat_a_human():
    human = scores.human_score("pong")
    ends = [human - 1, human + 1, human + 2, human - 2]
    records = [
        make_games("dqn", {"pong": 0.0}, [seed], curve=[[1, 0.0], [2_500_000, end]])[0]
        for seed, end in enumerate(ends, start=1)
    ]
    drawn = figures.profiles(group_of(records))
    assert drawn is not None
    assert drawn.description == "DQN, 4 runs: 50% above a human's score."


def test_profiles_of_an_environment_are_of_its_own_scores():
    of_dqn = [make_record(seed=seed, evaluation_returns=[x]) for seed, x in enumerate((1, 5, 3), 1)]
    of_ppo = [make_record("ppo", evaluation_returns=[-7.0])]
    drawn = figures.environment_profiles(group_of([*of_dqn, *of_ppo]), "CartPole-v1")
    assert drawn is not None
    assert drawn.title == "CartPole-v1: performance profiles"
    assert drawn.description == "DQN, 3 runs: median 3.0; PPO, 1 run: median -7.0."
    unscored = group_of([make_record(evaluation_returns=[])])
    assert figures.environment_profiles(unscored, "CartPole-v1") is None


def test_normalised_curve_ends_at_the_middle_of_all_runs():
    ends = {"pong": [1.0, 3.0], "breakout": [10.0, 40.0]}
    records = [
        make_games("dqn", {game: 0.0}, [seed], curve=[[1, 0.0], [2_500_000, end]])[0]
        for game, of in ends.items()
        for seed, end in enumerate(of, start=1)
    ]
    drawn = figures.normalised_curves(group_of(records))
    assert drawn is not None
    runs = sorted(scores.human_normalized(game, end) for game, of in ends.items() for end in of)
    assert f"ends at {np.mean(runs[1:3]):.2f}" in drawn.description


def test_ids_of_two_drawings_differ():
    drawings = []
    for name in ("a", "b"):
        with svg.canvas() as (figure, axes):
            axes.plot([1, 2], [1, 2], color=svg.SERIES[0], label="x")
            drawings.append(svg.inline(figure, name))
    first, second = (set(re.findall(r'\bid="([^"]+)"', drawing)) for drawing in drawings)
    assert first and not first & second


def test_colours_are_the_pages():
    with svg.canvas() as (figure, axes):
        axes.plot([1, 2], [1, 2], color=svg.SERIES[5], label="#000001x")
        drawing = svg.inline(figure, "a")
    assert not re.search(r"(stroke|fill): #", drawing)
    assert style.SERIES[5] in drawing and style.INK in drawing and style.FAINT in drawing


@pytest.mark.parametrize("on_paper", ["#ffffff", "#14171b"])
def test_lines_can_be_told_from_the_paper(on_paper):
    is_light = on_paper == "#ffffff"
    colours = re.findall(r"--series-\d: (#\w{6})", style.STYLE)
    half = len(style.SERIES)
    assert len(colours) == 2 * half and on_paper in style.STYLE
    for colour in colours[:half] if is_light else colours[half:]:
        light, dark = sorted((luminance(colour), luminance(on_paper)), reverse=True)
        # WCAG 2.1, 1.4.11: graphics need 3 to 1.
        assert (light + 0.05) / (dark + 0.05) >= 3


def luminance(colour: str) -> float:
    channels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
