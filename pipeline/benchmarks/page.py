"""Renders a report's Markdown as one HTML page without scripts, fonts or external links.

It also writes the files of a report.
"""

from __future__ import annotations

import importlib.resources
import pathlib
import re
from collections.abc import Mapping

from markdown_it import MarkdownIt

from pipeline.utils.files import named_errors, replacing

_RENDERER = MarkdownIt("commonmark", {"html": True}).enable("table")


def render(markdown: str) -> str:
    """Returns the HTML page of a report.

    Its title is the first heading of level 1. Its table of contents links to those of level 2.
    """
    body = _RENDERER.render(markdown)
    # A wide table scrolls in its own box, which has a tabindex so that the keyboard can reach it.
    body = re.sub(r"<table>", '<div class="table" tabindex="0"><table>', body)
    body = body.replace("</table>", "</table></div>")
    body = body.replace("<blockquote>", '<blockquote class="notice">')
    headings = re.findall(r"<h2>(.*?)</h2>", body)
    for number, heading in enumerate(headings, start=1):
        body = body.replace(f"<h2>{heading}</h2>", f'<h2 id="section-{number}">{heading}</h2>', 1)
    links = [f'<a href="#section-{n}">{text}</a>' for n, text in enumerate(headings, start=1)]
    title, *_ = re.findall(r"<h1>(.*?)</h1>", body)
    template = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    return (
        template.replace("{{ title }}", title)
        .replace("{{ contents }}", "".join(links) if len(links) > 1 else "")
        .replace("{{ body }}", body)
    )


def write_files(output_dir: pathlib.Path, texts: Mapping[str, str]) -> list[pathlib.Path]:
    """Writes the files of a report, each in one step, and returns their paths.

    Raises:
      UserError: If one cannot be written; a WriteError if that may pass.
    """
    paths = [output_dir / name for name in texts]
    with named_errors(output_dir, "--output_dir"):
        for path, text in zip(paths, texts.values(), strict=True):
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return paths
