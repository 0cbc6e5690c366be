"""Tests of the tune binary; `tuner_test` tests the searches, and the tutorial runs a whole one."""

import signal

import pytest
from conftest import assert_refused, start_binary
from waiting import wait_for

SEARCH = """
import pipeline.tuning.search
search.config = "dqn_cartpole"
search.num_env_steps = 1_000_000
search.parameters = {"ReplayBuffer.batch_size": ("choice", 16, 32)}
search.sampler = "grid"
"""


@pytest.fixture
def search(tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text(SEARCH)
    return f"--search={path}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set --search=FILE.gin to run a search, or --report to report on one."),
        (["SEARCH"], "--output_dir is required, for example --output_dir=runs/NAME."),
        (["--report", "OUT", "--trials=3"], "--trials has no effect with --report."),
        (["--report", "OUT", "--workers=2"], "--workers has no effect with --report."),
        (["--report", "OUT"], r"\S+/out contains no search.*"),
        (["SEARCH", "OUT", "--trials=3"], "--trials=3 is more than the 2 points of the grid.*"),
        (["SEARCH", "OUT", "--cpus_per_run=1"], "--cpus_per_run has no effect without .*"),
        (
            ["SEARCH", "OUT", "--ray_address=x", "--gpus_per_run=1.5"],
            "--gpus_per_run=1.5 must be .*",
        ),
    ],
)
def test_mistakes(tmp_path, search, arguments, message):
    output_dir = tmp_path / "out"
    known = {"SEARCH": search, "OUT": f"--output_dir={output_dir}"}
    assert_refused(message, "tune", *(known.get(argument, argument) for argument in arguments))
    assert not output_dir.exists()


def test_a_stopped_search_says_how_to_go_on_and_has_the_exit_code_of_the_signal(tmp_path, search):
    output_dir = tmp_path / "out"
    process = start_binary("tune", search, f"--output_dir={output_dir}")
    wait_for(lambda: list(output_dir.glob("mine/trial-*/seed-1/run.json")), 300, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped. The same command continues the search." in said
    assert f"pipeline.tune --report --output_dir={output_dir} reports" in said
