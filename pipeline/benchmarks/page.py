"""A document as one HTML page that needs nothing else: no script, no font, no picture beside it."""

from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Sequence

from pipeline.benchmarks.document import (
    Block,
    Details,
    Figure,
    Figures,
    Heading,
    Listing,
    Notice,
    Paragraph,
    Table,
)
from pipeline.benchmarks.style import STYLE

_CODE = re.compile(r"`([^`]+)`")


def render(blocks: Sequence[Block]) -> str:
    """The whole page; its title is the first heading of level 1.

    Headings of level 2 are linked from a list under the title.
    """
    title = next(b.text for b in blocks if isinstance(b, Heading) and b.level == 1)
    body = "\n".join(_html(block) for block in blocks)
    body = body.replace("</h1>", f"</h1>\n{_contents(blocks)}", 1)
    numbers = itertools.count(1)
    body = re.sub("<h2>", lambda _: f'<h2 id="section-{next(numbers)}">', body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _contents(blocks: Sequence[Block]) -> str:
    headings = [block for block in blocks if isinstance(block, Heading) and block.level == 2]
    if len(headings) < 2:
        return ""
    links = [
        f'<a href="#section-{number}">{_prose(heading.text)}</a>'
        for number, heading in enumerate(headings, start=1)
    ]
    return f'<nav aria-label="Contents">{" ".join(links)}</nav>'


@functools.singledispatch
def _html(block: Block) -> str:
    raise TypeError(f"no HTML for {type(block).__name__}")


@_html.register
def _(block: Heading) -> str:
    return f"<h{block.level}>{_prose(block.text)}</h{block.level}>"


@_html.register
def _(block: Paragraph) -> str:
    return f"<p>{_prose(block.text)}</p>"


@_html.register
def _(block: Notice) -> str:
    points = "".join(f"<li>{_prose(point)}</li>" for point in block.points)
    listed = f"<ul>{points}</ul>" if points else ""
    return f'<aside class="notice"><p><strong>{_prose(block.text)}</strong></p>{listed}</aside>'


@_html.register
def _(block: Listing) -> str:
    return f'<pre tabindex="0">{html.escape(block.text)}</pre>'


@_html.register
def _(block: Table) -> str:
    kinds = [column.kind for column in block.columns]
    titles = "".join(
        f'<th scope="col" class="{column.kind}">{_prose(column.title)}</th>'
        for column in block.columns
    )
    rows = "\n".join(_row(row, kinds) for row in block.rows)
    # A wide table scrolls in a box of its own, which the keyboard reaches through its tabindex.
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{html.escape(block.caption)}">'
        f"<table>\n<caption>{_prose(block.caption)}</caption>\n"
        f"<thead><tr>{titles}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _row(cells: Sequence[str], kinds: Sequence[str]) -> str:
    shown = [
        f"<code>{html.escape(cell)}</code>" if kind == "code" and cell else _prose(cell)
        for cell, kind in zip(cells, kinds, strict=True)
    ]
    others = "".join(
        f'<td class="{kind}">{cell}</td>' for cell, kind in zip(shown[1:], kinds[1:], strict=True)
    )
    return f'<tr><th scope="row" class="{kinds[0]}">{shown[0]}</th>{others}</tr>'


@_html.register
def _(block: Figures) -> str:
    return f'<div class="figures">\n{"".join(_figure(figure) for figure in block.figures)}</div>'


def _figure(figure: Figure) -> str:
    label = html.escape(f"{figure.title}. {figure.description}")
    drawing = figure.svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f"<figure><figcaption>{_prose(figure.title)}</figcaption>{drawing}</figure>\n"


@_html.register
def _(block: Details) -> str:
    inside = "\n".join(_html(part) for part in block.blocks)
    return f"<details><summary>{html.escape(block.summary)}</summary>\n{inside}\n</details>"


def _prose(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", html.escape(text)).replace(" %", "&nbsp;%")
