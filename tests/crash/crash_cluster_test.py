"""A suite of real trainings on a cluster that loses nodes ends with the bits of the local suite."""

import pathlib
import random
import threading
import time

import pytest
from ray_clusters import kill, ray_cluster
from waiting import wait_for

from pipeline.benchmarks import records, runner
from pipeline.benchmarks.cluster import Cluster, thread_bindings
from pipeline.benchmarks.suites import Experiment, Suite
from pipeline.benchmarks.train_process import Machines
from pipeline.utils.shutdown import StopSignal

pytestmark = pytest.mark.crash

SUITE = Suite(
    name="six",
    protocol="any",
    score="evaluation",
    num_seeds=3,
    budgets=(),
    bindings=(
        "train.checkpoint_interval = 1_000",
        "train.log_interval = 500",
        "train.eval_interval = 4_000",
        "train.num_final_episodes = 5",
        *thread_bindings(1),
    ),
    experiments=(
        Experiment("dqn", "CartPole-v1", "dqn_cartpole", 10_000),
        Experiment("ppo", "CartPole-v1", "ppo_cartpole", 40_000),
    ),
)


def digests(folder: pathlib.Path) -> dict[str, str]:
    found = records.read(folder / "six.jsonl")
    assert {record["status"] for record in found} == {"finished"}
    assert {record["inexact_resumes"] for record in found} == {0}
    return {f"{r['algorithm']} {r['seed']}": r["weights_sha256"] for r in found}


def trained_on(folder: pathlib.Path) -> int:
    """Returns how many runs of a suite have a checkpoint and are not finished."""
    begun = {path.parents[1] for path in folder.glob("six/*/*/checkpoints/step-*")}
    return sum(not (path / "result.json").exists() for path in begun)


def test_a_cluster_that_loses_two_nodes_and_gains_one_has_the_digests_of_one_machine(tmp_path):
    local, shared = tmp_path / "local", tmp_path / "shared"
    assert runner.run_suite(SUITE, Machines(local, 2), (), StopSignal())[0] == 6
    outcome: list = []
    said: list[str] = []
    with ray_cluster(1, 1, 1) as nodes:

        def train():
            with Cluster(nodes.address, shared, say=said.append) as cluster:
                on = Machines(shared, 9, cluster.start)
                outcome.append(runner.run_suite(SUITE, on, (), StopSignal()))

        thread = threading.Thread(target=train)
        thread.start()
        chance = random.Random(1)
        for number in range(2):
            wait_for(lambda: trained_on(shared) >= 2, 120)
            time.sleep(chance.uniform(0, 3))
            victim = chance.choice(sorted(nodes.worker_nodes, key=id))
            kill(victim)
            nodes.worker_nodes.remove(victim)
            if number:
                nodes.add_node(num_cpus=1)
            time.sleep(20)
        thread.join(1_800)  # minutes on idle processors
    assert [(x.finished, x.failed, x.left) for x in outcome] == [(6, [], 0)], said
    assert digests(shared) == digests(local)
    losses = [record.get("losses", 0) for record in records.read(shared / "six.jsonl")]
    assert 1 <= sum(losses) <= 6
