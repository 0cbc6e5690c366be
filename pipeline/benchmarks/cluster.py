"""Places runs on the nodes of a Ray cluster, after each node has been examined.

A node can train if it has the same revision of this package and the same files as the machine that
starts the runs. A run that has a checkpoint is trained only on nodes that continue it bit for bit:
those with the versions and vector instructions of the node that wrote it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pathlib
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.benchmarks.planned_runs import Run
from pipeline.benchmarks.ray_process import RayTrainProcess
from pipeline.checkpointing.exactness import saved_traits, traits
from pipeline.runs import source_revision
from pipeline.utils.errors import UserError

_PROBE_SECONDS = 120.0  # a worker's start and its imports
_REMIND_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_TRAIN = ("-m", "pipeline.train")


class Probe(NamedTuple):
    """What a node says of itself.

    Attributes:
      host: Name of the machine.
      source_sha256: Digest of the package's source.
      traits: See `exactness.traits`.
      niceness: Priority of the node's workers; a run has the same.
      free_memory: Bytes of memory that are not used.
      sees_file: Whether the node sees a file that this machine has written.
      is_locked_out: Whether a lock that this machine holds keeps the node out.
    """

    host: str
    source_sha256: str
    traits: Mapping[str, str]
    niceness: int
    free_memory: int
    sees_file: bool
    is_locked_out: bool


class Node(NamedTuple):
    """Node that can train.

    Attributes:
      id: Ray's name of the node.
      name: Name in messages.
      cpus: Number of processors that Ray may use.
      gpus: Number of GPUs that Ray may use.
      traits: See `exactness.traits`.
    """

    id: str
    name: str
    cpus: float
    gpus: float
    traits: Mapping[str, str]


def examine(folder: str, file: str, lock: str) -> Probe:
    """Returns what this node says of itself; it also writes a file into the folder."""
    shared = pathlib.Path(folder)
    sees_file = (shared / file).exists()
    is_locked_out = False
    try:
        (shared / f"{file}-{ray.get_runtime_context().get_node_id()}").touch()
        with (shared / lock).open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_locked_out = True
    except OSError:
        sees_file = False
    return Probe(
        host=socket.gethostname(),
        source_sha256=source_revision.source_sha256(),
        traits=traits(),
        niceness=os.nice(0),
        free_memory=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        sees_file=sees_file,
        is_locked_out=is_locked_out,
    )


class Cluster:
    """Connection to a Ray cluster, as a context manager; `start` trains a run on a node."""

    def __init__(
        self,
        address: str,
        folder: pathlib.Path,
        cpus_per_run: int = 1,
        gpus_per_run: float = 0.0,
        say: Callable[[str], None] = print,
        train: Sequence[str] = _TRAIN,
        is_any_node_right: bool = False,
    ):
        """Initializes the connection, which is made on entry.

        Args:
          address: Address of the cluster, as `ray.init` takes it.
          folder: Folder that all nodes share; created if missing.
          cpus_per_run: Processors of a node that a run takes.
          gpus_per_run: GPUs of a node that a run takes.
          say: Called with messages.
          train: Arguments of Python that train.
          is_any_node_right: Whether a run may go on where it cannot do so bit for bit.
        """
        self._address = address
        self._folder = folder.absolute()
        self._options: dict[str, Any] = {"num_cpus": cpus_per_run, "num_gpus": gpus_per_run}
        self._say = say
        self._train = train
        self._is_any_node_right = is_any_node_right
        self._nodes: dict[str, Node] = {}  # that can train
        self._probes: dict[str, tuple[Any, float]] = {}  # under way, with their start
        self._refused: set[str] = set()
        self._running: list[RayTrainProcess] = []
        self._reminded: dict[pathlib.Path, float] = {}
        self._file = f".cluster-{uuid.uuid4().hex}"
        self._lock = self._folder / f"{self._file}.lock"
        self._lock_file: Any = None

    def __enter__(self) -> Cluster:
        """Connects to the cluster and examines its nodes.

        Raises:
          UserError: If there is no such cluster, or if none of its nodes can train.
        """
        try:
            _check_address(self._address)
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"--ray_address={self._address}: no Ray cluster answers ({_first_line(error)}). "
                "Start one with: ray start --head"
            ) from error
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / self._file).touch()
            self._lock_file = self._lock.open("a")
            fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            self._look_around()
            while self._probes:
                time.sleep(0.1)
                self._look_around()
            if not self._nodes:
                raise UserError("no node of the cluster can train; the lines above say why.")
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
        for path in self._folder.glob(f"{self._file}*"):
            path.unlink(missing_ok=True)
        ray.shutdown()

    @property
    def capacity(self) -> int:
        """Returns how many runs fit on the nodes that can train."""
        return sum(self._room_of(node) for node in self._nodes.values())

    def start(self, run: Run) -> RayTrainProcess | None:
        """Starts a run on the node with the most room; returns None if there is no room now."""
        self._look_around()
        self._running = [process for process in self._running if process.poll() is None]
        used = Counter(process.node_id for process in self._running)
        right = [node for node in self._nodes.values() if self._suits(node, run)]
        free = [node for node in right if self._room_of(node) > used[node.id]]
        if not free:
            if not right:
                self._remind(run)
            return None
        node = max(free, key=lambda node: (self._room_of(node) - used[node.id], node.name))
        again = (run.folder / "run.json").exists()  # its lost process may still train
        process = RayTrainProcess(
            run, node.id, node.name, self._options, self._say, again, self._train
        )
        self._running.append(process)
        return process

    def _room_of(self, node: Node) -> int:
        room = int(node.cpus // self._options["num_cpus"])
        gpus = self._options["num_gpus"]
        return min(room, int(node.gpus / gpus)) if gpus else room

    def _suits(self, node: Node, run: Run) -> bool:
        """Returns True if a run continues bit for bit on a node."""
        checkpoints = sorted((run.folder / "checkpoints").glob("step-*"))
        known = saved_traits(checkpoints[-1]) if checkpoints else None
        return self._is_any_node_right or known is None or known == node.traits

    def _remind(self, run: Run) -> None:
        if time.monotonic() - self._reminded.get(run.folder, -_REMIND_SECONDS) >= _REMIND_SECONDS:
            self._reminded[run.folder] = time.monotonic()
            self._say(
                f"{run.name} waits: no node has the versions and vector instructions of the one "
                "that wrote its checkpoint (--allow_inexact_resume lets it go on anywhere)"
            )

    def _look_around(self) -> None:
        """Examines nodes that have joined, and forgets those that have left."""
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node_id in self._nodes.keys() - alive.keys():
            self._say(f"node {self._nodes.pop(node_id).name} has left the cluster")
        known = self._nodes.keys() | self._probes.keys() | self._refused
        for node_id in alive.keys() - known:
            if not alive[node_id]["Resources"].get("CPU"):  # a head that only manages
                self._refused.add(node_id)
                continue
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            task: Any = ray.remote(examine)
            task = task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
            probe = task.remote(str(self._folder), self._file, self._lock.name)
            self._probes[node_id] = probe, time.monotonic()
        for node_id, (probe, since) in list(self._probes.items()):
            if node_id not in alive:
                del self._probes[node_id]
            elif ray.wait([probe], timeout=0)[0]:
                del self._probes[node_id]
                self._note(node_id, alive[node_id], probe)
            elif time.monotonic() - since > _PROBE_SECONDS:
                del self._probes[node_id]
                self._refuse(node_id, alive[node_id]["NodeName"], "it does not answer")

    def _note(self, node_id: str, node: dict[str, Any], probe: Any) -> None:
        """Reads a node's answer, and says what is wrong with the node."""
        address = node["NodeName"]
        try:
            answer: Probe = ray.get(probe)
        except ray.exceptions.RayError as error:
            self._refuse(
                node_id,
                address,
                f"it cannot run this package ({_last_line(error)}). Install the same revision "
                "there, in the environment in which you call ray start",
            )
            return
        name = f"{answer.host} ({address}, {node_id[:6]})"
        resources = node["Resources"]
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        wrote = (self._folder / f"{self._file}-{node_id}").exists()
        found = Node(node_id, name, cpus, gpus, answer.traits)
        if not answer.sees_file or not wrote:
            why = f"it does not share {self._folder} with this machine. Mount the same folder there"
        elif not answer.is_locked_out:
            why = (
                f"locks in {self._folder} have no effect there, so that two processes could train "
                "in one folder. Use a file system with locks, such as NFS 4 or Lustre"
            )
        elif answer.source_sha256 != source_revision.source_sha256():
            why = "it has another revision of this package. Install the same one there"
        elif not self._room_of(found):
            why = f"it has {cpus:g} CPUs and {gpus:g} GPUs, which is too little for a run"
        else:
            self._nodes[node_id] = found
            self._say(
                f"node {name}: {cpus:g} CPUs, {gpus:g} GPUs, "
                f"{answer.free_memory / 2**30:.0f} GiB of free memory"
            )
            if answer.niceness > 0:
                self._say(
                    f"node {name}: its runs have low priority (nice {answer.niceness}). Set "
                    "RAY_worker_niceness=0 in the environment in which you call ray start"
                )
            self._say_what_differs(found)
            return
        self._refuse(node_id, name, why)

    def _say_what_differs(self, node: Node) -> None:
        """Says if runs cannot move bit for bit between a node and those before it."""
        first = next(iter(self._nodes.values()))
        differences = [key for key, value in node.traits.items() if first.traits[key] != value]
        if differences:
            self._say(
                f"node {node.name} differs from {first.name} ({', '.join(differences)}): a run "
                "that has begun on one of them does not go on on the other"
            )

    def _refuse(self, node_id: str, name: str, why: str) -> None:
        self._refused.add(node_id)
        self._say(f"node {name} is not used: {why}")


def _check_address(address: str) -> None:
    """Checks that something listens at HOST:PORT. Ray itself would try for several minutes.

    Raises:
      OSError: If nothing listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def thread_bindings(cpus_per_run: int) -> list[str]:
    """Returns the bindings with which a run uses as many threads as it has processors.

    Results depend on the number of threads, which would otherwise be that of a node's cores.
    """
    return [f"configure_tensorflow.{kind}_op = {cpus_per_run}" for kind in ("intra", "inter")]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
