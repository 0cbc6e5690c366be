"""Tests that the code which the documentation quotes is the code of the package."""

import re

import pytest
from conftest import ROOT

CODE = {
    line.strip()
    for folder in ("pipeline", "gin_configs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".gin")
    for line in path.read_text().splitlines()
}
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
BLOCKS = [
    (page, [line.strip() for line in block.splitlines() if line.strip() not in ("", "...")])
    for page, text in PAGES.items()
    for block in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
]
# A block of text is an excerpt if a line of it is a line of the package.
EXCERPTS = [
    pytest.param(lines, id=page)
    for page, lines in BLOCKS
    if any(len(line) > 15 and line in CODE for line in lines)
]


@pytest.mark.parametrize("lines", EXCERPTS)
def test_excerpts_are_lines_of_the_code(lines):
    assert [line for line in lines if line not in CODE] == []


def test_no_excerpt_has_lost_all_its_lines():
    assert len(EXCERPTS) >= 14


def test_lines_of_explain_name_the_place_of_the_binding():
    places = 0
    for line in "\n".join(PAGES.values()).splitlines():
        parameter = line.partition(" ")[0].rpartition(".")[2] or line
        for path, number in re.findall(r"(gin_configs/[\w/]+\.gin):(\d+)", line):
            assert parameter in (ROOT / path).read_text().splitlines()[int(number) - 1], line
            places += 1
    assert places
