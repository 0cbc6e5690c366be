"""Clusters of several Ray nodes on this machine, and suites that they train."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fake_training
from conftest import TESTS
from ray.cluster_utils import Cluster as RayCluster

from pipeline.benchmarks import runner
from pipeline.benchmarks.cluster import Cluster
from pipeline.benchmarks.train_process import Machines
from pipeline.utils.shutdown import StopSignal

FAKE = (fake_training.__file__,)


@contextlib.contextmanager
def ray_cluster(*cpus: int, **head: Any) -> Iterator[RayCluster]:
    """Yields a cluster whose head trains nothing, with a node for each of `cpus`.

    Further arguments are those of the head.
    """
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    with mock.patch.dict(os.environ, {"RAY_worker_niceness": "0", "PYTHONPATH": paths}):
        cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0} | head)
        try:
            for number in cpus:
                cluster.add_node(num_cpus=number)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()


def run(address: str, folder: pathlib.Path, suite, stop=None, say=print, **kwargs):
    """Trains a suite of `fake_training` on the cluster."""
    with Cluster(address, folder, say=say, train=FAKE, **kwargs) as cluster:
        on = Machines(folder, 9, cluster.start)
        return runner.run_suite(suite, on, (), stop or StopSignal())


def kill(node) -> None:
    """Kills a node, as if its machine had failed."""
    node.kill_raylet(check_alive=False)
    # Its workers go on until their parent has been reaped.
    for processes in node.all_processes.values():
        for process in processes:
            process.process.poll()


def raylet(node) -> int:
    """Returns the process id of a node's main process."""
    return node.all_processes["raylet"][0].process.pid


def runs_on(node, process_id: int) -> bool:
    """Returns True if a process descends from the main process of a node."""
    while process_id not in (0, 1, raylet(node)):
        stat = pathlib.Path(f"/proc/{process_id}/stat").read_text()
        process_id = int(stat.rpartition(")")[2].split()[1])
    return process_id == raylet(node)
