"""Writes elements of GitHub's Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"[-–+]?\d")
_SPECIAL = re.compile(r"([\\`*|~<>&\[\]]|(?<![^\W_])_|_(?![^\W_]))")


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with a caption in bold above it.

    A column whose cells all begin with a number is aligned to the right. Cells are Markdown, so
    pass other text through `escaped` or `code`.
    """
    lines = [list(row) for row in rows]
    are_numbers = [
        all(_NUMBER.match(line[place]) for line in lines if line[place]) and bool(lines)
        for place in range(len(columns))
    ]
    rules = ["---:" if is_number else ":---" for is_number in are_numbers]
    shown = [f"| {' | '.join(line)} |" for line in [list(columns), rules, *lines]]
    return "\n".join([f"**{caption}**", "", *shown, ""])


def notice(text: str, points: Sequence[str] = ()) -> str:
    """Returns a block quote with a line in bold and a list of points."""
    return "\n".join(
        [f"> **{text}**", *([">"] if points else []), *(f"> - {x}" for x in points), ""]
    )


def details(summary: str, text: str) -> str:
    """Returns Markdown that is collapsed under a summary.

    MkDocs renders the text only if it is marked as Markdown. GitHub ignores the mark.
    """
    title = f"<summary>{html.escape(summary)}</summary>"
    return f'<details markdown="1">{title}\n\n{text}\n</details>\n'


def listing(text: str) -> str:
    """Returns a code block that shows the text as it is."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}\n"


def code(text: str) -> str:
    """Returns a code span of one line, which can be used in a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    if not line:
        return ""
    return f"`` {line} ``" if "`" in line else f"`{line}`"


def escaped(text: str) -> str:
    """Returns text in one line, with the special characters of Markdown escaped."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
