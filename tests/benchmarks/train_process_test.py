import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import preloaded
import pytest
from conftest import ROOT
from tiny_benchmarks import FAKE, PATIENCE, is_alive, make_suite, recorded, run, waiting_processes
from waiting import wait_for

from pipeline.benchmarks import train_process
from pipeline.benchmarks.planned_runs import plan
from pipeline.benchmarks.suite_folder import SuiteFolder
from pipeline.benchmarks.train_process import LocalProcess, TrainProcess
from pipeline.utils import die_with_parent
from pipeline.utils.errors import RETRY_CODE, USER_ERROR_CODE
from pipeline.utils.shutdown import ECHO_SECONDS


@pytest.fixture
def program(tmp_path, request):
    """Starts a benchmark with two of four runs under way, and kills it when the test ends."""
    patience = getattr(request, "param", PATIENCE)
    command = [sys.executable, "-m", "tiny_benchmarks", str(tmp_path), patience]
    process = preloaded.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    waiting_processes(tmp_path, 2)
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_a_run_is_given_up_at_the_fourth_loss_without_a_checkpoint(tmp_path):
    planned = plan(make_suite(1), tmp_path)[0]
    lost = types.SimpleNamespace(
        run=planned,
        is_lost=True,
        poll=lambda: 1,
        was_stopped=lambda: False,
        error=lambda: "the node was lost",
    )
    said: list[str] = []
    losses = train_process.Losses(said.append)
    assert [losses.goes_on(lost) for _ in range(3)] == [True] * 3
    (planned.folder / "checkpoints" / "step-000000100").mkdir(parents=True)
    (planned.folder / "run.json").write_text("{}")
    assert [losses.goes_on(lost) for _ in range(4)] == [True, True, True, False]
    assert len(said) == 6 and "the node was lost. The run will be restarted" in said[0]
    assert losses[planned] == 7
    assert "lost 7 times, the last 4 times without a new checkpoint" in losses.error(lost)
    in_the_next_call = train_process.Losses(print)
    assert in_the_next_call[planned] == 7
    assert in_the_next_call.goes_on(lost)
    assert in_the_next_call[planned] == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_and_the_next_call_goes_on(program, tmp_path, number):
    running = waiting_processes(tmp_path, 2)
    program.send_signal(number)
    stdout, stderr = program.communicate(timeout=30)
    assert (program.returncode, stderr) == (0, b"stopping\n")
    assert stdout.endswith(b"0 finished, 4 left\n")
    assert not any(map(is_alive, running))
    # They had the half second that a checkpoint takes, and no other run was started.
    assert len(list(tmp_path.glob("tiny/*/seed-1/checkpoint"))) == 2
    assert not list(tmp_path.glob("tiny/*/seed-2"))
    assert recorded(tmp_path) == {}
    assert run(tmp_path, make_suite(1, PATIENCE)) == (2, [], 0)


def test_the_terminals_ctrl_c_does_not_reach_the_runs_but_kill_ends_them(program, tmp_path):
    running = waiting_processes(tmp_path, 2)
    assert all(map(is_alive, running))
    assert os.getpgid(program.pid) not in map(os.getpgid, running)
    program.kill()
    program.communicate(timeout=30)
    wait_for(lambda: not any(map(is_alive, running)), 5)
    with SuiteFolder(tmp_path, "tiny"):  # nobody holds the lock
        assert recorded(tmp_path) == {}


@pytest.mark.parametrize("program", ["fake.patience = 60"], indirect=True)
def test_a_second_ctrl_c_ends_everything_at_once(program, tmp_path):
    running = waiting_processes(tmp_path, 2)
    program.send_signal(signal.SIGINT)
    assert program.stderr.readline() == b"stopping\n"
    time.sleep(ECHO_SECONDS + 0.1)  # an earlier signal would count as an echo of the first
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=30)
    assert program.returncode == 128 + signal.SIGINT
    wait_for(lambda: not any(map(is_alive, running)), 5)
    assert not list(tmp_path.glob("tiny/*/*/checkpoint"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_somebody_else_stops_or_kills_is_started_again(tmp_path, number):
    killed = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"]

    def start(planned):
        process = TrainProcess(planned, FAKE if planned.folder in started else killed)
        started.append(planned.folder)
        return process

    started: list[pathlib.Path] = []
    outcome = run(tmp_path, make_suite(), start=start)
    assert outcome == (2, [], 0)
    assert [record["losses"] for record in recorded(tmp_path).values()] == [1, 1]


def test_a_run_that_is_killed_again_and_again_has_failed(tmp_path):
    def start(planned):
        started.append(planned.folder)
        return TrainProcess(planned, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])

    started: list[pathlib.Path] = []
    outcome = run(tmp_path, make_suite(), start=start)
    assert (outcome.finished, len(outcome.failed), len(started)) == (0, 2, 8)
    for record in recorded(tmp_path).values():
        assert record["error"].startswith("ended by signal 9 (Killed)\nThe run was lost 4 times")


@pytest.mark.parametrize(
    ("code", "is_lost", "expected"),
    [
        (0, False, True),
        (-signal.SIGSEGV, False, True),
        (128 + signal.SIGINT, False, True),
        (1, True, True),
        (1, False, False),
        (USER_ERROR_CODE, False, False),
        (RETRY_CODE, False, False),
        (255, False, False),
    ],
)
def test_signals_and_lost_machines_interrupt_a_run_and_its_own_errors_do_not(
    code, is_lost, expected
):
    process = types.SimpleNamespace(poll=lambda: code, is_lost=is_lost)
    assert train_process.was_interrupted(process) == expected


def test_a_process_that_is_to_die_with_its_parent_starts_nothing_for_a_parent_that_has_died(
    tmp_path,
):
    leash = die_with_parent.command([])[:-1]
    for parent, is_started in ((os.getpid(), True), (1, False)):
        path = tmp_path / str(parent)
        subprocess.run([*leash, str(parent), "/usr/bin/env", "touch", str(path)], check=True)
        assert path.exists() == is_started


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (None, 0),
        ("", 0),
        ('{"env_steps": 10}\n', 10),
        ('{"env_steps": 10}\n{"env_steps": 20', 10),
        ("x" * 100_000 + '\n{"env_steps": 30}\n', 30),
        ("nonsense\n", 0),
        ('{"env_steps": null}\n', 0),
    ],
)
def test_progress_is_the_last_whole_record(tmp_path, metrics, expected):
    run_ = plan(make_suite(), tmp_path)[0]
    run_.folder.mkdir(parents=True)
    if metrics is not None:
        (run_.folder / "metrics.jsonl").write_text(metrics)
    assert train_process.env_steps(run_) == expected


def test_a_process_whose_log_was_deleted_tells_its_exit_code(tmp_path):
    process = LocalProcess([sys.executable, "-c", "exit(3)"], tmp_path / "log")
    process.wait()
    (tmp_path / "log").unlink()
    assert process.error() == (
        f"exit code 3\n{tmp_path / 'log'} cannot be read: No such file or directory"
    )


def test_training_finds_modules_in_the_current_folder_if_the_program_does(tmp_path, monkeypatch):
    (tmp_path / "pipeline.py").write_text("raise SystemExit('the module of another project')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    others = [folder for folder in sys.path if folder]
    for path, is_found in ((others, False), (["", *others], True), ([str(tmp_path)], True)):
        monkeypatch.setattr(sys, "path", path)
        flags = ["--eager", "--exact_graph"]  # refused before TensorFlow is imported
        process = TrainProcess(plan(make_suite(1), tmp_path, (), flags)[0])
        process.wait()
        assert ("the module of another project" in process.error()) == is_found
        assert "error: " in process.error() or is_found  # the program's own
