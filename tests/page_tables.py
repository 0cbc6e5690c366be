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

_TABLES = {"speeds": throughput_tables.summary, "time budget": throughput_tables.time_budget}
_PART = re.compile(
    r"(?<=<!-- )(?P<folder>[\w-]+), (?P<table>[\w ]+)(?P<begin>: made by `make tables` -->\n)"
    r".*?(?P<end><!-- (?P=folder), (?P=table): end -->)",
    re.DOTALL,
)


def shown(text: str) -> list[tuple[str, str]]:
    """The folders of RESULTS, and which table of each, that are in a page's `text`."""
    return [(part["folder"], part["table"]) for part in _PART.finditer(text)]


def rewritten(text: str) -> str:
    """A page's `text` with every such part as the committed results have it."""

    def part(found: re.Match[str]) -> str:
        results = json.loads((RESULTS / found["folder"] / "throughput.json").read_text())
        table = _TABLES[found["table"]](results).strip()
        return f"{found['folder']}, {found['table']}{found['begin']}\n{table}\n\n{found['end']}"

    return _PART.sub(part, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
