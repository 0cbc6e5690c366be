"""Collectors over Ray that die, hang and freeze, with their nodes, while a run takes what comes."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
import ray
import tensorflow as tf
from conftest import ROOT, process_commands
from host_loops import PLAN, Run
from ray_clusters import kill, ray_cluster, raylet, runs_on
from tf_agents.trajectories import StepType
from waiting import wait_for

from pipeline.runs.run_folder import RunFolder
from pipeline.training import collector, ray_collectors
from pipeline.training.collector import Message, source_digests
from pipeline.training.ray_collectors import OverRay
from pipeline.utils.errors import UserError
from pipeline.utils.jsonl import read_jsonl

pytestmark = pytest.mark.crash

NUM_COLLECTORS = 4
TIMEOUT = 8.0  # distributed_runner.timeout
NUM_KILLS = 975  # of collectors
NUM_NODE_KILLS = 25


def light_collector():
    """Returns a class, which is sent to the workers because a function defines it."""

    class LightCollector:
        """Collector without TensorFlow, which returns the same message every time."""

        def __init__(self, leaves, machine, seconds, hang):
            self._leaves = leaves
            self._machine = machine
            self._seconds = seconds
            self._hang = hang

        def machine(self):
            return self._machine

        def call(self, method, *arguments):
            return getattr(self, method)(*arguments)

        def collect_leaves(self, weights, version, env_steps, is_random):
            time.sleep(self._seconds)
            return [*self._leaves[:-1], version], False, 0.01

        def save(self):
            if os.path.exists(self._hang):
                os.remove(self._hang)
                time.sleep(3_600)
            return {}

    return LightCollector


class Light(OverRay):
    """Starts light collectors.

    Attributes:
      digests: Digests of modules on the collectors' machines, if they differ from those here.
      traits: Traits of those machines, if they differ from those of this machine.
      spaces: Spaces there as JSON, or None for those of this machine.
      message_seconds: Seconds for a message of each of the first collectors; others take 0.01 s.
      hang: File. The collector that is saved while it exists deletes it and hangs.
      asked: Environment steps of each message that collectors were asked for.
    """

    digests: ClassVar[dict[str, str]] = {}
    traits: ClassVar[dict[str, str]] = {}
    spaces: list[dict] | None = None
    message_seconds: tuple[float, ...] = ()
    hang = ""
    asked: ClassVar[list[int]] = []

    def submit(self, number, order):
        super().submit(number, order)
        self.asked.append(self._like.rows.step_type.size)

    def _start(self, number, restarts):
        actor = ray.remote(light_collector()).options(num_cpus=1, scheduling_strategy="SPREAD")
        seconds = self.message_seconds[number] if number < len(self.message_seconds) else 0.01
        digests = source_digests() | self.digests
        machine = "far", self._traits | self.traits, self.spaces or self._spaces, digests
        started = actor.remote(self._leaves(), machine, seconds, self.hang)
        self._machines[number] = started.machine.remote()
        return started

    def _leaves(self):
        rows = self._like.rows
        rows = rows._replace(
            step_type=np.full_like(rows.step_type, StepType.MID),
            next_step_type=np.full_like(rows.next_step_type, StepType.MID),
            discount=np.ones_like(rows.discount),
        )
        counted = self._like.statistics._replace(env_steps=np.int64(rows.step_type.size))
        message = Message(rows, self._like.time_step, counted, 0)
        return tf.nest.flatten(message)


def process_ids(name="ray::LightCollector"):
    """Returns the ids of the processes of actors."""
    return [number for number, command in process_commands().items() if command.startswith(name)]


class Impala(Run):
    """Run with light collectors on a cluster."""

    def __init__(self, path, address, order="ready"):
        plan = PLAN._replace(
            num_env_steps=10**9, log_interval=1_000, eval_interval=0, checkpoint_interval=20_000
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_collectors, "OverRay", Light)
            super().__init__(
                path, plan, "impala",
                distributed_runner__ray_address=address,
                distributed_runner__order=order,
                distributed_runner__timeout=TIMEOUT,
                distributed_runner__num_collectors=NUM_COLLECTORS,
            )  # fmt: skip

    def train_until_done(self, hook):
        """Trains until `hook`, which is called at every update, raises Done."""
        self.progress.hook = hook
        try:
            with pytest.raises(Done):
                self.train()
        finally:
            self.close()


class Killer(threading.Thread):
    """Kills collectors at random moments, with a message or more between two kills."""

    def __init__(self, loop):
        super().__init__(daemon=True)
        self.num_kills = 0
        self._loop = loop
        self.start()

    def run(self):
        chance = random.Random(1)
        while self.num_kills < NUM_KILLS:
            before = self._loop.env_steps
            while self._loop.env_steps == before:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.1))
            if victims := process_ids():
                os.kill(chance.choice(victims), signal.SIGKILL)
                self.num_kills += 1


class NodeKiller:
    """Kills nodes while a killer kills collectors, and ends the run after it."""

    def __init__(self, nodes, killer):
        self.num_kills = 0
        self._nodes, self._killer = nodes, killer
        self._chance = random.Random(2)

    def __call__(self, record, phase):
        if not self._killer.is_alive() and self.num_kills == NUM_NODE_KILLS:
            raise Done
        if self.num_kills < NUM_NODE_KILLS * self._killer.num_kills // NUM_KILLS:
            victim = self._chance.choice(sorted(self._nodes.worker_nodes, key=id))
            kill(victim)
            self._nodes.worker_nodes.remove(victim)
            self._nodes.add_node(num_cpus=2)
            self.num_kills += 1


class Done(Exception):
    """Ends a run after the last kill."""


def test_a_thousand_kills_lose_nothing_in_silence(tmp_path, capfd):
    Light.asked.clear()
    with ray_cluster(2, 2, 2) as nodes:
        run = Impala(tmp_path / "run", nodes.address)
        killer = Killer(run.loop)
        node_killer = NodeKiller(nodes, killer)
        run.train_until_done(node_killer)
        wait_for(lambda: not process_ids(), 30)
    assert killer.num_kills == NUM_KILLS
    told = capfd.readouterr().err.count("a new one takes its place")
    assert told > NUM_KILLS / 2  # several may be killed before one of them is asked
    counted = run.parts.runner.measurements()
    assert counted["collector_restarts"] == told
    assert counted["lost_env_steps"] > 0
    under_way = sum(Light.asked) - run.loop.env_steps - counted["lost_env_steps"]
    assert 0 <= under_way <= NUM_COLLECTORS * 2 * Light.asked[0]  # two messages each


class Freezer:
    """Stops processes with SIGSTOP once, and ends the run when other collectors replace them."""

    def __init__(self, run, find):
        self._run, self._find = run, find
        self.frozen: list[int] = []

    def __call__(self, record, phase):
        if not self.frozen and self._run.loop.env_steps > 2_000:
            self.frozen = self._find()
            for process in self.frozen:
                os.kill(process, signal.SIGSTOP)
        alive = set(process_ids()).difference(self.frozen)
        if self.frozen and len(alive) == NUM_COLLECTORS:
            raise Done


@pytest.mark.parametrize("what", ["collector", "node"])
def test_what_freezes_is_replaced(tmp_path, capfd, what):
    with ray_cluster(2, 2, 2) as nodes:

        def find():
            victim = min(process_ids())
            if what == "collector":
                return [victim]
            (node,) = [node for node in nodes.worker_nodes if runs_on(node, victim)]
            return [raylet(node), *(x for x in process_ids() if runs_on(node, x))]

        run = Impala(tmp_path / "run", nodes.address)
        freezer = Freezer(run, find)
        try:
            run.train_until_done(freezer)
        finally:
            for process in freezer.frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
    assert run.parts.runner.measurements()["collector_restarts"]
    # The wait that failed is no usual one, by which Ctrl-C is given time.
    assert all(place.usual_seconds < TIMEOUT for place in run.parts.runner.watched)
    assert "a new one takes its place" in capfd.readouterr().err


def test_a_collector_that_hangs_in_a_checkpoint_is_replaced(tmp_path, monkeypatch):
    hang = tmp_path / "hang"
    hang.touch()
    monkeypatch.setattr(Light, "hang", str(hang))
    with ray_cluster(2, 2) as nodes:
        run = Impala(tmp_path / "run", nodes.address)

        def stop_after_the_checkpoint(record, phase):
            if list((tmp_path / "run" / "checkpoints").glob("step-*")) and not hang.exists():
                raise Done

        run.train_until_done(stop_after_the_checkpoint)
    assert run.parts.runner.measurements()["collector_restarts"] == 1


@pytest.mark.parametrize(
    ("trait", "value", "reason"),
    [
        ("digests", {"pipeline": "0"}, "which has another revision of pipeline"),
        ("digests", {"my_envs": "0"}, "which has another revision of my_envs"),
        ("spaces", [{"Box": {}}, {"Discrete": {}}], "where the environment has other spaces"),
    ],
)
def test_collectors_of_other_versions_are_refused(tmp_path, monkeypatch, trait, value, reason):
    monkeypatch.setattr(collector, "own_modules", lambda: {"my_envs": "1"})
    monkeypatch.setattr(Light, trait, value)
    with ray_cluster(2, 2) as nodes:
        run = Impala(tmp_path / "run", nodes.address)
        try:
            with pytest.raises(UserError, match=rf"collector \d is on far, {reason}"):
                run.train()
        finally:
            run.close()


def test_messages_fit_into_the_object_stores(tmp_path, monkeypatch):
    resources = {"CPU": 8.0, "object_store_memory": 100.0}
    with ray_cluster(2, 2) as nodes:
        monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
        with pytest.raises(UserError, match="object stores of the Ray cluster have 0.0 GiB"):
            Impala(tmp_path / "run", nodes.address)
        assert not ray.is_initialized()


@pytest.mark.parametrize(
    "of_collectors", [{"version of numpy": "1.0"}, {"threads.intra_op": "99"}], ids=str
)
@pytest.mark.parametrize(("order", "notes"), [("turns", NUM_COLLECTORS), ("ready", 0)])
def test_machines_that_differ_are_told_if_the_order_is_repeatable(
    tmp_path, monkeypatch, capfd, order, notes, of_collectors
):
    monkeypatch.setattr(Light, "traits", of_collectors)
    with ray_cluster(2, 2) as nodes:
        run = Impala(tmp_path / "run", nodes.address, order)

        def stop_soon(record, phase):
            if run.loop.env_steps > 2_000:
                raise Done

        run.train_until_done(stop_soon)
    (trait,) = of_collectors
    assert capfd.readouterr().err.count(f"differs from this machine ({trait})") == notes


def test_nobody_waits_for_a_slow_collector(tmp_path, monkeypatch):
    monkeypatch.setattr(Light, "message_seconds", (3.0,))
    with ray_cluster(2, 2) as nodes:
        run = Impala(tmp_path / "run", nodes.address)
        started = time.monotonic()

        def stop_after_many_messages(record, phase):
            if run.loop.env_steps > 20_000:
                raise Done

        run.train_until_done(stop_after_many_messages)
        rows = run.parts.runner.collect_steps * run.parts.runner.batch_size // NUM_COLLECTORS
        in_turns = 3.0 * 20_000 / rows / NUM_COLLECTORS
        assert time.monotonic() - started < in_turns / 2
    assert run.parts.runner.measurements()["collector_restarts"] == 0


NO_DISK = {  # an object store may not use the disk when it is full
    "automatic_object_spilling_enabled": False,
    "local_fs_capacity_threshold": 0.0001,
    "object_store_full_delay_ms": 50,
}


def test_a_full_object_store_is_named(tmp_path):
    with ray_cluster(2, 2, object_store_memory=80 << 20, _system_config=NO_DISK) as nodes:
        run = Impala(tmp_path / "run", nodes.address)
        held = []
        for num_bytes in (4 << 20, 64 << 10, 1 << 10, 1):
            with pytest.raises(ray.exceptions.RayError):
                while True:
                    held.append(ray.put(np.zeros(num_bytes, np.uint8)))
        started = time.monotonic()
        try:
            with pytest.raises(UserError, match="cannot store the weights .* Give the object s"):
                run.train()
        finally:
            run.close()
        assert time.monotonic() - started < TIMEOUT


# Real collectors.

ACTOR = "ray::CollectorActor"


def start(folder, address, *flags):
    command = [
        sys.executable, "-m", "pipeline.train", f"--root_dir={folder}", "--gin_file=dqn_cartpole",
        "--gin_file=runners/distributed", f"--ray_address={address}",
        "--gin_bindings=distributed_runner.order = 'ready'",
        "--gin_bindings=train.num_env_steps = 40_000",
        "--gin_bindings=train.checkpoint_interval = 2_000",
        "--gin_bindings=train.eval_interval = 0", "--gin_bindings=train.log_interval = 500",
        "--gin_bindings=train.num_final_episodes = 5", *flags,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def has_logged(folder, env_steps):
    records = read_jsonl(folder / "metrics.jsonl")
    return bool(records) and records[-1]["env_steps"] >= env_steps


def test_a_training_that_loses_collectors_goes_on_and_learns(tmp_path):
    folder = tmp_path / "run"
    with ray_cluster(2, 2) as nodes:
        process = start(folder, nodes.address)
        chance = random.Random(3)
        for number in range(5):
            wait_for(functools.partial(has_logged, folder, 2_000 + 6_000 * number), 200)
            wait_for(lambda: len(process_ids(ACTOR)) == 2)
            os.kill(chance.choice(process_ids(ACTOR)), signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        wait_for(lambda: not process_ids(ACTOR), 30)
    assert output.count("a new one takes its place") == 5
    last = read_jsonl(folder / "metrics.jsonl")[-1]
    assert last["collector_restarts"] == 5
    assert RunFolder(folder).read_json("result.json")["evaluation"]["return_mean"] > 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step(tmp_path, number):
    folder = tmp_path / "run"
    with ray_cluster(2, 2) as nodes:
        process = start(folder, nodes.address, "--gin_bindings=train.checkpoint_interval = 0")
        wait_for(lambda: has_logged(folder, 1_000), 200)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number, output
        wait_for(lambda: not process_ids(ACTOR), 30)
    assert "the same command resumes" in output
    *_, newest = sorted((folder / "checkpoints").glob("step-*"))
    assert int(newest.name.removeprefix("step-")) >= 1_000


def test_ctrl_c_ends_a_run_whose_collectors_hang_and_a_killed_learner_leaves_none(tmp_path):
    folder = tmp_path / "run"
    with ray_cluster(2, 2) as nodes:
        process = start(folder, nodes.address)
        wait_for(lambda: has_logged(folder, 4_000), 200)
        hanging = process_ids(ACTOR)
        for each in hanging:
            os.kill(each, signal.SIGSTOP)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert re.search(
            r"collector has answered for|collector \d+ has not answered for", output
        ), output
        for each in hanging:
            os.kill(each, signal.SIGCONT)
        wait_for(lambda: not process_ids(ACTOR), 30)

        process = start(folder, nodes.address)
        wait_for(lambda: has_logged(folder, 8_000), 200)
        process.kill()
        process.wait()
        wait_for(lambda: not process_ids(ACTOR), 30)
        process = start(folder, nodes.address)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "resuming" in output
