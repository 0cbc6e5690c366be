"""Renders a report's Markdown as one HTML page without scripts, fonts or external links."""

from __future__ import annotations

import html
import importlib.resources
import re

from markdown_it import MarkdownIt

_RENDERER = MarkdownIt("commonmark", {"html": True}).enable("table")


def render(markdown: str) -> str:
    """Returns the HTML page of a report.

    Its title is the first heading. Its table of contents links to the headings of level 2.
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
    title = re.search(r"<h1>(.*?)</h1>", body)
    template = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    return (
        template.replace("{{ title }}", title[1] if title else html.escape("Report"))
        .replace("{{ contents }}", "".join(links) if len(links) > 1 else "")
        .replace("{{ body }}", body)
    )
