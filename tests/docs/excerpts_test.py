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
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT / "docs").as_posix())
def test_excerpts_are_lines_of_the_code(page):
    """Takes a block of text for an excerpt if a line of it is a line of the package."""
    blocks = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        lines = [line.strip() for line in block.splitlines() if line.strip() not in ("", "...")]
        if any(len(line) > 15 and line in CODE for line in lines):
            assert [line for line in lines if line not in CODE] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT / "docs").as_posix())
def test_lines_of_explain_name_the_place_of_the_binding(page):
    for line in page.read_text().splitlines():
        parameter = line.partition(" ")[0].rpartition(".")[2]
        for path, number in re.findall(r"((?:gin_configs|pipeline)/[\w/]+\.gin):(\d+)", line):
            assert parameter in (ROOT / path).read_text().splitlines()[int(number) - 1], line
