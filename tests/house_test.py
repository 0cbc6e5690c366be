"""The rules of the house: who may import whom, and how long things may grow.

A new module fails here until it has its line in `MAY_IMPORT`: decide what it may know.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 60

# Anyone may import these; they import nothing but each other.
GROUND = {"data_files", "durable", "errors", "folders", "randomness", "tensorflow_import"}
# The binaries and the package itself: they may import everything.
TOP = {"__init__", "train", "evaluate", "plot", "benchmark", "parity"}

MAY_IMPORT: dict[str, set[str]] = {
    # It runs the binary that trains; only its stages look inside, to time the parts.
    "benchmarks": {
        "checkpoints",
        "circumstances",
        "collect",
        "components",
        "configuration",
        "gin_statements",
        "host_loop",
        "iteration",
        "jsonl",
        "parts",
        "plan",
        "policies",
        "progress",
        "revision",
        "run_folder",
        "shutdown",
        "train_loop",
    },
    # It repeats updates, and reads finished runs as the benchmarks do.
    "drift": {
        "agents",
        "benchmarks",
        "collect",
        "components",
        "execution",
        "failures",
        "parts",
        "run_folder",
    },
    "configuration": {"gin_explain", "gin_registry", "gin_statements", "gin_values"},
    "gin_explain": {"gin_registry", "gin_statements"},
    "gin_values": {"gin_registry", "gin_statements"},
    "gin_registry": {"gin_statements"},
    "gin_statements": set(),
    "train_loop": {
        "agents",
        "circumstances",
        "collect",
        "components",
        "configuration",
        "environments",
        "execution",
        "experience",
        "host_loop",
        "patience",
        "plan",
        "progress",
        "run_folder",
        "shutdown",
        "watchdog",
    },
    "components": {
        "agents",
        "collect",
        "environments",
        "evaluation",
        "execution",
        "experience",
        "iteration",
    },
    "execution": set(),
    "host_loop": {
        "checkpoints",
        "chunks",
        "circumstances",
        "collect",
        "components",
        "failures",
        "finiteness",
        "iteration",
        "metrics",
        "parts",
        "patience",
        "plan",
        "progress",
        "run_folder",
        "run_logs",
        "shutdown",
        "stopwatch",
        "watchdog",
    },
    "asynchronous": {
        "actors",
        "agents",
        "collect",
        "components",
        "environments",
        "execution",
        "experience",
        "iteration",
        "metrics",
        "schedules",
    },
    "actors": {
        "agents",
        "checkpoints",
        "collect",
        "environments",
        "experience",
        "iteration",
        "metrics",
        "parts",
    },
    "plan": set(),
    "chunks": {"iteration", "stopwatch"},
    "finiteness": {"agents", "experience"},
    "patience": set(),
    "watchdog": {"environments", "shutdown"},
    "run_logs": {"event_log", "failures", "jsonl", "run_folder"},
    "stopwatch": {"environments", "iteration"},
    "iteration": {"agents", "collect", "execution", "experience", "policies"},
    "circumstances": {"configuration", "gin_statements"},
    "revision": {"gin_statements"},
    "run_folder": {"circumstances", "configuration", "revision"},
    "saved_run": {"checkpoints", "configuration", "gin_statements", "run_folder"},
    "saved_policy": {
        "agents",
        "checkpoints",
        "components",
        "configuration",
        "environments",
        "parts",
        "policies",
        "saved_run",
        "train_loop",
    },
    "cli": {"configuration"},
    "failures": {"environments"},
    "evaluation": {"collect", "environments", "failures", "policies"},
    "checkpoints": {"manifest"},
    "manifest": set(),
    "parts": set(),
    "collect": {"environments", "execution", "metrics", "policies"},
    "experience": {"observations", "returns"},
    "agents": {
        "execution",
        "initializers",
        "networks",
        "normalizers",
        "observations",
        "optimizers",
        "policies",
        "returns",
        "schedules",
    },
    "policies": set(),
    "networks": {"initializers", "layers", "observations"},
    "layers": set(),
    "initializers": set(),
    "normalizers": {"returns"},
    "observations": set(),
    "optimizers": set(),
    "returns": set(),
    "schedules": set(),
    "environments": set(),
    "metrics": set(),
    "event_log": set(),
    "jsonl": set(),
    "progress": set(),
    "shutdown": set(),
}

FORBIDDEN = {
    "cloudpickle": "a checkpoint is data, never code",
    "dill": "a checkpoint is data, never code",
    "gym": "gymnasium is its successor",
    "pygame": "gymnasium renders",
    "pickle": "a checkpoint is data, never code",
    "shelve": "a checkpoint is data, never code",
}

ALGORITHMS = {"a2c", "a3c", "dqn", "nstep", "ppo", "sac", "trpo"}
ENVIRONMENTS = {"atari", "ale_py"}
# What a file must not know of, wherever the words of its code stand.
UNMENTIONED = {
    "agents": ENVIRONMENTS,
    "environments": ALGORITHMS,
    "train_loop": ALGORITHMS | ENVIRONMENTS,
    "host_loop": ALGORITHMS | ENVIRONMENTS,
    "iteration": ALGORITHMS | ENVIRONMENTS,
    "actors": ALGORITHMS | ENVIRONMENTS,
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(tree: ast.AST) -> set[str]:
    parts = (name.split(".") for name in imports_of(tree))
    return {name[1] for name in parts if name[0] == "pipeline" and len(name) > 1}


def words_of(tree: ast.Module) -> set[str]:
    """Lower-case words of names and strings; comments and docstrings may say what they like."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    texts = [
        str(value)
        for node in ast.walk(tree)
        if id(node) not in docstrings
        for _, value in ast.iter_fields(node)
        if isinstance(value, str)
    ]
    return set("".join(c.lower() if c.isalnum() else " " for c in " ".join(texts)).split())


def functions_of(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def label(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


@pytest.fixture(params=FILES, ids=label)
def path(request) -> Path:
    return request.param


@pytest.fixture
def tree(path) -> ast.Module:
    return ast.parse(path.read_text())


def test_imports_go_downwards(path, tree):
    room = room_of(path)
    assert room in GROUND | TOP | MAY_IMPORT.keys(), f"give {room} its line in MAY_IMPORT"
    if room in TOP:
        return
    allowed = GROUND | (set() if room in GROUND else {room, *MAY_IMPORT[room]})
    turned = rooms_imported(tree) - allowed
    assert not turned, f"{label(path)} may not import {sorted(turned)}"


def test_no_room_imports_itself_in_a_circle():
    def reach(room: str, above: tuple[str, ...] = ()) -> None:
        assert room not in above, f"circle: {' -> '.join([*above, room])}"
        for below in MAY_IMPORT.get(room, ()):
            reach(below, (*above, room))

    for room in MAY_IMPORT:
        reach(room)


def test_every_permission_is_used():
    assert {room_of(path) for path in FILES} == GROUND | TOP | MAY_IMPORT.keys()
    for room, allowed in MAY_IMPORT.items():
        files = [path for path in FILES if room_of(path) == room]
        used = set().union(*(rooms_imported(ast.parse(path.read_text())) for path in files))
        assert allowed <= used, f"{room} does not import {sorted(allowed - used)}"


def test_the_layout_in_build_md_lists_every_room_above_what_it_imports():
    layout = (ROOT / "BUILD.md").read_text().split("## Layout")[1].split("    gin_configs/")[0]
    line_of: dict[str, int] = {}
    for number, line in enumerate(layout.splitlines()):
        for name in re.findall(r"(\w+)(?:\.py|/)", line):
            line_of.setdefault(name, number)
    for room, allowed in MAY_IMPORT.items():
        for below in allowed | GROUND:
            assert line_of[room] <= line_of[below], f"{below} stands above {room}, which imports it"


def test_no_forbidden_import(path, tree):
    for name in imports_of(tree):
        reason = FORBIDDEN.get(name.split(".")[0])
        assert reason is None, f"{label(path)} imports {name}: {reason}"


def test_rooms_do_not_mention_each_other(path, tree):
    mentioned = words_of(tree) & UNMENTIONED.get(room_of(path), set())
    assert not mentioned, f"{label(path)} mentions {sorted(mentioned)}"


def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{label(path)} has {lines} lines"


def test_functions_are_short(path, tree):
    for function in functions_of(tree):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{label(path)}: {function.name} has {lines} lines"


def test_the_rules_see_what_they_should():
    tree = ast.parse(
        '"""Atari."""\n'
        "import pickle\n"
        "from pipeline import train\n"
        "from pipeline.agents.dqn import x\n"
        "def f(dqn):\n"
        "    'ppo'\n"
        "    import gym.spaces\n"
        "    return 'for Atari'\n"
    )
    assert set(imports_of(tree)) == {
        "pickle",
        "pipeline.train",
        "pipeline.agents.dqn.x",
        "gym.spaces",
    }
    assert rooms_imported(tree) == {"train", "agents"}
    assert words_of(tree) & (ALGORITHMS | ENVIRONMENTS) == {"atari", "dqn"}
    assert [function.name for function in functions_of(tree)] == ["f"]
