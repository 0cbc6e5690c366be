"""Matplotlib's drawings as SVG inside a page: in its colours and fonts, and the same every time."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.benchmarks import style

_INCHES = (4.8, 3.6)

# Matplotlib wants colours of its own kind; the page's take their places in the SVG.
_INK, _FAINT = "#000001", "#000002"
SERIES = tuple(f"#00001{index}" for index in range(len(style.SERIES)))
_OF_THE_PAGE = dict(
    zip((_INK, _FAINT, *SERIES), (style.INK, style.FAINT, *style.SERIES), strict=True)
)

_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pipeline",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}


@contextmanager
def canvas() -> Iterator[tuple[Figure, Axes]]:
    """One panel, in a style of its own whatever the user's is; finish it by `inline` inside."""
    with matplotlib.style.context(["default", _RC]):
        figure = Figure(_INCHES, layout="constrained")
        yield figure, figure.add_subplot()


def inline(figure: Figure, name: str) -> str:
    """The `<svg>` of a figure with a legend below it.

    Args:
        figure: from `canvas`; its lines are of `SERIES`.
        name: which no other figure of the page has, for all ids in a page must differ.
    """
    figure.legend(loc="outside lower center", ncols=2, columnspacing=1.2, handlelength=1.8)
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    text = file.getvalue()
    return _for_a_page(text[text.index("<svg") :].strip(), name)


def _for_a_page(text: str, name: str) -> str:
    prefix = f"f{hashlib.sha256(name.encode()).hexdigest()[:8]}-"
    # A page needs no namespaces, scales the drawing, and has a style and fonts of its own.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    # A tenth of a point is finer than any screen; Matplotlib writes a millionth.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    text = re.sub(r'(\bid="|url\(#)', rf"\1{prefix}", text)
    text = text.replace('xlink:href="#', f'href="#{prefix}')
    return re.sub(r"#0000[01]\d\b", lambda colour: _OF_THE_PAGE[colour[0]], text)
