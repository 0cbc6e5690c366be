"""The drawings of a report: learning curves and performance profiles, as SVG inside a page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from pipeline.benchmarks import results, scores, statistics, svg, wording
from pipeline.benchmarks.document import Figure
from pipeline.benchmarks.results import SAME_BUDGET, Group, Pair
from pipeline.benchmarks.scores import Published
from pipeline.benchmarks.statistics import Band

_POINTS = 101
_SHORT = FuncFormatter(lambda value, _: wording.short(value))
# Budgets further apart than this share a panel only on a logarithmic axis.
_WIDEST_LINEAR = 4
_PEER_MARKERS = "os^vP*X"
_NO_POINTS_OF_CURVES = {"evaluation": "final evaluation", "iteration": "mean of an iteration"}

# The usual agents keep their colours in every report.
_FIXED = ("dqn", "ppo", "sac", "a2c", "trpo", "nstep_q")


def learning_curves(group: Group, environment: str) -> Figure | None:
    """Training returns of every run in an environment, and what others published.

    A thin line a run; a thick one for their interquartile mean, with its 95 % band. Scores that are
    no points of these lines, of final evaluations or iterations, are diamonds. Others' scores are
    hollow, and only of this protocol and our agents.

    Returns:
        None if no run has a curve.
    """
    pairs = [pair for pair in group.of(environment) if pair.curves]
    if not pairs:
        return None
    with svg.canvas() as (figure, axes):
        drawn = [_draw_pair(axes, pair, _colour(group, pair.algorithm)) for pair in pairs]
        drawn += [text for pair in pairs for text in _draw_published(axes, group, pair)]
        _steps_axis(axes, pairs)
        axes.set_ylabel("return")
        axes.yaxis.set_major_formatter(_SHORT)
        drawing = svg.inline(figure, f"curves {environment} {_key(group)}")
    title = f"{environment}: return while training"
    return Figure(title, f"Return over environment steps: {'; '.join(drawn)}.", drawing)


def normalised_curves(group: Group) -> Figure | None:
    """Human-normalised returns over all games of a group, while training: one line an agent.

    Returns:
        None if no agent has a curve in at least two games.
    """
    per_agent = {
        algorithm: [pair for pair in group.of(algorithm=algorithm) if pair.curves]
        for algorithm in group.algorithms
    }
    per_agent = {algorithm: pairs for algorithm, pairs in per_agent.items() if len(pairs) > 1}
    if not per_agent:
        return None
    drawn = []
    with svg.canvas() as (figure, axes):
        for algorithm, pairs in per_agent.items():
            steps = _common_steps([curve for pair in pairs for curve in pair.curves])
            tasks = [
                scores.human_normalized(pair.environment, _at(pair.curves, steps)) for pair in pairs
            ]
            band = statistics.curve_estimate(tasks)
            label = f"{wording.agent(algorithm)}, IQM over {len(pairs)} games"
            _draw_band(axes, steps, band, _colour(group, algorithm), label)
            drawn.append(f"{label}, ends at {band.point[-1]:.2f}")
        _steps_axis(axes, [pair for pairs in per_agent.values() for pair in pairs])
        axes.set_ylabel("human-normalised return")
        drawing = svg.inline(figure, f"normalised {_key(group)}")
    title = "All games: human-normalised return while training"
    return Figure(title, f"Return over environment steps: {'; '.join(drawn)}.", drawing)


def profiles(group: Group) -> Figure | None:
    """Performance profiles over all games: which fraction of an agent's runs scores above each τ.

    Returns:
        None if no run has a score.
    """
    tasks = {
        algorithm: [
            scores.human_normalized(pair.environment, pair.scores)
            for pair in group.of(algorithm=algorithm)
            if len(pair.scores)
        ]
        for algorithm in group.algorithms
    }
    tasks = {algorithm: of for algorithm, of in tasks.items() if of}
    if not tasks:
        return None
    highest = max(float(np.max(one)) for of in tasks.values() for one in of)
    above = [statistics.performance_profile(of, [1.0])[0] for of in tasks.values()]
    drawing, labels = _draw_profiles(
        group, tasks, np.linspace(0, max(1.0, 1.05 * highest), _POINTS), "human-normalised score"
    )
    drawn = [
        f"{label}: {x:.0%} above a human's score" for label, x in zip(labels, above, strict=True)
    ]
    return Figure("Performance profiles over all games", f"{'; '.join(drawn)}.", drawing)


def environment_profiles(group: Group, environment: str) -> Figure | None:
    """Performance profiles of the agents in one environment, by its own scores.

    Returns:
        None if no run has a score.
    """
    tasks = {pair.algorithm: [pair.scores] for pair in group.of(environment) if len(pair.scores)}
    if not tasks:
        return None
    known = np.concatenate([of[0] for of in tasks.values()])
    margin = 0.05 * (known.max() - known.min()) or 1.0
    thresholds = np.linspace(known.min() - margin, known.max() + margin, _POINTS)
    drawing, labels = _draw_profiles(group, tasks, thresholds, "score", environment)
    medians = [wording.number(float(np.median(of[0]))) for of in tasks.values()]
    drawn = [f"{label}: median {x}" for label, x in zip(labels, medians, strict=True)]
    return Figure(f"{environment}: performance profiles", f"{'; '.join(drawn)}.", drawing)


def _draw_profiles(
    group: Group,
    tasks: Mapping[str, Sequence[np.ndarray]],
    thresholds: np.ndarray,
    what: str,
    environment: str = "",
) -> tuple[str, list[str]]:
    """The drawing, and a label for each agent of `tasks`."""
    labels = []
    with svg.canvas() as (figure, axes):
        for algorithm, of in tasks.items():
            band = statistics.profile_estimate(of, thresholds)
            label = f"{wording.agent(algorithm)}, {wording.count(sum(map(len, of)), 'run')}"
            _draw_band(axes, thresholds, band, _colour(group, algorithm), label, "post")
            labels.append(label)
        axes.set_xlabel(f"{what} τ")
        axes.set_ylabel("fraction of runs with score > τ")
        axes.set_xlim(thresholds[0], thresholds[-1])
        axes.set_ylim(0, 1.02)
        return svg.inline(figure, f"profiles {environment} {_key(group)}"), labels


def _draw_pair(axes: Axes, pair: Pair, colour: str) -> str:
    """Returns what it drew, in words."""
    curves, runs = pair.curves, wording.of_runs(len(pair.curves), pair.seeds)
    label = f"{wording.agent(pair.algorithm)}, {runs}"
    steps = _common_steps(curves)
    if len(curves) > 1:
        for curve in curves:
            axes.plot(*curve.T, color=colour, linewidth=0.6, alpha=0.45)
        label = f"{wording.agent(pair.algorithm)}, IQM of {runs}"
    band = statistics.curve_estimate([_at(curves, steps)])
    _draw_band(axes, steps, band, colour, label)
    _draw_scores(axes, pair, colour)
    return f"{label}, ends at {wording.number(band.point[-1])}"


def _draw_scores(axes: Axes, pair: Pair, colour: str) -> None:
    """Diamonds, for scores that are no points of the curve."""
    asked, end = pair.finished[0], pair.num_env_steps
    if asked["score"] not in _NO_POINTS_OF_CURVES:
        return
    budgets = asked["budgets"] if asked["score"] == "iteration" else []
    before = [(b, results.estimate(pair.scores_at(b))) for b in budgets if b < end]
    drawn = [(at, estimate) for at, estimate in [*before, (end, pair.estimate)] if estimate]
    if not drawn:
        return
    steps, estimates = zip(*drawn, strict=True)
    points, lows, highs, _ = zip(*estimates, strict=True)
    label = f"{wording.agent(pair.algorithm)}, {_NO_POINTS_OF_CURVES[asked['score']]}"
    axes.vlines(steps, lows, highs, color=colour, linewidth=1.8)
    axes.plot(steps, points, "D", color=colour, markersize=4.5, label=label)


def _draw_published(axes: Axes, group: Group, pair: Pair) -> Iterator[str]:
    """Yields what it drew, in words."""
    furthest = (1 + SAME_BUDGET) * max(p.num_env_steps for p in group.of(pair.environment))
    peers: dict[str, list[Published]] = {}
    for score in group.published(pair.environment):
        if score.algorithm == pair.algorithm and score.env_steps <= furthest:
            peers.setdefault(wording.peer(score, pair.environment), []).append(score)
    for (label, points), marker in zip(peers.items(), itertools.cycle(_PEER_MARKERS), strict=False):
        points = sorted(points, key=lambda score: score.env_steps)
        axes.errorbar(
            [score.env_steps for score in points],
            [score.score for score in points],
            yerr=[score.spread or 0 for score in points],
            fmt=f"{marker}:",
            color=_colour(group, pair.algorithm),
            markerfacecolor="none",
            markersize=8,
            markeredgewidth=1.3,
            elinewidth=0.8,
            linewidth=1.2,
            zorder=3,
            label=label,
        )
        yield f"{label}, {wording.number(points[-1].score)} at {points[-1].env_steps:,}"


def _draw_band(
    axes: Axes,
    x: np.ndarray,
    band: Band,
    colour: str,
    label: str,
    step: Literal["post"] | None = None,
) -> None:
    style_ = "steps-post" if step else "default"
    axes.plot(x, band.point, color=colour, label=label, drawstyle=style_)
    axes.fill_between(x, band.low, band.high, color=colour, alpha=0.18, linewidth=0, step=step)


def _common_steps(curves: Sequence[np.ndarray]) -> np.ndarray:
    """[points]: environment steps that all curves have seen."""
    first = max(curve[0, 0] for curve in curves)
    last = min(curve[-1, 0] for curve in curves)
    return np.linspace(first, max(first, last), _POINTS)


def _at(curves: Sequence[np.ndarray], steps: np.ndarray) -> np.ndarray:
    """[runs, points]: interpolated."""
    return np.stack([np.interp(steps, *curve.T) for curve in curves])


def _key(group: Group) -> str:
    return f"{group.suite} {group.protocol} {group.score}"


def _colour(group: Group, algorithm: str) -> str:
    if algorithm in _FIXED:
        return svg.SERIES[_FIXED.index(algorithm)]
    taken = {_FIXED.index(known) for known in set(_FIXED) & set(group.algorithms)}
    free = [colour for index, colour in enumerate(svg.SERIES) if index not in taken]
    others = sorted(set(group.algorithms) - set(_FIXED))
    return free[others.index(algorithm) % len(free)]


def _steps_axis(axes: Axes, pairs: Sequence[Pair]) -> None:
    budgets = [pair.num_env_steps for pair in pairs]
    if max(budgets) > _WIDEST_LINEAR * min(budgets):
        axes.set_xscale("log")
        axes.set_xlabel("environment steps (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(_SHORT)
