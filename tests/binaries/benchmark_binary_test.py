"""Tests of the benchmark binary with real trainings: killed, called again, reported."""

import json
import pathlib
import re
import subprocess
import time
from typing import NamedTuple

import pytest
from conftest import assert_refused, process_commands, run_binary, start_binary
from waiting import wait_for

from pipeline.utils.jsonl import read_jsonl


class Benchmark(NamedTuple):
    """Results of two experiments of the smoke suite, which is killed halfway and then finished."""

    output_dir: pathlib.Path
    left_after_kill: list[str]
    recorded_before: list[str]  # lines
    begun_before: list[str]  # runs with a checkpoint but without a result
    finished: subprocess.CompletedProcess


def flags(output_dir: pathlib.Path) -> list[str]:
    experiments = "--experiments=dqn-CartPole-v1,ppo-CartPole-v1"
    small = "--gin_bindings=mlp_encoder.units = (8,)"
    return ["--suite=smoke", f"--output_dir={output_dir}", "--seeds=1", experiments, small]


def trainings(output_dir: pathlib.Path) -> list[str]:
    """Returns the commands of the processes that train in the folder."""
    flag = f"--root_dir={output_dir}"
    return [command for command in process_commands().values() if flag in command]


def kill(process: subprocess.Popen, output_dir: pathlib.Path) -> list[str]:
    """Kills the benchmark and returns the trainings that are left after two seconds."""
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 2
    while trainings(output_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    return trainings(output_dir)


def begun(output_dir: pathlib.Path) -> list[str]:
    """Returns the experiments whose run has a checkpoint but no result."""
    paths = output_dir.glob("smoke/*/seed-1/checkpoints/step-*")
    folders = {path.parent.parent for path in paths}
    return sorted(f.parent.name for f in folders if not (f / "result.json").exists())


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory) -> Benchmark:
    output_dir = tmp_path_factory.mktemp("bench")
    records = output_dir / "smoke.jsonl"
    process = start_binary("benchmark", *flags(output_dir))
    wait_for(lambda: records.exists() and begun(output_dir), 300, process)
    left = kill(process, output_dir)
    before = records.read_text().splitlines(), begun(output_dir)
    finished = run_binary("benchmark", *flags(output_dir))
    return Benchmark(output_dir, left, *before, finished)


def test_kill_leaves_no_training_behind(benchmark):
    assert benchmark.left_after_kill == []


def test_the_next_call_finishes_what_was_begun(benchmark):
    ended = benchmark.finished
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-2] == "finished: 2. For the report:"
    records = read_records(benchmark.output_dir)
    assert sorted(f"{r['algorithm']}-{r['environment']}" for r in records) == [
        "dqn-CartPole-v1",
        "ppo-CartPole-v1",
    ]
    for record in records:
        assert (record["status"], record["seed"]) == ("finished", 1)
        assert record["num_env_steps"] <= record["env_steps"] < record["num_env_steps"] + 300
        assert len(record["evaluation_returns"]) == 20
        assert len(record["curve"]) >= 3 and len(record["evaluations"]) >= 1
        assert record["env_steps_per_second"] > 0
        assert record["evaluation_policy"] == "greedy"


def test_what_was_recorded_before_the_kill_has_not_been_repeated(benchmark):
    before = benchmark.recorded_before
    kept = (benchmark.output_dir / "smoke.jsonl").read_text().splitlines()
    assert before and kept[: len(before)] == before
    for record in map(json.loads, before):
        name = f"{record['algorithm']}-{record['environment']}"
        log = benchmark.output_dir / "smoke" / name / "seed-1.log"
        assert log.read_text().count("loading TensorFlow") == 1


def test_killed_runs_went_on_from_their_checkpoints(benchmark):
    assert benchmark.begun_before
    for name in benchmark.begun_before:
        folder = benchmark.output_dir / "smoke" / name / "seed-1"
        (resumed_at,) = json.loads((folder / "run.json").read_text())["resumed_at_env_steps"]
        assert resumed_at > 0
        logged = [record["env_steps"] for record in read_jsonl(folder / "metrics.jsonl")]
        assert logged == sorted(set(logged))
        log = folder.with_name("seed-1.log").read_text()
        assert f"resuming {folder} at environment step {resumed_at:_}" in log


def test_a_call_when_all_is_done_trains_nothing_and_the_report_follows(benchmark):
    ended = run_binary("benchmark", *flags(benchmark.output_dir), "--report")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "runs to do: 0, done: 2; at most 1 at a time",
        f"wrote {benchmark.output_dir}/report.md",
        f"wrote {benchmark.output_dir}/report.html",
    ]
    assert "<html" in (benchmark.output_dir / "report.html").read_text()


def test_other_settings_are_refused(benchmark):
    binding = "--gin_bindings=train.num_final_episodes = 7"
    ended = run_binary("benchmark", *flags(benchmark.output_dir), binding)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "\n  train.num_final_episodes: 20 then, 7 now\n" in ended.stderr


def test_a_failed_run_is_told_and_the_exit_code_is_1(tmp_path):
    suite = tmp_path / "mine.gin"
    suite.write_text(
        "import pipeline.benchmarks.suites\n"
        "suite.protocol = 'any'\n"
        "suite.experiments = (('dqn', 'CartPole-v1', 'dqn_cartpole', 100),)\n"
    )
    output_dir = tmp_path / "bench"
    folder = output_dir / "mine" / "dqn-CartPole-v1" / "seed-1"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{")
    folder.with_name("seed-1.log").touch()
    arguments = [f"--suite={suite}", f"--output_dir={output_dir}", "--seeds=1"]
    ended = run_binary("benchmark", *arguments, "--report")
    assert (ended.returncode, ended.stderr) == (1, "")
    reason = f"{folder}/result.json is damaged"
    assert re.search(
        rf"^dqn-CartPole-v1 seed 1 has failed \({reason}.*\); its output is in {folder}.log\n"
        r"failed: 1; the same command tries these runs again.\n"
        r"To start a failed run over, delete its folder\. Its log is beside it, as FOLDER\.log\.\n",
        ended.stdout,
        re.MULTILINE,
    )
    (record,) = read_records(output_dir)
    assert (record["status"], record["error"].startswith(reason)) == ("failed", True)
    assert (output_dir / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to do: --suite=NAME, --report or --throughput."),
        (["--suite=smoke"], "say where results go: --output_dir=runs/NAME."),
        (["--suite=smok", "--output_dir=OUT"], "no suite is named 'smok'. Nearest: smoke.*"),
        (["--suite=smoke", "--output_dir=OUT", "--seeds=0"], "flag --seeds=0: .*"),
        (["--suite=smoke", "--output_dir=OUT", "--workers=0"], "flag --workers=0: .*"),
        (["--report", "--output_dir=OUT", "--seeds=1"], "--seeds has no effect without --suite."),
        (
            ["--suite=smoke", "--output_dir=OUT", "--experiments=ppo-*,dqn-CartPol-v1"],
            "--experiments=dqn-CartPol-v1: the suite smoke has no such experiment. "
            "Nearest: dqn-CartPole-v1.*",
        ),
        (
            ["--report", "--output_dir=OUT", "--allow_inexact_resume"],
            "--allow_inexact_resume has no effect without --suite.",
        ),
        (["--throughput"], "say which run to time: --throughput --gin_file=dqn_cartpole."),
        (
            ["--throughput", "--output_dir=OUT", "--suite=smoke"],
            "--throughput needs the machine .*",
        ),
        (
            ["--throughput", "--gin_file=dqn_cartpole", "--output_dir=OUT"],
            "--output_dir has no effect without --suite or --report.",
        ),
        (
            ["--report", "--output_dir=OUT", "--seconds=2"],
            "--seconds has no effect without --throughput.",
        ),
        (
            ["--report", "--output_dir=OUT", "--gin_file=dqn_cartpole"],
            "--gin_file has no effect without --throughput.",
        ),
        (
            ["--report", "--output_dir=OUT", "--gin_bindings=a.b = 1"],
            "--gin_bindings has no effect without --suite or --throughput.",
        ),
        (["--throughput", "--seconds=nan"], "flag --seconds=nan: must be a finite number"),
        (
            ["--suite=smoke", "--output_dir=OUT", "--gin_bindings=train.num_env_steps"],
            "--gin_bindings: .*",
        ),
    ],
)
def test_mistakes(tmp_path, arguments, message):
    output_dir = tmp_path / "bench"
    flags = [argument.replace("OUT", str(output_dir)) for argument in arguments]
    assert assert_refused(message, "benchmark", *flags) == ""
    assert not output_dir.exists()


def read_records(output_dir: pathlib.Path) -> list[dict]:
    return [record for path in output_dir.glob("*.jsonl") for record in read_jsonl(path)]


def test_throughput_of_a_run_is_a_line_a_stage():
    flags = ["--throughput", "--gin_file=ppo_cartpole", "--seconds=0.1"]
    ended = run_binary("benchmark", *flags)
    assert (ended.returncode, ended.stderr) == (0, "")
    loading, *lines = ended.stdout.splitlines()
    assert loading == "loading TensorFlow ..."
    stages = [line.split() for line in lines]
    assert [stage[0] for stage in stages] == [
        "environment",
        "collect",
        "sample",
        "update",
        "training",
    ]
    assert all(float(stage[1].replace(",", "")) > 0 for stage in stages)
