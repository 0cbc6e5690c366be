import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import measurements, peer_environment, sides, tables, throughput, worker_process
from benchmarks.measurements import ratios
from benchmarks.sides import Side
from benchmarks.tables import summary
from benchmarks.throughput import measure, measure_workload
from benchmarks.workers import protocol, workloads
from pipeline.utils import files
from pipeline.utils.errors import UserError

WORKERS = pathlib.Path(protocol.__file__).parent
UNIT = "environment steps"

# Worker that speaks the protocol, writes each request to a file that all workers share, and then
# fails in the way of `failure`.
FAKE = """
import os, pathlib, sys, time
sys.path.insert(0, {workers!r})
import protocol

channel, options = protocol.Channel(), protocol.arguments()
name, stages = {name!r}, {stages!r}
print("a library is talkative")
os.write(1, b"so is its C++\\n")
assert pathlib.Path(options.output_dir).is_dir()
asked = []

def stage(title):
    def measure(seconds):
        asked.append(title)
        with open({order!r}, "a") as order:
            order.write(f"{{name}} {{title}}\\n")
        if len(asked) == {failing_at}:
            {failure}
        return {{"seconds": seconds, "count": 10 * len(asked), "unit": {unit!r}}}
    return measure

channel.serve({{"versions": {{"fake": "1"}}}}, {{s: stage(s) for s in stages}})
"""


def fake(tmp_path, name, stages=("environment", "training"), failure="pass", failing_at=2):
    script = tmp_path / f"{name.replace(':', '_')}.py"
    script.write_text(
        textwrap.dedent(FAKE).format(
            workers=str(WORKERS), name=name, stages=stages, order=str(tmp_path / "order"),
            failure=failure, failing_at=failing_at, unit=UNIT,
        )
    )  # fmt: skip
    return Side(name, (sys.executable, str(script)), "dqn_pong_1")


@pytest.fixture
def output_dir(tmp_path):
    folder = tmp_path / "out"
    (folder / "logs").mkdir(parents=True)
    return folder


def test_the_sides_take_turns_in_each_stage_of_a_round(tmp_path, output_dir):
    of_workload = [fake(tmp_path, "a"), fake(tmp_path, "b", stages=("training", "more"))]
    results = measure_workload("dqn_pong_1", of_workload, output_dir, seconds=0.5, rounds=2)
    assert (tmp_path / "order").read_text().splitlines() == [
        "a environment", "a training", "b training", "b more",
        "a environment", "a training", "b training", "b more",
    ]  # fmt: skip
    training = results["a"]["stages"]["training"]
    assert [answer["count"] for answer in training["rounds"]] == [20, 40]
    assert training["per_second"] == 60.0  # median of 20 / 0.5 and 40 / 0.5
    assert results["b"]["facts"]["versions"] == {"fake": "1"}
    assert results["a"]["error"] is None
    assert [path.name for path in output_dir.iterdir()] == ["logs"]


def test_what_else_a_worker_prints_is_in_its_log(tmp_path, output_dir):
    measure_workload("dqn_pong_1", [fake(tmp_path, "a")], output_dir, 0.1, 1)
    printed = (output_dir / "logs" / "dqn_pong_1-a.log").read_text().splitlines()
    assert set(printed) == {"a library is talkative", "so is its C++"}


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("raise ValueError('out of coffee')", ["exit code 1", "ValueError: out of coffee"]),
        ("os.kill(os.getpid(), 9)", ["exit code -9"]),
        ("protocol.json.dumps = str; channel.say('bananas')", ["unexpected message, 'bananas'"]),
        ("time.sleep(60)", ["did not answer for"]),
    ],
)
def test_a_worker_that_fails_costs_only_what_it_had_left(
    tmp_path, output_dir, monkeypatch, capsys, failure, said
):
    monkeypatch.setattr(worker_process, "_ANSWER_SECONDS", 2.0)
    of_workload = [fake(tmp_path, "good"), fake(tmp_path, "bad", failure=failure)]
    started = time.monotonic()
    results = measure_workload("dqn_pong_1", of_workload, output_dir, 0.1, 2)
    assert time.monotonic() - started < 30
    good, bad = results["good"], results["bad"]
    assert good["error"] is None
    assert {stage: len(m["rounds"]) for stage, m in good["stages"].items()} == {
        "environment": 2,
        "training": 2,
    }
    assert len(bad["stages"]["environment"]["rounds"]) == 1
    assert "training" not in bad["stages"]
    for words in [
        "bad's worker for dqn_pong_1",
        str(output_dir / "logs" / "dqn_pong_1-bad.log"),
        *said,
    ]:
        assert words in bad["error"]
    assert capsys.readouterr().err == bad["error"] + "\n"


def test_a_worker_that_cannot_start_does_not_stop_the_others(tmp_path, output_dir):
    broken = Side(
        "broken", (sys.executable, "-c", "raise SystemExit('no such workload')"), "dqn_pong_1"
    )
    results = measure_workload("dqn_pong_1", [broken, fake(tmp_path, "a")], output_dir, 0.1, 1)
    assert "no such workload" in results["broken"]["error"]
    assert results["broken"]["stages"] == {}
    assert set(results["a"]["stages"]) == {"environment", "training"}


SMALL = ("dqn_pong_1", "dqn_pong_1:bfloat16"), 0.1


@pytest.fixture
def fake_sides(tmp_path, monkeypatch):
    """Replaces all sides with fake workers."""

    def ours(workload, variants):
        return [fake(tmp_path, f"ours{':' if v else ''}{v}") for v in variants]

    monkeypatch.setattr(sides, "ours", ours)
    monkeypatch.setattr(sides, "peers", lambda workload, python: [fake(tmp_path, "sb3")])
    monkeypatch.setattr(peer_environment, "ensure", lambda: pathlib.Path("/python"))


def test_measure_writes_everything(tmp_path, fake_sides):
    measure(tmp_path / "speed", True, *SMALL, 3)
    results = json.loads((tmp_path / "speed" / "throughput.json").read_text())
    measured = results["workloads"]["dqn_pong_1"]["sides"]
    assert list(measured) == ["ours", "ours:bfloat16", "sb3"]
    assert all(len(side["stages"]["training"]["rounds"]) == 3 for side in measured.values())
    assert results["rounds"] == 3 and results["cpu_count"] >= 1 and results["memory_gib"] > 0
    text = (tmp_path / "speed" / "throughput.md").read_text()
    assert summary(results) in text
    assert f"{results['cpu_count']} cores" in text


def test_without_peers_there_are_none(tmp_path, fake_sides, monkeypatch):
    monkeypatch.setattr(peer_environment, "ensure", None)
    measure(tmp_path, False, *SMALL, 1)
    results = json.loads((tmp_path / "throughput.json").read_text())
    assert list(results["workloads"]["dqn_pong_1"]["sides"]) == ["ours", "ours:bfloat16"]


def test_measure_tells_of_failures_once_all_is_written(tmp_path, fake_sides, monkeypatch):
    broken = fake(tmp_path, "sb3", failure="raise ValueError('oh')")
    monkeypatch.setattr(sides, "peers", lambda workload, python: [broken])
    assert measure(tmp_path, True, *SMALL) == ["dqn_pong_1: sb3"]
    results = json.loads((tmp_path / "throughput.json").read_text())
    assert (
        results["workloads"]["dqn_pong_1"]["sides"]["ours"]["stages"]["training"]["per_second"] > 0
    )
    text = (tmp_path / "throughput.md").read_text()
    assert "Not everything was measured" in text and "ValueError: oh" in text


def test_what_a_folder_holds_is_not_replaced(tmp_path, fake_sides):
    for name in ("scratch", ".throughput-scratch-killed"):
        (tmp_path / name).mkdir()
    measure(tmp_path, False, *SMALL)
    kept = {"throughput.json", "throughput.md", "logs", "scratch", ".throughput.lock"}
    assert kept < {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob(".throughput-scratch-*"))
    before = (tmp_path / "throughput.json").read_bytes()
    (tmp_path / ".throughput-scratch-killed").mkdir()
    with pytest.raises(UserError, match=r"another seconds, rounds,.* delete the file"):
        measure(tmp_path, False, SMALL[0], 0.2, 1)
    assert (tmp_path / "throughput.json").read_bytes() == before
    assert not list(tmp_path.glob(".throughput-scratch-*"))


def test_the_same_command_goes_on_with_what_is_left(tmp_path, fake_sides, monkeypatch, capsys):
    broken = fake(tmp_path, "sb3", failure="raise ValueError('oh')")
    working = sides.peers
    settings = ("dqn_pong_1", "ppo_pong_1", "sac_pong_1"), SMALL[1]
    monkeypatch.setattr(
        sides,
        "peers",
        lambda workload, python: [broken] if "ppo" in workload else working(workload, {}),
    )
    monkeypatch.setattr(throughput, "measure_workload", stopping_at("sac_pong_1", measure_workload))
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, True, *settings)
    before = json.loads((tmp_path / "throughput.json").read_text())["workloads"]
    assert list(before) == ["dqn_pong_1", "ppo_pong_1"]

    monkeypatch.setattr(sides, "peers", working)
    monkeypatch.setattr(throughput, "measure_workload", measure_workload)
    capsys.readouterr()
    measure(tmp_path, True, *settings)
    after = json.loads((tmp_path / "throughput.json").read_text())["workloads"]
    assert list(after) == ["dqn_pong_1", "ppo_pong_1", "sac_pong_1"]
    assert after["dqn_pong_1"] == before["dqn_pong_1"]
    assert after["ppo_pong_1"]["sides"]["sb3"]["error"] is None
    assert "dqn_pong_1  already measured\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["command", "source_sha256", "cpu_model"])
def test_measurements_of_another_source_or_machine_are_not_gone_on_with(tmp_path, fake_sides, name):
    measure(tmp_path, False, *SMALL)
    path = tmp_path / "throughput.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "another"}))
    with pytest.raises(UserError, match=f"measurements with another {name}, which"):
        measure(tmp_path, False, *SMALL)


def stopping_at(name, measure_workload):
    def stopping(workload, *arguments):
        if workload == name:
            raise KeyboardInterrupt
        return measure_workload(workload, *arguments)

    return stopping


def test_two_measurements_do_not_share_a_folder(tmp_path, fake_sides, impatient_locks):
    held = files.lock(tmp_path / ".throughput.lock", "", "")
    with pytest.raises(UserError, match="another measurement writes to"):
        measure(tmp_path, False, *SMALL)
    held.close()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"cannot write to --output_dir={tmp_path}/file"):
        measure(tmp_path / "file", False, *SMALL)
    (tmp_path / "logs").touch()
    with pytest.raises(UserError, match=f"cannot write to --output_dir={tmp_path}: File exists"):
        measure(tmp_path, False, *SMALL)


def test_measuring_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="--workloads is empty"):
        measure(tmp_path, False, [])


@pytest.mark.parametrize(
    "workload",
    [
        "dqn_cartpole_8:bfloat16",
        "machine:bfloat16",
        "dqn_pong_8:fast",
        "dqn_pong_8:",
        "dqn_pong_8:asynchronous",
        "trpo_cartpole_2:in_turns",
    ],
)
def test_a_variant_that_a_workload_has_not_is_refused(tmp_path, workload):
    with pytest.raises(UserError, match=f"'{workload}' is not a workload"):
        measure(tmp_path, False, [workload])


def test_a_workload_named_twice_is_measured_once(tmp_path, fake_sides):
    measure(tmp_path, False, ["dqn_pong_1", "dqn_pong_1"], SMALL[1])
    results = json.loads((tmp_path / "throughput.json").read_text())
    assert list(results["workloads"]["dqn_pong_1"]["sides"]) == ["ours"]


def test_every_peer_has_its_worker_and_workloads():
    for name, names in sides._PEER_WORKLOADS.items():
        assert (WORKERS / f"{name}_worker.py").is_file()
        assert set(names) <= workloads.WORKLOADS.keys()


@pytest.mark.parametrize(
    ("workload", "num_envs", "steps"),
    [
        ("trpo_cartpole", 2, 20 * 2),
        ("trpo_pong", 16, 2 * 4),
        ("trpo_pong", 1, 2),
        ("dqn_pong", 8, 0),
    ],
)
def test_optimizer_steps_of_an_update_of_trpo(workload, num_envs, steps):
    assert workloads.WORKLOADS[workload].value_steps(num_envs) == steps


def test_every_workload_is_measured_unless_others_are_chosen():
    names = [name.partition(":")[0].rpartition("_")[0] for name in sides.DEFAULT_WORKLOADS]
    assert workloads.WORKLOADS.keys() <= set(names)


@pytest.mark.parametrize(
    ("workload", "peers"),
    [
        ("dqn_pong_8", ["sb3", "tf_agents"]),
        ("a2c_pong_16", ["sb3"]),
        ("trpo_cartpole_2", ["sb3"]),
        ("nstep_q_pong_16", []),
        ("machine", []),
    ],
)
def test_the_peers_of_a_workload(workload, peers):
    python = {"sb3": "/sb3/python", "tf_agents": "/tf/python"}
    assert [peer.name for peer in sides.peers(workload, python)] == peers


def side(**speeds):
    stages = {
        stage: {"per_second": speed, "rounds": [{"unit": UNIT, "count": 8, "seconds": 8 / speed}]}
        for stage, speed in speeds.items()
    }
    return {"facts": {}, "stages": stages, "error": None}


def results_of(workload="dqn_pong_8", **sides):
    named = {name.replace("__", ":"): value for name, value in sides.items()}
    return {
        "cpu_count": 2, "cpu_model": "X", "memory_gib": 23.4, "command": "c", "git_revision": None,
        "seconds": 10, "rounds": 2, "workloads": {workload: {"sides": named}},
    }  # fmt: skip


def cells(table, row=0):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [cell.strip() for cell in lines[2 + row].strip("|").split("|")]


def test_the_table_has_speeds_and_ratios():
    results = results_of(
        ours=side(training=1234.4), ours__bfloat16=side(training=1500.0),
        sb3=side(training=500.0), tf_agents=side(training=50.0),
    )  # fmt: skip
    assert cells(summary(results)) == [
        "DQN Pong, 8 environments", "1,234", "1,500", "500", "50", "2.47 / 3.00", "24.69 / 30.00",
    ]  # fmt: skip


def test_the_table_leaves_empty_what_was_not_measured():
    results = results_of("sac_pendulum_1", ours=side(training=300.0), sb3=side(collect=5.0))
    row = ["SAC Pendulum, 1 environment", "300", "", ""]
    assert cells(summary(results)) == row
    assert "machine" not in summary(results_of("machine", ours=side(matmul_float32=9.0)))


def test_asynchronous_actors_have_a_table_of_their_own():
    results = results_of(
        "a2c_pong_4", ours=side(training=900.0), ours__asynchronous=side(training=500.0),
        ours__in_turns=side(training=250.0), sb3=side(training=300.0),
    )  # fmt: skip
    results["workloads"]["dqn_pong_8"] = {"sides": {"ours": side(training=100.0)}}
    table = tables.asynchronous_actors(results)
    assert cells(table) == ["A2C Pong, 4 environments", "900", "500", "250"]
    assert "DQN" not in table
    assert cells(summary(results)) == ["A2C Pong, 4 environments", "900", "300", "3.00"]
    assert table.strip() in tables.document(results)


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_a_ratio_is_that_of_the_speeds(ours, theirs):
    results = results_of(ours=side(training=ours), sb3=side(training=theirs))
    assert float(cells(summary(results))[3]) == pytest.approx(ours / theirs, abs=0.0051)


def test_ratios_are_of_the_rounds_with_their_range():
    def of_rounds(*speeds):
        slow = side(training=1.0)
        slow["stages"]["training"]["rounds"] = [{"count": x, "seconds": 1.0} for x in speeds]
        return slow

    ours, theirs = of_rounds(40.0, 20.0, 60.0), of_rounds(20.0, 20.0, 20.0)
    assert ratios([ours], theirs) == "2.00 (1.00 to 3.00)"
    # A side that failed in its second round still has one round to compare.
    assert ratios([ours, None], of_rounds(10.0)) == "4.00"
    assert ratios([None, ours], of_rounds(10.0)) == "– / 4.00"
    assert ratios([ours], side(collect=1.0)) == ratios([ours, None], None) == ""


def test_the_stages_are_in_milliseconds():
    update = {
        "per_second": 100.0,
        "rounds": [{"unit": "updates", "count": 1, "seconds": 0.01, "flops_per_count": 2.5e9}],
    }
    ours = side(environment=4000.0, collect=1000.0, training=800.0)
    ours["stages"]["update"] = update
    ours["stages"]["training"]["rounds"][0] |= {"updates": 2, "return_mean": -20.54}
    results = results_of(ours=ours)
    results["workloads"]["machine"] = {"sides": {"ours": side(matmul_float32=500.0)}}
    text = tables.document(results)
    row = next(line for line in text.splitlines() if "ours, float32 | 2 |" in line)
    # 8 / 4000 s, 8 / 1000 s, nothing, 1 / 100 s, 2.5 of 500 GFLOP 100 times a second, 8 / 800 s
    shown = [cell.strip() for cell in row.strip("|").split("|")][2:]
    assert shown == ["2", "8", "", "10", "50%", "10", "4", "-20.5"]
    assert "| machine | ours, float32 | matmul_float32 | 500 | 0.002 |" in text.replace("\\", "")


def test_the_budget_is_of_a_vector_step():
    ours = side(environment=8000.0, collect=4000.0, sample=500.0, update=100.0, training=320.0)
    sb3 = side(environment=8000.0, collect=4000.0, sample=500.0, update=100.0, training=160.0)
    tf_agents = side(environment=8e3, collect=4e3, sample=500.0, update=100.0, training=320.0)
    for trained in (ours, sb3, tf_agents):
        trained["stages"]["training"]["rounds"] = [
            {"count": 80, "seconds": 0.25, "updates": 20, "unit": UNIT}
        ]
    ours["stages"]["update"]["rounds"] = [{"flops_per_count": 2e9, "unit": "updates"}]
    results = results_of(ours=ours, sb3=sb3, tf_agents=tf_agents)
    results["workloads"]["machine"] = {"sides": {"ours": side(matmul_float32=400.0)}}
    text = tables.document(results)
    (row,) = (line for line in text.splitlines() if line.endswith("| 25 | 10 | 11 | 4.55 | 2.27 |"))
    # 8 environments, an update every 4 steps: 1 ms of environment, 1 ms of the rest of collecting,
    # 2 batches of 2 ms, 2 updates of 10 ms, and 25 ms in all; 2 * 2 of 400 GFLOP/s are 10 ms.
    # Stable-Baselines3 takes 50 ms, TF-Agents' examples 25.
    shown = [cell.strip() for cell in row.strip("|").split("|")][2:]
    assert shown == ["1", "1", "4", "20", "-1", "25", "10", "11", "4.55", "2.27"]


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("nstep_q_pong_16", "n-step Q Pong, 16 environments"),
        ("trpo_cartpole_1", "TRPO CartPole, 1 environment"),
        ("start_pong", "start_pong"),
    ],
)
def test_a_workload_in_words(workload, words):
    assert measurements.workload_title(workload) == words


def test_what_an_update_of_trpo_is_stands_where_there_is_one():
    told = "an update of TRPO is"
    ours = side(environment=9.0, training=1.0)
    assert told in tables.document(results_of("trpo_cartpole_2", ours=ours))
    assert told not in tables.document(results_of("a2c_cartpole_2", ours=ours))


def test_no_return_yet_is_no_number(tmp_path):
    ours = side(training=1.0)
    ours["stages"]["training"]["rounds"][0]["return_mean"] = float("nan")
    throughput.write(tmp_path, results_of(ours=ours))
    assert "nan" not in (tmp_path / "throughput.md").read_text()


def test_peers_that_were_not_measured_have_no_columns():
    text = tables.document(results_of(ours=side(training=1.0)))
    assert "Stable-Baselines3" not in text and "TF-Agents" not in text


def test_a_table_without_rows_is_left_out():
    text = tables.document(results_of(ours=side(training=1.0)))
    assert text.count("| :--- |") == 2  # the tables of speeds and stages
    assert "The machine" not in text


def test_what_differs_is_told_once_with_its_workloads():
    peer = side(training=1.0)
    peer["facts"]["differences"] = ["it is slow"]
    results = results_of(sb3=peer)
    results["workloads"]["ppo_pong_8"] = {"sides": {"sb3": peer}}
    text = tables.document(results)
    assert "it is slow (DQN Pong, 8 environments; PPO Pong, 8 environments)" in text
    assert text.count("it is slow") == 1


@given(st.sampled_from(sorted(workloads.WORKLOADS)), st.sampled_from([1, 2, 4, 8]))
def test_an_iteration_keeps_the_ratio_of_updates(name, num_envs):
    workload, parsed = workloads.parse(f"{name}_{num_envs}")
    assert workload is workloads.WORKLOADS[name] and parsed == num_envs
    env_steps = workload.vector_steps(num_envs) * num_envs
    if workload.uses_rollouts:
        batches = env_steps / (workload.batch_size or env_steps)
        assert workload.updates(num_envs) == workload.num_epochs * batches
    else:
        assert env_steps == workload.updates(num_envs) * workload.env_steps_per_update


@pytest.mark.parametrize("name", ["dqn_pong", "dqn_8", "dqn_pong_x", ""])
def test_a_name_of_no_workload_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' is not WORKLOAD_N"):
        workloads.parse(name)


def test_the_share_of_the_memory_that_stacks_take():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stacks = workloads.stacks_in_memory(0.5)
    assert 0 <= total / 2 - stacks * 4 * 84 * 84 < 4 * 84 * 84


class TestPeerEnvironment:
    @pytest.fixture
    def commands(self, monkeypatch):
        run: list[list[str]] = []

        def record(command):
            run.append(command)
            pathlib.Path(command[-1]).mkdir(exist_ok=True) if "venv" in command else None

        monkeypatch.setattr(peer_environment, "_run", record)
        return run

    def test_torch_comes_first_and_everything_is_pinned(self, tmp_path, commands):
        python = peer_environment.ensure(tmp_path / "venv")
        assert python == tmp_path / "venv" / "bin" / "python"
        assert commands[0][1:3] == ["-m", "venv"]
        assert [c[c.index(str(peer_environment.CONSTRAINTS)) + 1] for c in commands[1:]] == [
            "torch",
            "stable-baselines3",
        ]

    def test_it_is_made_once_and_again_for_other_pins_or_another_python(
        self, tmp_path, commands, monkeypatch
    ):
        pins = tmp_path / "pins.txt"
        pins.write_text("torch==1\n")
        peer_environment.ensure(tmp_path / "venv", pins)
        commands.clear()
        peer_environment.ensure(tmp_path / "venv", pins)
        assert not commands
        pins.write_text("torch==2\n")
        peer_environment.ensure(tmp_path / "venv", pins)
        assert len(commands) == 3
        monkeypatch.setattr(peer_environment.platform, "python_version", lambda: "3.99.0")
        peer_environment.ensure(tmp_path / "venv", pins)
        assert len(commands) == 6

    def test_a_failure_is_told_in_the_words_of_pip(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        (tmp_path / "python").write_text("#!/bin/sh\necho no space left\nexit 1\n")
        (tmp_path / "python").chmod(0o755)
        with pytest.raises(UserError, match="no space left"):
            peer_environment.ensure(tmp_path / "venv")
        assert not (tmp_path / "venv" / "installed.txt").exists()

    def test_the_environments_are_in_the_versions_of_this_pipeline(self):
        shared = ("ale-py==", "gymnasium==", "numpy==", "opencv-python-headless==")

        def pins(path):
            return [line for line in path.read_text().splitlines() if line.startswith(shared)]

        assert pins(peer_environment.CONSTRAINTS) == pins(ROOT / "requirements.txt")
        assert len(pins(peer_environment.CONSTRAINTS)) >= len(shared)


def peer_python(name):
    python = ROOT / peer_environment.FOLDER / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no .venv-peers: make test-peers")
    return sys.executable if name == "tf_agents" else str(python)


@pytest.mark.parametrize("name", ["tf_agents", "sb3"])
def test_a_peer_makes_an_update_every_four_environment_steps(output_dir, name):
    peer = Side(name, (peer_python(name), str(WORKERS / f"{name}_worker.py")), "dqn_cartpole_8")
    results = measure_workload("dqn_cartpole_8", [peer], output_dir, 0.3, 1)[name]
    assert results["error"] is None
    assert list(results["stages"]) == ["environment", "collect", "sample", "update", "training"]
    assert results["facts"]["num_parameters"] == 4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2
    training = results["stages"]["training"]["rounds"][0]
    assert training["count"] / 4 == pytest.approx(training["updates"], abs=2)
    assert results["stages"]["collect"]["rounds"][0]["updates"] == 0


SB3_STAGES = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import workloads
from sb3_worker import Stages, differences

def everything(model):
    states, tensors = model._get_torch_save_params()
    parameters = model.get_parameters()
    found = [getattr(model, name) for name in tensors if getattr(model, name) is not None]
    for name in states:
        state = parameters[name]
        found += list(state.values()) if "state" not in state else [
            x for of_one in state["state"].values() for x in of_one.values() if torch.is_tensor(x)
        ]
    return [x.detach().clone() for x in found]

torch.set_num_threads(1)
for name in sys.argv[2:]:
    workload, num_envs = workloads.parse(name)
    stages = Stages(workload, num_envs)
    answers = {"sample": stages.sample(0.2)}
    stages._fill_rollout()
    stages._fill_rollout = lambda: None  # which trains
    before = everything(stages.model)
    answers["update"] = stages.update(0.2)
    pairs = zip(before, everything(stages.model), strict=True)
    answers["untouched"] = [torch.equal(*pair) for pair in pairs]
    answers["training"] = stages.training(0.2)
    answers["num_parameters"] = stages.num_parameters()
    answers["differences"] = differences(workload, stages)
    print(json.dumps(answers))
"""


def test_timed_updates_leave_stable_baselines3_its_temperature():
    command = [peer_python("sb3"), "-c", SB3_STAGES, str(WORKERS), "sac_pendulum_1"]
    answers = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert all(answers["untouched"]) and len(answers["untouched"]) > 20


def test_stable_baselines3_makes_an_update_of_every_rollout():
    names = {"a2c_cartpole_8": 8 * 5, "trpo_cartpole_2": 2 * 512}
    command = [peer_python("sb3"), "-c", SB3_STAGES, str(WORKERS), *names]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    encoder = 4 * 64 + 64 + 64 * 64 + 64
    for line, env_steps in zip(lines, names.values(), strict=True):
        answers = json.loads(line)
        assert answers["num_parameters"] == 2 * encoder + (64 * 2 + 2) + (64 + 1)
        assert answers["sample"]["count"] > 0 and answers["update"]["count"] > 0
        assert all(answers["untouched"]) and len(answers["untouched"]) > 4
        training = answers["training"]
        assert training["updates"] > 0
        assert training["count"] == training["updates"] * env_steps
        assert len(answers["differences"]) == len(set(answers["differences"])) >= 4


@pytest.mark.parametrize("name", ["dqn_pang_8", "dqn_pong", "dqn_pong_0", "dqn_pong_8:float16", ""])
def test_a_workload_that_does_not_exist_is_refused_before_anything_is_measured(tmp_path, name):
    with pytest.raises(UserError, match=f"'{name}' is not a workload"):
        measure(tmp_path, False, ["dqn_cartpole_1", name])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_envs", [3, 6, 10])
def test_peers_that_could_not_make_as_many_updates_are_not_measured(tmp_path, num_envs):
    with pytest.raises(UserError, match="not have a whole number of updates"):
        measure(tmp_path, False, [f"dqn_cartpole_{num_envs}"])
    assert workloads.parse(f"ppo_cartpole_{num_envs}")[1] == num_envs  # whole rollouts are used


def test_what_can_be_measured_once_only_takes_no_rounds(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    side = fake(tmp_path, "ours")
    ready = worker_process.Worker.ready
    monkeypatch.setattr(
        worker_process.Worker, "ready", lambda self: ready(self) | {"takes_rounds": False}
    )
    results = measure_workload("dqn_pong_1", [side], tmp_path, 0.1, 3)
    stages = results["ours"]["stages"]
    assert list(stages) == ["environment", "training"]
    for measured in stages.values():
        (answer,) = measured["rounds"]
        assert answer["seconds"] == pytest.approx(0.3)  # as long as all rounds of the others
