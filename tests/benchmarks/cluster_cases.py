"""Suites on clusters of several Ray nodes, which are all on this machine."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from conftest import ROOT, TESTS, process_commands
from ray.exceptions import ActorDiedError, RayTaskError
from ray_clusters import kill, ray_cluster, raylet, run, runs_on
from tiny_benchmarks import PATIENCE, is_alive, make_suite, process_ids, recorded, starts
from waiting import wait_for

from pipeline.benchmarks import cluster, planned_runs, ray_process
from pipeline.benchmarks.ray_process import ProcessActor
from pipeline.runs import source_revision
from pipeline.utils import ray_connection
from pipeline.utils.errors import RETRY_CODE, UserError
from pipeline.utils.shutdown import StopSignal


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster(1, 1) as cluster:
        yield cluster


class Suite(threading.Thread):
    """Suite that a thread trains on the cluster."""

    def __init__(self, address, folder, suite):
        super().__init__()
        self.stop, self.outcome = StopSignal(), None  # not installed
        self.said: list[str] = []
        self._arguments = address, folder, suite, self.stop, self.said.append
        self.start()

    def run(self):
        self.outcome = run(*self._arguments)

    def result(self):
        self.join(120)
        return self.outcome


def started(nodes, folder: pathlib.Path) -> tuple[Suite, int]:
    """Starts a suite of one run, which waits for a signal; returns it and the run's process."""
    one = make_suite(1, PATIENCE)
    suite = Suite(nodes.address, folder, one._replace(experiments=one.experiments[:1]))
    wait_for(lambda: process_ids(folder))
    (trained,) = process_ids(folder)
    return suite, trained


def test_a_suite_is_trained_on_the_nodes(nodes, tmp_path):
    said: list[str] = []
    assert run(nodes.address, tmp_path, make_suite(2), say=said.append) == (4, [], 0)
    assert set(starts(tmp_path).values()) == {1}
    by_run = recorded(tmp_path)
    assert by_run["B-v1", 2]["evaluation_returns"] == [2.0, 4.0]
    assert not any("losses" in record for record in by_run.values())
    assert len([line for line in said if "1 CPUs, 0 GPUs" in line]) == 2
    assert not list(tmp_path.glob(".cluster-*"))


@pytest.mark.crash
def test_as_many_runs_train_as_fit_and_a_stop_lets_them_write_checkpoints(nodes, tmp_path):
    suite = Suite(nodes.address, tmp_path, make_suite(2, PATIENCE))
    wait_for(lambda: len(process_ids(tmp_path)) == 2)
    time.sleep(1)
    suite.stop.requested = True
    assert suite.result() == (0, [], 4)
    assert len(list(tmp_path.glob("tiny/*/*/checkpoint"))) == 2
    assert len(starts(tmp_path)) == 2
    assert run(nodes.address, tmp_path, make_suite(1, PATIENCE)) == (2, [], 0)


@pytest.mark.crash
def test_the_run_of_a_lost_node_goes_on_elsewhere(nodes, tmp_path, capsys):
    suite, trained = started(nodes, tmp_path)
    (owner,) = [node for node in nodes.worker_nodes if runs_on(node, trained)]
    (tmp_path / "tiny/dqn-A-v1/seed-1/checkpoint").touch()  # started again, it finishes
    kill(owner)
    nodes.worker_nodes.remove(owner)
    wait_for(lambda: not is_alive(trained), 5)
    nodes.add_node(num_cpus=1)  # for the tests that follow
    assert suite.result() == (1, [], 0)
    assert recorded(tmp_path)["A-v1", 1]["losses"] == 1
    told = "dqn-A-v1 seed 1: the process on node .* was lost .*. The run will be restarted"
    assert re.search(told, capsys.readouterr().out)
    assert any("has left the cluster" in line for line in suite.said)


@pytest.mark.crash
def test_no_run_is_started_on_a_lost_node_that_is_still_listed(nodes, tmp_path, monkeypatch):
    suite = Suite(nodes.address, tmp_path, make_suite(1, PATIENCE))
    wait_for(lambda: len(process_ids(tmp_path)) == 2)
    folder = tmp_path / "tiny/dqn-A-v1/seed-1"
    trained = int((folder / "process_id").read_text())
    (owner,) = [node for node in nodes.worker_nodes if runs_on(node, trained)]
    listed, before = ray.nodes, ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: before)
    (folder / "checkpoint").touch()  # started again, it finishes
    kill(owner)
    nodes.worker_nodes.remove(owner)
    time.sleep(15)  # Only the lost node has room.
    monkeypatch.setattr(ray, "nodes", listed)
    nodes.add_node(num_cpus=1)
    wait_for((folder / "result.json").exists)
    suite.stop.requested = True
    assert suite.result() == (1, [], 1)
    assert recorded(tmp_path)["A-v1", 1]["losses"] == 1


@pytest.mark.crash
def test_a_killed_ray_worker_takes_its_training_along_and_the_run_goes_on(nodes, tmp_path):
    suite, trained = started(nodes, tmp_path)
    (worker,) = workers()
    (tmp_path / "tiny/dqn-A-v1/seed-1/checkpoint").touch()  # started again, it finishes
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not is_alive(trained), 5)
    assert suite.result() == (1, [], 0)
    assert recorded(tmp_path)["A-v1", 1]["losses"] == 1


@pytest.mark.crash
def test_the_run_of_a_frozen_node_trains_once_and_ends(nodes, tmp_path):
    suite, trained = started(nodes, tmp_path)
    (owner,) = [node for node in nodes.worker_nodes if runs_on(node, trained)]
    frozen = [raylet(owner), *workers()]
    for process in frozen:
        os.kill(process, signal.SIGSTOP)
    time.sleep(5)
    assert starts(tmp_path) == {"dqn-A-v1/seed-1": 1}  # nobody trains the run a second time
    for process in frozen:
        os.kill(process, signal.SIGCONT)
    suite.stop.requested = True
    assert suite.result() == (0, [], 1)
    assert (tmp_path / "tiny/dqn-A-v1/seed-1/checkpoint").exists()


def workers():
    """Returns the ids of the processes of actors that train a run."""
    return [x for x, command in process_commands().items() if command.startswith("ray::Process")]


def test_a_run_that_fails_is_recorded_with_its_last_lines(nodes, tmp_path):
    (tmp_path / "broken").touch()
    bindings = "fake.failing = '1'", f"fake.broken = '{tmp_path / 'broken'}'"
    outcome = run(nodes.address, tmp_path / "suite", make_suite(1, *bindings))
    assert [reason for _, reason in outcome.failed] == ["exit code 2: error: the loss is NaN"] * 2


@pytest.mark.crash
def test_a_run_that_has_no_room_on_its_node_can_be_stopped(nodes, tmp_path):
    blocker = Suite(nodes.address, tmp_path / "first", make_suite(1, PATIENCE))
    wait_for(lambda: len(process_ids(tmp_path / "first")) == 2)
    # Another search does not know that the nodes are in use.
    program = f"""
import pathlib
from pipeline.benchmarks import ray_process
from pipeline.utils.shutdown import StopSignal
from ray_clusters import run
from tiny_benchmarks import make_suite
stop, said = StopSignal(), []
ray_process._START_SECONDS = 1
def say(line):
    said.append(line)
    stop.requested = str(said).count("other programs may use the CPUs there") == 2
print(run({nodes.address!r}, pathlib.Path({str(tmp_path / "second")!r}), make_suite(1), stop, say))
"""
    paths = os.pathsep.join([str(TESTS), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Outcome(finished=0, failed=[], left=2)" in ended.stdout, ended.stderr
    blocker.stop.requested = True
    assert blocker.result() == (0, [], 2)


def test_no_folder(nodes, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--output_dir"):
        run(nodes.address, tmp_path / "file", make_suite(1))


def test_no_cluster(tmp_path):
    with pytest.raises(UserError, match=r"--ray_address=127\.0\.0\.1:1: cannot connect"):
        run("127.0.0.1:1", tmp_path, make_suite(1))
    assert not ray.is_initialized()


def test_a_connection_leaves_sigterm_to_the_program(nodes):
    """Ray's own handler would exit, and abort 3 seconds later, before a checkpoint is written."""
    with StopSignal("stopping") as stop:
        ray_connection.connect(nodes.address)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: stop.requested, 5)
        finally:
            ray.shutdown()


def test_another_program_at_the_address(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_connection, "_CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--ray_address={address}.*not answered as Ray does"):
            run(address, tmp_path, make_suite(1))
    assert not ray.is_initialized()


def test_a_run_whose_lost_process_still_trains_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_process, "_LOCK_SECONDS", 0.1)
    locked, log = tmp_path / "locked", tmp_path / "log"
    locked.touch()
    program = (
        "import pathlib, sys\n"
        f"if pathlib.Path({str(locked)!r}).exists():\n"
        "    sys.exit('error: another process is training in x.')\n"
    )
    actor = ProcessActor(["-c", program], str(log), str(tmp_path), has_gpu=False)
    wait_for(lambda: actor.poll()[1])
    assert "another process still trains in its folder" in actor.poll()[1]
    locked.unlink()
    wait_for(lambda: actor.poll() == (0, ""))
    assert log.read_text().count("another process is training in x.") >= 1

    locked.touch()
    actor = ProcessActor(["-c", program], str(log), str(tmp_path), has_gpu=False)
    wait_for(lambda: actor.poll()[1])
    actor.stop()
    locked.unlink()
    assert actor.poll()[0] == 143


class FakeRay:
    """Stands in for Ray; `answer` returns what the check of any of its nodes answers."""

    exceptions = ray.exceptions

    def __init__(self, monkeypatch):
        self.now, self.submitted = 0.0, 0
        self.answer: Callable[[], Any] = self.succeed
        self.node_ids, self.is_connected = ["1"], False
        self.processes: list[Process] = []
        for name, value in (
            ("ray", self),
            ("connect", self.connect),
            ("NodeAffinitySchedulingStrategy", lambda *args, **kwargs: None),
            ("time", types.SimpleNamespace(monotonic=lambda: self.now)),
            ("RayTrainProcess", self.train),
        ):
            monkeypatch.setattr(cluster, name, value)

    def connect(self, address):
        self.is_connected = True

    def shutdown(self):
        self.is_connected = False

    def nodes(self):
        resources = {"CPU": 8.0, "memory": 2.0**35}
        for name in self.node_ids:
            yield {"NodeID": name, "Alive": True, "NodeName": "A", "Resources": resources}

    def remote(self, *_):
        return self

    def options(self, **_):
        return types.SimpleNamespace(remote=self.submit)

    def submit(self, folder, file, lock, own):
        self.submitted += 1
        (pathlib.Path(folder) / own).touch()

    def wait(self, probes, timeout):
        return probes, []

    def cancel(self, probe, force):
        pass

    def get(self, probe):
        return self.answer()

    def fail(self):
        raise ray.exceptions.RayTaskError("examine", "RuntimeError: killed", RuntimeError("killed"))

    def succeed(self, **changes):
        revision = source_revision.source_sha256()
        return cluster.Probe("host", revision, {}, 0, 2**34, True, True)._replace(**changes)

    def train(self, run, node_id, *_):
        self.processes.append(Process(node_id))
        return self.processes[-1]

    def starts(self, nodes, seconds):
        """Returns whether a run is started within some seconds."""
        run = make_suite_run()
        for _ in range(seconds):
            self.now += 1.1
            if nodes.start(run):
                return True
        return False


class Process:
    """Run that trains until a test sets its exit code."""

    is_lost = False

    def __init__(self, node_id):
        self.node_id, self.code = node_id, None

    def poll(self):
        return self.code

    def lose(self):
        self.code, self.is_lost = -9, True


def make_suite_run():
    return planned_runs.plan(make_suite(1), pathlib.Path("nowhere"))[0]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Returns a fake Ray and a `Cluster` whose only node trains two runs."""
    stand_in, said = FakeRay(monkeypatch), list[str]()
    nodes = cluster.Cluster("any", tmp_path, say=said.append)
    assert stand_in.starts(nodes, 3) and stand_in.starts(nodes, 1)
    return stand_in, nodes, said


def test_a_node_that_does_not_answer_after_a_loss_is_asked_again(fake):
    stand_in, nodes, said = fake
    stand_in.answer = stand_in.fail
    stand_in.processes[0].lose()
    before = stand_in.submitted
    assert not stand_in.starts(nodes, 100)
    assert 5 < stand_in.submitted - before < 15  # not at every look
    assert [line for line in said if "no further run" in line] == [
        "node host (A, 1) gets no further run until it answers"
    ]
    stand_in.answer = stand_in.succeed
    assert stand_in.starts(nodes, 15)


def test_a_node_that_answers_after_a_loss_that_it_has_changed_is_refused(fake):
    stand_in, nodes, said = fake
    stand_in.answer = lambda: stand_in.succeed(is_locked_out=False)
    for process in stand_in.processes:
        process.lose()
        assert not stand_in.starts(nodes, 5)
    assert "is not used: locks in" in said[-1]
    lines = len(said)
    assert not stand_in.starts(nodes, 600) and len(said) == lines  # refused again
    stand_in.answer = lambda: stand_in.succeed(free_memory=2**20)  # Runs use the rest.
    assert stand_in.starts(nodes, 300)
    assert "16.0 GiB of free memory; parallel runs: 8" in said[-1]


def test_memory_that_other_runs_use_is_no_reason_to_refuse_a_node_after_a_loss(fake):
    stand_in, nodes, _ = fake
    stand_in.answer = lambda: stand_in.succeed(free_memory=1)
    stand_in.processes[0].lose()
    assert stand_in.starts(nodes, 5)


@pytest.mark.parametrize("is_initial", [True, False])
def test_a_node_on_which_a_process_cannot_start_is_examined(monkeypatch, is_initial):
    """Another one would take all further runs, because the failed process leaves it room."""
    failed = RayTaskError("any", "a traceback\nOSError: no room", OSError("no room"))
    error: Exception = ActorDiedError(failed) if is_initial else failed
    stand_in = Mock(wait=lambda *args, **kwargs: ([1], []), get=Mock(side_effect=error))
    monkeypatch.setattr(ray_process, "ray", stand_in)
    monkeypatch.setattr(ray_process, "NodeAffinitySchedulingStrategy", Mock())
    process = ray_process.RayTrainProcess(make_suite_run(), "1", "A", {}, print, ".", ())
    assert process.poll() == RETRY_CODE
    assert process.is_lost
    assert process.error().endswith("OSError: no room") and "\n" not in process.error()


def test_a_node_that_leaves_after_a_loss_is_forgotten(fake):
    stand_in, nodes, said = fake
    stand_in.answer, stand_in.node_ids = stand_in.fail, []
    stand_in.processes[0].lose()
    assert not stand_in.starts(nodes, 30)
    assert said[-1] == "node host (A, 1) has left the cluster"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"source_sha256": "0"}, "it has another revision of this package"),
        ({"sees_file": False}, "it does not share"),
        ({"is_locked_out": False}, "locks in .* have no effect there"),
        (
            {"free_memory": 2**30},
            "it has 8 CPUs, 0 GPUs, 1.0 GiB of free memory, but a run needs 1, 0 and 1.5",
        ),
        (
            {},
            r"it cannot run this package \(RuntimeError: killed\). Install the same revision "
            "there, in the environment in which you run ray start",
        ),
    ],
)
def test_a_node_that_cannot_train_is_named(monkeypatch, tmp_path, answer, message):
    stand_in, said = FakeRay(monkeypatch), list[str]()
    stand_in.answer = (lambda: stand_in.succeed(**answer)) if answer else stand_in.fail
    nodes = cluster.Cluster("any", tmp_path, say=said.append, memory_per_run=1.5)
    with pytest.raises(UserError, match="no node of the cluster can train"):
        nodes.__enter__()
    (line,) = said
    assert re.search(f"^node .* is not used: {message}", line)
    assert not stand_in.starts(nodes, 100)
    assert stand_in.submitted == 1
    assert not stand_in.is_connected
    assert not list(tmp_path.iterdir())


def test_memory_limits_the_parallel_runs_of_a_node(monkeypatch, tmp_path):
    stand_in, said = FakeRay(monkeypatch), list[str]()
    stand_in.answer = lambda: stand_in.succeed(free_memory=5 * 2**29)
    with cluster.Cluster("any", tmp_path, say=said.append, memory_per_run=1) as nodes:
        assert "2.5 GiB of free memory; parallel runs: 2" in said[0]
        assert [bool(nodes.start(make_suite_run())) for _ in range(3)] == [True, True, False]


def test_what_slows_runs_down_or_keeps_them_on_a_node_is_said(monkeypatch, tmp_path):
    stand_in, said = FakeRay(monkeypatch), list[str]()
    stand_in.node_ids.append("2")
    versions = iter("12")
    stand_in.answer = lambda: stand_in.succeed(
        niceness=15, traits={"version of numpy": next(versions), "flags": ""}
    )
    with cluster.Cluster("any", tmp_path, say=said.append):
        assert len([line for line in said if "low priority (nice 15)" in line]) == 2
        differing = [line for line in said if "differs from" in line]
        assert len(differing) == 1 and "(version of numpy)" in differing[0]


def train_with_collectors(nodes, folder, path, *bindings):
    """Runs the training program with collectors on the cluster, and modules from `path`."""
    command = [
        sys.executable, "-m", "pipeline.train", f"--root_dir={folder / 'run'}",
        f"--ray_address={nodes.address}", "--gin_file=dqn_cartpole",
        "--gin_file=runners/distributed", *(f"--gin_bindings={binding}" for binding in bindings),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{path}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_collectors_on_a_cluster_train_a_run_and_close_their_environments(nodes, tmp_path):
    ended = train_with_collectors(
        nodes,
        tmp_path,
        TESTS,
        "train.num_env_steps = 600",
        "initialize_replay_buffer.num_env_steps = 200",
        "train.num_final_episodes = 2",
        "gymnasium_environment.name = 'scripted_environments:Closing-v0'",
        f"gymnasium_environment.kwargs = {{'folder': {str(tmp_path)!r}}}",
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["num_collectors"] == 2
    assert len(list(tmp_path.glob("closed by *"))) == 3  # the learner evaluates


def test_a_collector_that_cannot_be_built_is_named_with_the_reason(nodes, tmp_path):
    cartpole = "gymnasium.envs.classic_control:CartPoleEnv"
    module = f"import gymnasium\ngymnasium.register('Here-v0', {cartpole!r})"
    (tmp_path / "only_here.py").write_text(module)
    binding = "gymnasium_environment.name = 'only_here:Here-v0'"
    ended = train_with_collectors(nodes, tmp_path, tmp_path, binding)
    assert ended.returncode == 2
    reason = "collector . cannot start: .*needs the module 'only_here', which is not installed."
    assert re.search(reason, ended.stderr)
