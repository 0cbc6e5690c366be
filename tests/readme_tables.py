"""The parts of README.md that are made from committed results. Run it to write them anew.

python tests/readme_tables.py
"""

import json
import pathlib
import re

from pipeline.benchmarks import throughput_tables

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs/results"

_BETWEEN = "(?<=<!-- {name}: made by `make tables` -->\n).*?(?=<!-- {name}: end -->)"


def rewritten(text: str) -> str:
    """`text` with every such part as the committed results have it."""
    measured = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("throughput*/*.json"))]
    summary = "\n\n".join(throughput_tables.summary(results).strip() for results in measured)
    pattern = re.compile(_BETWEEN.format(name="throughput"), re.DOTALL)
    replaced, count = pattern.subn(lambda _: f"\n{summary}\n\n", text)
    if count != 1:
        raise ValueError(f"README.md has {count} places for the throughput, not 1")
    return replaced


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
