"""Draws learning curves: python -m pipeline.plot --root_dir=runs/a --root_dir=runs/b.

Runs share a colour if the names of their folders differ only in a trailing _seed3 or -seed3, or if
they are seed-3, seed-4, ... of one folder. A thin line shows each run, and a thick line their mean.
--x=wall_seconds draws the runs against time. --y draws any numeric field of metrics.jsonl.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from absl import flags

from pipeline import cli
from pipeline.benchmarks.formatting import short
from pipeline.runs.run_folder import RunFolder
from pipeline.utils import errors, jsonl
from pipeline.utils.files import error_kind, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_SEED = re.compile(r"((?<=.)[_-]|^)seed[_-]?\d+$")
_INCHES, _DOTS_PER_INCH = (9.0, 5.0), 100
_FORMATS = (".png", ".svg", ".pdf")
_RETURN = "return_mean_100"
_LABELS = {
    "env_steps": "environment steps",
    "wall_seconds": "seconds of training",
    "env_steps_per_second": "environment steps per second",
    _RETURN: "return (line: mean of last 100 episodes, dots: evaluation)",
}

_ROOT_DIRS = cli.define_paths("root_dir", "Folder of a run. Give this flag once per run.")
_X = flags.DEFINE_enum("x", "env_steps", ["env_steps", "wall_seconds"], "Field of the x-axis.")
_Y = flags.DEFINE_string("y", _RETURN, "Field of metrics.jsonl to draw.")
_OUTPUT = cli.define_path("output", "curve.png", "File of the plot: .png, .svg or .pdf.")


class Run(NamedTuple):
    """Data of one run for a plot.

    Attributes:
      folder: Absolute path of the run's folder.
      config: Gin files that the run was started with, or "" if unknown.
      curve: float64 [K, 2], values of `x` and `y`.
      evaluations: float64 [E, 3], `x`, mean and standard deviation of returns. It is empty if `y`
        is not a return.
      evaluated_at: Environment steps of the evaluations, float64 [E].
    """

    folder: pathlib.Path
    config: str
    curve: np.ndarray
    evaluations: np.ndarray
    evaluated_at: np.ndarray
    x: str = "env_steps"
    y: str = _RETURN

    @property
    def group(self) -> pathlib.Path:
        """Returns the folder without the seed, or its parent if the name is only a seed."""
        rest = _SEED.sub("", self.folder.name)
        return self.folder.with_name(rest) if rest else self.folder.parent

    @property
    def name(self) -> str:
        """Returns the name that the legend shows: the last part of the path, or the last two."""
        return str(self.folder.relative_to(self.group.parent))


def read_run(root_dir: pathlib.Path, x: str = "env_steps", y: str = _RETURN) -> Run:
    """Reads metrics.jsonl, and eval.jsonl and run.json if they exist.

    Args:
      root_dir: Folder of the run.
      x: Field of metrics.jsonl to draw against. Its values must increase.
      y: Field of metrics.jsonl to draw.

    Raises:
      UserError: If there is no folder, or nothing to draw in its metrics.jsonl.
    """
    if not root_dir.is_dir():
        raise errors.UserError(f"no folder {root_dir}; --root_dir names the folder of a run")
    if not (root_dir / "metrics.jsonl").is_file():
        raise errors.UserError(f"{root_dir} holds no run: it has no metrics.jsonl")
    records = jsonl.read_jsonl(root_dir / "metrics.jsonl")
    curve = _columns(records, x, y)
    if not len(curve):
        raise errors.UserError(f"{root_dir / 'metrics.jsonl'} {_lack(records, y)}")
    evaluations = jsonl.read_jsonl(root_dir / "eval.jsonl") if y == _RETURN else []
    points = _columns(evaluations, "env_steps", "return_mean", "return_std")
    evaluated_at = points[:, 0].copy()
    if x != "env_steps":
        logged = np.vstack([[0.0, 0.0], _columns(records, "env_steps", x)])
        is_known = evaluated_at <= logged[-1, 0]  # x of later evaluations is not
        points, evaluated_at = points[is_known], evaluated_at[is_known]
        points[:, 0] = np.interp(evaluated_at, *logged.T)
    folder = pathlib.Path(os.path.abspath(root_dir))  # not resolved: a link has its own name
    return Run(folder, _config(folder), curve, points, evaluated_at, x, y)


def _lack(records: Sequence[dict[str, Any]], y: str) -> str:
    if y == _RETURN:
        return "has no finished episode; train the run further"
    fields = {key for record in records for key, value in record.items() if _is_number(value)}
    return f"has no numeric field {y!r}; it has {', '.join(sorted(fields)) or 'none'}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _columns(records: Sequence[dict[str, Any]], *keys: str) -> np.ndarray:
    rows = [[record.get(key) for key in keys] for record in records]
    rows = [row for row in rows if all(map(_is_number, row))]
    return np.array(rows, np.float64).reshape(-1, len(keys))


def _config(root_dir: pathlib.Path) -> str:
    try:
        command = shlex.split(RunFolder(root_dir).read_json("run.json").get("command", ""))
    except ValueError:  # it has an open quote, and is only needed for the title
        return ""
    names = re.findall(r"(?:^|\n)--?gin_file[=\n]([^\n]+)", "\n".join(command))
    return _plain(" + ".join(pathlib.Path(name).stem for name in names))


def _plain(text: str) -> str:
    """Returns text that Matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def draw(runs: Sequence[Run]) -> Figure:
    """Draws the learning curves of `runs`, with one colour per group.

    A group of one run shows its evaluations as mean ± standard deviation over episodes. A group of
    several runs shows the mean ± standard deviation over the means of the runs.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(_INCHES, _DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    groups: dict[pathlib.Path, list[Run]] = {}
    for run_ in {run_.folder: run_ for run_ in runs}.values():
        groups.setdefault(run_.group, []).append(run_)
    colors = matplotlib.colormaps["tab10" if len(groups) <= 10 else "tab20"]
    if len(groups) > colors.N:
        colors = matplotlib.colormaps["turbo"].resampled(len(groups))
    lines = [
        _draw_group(axes, name, members, color=colors(index))
        for index, (name, members) in enumerate(zip(_names(groups), groups.values(), strict=True))
    ]
    axes.set_title(", ".join(dict.fromkeys(run_.config for run_ in runs if run_.config)))
    _decorate(axes, runs[0].x, runs[0].y)
    # By itself, Matplotlib would leave out labels that begin with an underscore.
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False)
    return figure


def _names(groups: Mapping[pathlib.Path, Sequence[Run]]) -> list[str]:
    """Returns the names of groups, with as many parts of their paths as make them differ."""
    paths = [of[0].folder if len(of) == 1 else path for path, of in groups.items()]
    of_runs = [of[0].name if len(of) == 1 else path.name for path, of in groups.items()]
    numbers = [len(pathlib.Path(name).parts) for name in of_runs]
    are_means = [len(of) > 1 for of in groups.values()]
    candidates = (
        ["/".join(path.parts[-n - more :]) for path, n in zip(paths, numbers, strict=True)]
        for more in itertools.count()
    )
    # A mean is marked as one, so a run may have its name.
    return next(
        names for names in candidates if len(set(zip(names, are_means, strict=True))) == len(names)
    )


def _draw_group(axes: Axes, name: str, members: Sequence[Run], color: Any) -> Line2D:
    """Draws the runs of a group, and returns the line that the legend shows."""
    if len(members) == 1:
        (member,) = members
        style = _format(member.curve)
        (line,) = axes.plot(*member.curve.T, style, color=color, linewidth=1.8, label=_plain(name))
        evaluations = member.evaluations
    else:
        for member in members:
            axes.plot(*member.curve.T, _format(member.curve), color=color, linewidth=0.8, alpha=0.4)
        mean = _mean_curve(members)
        kind = "mean of" if len(mean) else "no common steps of"
        label = f"{_plain(name)} ({kind} {len(members)} runs)"
        (line,) = axes.plot(*mean.T, _format(mean), color=color, linewidth=2.2, label=label)
        evaluations = _mean_evaluations(members)
    if len(evaluations):
        steps, means, deviations = evaluations.T
        axes.errorbar(
            *(steps, means, deviations),
            fmt="o",
            color=color,
            markersize=4,
            elinewidth=0.8,
            capsize=2,
        )
    return line


def _format(curve: np.ndarray) -> str:
    """Returns how a curve is drawn: a line through one point would not be visible."""
    return "o" if len(curve) == 1 else "-"


def _mean_curve(members: Sequence[Run]) -> np.ndarray:
    """Returns the mean curve, [K, 2], over the range of `x` that all members cover.

    The curve of each member is interpolated between logs.
    """
    first = max(member.curve[0, 0] for member in members)
    last = min(member.curve[-1, 0] for member in members)
    steps = np.unique(np.concatenate([member.curve[:, 0] for member in members]))
    steps = steps[(steps >= first) & (steps <= last)]
    returns = [np.interp(steps, *member.curve.T) for member in members]
    return np.stack([steps, np.mean(returns, axis=0)], axis=1)


def _mean_evaluations(members: Sequence[Run]) -> np.ndarray:
    """Returns `x`, mean and standard deviation, [E, 3], over the evaluations of all members.

    Evaluations that were not due at the same environment steps are left out. The steps may differ a
    little, because an iteration may exceed an interval by some steps, and by different numbers of
    them in each run.
    """
    due = min((member.evaluated_at for member in members), key=len)
    if not len(due):
        return np.empty((0, 3))
    places = (
        np.interp(due, member.evaluated_at, np.arange(len(member.evaluated_at)))
        for member in members
    )
    nearest = [place.round().astype(int) for place in places]
    pairs = list(zip(members, nearest, strict=True))
    steps = np.stack([member.evaluated_at[places] for member, places in pairs])
    x, means = np.stack([member.evaluations[places, :2] for member, places in pairs]).T
    together = np.ptp(steps, axis=0) <= 0.02 * steps.max(axis=0)
    rows = np.stack([x.mean(axis=1), means.mean(axis=1), means.std(axis=1)], axis=1)
    return rows[together]


def _decorate(axes: Axes, x: str, y: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xlabel(_LABELS.get(x, x))
    axes.set_ylabel(_LABELS.get(y, y))
    axes.set_xlim(left=0)
    if axes.dataLim.ymin >= 0:
        axes.set_ylim(bottom=0)  # A steady curve should look steady.
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


@cli.program
def main(_: Sequence[str]) -> None:
    if not _ROOT_DIRS.value:
        raise errors.UserError("no run to draw; name one or more: --root_dir=runs/NAME")
    folders = map(pathlib.Path, _ROOT_DIRS.value)
    figure = draw([read_run(folder, _X.value, _Y.value) for folder in folders])
    output = pathlib.Path(_OUTPUT.value)
    if output.suffix.lower() not in _FORMATS:
        raise errors.UserError(f"--output={output}: the name must end in {', '.join(_FORMATS)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as temporary, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # boxes replace them
            figure.savefig(temporary)
    except OSError as error:
        reason = error.strerror or error
        raise error_kind(error)(f"cannot write --output={output}: {reason}") from error
    with cli.expendable_output():
        print(f"wrote {output}")


if __name__ == "__main__":
    main()
