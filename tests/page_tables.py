"""The parts of README.md and docs/ that are made from committed results. Run it to write them anew.

python tests/page_tables.py
"""

import json
import pathlib
import re
from collections.abc import Callable

from pipeline.benchmarks import throughput_tables

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "docs/results"

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
        table = _TABLES[found["table"]](RESULTS / found["folder"]).strip()
        return f"{found['folder']}, {found['table']}{found['begin']}\n{table}\n\n{found['end']}"

    return _PART.sub(part, text)


Table = Callable[[pathlib.Path], str]


def _of_throughput(table: Callable[[throughput_tables.Results], str]) -> Table:
    return lambda folder: table(json.loads((folder / "throughput.json").read_text()))


def _scores(folder: pathlib.Path) -> str:
    """The first table of a benchmark's report."""
    report = (folder / "report.md").read_text()
    return report.split("**Results**")[1].split("**What was run**")[0]


_TABLES: dict[str, Table] = {
    "speeds": _of_throughput(throughput_tables.summary),
    "asynchronous actors": _of_throughput(throughput_tables.asynchronous_actors),
    "time budget": _of_throughput(throughput_tables.time_budget),
    "scores": _scores,
}


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
