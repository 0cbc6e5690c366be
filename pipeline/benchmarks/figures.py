"""Draws the figures of a report with Matplotlib, as SVG that uses the colours of the page."""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter

from pipeline.benchmarks import formatting, interval_estimates, published_scores, results
from pipeline.benchmarks.interval_estimates import Estimate
from pipeline.benchmarks.published_scores import Published
from pipeline.benchmarks.results import SAME_BUDGET, Group, Pair
from pipeline.utils import progress

_POINTS = 101
_SHORT = FuncFormatter(lambda value, _: formatting.short(value))
_WIDEST_LINEAR = 4  # ratio of budgets above which an axis is logarithmic
_PEER_MARKERS = "os^vP*X"
_DIAMONDS = {"evaluation": "final evaluation", "iteration": "mean of an iteration"}
# These agents have the same colours in every report.
_AGENTS = (
    "dqn", "ppo", "sac", "a2c", "trpo", "nstep_q", "dqn3", "a3c", "impala", "async_nstep_q",
)  # fmt: skip

# Matplotlib needs colours of its own; the page's variables replace them in the SVG.
_INK, _FAINT = "#000001", "#000002"
SERIES = tuple(f"#00001{index}" for index in range(len(_AGENTS)))
_PAGE_COLOURS = {_INK: "var(--ink)", _FAINT: "var(--faint)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)
}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pipeline",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}


class Figure(NamedTuple):
    """Figure of a report.

    Attributes:
      title: Caption of the figure.
      description: Description of what the figure shows.
      svg: The `<svg>` element for a page.
    """

    title: str
    description: str
    svg: str

    def html(self) -> str:
        """Returns the `<figure>` element, without empty lines, which would end it in Markdown."""
        label = html.escape(f"{self.title}. {self.description}")
        drawing = self.svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        text = f"<figure><figcaption>{html.escape(self.title)}</figcaption>{drawing}</figure>"
        return re.sub(r"\n\s*\n", "\n", text)


def learning_curves(group: Group, environment: str) -> Figure | None:
    """Draws the training returns of every run in an environment, and published scores.

    A thin line is a run. A thick line is the interquartile mean with its 95 % band. Diamonds are
    the scores of the runs, if the lines do not show them. Hollow markers are published scores of
    this protocol and of our agents.

    Returns:
      None if no run has a curve.
    """
    pairs = [pair for pair in group.of(environment) if pair.curves]
    if not pairs:
        return None
    colours = _colours(group)
    with panel() as (canvas, axes):
        drawn = [_draw_pair(axes, pair, colours[pair.algorithm]) for pair in pairs]
        for pair in pairs:
            drawn += _draw_published(axes, group, pair, colours[pair.algorithm])
        _steps_axis(axes, pairs)
        axes.set_ylabel("return")
        axes.yaxis.set_major_formatter(_SHORT)
        svg = inline_svg(canvas)
    title = f"{environment}: return while training"
    return Figure(title, f"Return over environment steps: {'; '.join(drawn)}.", svg)


def normalized_curves(group: Group) -> Figure | None:
    """Draws human-normalized returns over all games while training, one line per agent.

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
    drawn, colours = [], _colours(group)
    with panel() as (canvas, axes):
        for algorithm, pairs in per_agent.items():
            steps = _common_steps([curve for pair in pairs for curve in pair.curves])
            tasks = [
                published_scores.human_normalized(pair.environment, _at(pair.curves, steps))
                for pair in pairs
            ]
            band = interval_estimates.estimate_curve(tasks)
            label = f"{formatting.agent(algorithm)}, IQM over {len(pairs)} games"
            _draw_band(axes, steps, band, colours[algorithm], label)
            drawn.append(f"{label}, {band.point[-1]:.2f} at {int(steps[-1]):,} steps")
        _steps_axis(axes, [pair for pairs in per_agent.values() for pair in pairs])
        axes.set_ylabel("human-normalized return")
        svg = inline_svg(canvas)
    title = "All games: human-normalized return while training"
    return Figure(title, f"Return over environment steps: {'; '.join(drawn)}.", svg)


def profiles(group: Group) -> Figure | None:
    """Draws performance profiles over all games: the fraction of runs that score above each τ.

    An agent's scores are those after the steps for which it was trained in all games.

    Returns:
      None if no run has a score.
    """
    ends = {algorithm: group.common_steps(algorithm) for algorithm in group.algorithms}
    tasks = {x: of for x, end in ends.items() if (of := group.normalized_scores(x, end))}
    if not tasks:
        return None
    highest = max(float(np.max(one)) for of in tasks.values() for one in of)
    thresholds = np.linspace(0, max(1.0, 1.05 * highest), _POINTS)
    svg, labels = _draw_profiles(group, tasks, thresholds, "human-normalized score")
    above = [interval_estimates.mean(*(runs > 1 for runs in of)) for of in tasks.values()]
    drawn = [
        f"{label}: {x:.0%} above 1 after {ends[algorithm]:,} environment steps"
        for algorithm, label, x in zip(tasks, labels, above, strict=True)
    ]
    return Figure("Performance profiles over all games", f"{'; '.join(drawn)}.", svg)


def environment_profiles(group: Group, environment: str) -> Figure | None:
    """Draws performance profiles of the agents in one environment, by its own scores.

    Returns:
      None if no run has a score.
    """
    tasks = {pair.algorithm: [pair.scores] for pair in group.of(environment) if len(pair.scores)}
    if not tasks:
        return None
    known = np.concatenate([of[0] for of in tasks.values()])
    margin = 0.05 * (known.max() - known.min()) or 1.0
    thresholds = np.linspace(known.min() - margin, known.max() + margin, _POINTS)
    svg, labels = _draw_profiles(group, tasks, thresholds, "score")
    medians = [progress.score_text(float(np.median(of[0]))) for of in tasks.values()]
    drawn = [f"{label}: median {x}" for label, x in zip(labels, medians, strict=True)]
    return Figure(f"{environment}: performance profiles", f"{'; '.join(drawn)}.", svg)


def _draw_profiles(
    group: Group, tasks: Mapping[str, Sequence[np.ndarray]], thresholds: np.ndarray, what: str
) -> tuple[str, list[str]]:
    """Draws a profile per agent; returns the SVG and the labels."""
    labels, colours = [], _colours(group)
    with panel() as (canvas, axes):
        for algorithm, of in tasks.items():
            band = interval_estimates.estimate_profile(of, thresholds)
            label = f"{formatting.agent(algorithm)}, {formatting.count(band.n, 'run')}"
            _draw_band(axes, thresholds, band, colours[algorithm], label)
            labels.append(label)
        axes.set_xlabel(f"{what} τ")
        axes.set_ylabel("fraction of runs with score > τ")
        axes.set_xlim(thresholds[0], thresholds[-1])
        axes.set_ylim(0, 1.02)
        return inline_svg(canvas), labels


def _draw_pair(axes: Axes, pair: Pair, colour: str) -> str:
    """Draws the runs of a pair; returns a description of the drawing."""
    curves, runs = pair.curves, formatting.of_runs(len(pair.curves), pair.seeds)
    label = f"{formatting.agent(pair.algorithm)}, {runs}"
    steps = _common_steps(curves)
    if len(curves) > 1:
        for curve in curves:
            axes.plot(*curve.T, color=colour, linewidth=0.6, alpha=0.45)
        label = f"{formatting.agent(pair.algorithm)}, IQM of {runs}"
    band = interval_estimates.estimate_curve([_at(curves, steps)])
    _draw_band(axes, steps, band, colour, label)
    _draw_diamonds(axes, pair, colour)
    return f"{label}, ends at {progress.score_text(band.point[-1])}"


def _draw_diamonds(axes: Axes, pair: Pair, colour: str) -> None:
    """Draws the scores of the runs as diamonds, if they are not points of the curves."""
    run, end = pair.finished[0], pair.num_env_steps
    if run["score"] not in _DIAMONDS:
        return
    budgets = run["budgets"] if run["score"] == "iteration" else []
    before = [(b, results.estimate(pair.scores_at(b))) for b in budgets if b < end]
    drawn = [(at, estimate) for at, estimate in [*before, (end, pair.estimate)] if estimate]
    if not drawn:
        return
    steps, estimates = zip(*drawn, strict=True)
    points, lows, highs, *_ = zip(*estimates, strict=True)
    label = f"{formatting.agent(pair.algorithm)}, {_DIAMONDS[run['score']]}"
    axes.vlines(steps, lows, highs, color=colour, linewidth=1.8)
    axes.plot(steps, points, "D", color=colour, markersize=4.5, label=label)


def _draw_published(axes: Axes, group: Group, pair: Pair, colour: str) -> Iterator[str]:
    """Draws published scores; yields a description of each peer's scores."""
    furthest = (1 + SAME_BUDGET) * max(p.num_env_steps for p in group.of(pair.environment))
    peers: dict[str, list[Published]] = {}
    for score in group.published(pair.environment):
        if score.algorithm == pair.algorithm and score.env_steps <= furthest:
            peers.setdefault(formatting.peer(score, pair.environment), []).append(score)
    for (label, points), marker in zip(peers.items(), itertools.cycle(_PEER_MARKERS), strict=False):
        points = sorted(points, key=lambda score: score.env_steps)
        axes.errorbar(
            [score.env_steps for score in points],
            [score.score for score in points],
            yerr=[score.spread or 0 for score in points],
            fmt=f"{marker}:",
            color=colour,
            markerfacecolor="none",
            markersize=8,
            markeredgewidth=1.3,
            elinewidth=0.8,
            linewidth=1.2,
            zorder=3,
            label=label,
        )
        yield f"{label}, {progress.score_text(points[-1].score)} at {points[-1].env_steps:,}"


def _draw_band(axes: Axes, x: np.ndarray, band: Estimate, colour: str, label: str) -> None:
    axes.plot(x, band.point, color=colour, label=label)
    axes.fill_between(x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)


def _common_steps(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Returns environment steps that all curves cover, [points]."""
    first = max(curve[0, 0] for curve in curves)
    last = min(curve[-1, 0] for curve in curves)
    return np.linspace(first, max(first, last), _POINTS)


def _at(curves: Sequence[np.ndarray], steps: np.ndarray) -> np.ndarray:
    """Interpolates the curves at `steps` and returns the values, [runs, points]."""
    return np.stack([np.interp(steps, *curve.T) for curve in curves])


def _colours(group: Group) -> dict[str, str]:
    """Returns the colour of each agent of a group.

    The agents in `_AGENTS` have colours of their own. Others get different ones by their names, as
    long as there are any.
    """
    colours: dict[str, str] = {}
    for algorithm in sorted(group.algorithms, key=lambda name: name not in _AGENTS):
        is_known = algorithm in _AGENTS
        first = _AGENTS.index(algorithm) if is_known else sum(algorithm.encode()) % len(SERIES)
        in_order = SERIES[first:] + SERIES[:first]
        free = [colour for colour in in_order if colour not in colours.values()]
        colours[algorithm] = (free or in_order)[0]
    return colours


def _steps_axis(axes: Axes, pairs: Sequence[Pair]) -> None:
    budgets = [pair.num_env_steps for pair in pairs]
    if max(budgets) > _WIDEST_LINEAR * min(budgets):
        axes.set_xscale("log")
        axes.set_xlabel("environment steps (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(_SHORT)


@contextmanager
def panel() -> Iterator[tuple[Canvas, Axes]]:
    """Yields a canvas with one panel, in a style that does not depend on the user's."""
    with matplotlib.style.context(["default", _STYLE]):
        canvas = Canvas((4.8, 3.6), layout="constrained")
        yield canvas, canvas.add_subplot()


def inline(drawn: Sequence[Figure]) -> str:
    """Returns the HTML element that contains all figures."""
    return f'<div class="figures">\n{"".join(figure.html() for figure in drawn)}</div>\n'


def inline_svg(canvas: Canvas) -> str:
    """Returns the `<svg>` of a panel with a legend below it. Its ids are unique in a page."""
    canvas.legend(loc="outside lower center", ncols=2, columnspacing=1.2, handlelength=1.8)
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    canvas.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    # The page scales the drawing, has its own style and fonts, and needs no namespaces.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    # One decimal of a point is finer than any screen; Matplotlib writes six.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    prefix = f"f{hashlib.sha256(text.encode()).hexdigest()[:8]}-"
    text = re.sub(r'(\bid="|url\(#)', rf"\1{prefix}", text)
    text = text.replace('xlink:href="#', f'href="#{prefix}')
    return re.sub(r"#0000[01]\d\b", lambda colour: _PAGE_COLOURS[colour[0]], text)
