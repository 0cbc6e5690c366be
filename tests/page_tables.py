"""Tables of the pages that are made from committed results and from signatures.

`make tables` writes them anew.
"""

import inspect
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import gin

from benchmarks import tables
from benchmarks.measurements import Results
from pipeline.benchmarks.markdown import code, table
from pipeline.configuration import loading, registry
from pipeline.configuration.statements import Binding, value_of

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
RESULTS = ROOT / "docs/results"

_PART = re.compile(
    r"(?<=<!-- )(?P<source>[\w-]+), (?P<table>[\w/ -]+)(?P<begin>: made by `make tables` -->\n)"
    r".*?(?P<end><!-- (?P=source), (?P=table): end -->)",
    re.DOTALL,
)


def shown(text: str) -> list[tuple[str, str]]:
    """Returns the sources (folders of RESULTS, or "gin") and tables in a page's `text`."""
    return [(part["source"], part["table"]) for part in _PART.finditer(text)]


def rewritten(text: str) -> str:
    """Returns a page's `text` with all such tables made anew from their sources."""

    def part(found: re.Match[str]) -> str:
        source, name = found["source"], found["table"]
        made = _parameters(name) if source == "gin" else _TABLES[name](RESULTS / source)
        return f"{source}, {name}{found['begin']}\n{made.strip()}\n\n{found['end']}"

    return _PART.sub(part, text)


Table = Callable[[pathlib.Path], str]


def _of_throughput(made: Callable[[Results], str]) -> Table:
    return lambda folder: made(json.loads((folder / "throughput.json").read_text()))


def _scores(folder: pathlib.Path) -> str:
    """Returns the table of results of a benchmark's report."""
    report = (folder / "report.md").read_text()
    return re.search(r"(?<=\*\*Results\*\*\n\n)(\|.*\n)+", report)[0]  # type: ignore[index]


def _rows(folder: pathlib.Path) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in _scores(folder).splitlines()[2:]]


def _scores_of(agent: str) -> Table:
    """Returns a function that makes the table of one agent's scores."""

    def made(folder: pathlib.Path) -> str:
        columns = (
            "environment",
            "environment steps",
            "IQM [95 % interval] (runs)",
            "mean [95 % interval]",
        )
        rows = [(row[0], *row[2:5]) for row in _rows(folder) if row[1] == agent]
        iqm = "IQM: interquartile mean of the runs, with a bootstrap interval"
        return table(f"{agent}: mean return of 100 episodes; {iqm}", columns, rows)

    return made


def _means(folder: pathlib.Path) -> str:
    """Returns a table of mean scores with three digits: environments by agents."""
    means: dict[str, dict[str, str]] = {}
    for environment, agent, _, _, mean, *_ in _rows(folder):
        means.setdefault(environment, {})[agent] = f"{float(mean.split()[0]):.3g}"
    rows = [(name, *(of.get(agent, "") for agent in _AGENTS)) for name, of in means.items()]
    return table("Mean return", ("environment", *_AGENTS), rows)


_AGENTS = ("DQN", "PPO", "A2C", "TRPO", "n-step Q", "SAC")
_TABLES: dict[str, Table] = {
    "speeds": _of_throughput(tables.summary),
    "asynchronous actors": _of_throughput(tables.asynchronous_actors),
    "time budget": _of_throughput(tables.time_budget),
    "scores": _scores,
    "means": _means,
    **{f"scores of {agent}": _scores_of(agent) for agent in _AGENTS},
}


def _parameters(title: str) -> str:
    """Returns a table of the parameters that gin can bind, of "CONFIGURABLE[ of CONFIG]".

    With a config, a column has the values that it and its included files bind, by their scopes.
    """
    name, _, config = title.partition(" of ")
    configurable = registry.registered(name)
    assert configurable, name
    target = configurable.wrapped
    signature = inspect.signature(target).parameters
    meanings = dict(_meanings(target))
    bound = _bound(config)
    rows = [
        (
            code(f"{name}.{parameter}"),
            _default(signature[parameter].default),
            *(["; ".join(bound.get(f"{name}.{parameter}", {}).values())] if config else []),
            meanings.get(parameter, "").replace("|", "\\|"),  # Markdown, as docstrings are
        )
        for parameter in registry.parameters(configurable)
    ]
    assert all(meaning for *_, meaning in rows), (name, rows)
    columns = ("parameter", "default", *([code(config)] if config else []), "meaning")
    return table(code(name), columns, rows)


def _bound(config: str) -> dict[str, dict[str, str]]:
    """Returns the texts of the values that a config binds, by parameter and scope."""
    statements = loading.read([config], []) if config else []
    bindings = [statement for statement in statements if isinstance(statement, Binding)]
    macros = {binding.name: binding.value for binding in bindings if not binding.parameter}
    bound: dict[str, dict[str, str]] = {}
    for binding in bindings:
        text = code(repr(value_of(binding.value, macros)))
        scoped = f"{code(binding.scope + '/')} {text}" if binding.scope else text
        bound.setdefault(binding._replace(scope="").short_name, {})[binding.scope] = scoped
    return bound


def _default(value: object) -> str:
    if value in (gin.REQUIRED, inspect.Parameter.empty):
        return "must be bound"
    return code(f"@{value.__name__}" if callable(value) else repr(value))  # type: ignore[attr-defined]


def _meanings(target: Any) -> Iterator[tuple[str, str]]:
    """Yields the parameters of a function, or of a class and its constructor, with their meanings.

    These are in comments of the signature or in docstrings.
    """
    documented = [target, target.__init__] if inspect.isclass(target) else [target]
    for found in re.finditer(
        r"^ +(\w+): [^#\n]*,  # (.*)$", inspect.getsource(target), re.MULTILINE
    ):
        yield found[1], found[2]
    for text in (inspect.getdoc(x) or "" for x in documented):
        for section in re.findall(r"(?:Args|Attributes):\n((?:  .*\n?|\n)+)", text):
            for found in re.finditer(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE):
                yield found[1], " ".join(found[2].split())


if __name__ == "__main__":
    from pipeline.utils.tensorflow_import import import_tensorflow

    import_tensorflow()
    import pipeline.training  # noqa: F401  (registers what gin can bind)

    for numbers in RESULTS.glob("*/throughput.json"):
        document = tables.document(json.loads(numbers.read_text()))
        numbers.with_suffix(".md").write_text(document)
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
