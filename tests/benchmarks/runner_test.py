import errno
import json
import re
import sys

import pytest
from tiny_benchmarks import (
    FAKE,
    PATIENCE,
    StopWhen,
    is_alive,
    make_suite,
    recorded,
    run,
    start_fake,
    starts,
    waiting_processes,
)

from pipeline.benchmarks import runner
from pipeline.benchmarks.suite_folder import SuiteFolder
from pipeline.benchmarks.train_process import Machines, TrainProcess
from pipeline.runs.run_folder import RunFolder
from pipeline.utils.errors import RETRY_CODE, RetryableError, UserError, WriteError
from pipeline.utils.shutdown import StopSignal

# Suites that run to the end.


def test_runs_all_records_them_and_repeats_nothing(tmp_path, capsys):
    assert run(tmp_path, make_suite(2)) == (4, [], 0)
    by_run = recorded(tmp_path)
    assert by_run.keys() == {("A-v1", 1), ("B-v1", 1), ("A-v1", 2), ("B-v1", 2)}
    assert {record["status"] for record in by_run.values()} == {"finished"}
    assert by_run["B-v1", 2]["evaluation_returns"] == [2.0, 4.0]
    assert set(starts(tmp_path).values()) == {1}
    assert "dqn-B-v1 seed 2: finished (evaluation 3.0) after 0:0" in capsys.readouterr().out
    before = (tmp_path / "tiny.jsonl").read_text()
    assert run(tmp_path, make_suite(2)) == (4, [], 0)
    assert (tmp_path / "tiny.jsonl").read_text() == before
    assert set(starts(tmp_path).values()) == {1}


def test_the_warnings_of_runs_are_told_once(tmp_path, capsys):
    def start(started):
        started.log.parent.mkdir(parents=True, exist_ok=True)
        started.log.write_text("warning: evalution/f.x is not used here.\nwarned: no\n")
        return start_fake(started)

    run(tmp_path, make_suite(2), start=start)
    lines = [line for line in capsys.readouterr().out.splitlines() if "warn" in line]
    assert lines == ["dqn-A-v1 seed 1: warning: evalution/f.x is not used here."]


def test_what_is_no_fault_of_a_run_fails_no_run(tmp_path):
    def start(started):
        if started.experiment.environment == "B-v1":
            return start_fake(started)
        program = f"print('error: the disk is full'); raise SystemExit({RETRY_CODE})"
        return TrainProcess(started, (sys.executable, "-c", program))

    with pytest.raises(RetryableError, match="(?s)^1 run cannot.*dqn-A-v1 seed 1.*disk is full"):
        run(tmp_path, make_suite(1), start=start)
    assert recorded(tmp_path).keys() == {("B-v1", 1)}
    assert run(tmp_path, make_suite(1)) == (2, [], 0)


def test_a_stop_leaves_a_run_that_cannot_be_trained_now(tmp_path):
    def start(started):
        program = (sys.executable, "-c", f"raise SystemExit({RETRY_CODE})")
        return TrainProcess(started, program if "A-v1" in started.name else FAKE)

    b_has_begun = StopWhen(lambda: list(tmp_path.glob("tiny/dqn-B-v1/*/process_id")))
    assert run(tmp_path, make_suite(1, PATIENCE), stop=b_has_begun, start=start) == (0, [], 2)


@pytest.mark.parametrize("have_ended", [False, True], ids=["at the end", "at the start"])
def test_a_result_that_cannot_be_read_now_is_no_failure(tmp_path, monkeypatch, have_ended):
    def stale(self, *arguments):
        if "A-v1" in str(self.path) and (self.path / "result.json").exists():
            raise WriteError("cannot read result.json: Stale file handle")
        return finished(self, *arguments)

    finished = RunFolder.finished
    if have_ended:
        run(tmp_path, make_suite())
        (tmp_path / "tiny.jsonl").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finished", stale)
        with pytest.raises(RetryableError, match="(?s)^1 run cannot.*dqn-A-v1 seed 1.*Stale file"):
            run(tmp_path, make_suite())
    assert recorded(tmp_path).keys() == {("B-v1", 1)}
    assert run(tmp_path, make_suite()) == (2, [], 0)
    assert set(starts(tmp_path).values()) == {1}


def test_a_full_disk_at_the_start_of_a_process_fails_no_run(tmp_path):
    def start(started):
        if "A-v1" in started.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return start_fake(started)

    with pytest.raises(RetryableError, match="(?s)dqn-A-v1 seed 1.*cannot be started: .*No space"):
        run(tmp_path, make_suite(), start=start)
    assert recorded(tmp_path).keys() == {("B-v1", 1)}


def test_more_seeds_go_on_with_the_others(tmp_path):
    run(tmp_path, make_suite(1))
    assert run(tmp_path, make_suite(2)) == (4, [], 0)
    assert set(starts(tmp_path).values()) == {1}
    # The first seed of every experiment comes before the second seed of any.
    assert [seed for _, seed in recorded(tmp_path)] == [1, 1, 2, 2]


@pytest.mark.parametrize("workers", [1, 3])
def test_so_many_run_at_once(tmp_path, workers):
    run(tmp_path, make_suite(2, f"fake.together = '{workers}'"), workers)
    texts = [path.read_text() for path in tmp_path.glob("tiny/*/times.jsonl")]
    events = [json.loads(line) for line in "".join(texts).splitlines()]
    changes = [change for _, change in sorted((when, change) for _, change, when in events)]
    assert max(sum(changes[: end + 1]) for end in range(len(changes))) == workers
    assert {record["workers"] for record in recorded(tmp_path).values()} == {workers}


def test_a_run_that_nobody_recorded_is_recorded_without_running_again(tmp_path):
    run(tmp_path, make_suite())
    before = recorded(tmp_path)
    (tmp_path / "tiny.jsonl").unlink()
    run(tmp_path, make_suite())
    # How many runs shared the machine is no longer known.
    assert recorded(tmp_path) == {key: of | {"workers": None} for key, of in before.items()}
    assert set(starts(tmp_path).values()) == {1}


def test_a_record_is_enough_for_a_run_whose_folder_is_gone(tmp_path):
    run(tmp_path, make_suite())
    folder = tmp_path / "tiny" / "dqn-A-v1" / "seed-1"
    folder.rename(tmp_path / "elsewhere")
    assert run(tmp_path, make_suite()) == (2, [], 0)
    assert not folder.exists()


# Failures.


def test_a_failed_run_is_recorded_and_tried_again(tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.touch()
    suite = make_suite(2, "fake.failing = '2'", f"fake.broken = '{broken}'")
    outcome = run(tmp_path, suite)
    reason = "exit code 2: error: the loss is NaN"
    assert (outcome.finished, outcome.left) == (2, 0)
    assert {run.name: why for run, why in outcome.failed} == {
        "dqn-A-v1 seed 2": reason,
        "dqn-B-v1 seed 2": reason,
    }
    record = recorded(tmp_path)["A-v1", 2]
    assert record["status"] == "failed"
    assert record["error"] == "exit code 2\nstarted 2\na line\nerror: the loss is NaN"
    assert f"dqn-A-v1 seed 2: failed ({reason})" in capsys.readouterr().out

    # The log keeps both attempts; the record describes the last one.
    run(tmp_path, suite)
    assert recorded(tmp_path)["A-v1", 2] == record

    broken.unlink()
    assert run(tmp_path, suite) == (4, [], 0)
    assert recorded(tmp_path)["A-v1", 2]["status"] == "finished"
    assert len((tmp_path / "tiny.jsonl").read_text().splitlines()) == 4
    assert (starts(tmp_path)["dqn-A-v1/seed-1"], starts(tmp_path)["dqn-A-v1/seed-2"]) == (1, 3)


def test_a_damaged_result_stops_nobody_else(tmp_path):
    run(tmp_path, make_suite())
    (tmp_path / "tiny.jsonl").unlink()
    damaged = tmp_path / "tiny" / "dqn-A-v1" / "seed-1" / "result.json"
    damaged.write_text("{")
    outcome = run(tmp_path, make_suite())
    ((failed, reason),) = outcome.failed
    assert (outcome.finished, failed.name) == (1, "dqn-A-v1 seed 1")
    assert reason.startswith(f"{damaged} is damaged")


def test_a_run_that_cannot_be_started_stops_nobody_else(tmp_path):
    (tmp_path / "tiny" / "dqn-A-v1" / "seed-1.log").mkdir(parents=True)
    outcome = run(tmp_path, make_suite())
    ((failed, reason),) = outcome.failed
    assert (outcome.finished, outcome.left, failed.name) == (1, 0, "dqn-A-v1 seed 1")
    assert reason.startswith("the process cannot be started: ") and "seed-1.log" in reason


def test_a_run_with_a_result_has_finished_however_its_process_ended(tmp_path):
    assert run(tmp_path, make_suite(1, "fake.exit_code = '139'")) == (2, [], 0)


def test_no_process_outlives_an_error_here(tmp_path, monkeypatch):
    def full(self, record):
        waiting_processes(tmp_path, 1)
        raise UserError("the disk is full")

    monkeypatch.setattr(SuiteFolder, "add", full)
    first, second = make_suite().experiments
    suite = make_suite()._replace(experiments=(first, second._replace(bindings=(PATIENCE,))))
    with pytest.raises(UserError, match="the disk is full"):
        run(tmp_path, suite, workers=2)
    (process_id,) = waiting_processes(tmp_path, 1)
    assert not is_alive(process_id)


# Terminal output.


def test_plain_lines_count_what_running_runs_have_done(tmp_path, monkeypatch, capsys):
    two_are_halfway = StopWhen(lambda: len(list(tmp_path.glob("tiny/*/*/process_id"))) == 2)
    monkeypatch.setattr(runner, "_PLAIN_SECONDS", 0.0)
    assert run(tmp_path, make_suite(2, PATIENCE), workers=2, stop=two_are_halfway) == (0, [], 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs to do: 4, done: 0; at most 2 at a time"
    assert lines[1] == "training: 0/400 steps  0%  0 finished, 2 running, 0 failed, 2 left"
    # Two of the four runs have taken 50 of their 100 steps.
    half = r"training: 100/400 steps  25%  [0-9:]+ left  0 finished, 2 running, 0 failed, 2 left"
    assert any(re.fullmatch(half, line) for line in lines)


def test_the_bindings_of_the_machines_come_before_those_of_the_user(tmp_path):
    runs = []

    def start(run):
        runs.append(run)
        return start_fake(run)

    on = Machines(tmp_path, 2, start, ["a.b = 1", "a.c = 1"])
    runner.run_suite(make_suite(1), on, ["a.c = 2"], StopSignal())
    for planned in runs:
        assert planned.bindings[-3:] == ("a.b = 1", "a.c = 1", "a.c = 2")
    assert len(runs) == 2
