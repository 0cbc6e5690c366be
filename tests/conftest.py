"""Fixtures and helpers of all tests, such as a run that the binary trains once per session."""

import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import multiprocessing.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import gin
import preloaded
import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from pipeline.utils import files
from pipeline.utils.tensorflow_import import import_tensorflow

settings.register_profile("thorough", deadline=None, max_examples=2_000)  # `make test-crash`
settings.register_profile(
    "everyday", deadline=None, derandomize=True, database=None, max_examples=20
)
settings.load_profile("everyday")

ROOT = pathlib.Path(__file__).parent.parent
TESTS = ROOT / "tests"
FINISHED_RUN_FLAGS = [
    "--gin_file=dqn_cartpole",
    "--gin_bindings=train.num_env_steps = 1_200",
    "--gin_bindings=train.log_interval = 200",
    "--gin_bindings=train.eval_interval = 400",
    "--gin_bindings=train.checkpoint_interval = 400",
    "--gin_bindings=train.num_eval_episodes = 3",
    "--gin_bindings=train.num_final_episodes = 5",
    "--gin_bindings=initialize_replay_buffer.num_env_steps = 200",
    "--gin_bindings=mlp_encoder.units = (8,)",
    "--gin_bindings=ReplayBuffer.env_steps_per_update = 16",
    "--gin_bindings=configure_tensorflow.onednn = False",
]


# These fork, which takes longer the more memory the test process has gathered.
FORKING_FILES = ("nested_spaces", "vectors", "exact_restore")
# These start next, so that all test processes are busy to the end.
LONGEST_FILES = (
    *("resume", "asynchronous", "exact_resume", "host_loop", "train_binary", "evaluate"),
    *("shipped_configs", "parity", "our_worker", "tensorflow_import", "execution", "tutorials"),
)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ:  # further processes of pytest inherit it
        _gather_temporary_files(config)
    set_hypothesis_home_dir(pathlib.Path(tempfile.gettempdir()) / "hypothesis")
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # This process only distributes the tests.
    import_tensorflow()
    importlib.import_module("pipeline.training")  # registers what gin can bind
    importlib.import_module("pipeline.utils.execution").configure_gpu(True)
    # The test processes keep the processors busy, so further threads only take time.
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    with mock.patch.dict(os.environ, threads):
        importlib.import_module("tensorflow").constant(0)  # TensorFlow reads them now
    # Only a power failure would show that files are not synced; `files_test` checks the calls.
    mock.patch.object(os, "fsync", lambda descriptor: None).start()


def _gather_temporary_files(config: pytest.Config) -> None:
    """Gives all processes a temporary folder, which is removed with what killed ones have left."""
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()  # those of the tests stay there
    multiprocessing.util.get_temp_dir()  # Python removes it itself, after the folder below
    folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name


def pytest_collection_finish() -> None:
    gc.freeze()  # or each collection would visit millions of objects of modules and tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = FORKING_FILES + LONGEST_FILES
    places = {f"{name}_test.py": place for place, name in enumerate(first)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


class FinishedRun(NamedTuple):
    """Folder of a run, which tests share and must not change, and the program's output."""

    root_dir: pathlib.Path
    first_line_seconds: float
    stdout: str
    stderr: str


def combinations(*factors: Iterable, often: Collection[tuple]) -> list:
    """Returns parameters for all combinations; those not in `often` run in `make test-crash`."""
    return [
        pytest.param(*values, marks=[pytest.mark.crash] * (values not in often))
        for values in itertools.product(*factors)
    ]


def user_environment(**variables: str) -> dict[str, str]:
    """Returns a user's environment, without variables set here by TensorFlow and pytest."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "PYTEST_"))}
    return kept | variables


def process_commands() -> dict[int, str]:
    """Returns the command lines of all processes of this machine, by process id."""
    commands = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            commands[int(path.parent.name)] = (
                path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
    return commands


def start_binary(
    binary: str, *flags: str, popen: type[subprocess.Popen] = preloaded.Popen, **kwargs
) -> subprocess.Popen:
    """Starts `python -m pipeline.<binary>` as a user's shell would, with output in pipes."""
    settings: dict[str, Any] = {
        "cwd": ROOT,
        "env": user_environment(),
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    command = [sys.executable, "-m", f"pipeline.{binary}", *flags]
    return popen(command, **(settings | kwargs))


def run_binary(binary: str, *flags: str, **kwargs) -> subprocess.CompletedProcess:
    """Runs `python -m pipeline.<binary>` to its end."""
    process = start_binary(binary, *flags, **kwargs)
    stdout, stderr = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def assert_refused(message: str, binary: str, *flags: str, **kwargs) -> str:
    """Checks for one message on standard error and exit code 2; returns the standard output."""
    ended = run_binary(binary, *flags, **kwargs)
    assert ended.returncode == 2, ended.stderr
    assert re.fullmatch(f"error: {message}\n", ended.stderr, re.DOTALL), ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> FinishedRun:
    """Trains DQN on CartPole for 1,200 environment steps, which are too few to play well.

    All test processes share the run; the first that needs it trains it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    told = shared / "finished_run.json"
    with (shared / "finished_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            told.write_text(json.dumps(_train(shared / "my runs" / "dqn_cartpole")))
    root_dir, *others = json.loads(told.read_text())
    return FinishedRun(pathlib.Path(root_dir), *others)


def _train(root_dir: pathlib.Path) -> tuple[str, float, str, str]:
    """Trains the finished run, and returns the fields of `FinishedRun`."""
    started = time.monotonic()
    flags = (f"--root_dir={root_dir}", *FINISHED_RUN_FLAGS)
    process = start_binary("train", *flags, popen=subprocess.Popen)
    assert process.stdout is not None
    first_line = process.stdout.readline()
    first_line_seconds = time.monotonic() - started
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return str(root_dir), first_line_seconds, first_line + stdout, stderr


@pytest.fixture(autouse=True)
def clean_gin() -> Iterator[None]:
    """Clears gin's configuration, which is global, after each test."""
    yield
    gin.clear_config()


@pytest.fixture
def impatient_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses a lock that another process holds almost at once, instead of after a second."""
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.05)


@contextlib.contextmanager
def any_threads() -> Iterator[None]:
    """Lets configs ask for other numbers of threads than this process has."""
    import tensorflow as tf

    # TensorFlow is running and would refuse another number of threads.
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("intra", "inter"):
            name = f"set_{kind}_op_parallelism_threads"
            patch.setattr(tf.config.threading, name, lambda count: None)
        yield


@pytest.fixture(scope="module")
def collect_loops() -> Iterator[None]:
    """Lets drivers collect short rollouts in a loop, as long ones: its graph is built sooner."""
    driver = importlib.import_module("pipeline.acting.collect_driver")
    with mock.patch.object(driver, "_MAX_UNROLLED_STEPS", 0):
        yield


@pytest.fixture
def any_config() -> Iterator[None]:
    """Lets a test load configs with other numbers of threads than this process has."""
    with any_threads():
        yield
