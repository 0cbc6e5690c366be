"""What a report consists of, in no particular format, and its Markdown.

A document is a sequence of blocks; `page.render` turns the same blocks into HTML. Texts are plain,
except that `backticks` mean code.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

_LONGEST_FENCE = re.compile(r"`+")
_CODE_SPAN = re.compile(r"(`[^`]+`)")
# An underscore inside a word is only itself, and so is a bracket that no parenthesis follows.
_MARKUP = re.compile(r"([\\`*|~]|\](?=\()|(?<![^\W_])_|_(?![^\W_]))")


class Heading(NamedTuple):
    """A heading; level 1 is the document's title, which comes first and once."""

    text: str
    level: int = 2


class Paragraph(NamedTuple):
    """A paragraph of running text."""

    text: str


class Notice(NamedTuple):
    """What a reader must not miss: a line of introduction and points."""

    text: str
    points: tuple[str, ...] = ()


class Listing(NamedTuple):
    """Lines shown as they are: commands, output."""

    text: str


class Column(NamedTuple):
    """A table's column; numbers stand on the right, code in a typewriter face."""

    title: str
    kind: Literal["text", "number", "code"] = "number"


class Table(NamedTuple):
    """A table; the first column names its rows.

    Attributes:
        rows: one cell a column; an empty cell is "".
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(NamedTuple):
    """A drawing.

    Attributes:
        title: what it shows, in a line; also its caption.
        description: what one would see, for those who do not.
        svg: an `<svg>` element that may stand inside a page.
    """

    title: str
    description: str
    svg: str


class Figures(NamedTuple):
    """Figures side by side, as many in a row as there is room for."""

    figures: tuple[Figure, ...]


class Details(NamedTuple):
    """Blocks under a summary that opens them."""

    summary: str
    blocks: tuple[Block, ...]


Block: TypeAlias = "Heading | Paragraph | Notice | Listing | Table | Figures | Details"


def to_markdown(blocks: Sequence[Block], figures_at: str) -> str:
    """The blocks as GitHub's Markdown.

    Args:
        figures_at: file that has the figures, of which here are only words.
    """
    return "\n".join(_markdown(block, figures_at) for block in blocks)


@functools.singledispatch
def _markdown(block: Block, figures_at: str) -> str:
    raise TypeError(f"no Markdown for {type(block).__name__}")


@_markdown.register
def _(block: Heading, figures_at: str) -> str:
    return f"{'#' * block.level} {_prose(block.text)}\n"


@_markdown.register
def _(block: Paragraph, figures_at: str) -> str:
    return f"{_prose(block.text)}\n"


@_markdown.register
def _(block: Notice, figures_at: str) -> str:
    points = "".join(f"> - {_prose(point)}\n" for point in block.points)
    return f"> **{_prose(block.text)}**\n" + (f">\n{points}" if points else "")


@_markdown.register
def _(block: Listing, figures_at: str) -> str:
    runs = _LONGEST_FENCE.findall(block.text)
    fence = "`" * max([3, *(len(run) + 1 for run in runs)])
    return f"{fence}text\n{block.text}\n{fence}\n"


@_markdown.register
def _(block: Table, figures_at: str) -> str:
    rules = ["---:" if column.kind == "number" else ":---" for column in block.columns]
    rows = [
        [_cell(cell, column.kind) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows
    ]
    titles = [_cell(column.title, "text") for column in block.columns]
    lines = [f"| {' | '.join(row)} |" for row in [titles, rules, *rows]]
    return "\n".join([f"**{_prose(block.caption)}**", "", *lines, ""])


@_markdown.register
def _(block: Figures, figures_at: str) -> str:
    lines = [f"- {_prose(f'{figure.title}. {figure.description}')}" for figure in block.figures]
    return "\n".join([f"Drawn in [{figures_at}]({figures_at}):", "", *lines, ""])


@_markdown.register
def _(block: Details, figures_at: str) -> str:
    inside = to_markdown(block.blocks, figures_at)
    return f"<details><summary>{html.escape(block.summary)}</summary>\n\n{inside}\n</details>\n"


def _cell(text: str, kind: str) -> str:
    return _code(text) if kind == "code" else _prose(text)


def _code(text: str) -> str:
    """A code span of one line that may stand in a table, where a bar ends a cell even in code."""
    line = " ".join(text.split()).replace("|", "\\|")
    if not line:
        return ""
    return f"`` {line} ``" if "`" in line else f"`{line}`"


def _prose(text: str) -> str:
    spans = _CODE_SPAN.split(" ".join(text.split()))
    return "".join(_code(span[1:-1]) if _CODE_SPAN.match(span) else _escape(span) for span in spans)


def _escape(text: str) -> str:
    return _MARKUP.sub(r"\\\1", html.escape(text, quote=False))
