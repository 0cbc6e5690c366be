"""The parts of README.md and docs/ that are made from committed results. Run it to write them anew.

python tests/page_tables.py
"""

import json
import pathlib
import re

from pipeline.benchmarks import throughput_tables

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "docs/results"

_PART = re.compile(
    r"(?<=<!-- )(?P<folder>[\w-]+)(?P<begin>: made by `make tables` -->\n)"
    r".*?(?P<end><!-- (?P=folder): end -->)",
    re.DOTALL,
)


def shown(text: str) -> list[str]:
    """The folders of RESULTS whose tables are in a page's `text`."""
    return [part["folder"] for part in _PART.finditer(text)]


def rewritten(text: str) -> str:
    """A page's `text` with every such part as the committed results have it."""

    def part(found: re.Match[str]) -> str:
        results = json.loads((RESULTS / found["folder"] / "throughput.json").read_text())
        summary = throughput_tables.summary(results).strip()
        return f"{found['folder']}{found['begin']}\n{summary}\n\n{found['end']}"

    return _PART.sub(part, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
