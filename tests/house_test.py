"""Tests of the project's rules that no linter checks."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60

ALGORITHMS = {"a2c", "a3c", "dqn", "impala", "nstep", "ppo", "sac", "trpo"}
ENVIRONMENTS = {"atari", "ale_py"}
# Words that the code of a package must not mention; comments and docstrings may.
UNMENTIONED = {
    "agents": ENVIRONMENTS,
    "environments": ALGORITHMS,
    "training": ALGORITHMS | ENVIRONMENTS,
}


def words_of(tree: ast.Module) -> set[str]:
    """Returns the lower-case words of names and strings, without docstrings."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    imports = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for child in ast.walk(node)
    }
    texts = [
        str(value)
        for node in ast.walk(tree)
        if id(node) not in docstrings | imports
        for _, value in ast.iter_fields(node)
        if isinstance(value, str)
    ]
    return set("".join(c.lower() if c.isalnum() else " " for c in " ".join(texts)).split())


@pytest.mark.parametrize("room", UNMENTIONED)
def test_rooms_do_not_mention_each_other(room: str):
    files = set((PACKAGE / room).rglob("*.py"))
    # It lists the agents that it can run.
    files -= {PACKAGE / "training/asynchronous.py"}
    for path in files:
        mentioned = words_of(ast.parse(path.read_text())) & UNMENTIONED[room]
        assert not mentioned, f"{path} mentions {sorted(mentioned)}"
    assert len(files) > 5


def test_functions_are_short():
    functions = 0
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"
                functions += 1
    assert functions > 1_000


def test_every_package_is_installed():
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(x.parent.relative_to(ROOT).parts) for x in PACKAGE.rglob("__init__.py")}
    assert folders == {name for name in listed if name != "pipeline.gin_configs"}


ROOMS = [x for x in sorted(PACKAGE.glob("*/__init__.py")) if "__all__" not in x.read_text()]


@pytest.mark.parametrize("room", ROOMS, ids=lambda x: x.parent.name)
def test_a_room_without_public_names_lists_its_modules(room: Path):
    lines = room.read_text().splitlines()
    listed = {line.split()[0] for line in lines if re.match(r"\w+(\.py|/) ", line)}
    modules = {path.name for path in room.parent.glob("*.py")} - {"__init__.py"}
    packages = {f"{path.parent.name}/" for path in room.parent.glob("*/__init__.py")}
    assert listed == modules | packages


def test_the_rules_see_what_they_should():
    tree = ast.parse(
        '"""Atari."""\nfrom pipeline import atari\ndef f(dqn):\n    return "for PPO"\n'
    )
    assert words_of(tree) & (ALGORITHMS | ENVIRONMENTS) == {"dqn", "ppo"}
