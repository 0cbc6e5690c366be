"""Places runs on the nodes of a Ray cluster, after each node has been examined.

A node can train if it has the same revision of this package and the same files as the machine that
starts the runs. A run that has a checkpoint is trained only on nodes that continue it bit for bit:
those with the versions and vector instructions of the node that wrote it.
"""

from __future__ import annotations

import fcntl
import json
import pathlib
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.benchmarks.planned_runs import Run
from pipeline.benchmarks.ray_process import RayTrainProcess, environment, working_folder
from pipeline.checkpointing.exactness import saved_traits
from pipeline.runs import source_revision
from pipeline.utils.errors import UserError, last_line
from pipeline.utils.files import named_errors
from pipeline.utils.ray_connection import connect

_PROBE_SECONDS = 120.0  # a worker's start and its imports
_RETRY_SECONDS = 10.0  # between checks of a node on which a run was lost
_REFUSED_SECONDS = 300.0  # until a node that was refused is checked again
_REMIND_SECONDS = 60.0
_EXAMINE_SECONDS = 1.0  # between checks of the nodes, which every waiting run asks for
_TRAIN = ("-m", "pipeline.train")


class Probe(NamedTuple):
    """Result of the check of a node.

    Attributes:
      host: Name of the machine.
      source_sha256: Digest of the package's source.
      traits: See `exactness.traits`.
      niceness: Priority of the node's workers; a run has the same.
      free_memory: Bytes of memory that new processes can use.
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
      memory: Bytes of memory that its runs can use.
      traits: See `exactness.traits`.
    """

    id: str
    name: str
    cpus: float
    gpus: float
    memory: float
    traits: Mapping[str, str]

    @property
    def resources(self) -> str:
        """Returns the resources in words."""
        memory = f"{self.memory / 2**30:.1f} GiB of free memory"
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs, {memory}"


def examine(folder: str, file: str, lock: str, own: str) -> Probe:
    """Checks this node with a process like that of a run. It also writes the file `own`.

    Raises:
      RuntimeError: If the process fails, for instance because the package is not installed.
    """
    command = [sys.executable, "-m", "pipeline.benchmarks.node_probe", folder, file, lock, own]
    ended = subprocess.run(
        command,
        env=environment(has_gpu=False),
        cwd=working_folder(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=_PROBE_SECONDS,
    )
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2] or "it cannot run Python")
    return Probe(**json.loads(ended.stdout))


class Cluster:
    """Connection to a Ray cluster, as a context manager; `start` trains a run on a node."""

    def __init__(
        self,
        address: str,
        folder: pathlib.Path,
        cpus_per_run: int = 1,
        gpus_per_run: float = 0.0,
        memory_per_run: float = 0.0,
        say: Callable[[str], None] = print,
        train: Sequence[str] = _TRAIN,
        allow_inexact_resume: bool = False,
    ):
        """Initializes the connection, which is made on entry.

        Args:
          address: Address of the cluster, as `ray.init` takes it.
          folder: Folder that all nodes share; created if missing.
          cpus_per_run: Number of CPUs reserved for each run.
          gpus_per_run: Number of GPUs reserved for each run: a whole number, or less than 1.
          memory_per_run: GiB of memory that each run needs; if 0, memory is not divided.
          say: Function that shows a message.
          train: Python arguments that run the training program.
          allow_inexact_resume: Whether a run may continue on a node where its results are not
            exactly reproducible.
        """
        self._address = address
        self._folder = folder.absolute()
        self._options: dict[str, Any] = {"num_cpus": cpus_per_run, "num_gpus": gpus_per_run}
        if memory_per_run:
            self._options["memory"] = memory_per_run * 2**30  # in bytes
        self._say = say
        self._train = train
        self._allow_inexact_resume = allow_inexact_resume
        self._nodes: dict[str, Node] = {}  # that can train
        self._memory: dict[str, float] = {}  # of nodes that have trained, before the first run
        self._probes: dict[str, tuple[Any, float]] = {}  # under way, with their start
        self._refused: dict[str, tuple[str, float]] = {}  # why, and when they are examined again
        self._running: list[RayTrainProcess] = []
        self._reminded: dict[pathlib.Path, float] = {}
        self._examined_at = 0.0
        self._file = f".cluster-{uuid.uuid4().hex}"
        self._lock = self._folder / f"{self._file}.lock"
        self._lock_file: Any = None

    def __enter__(self) -> Cluster:
        """Connects to the cluster and examines its nodes.

        Raises:
          UserError: If there is no such cluster, or if none of its nodes can train.
        """
        connect(self._address)
        try:
            with named_errors(self._folder, "--output_dir"):
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / self._file).touch()
                self._lock_file = self._lock.open("a")
                fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            self._examine_nodes()
            while self._probes:
                time.sleep(0.1)
                self._examine_nodes()
            if not self._nodes:
                raise UserError(
                    "no node of the cluster can train; the lines above say why. Nodes without "
                    "CPUs (ray start --num-cpus=0) are not used."
                )
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
        ray.shutdown()
        for path in self._folder.glob(f"{self._file}*"):
            path.unlink(missing_ok=True)

    def start(self, run: Run) -> RayTrainProcess | None:
        """Starts a run on the node with the most room; returns None if there is no room now."""
        ended = [process for process in self._running if process.poll() is not None]
        lost_on = {process.node_id for process in ended if process.is_lost}
        for node_id in (lost_on & self._nodes.keys()) - self._probes.keys():
            # Ray lists a lost node as alive for some time.
            self._say(f"node {self._nodes[node_id].name} gets no further run until it answers")
            self._examine(node_id)
        if time.monotonic() - self._examined_at >= _EXAMINE_SECONDS:
            self._examine_nodes()
        self._running = [process for process in self._running if process not in ended]
        used = Counter(process.node_id for process in self._running)
        usable = [node for node in self._nodes.values() if node.id not in self._probes]
        free = [node for node in usable if self._room_of(node) > used[node.id]]
        if not free:
            return None
        needed = self._needed_traits(run).items()
        free = [node for node in free if needed <= node.traits.items()]
        if not free:
            if not any(needed <= node.traits.items() for node in self._nodes.values()):
                self._remind(run)
            return None
        node = max(free, key=lambda node: (self._room_of(node) - used[node.id], node.name))
        process = RayTrainProcess(
            run, node.id, node.name, self._options, self._say, str(self._folder), self._train
        )
        self._running.append(process)
        return process

    def _room_of(self, node: Node) -> int:
        room = int(node.cpus // self._options["num_cpus"])
        if memory := self._options.get("memory"):
            room = min(room, int(node.memory // memory))
        gpus = self._options["num_gpus"]
        if not gpus:
            return room
        # A fraction of a GPU cannot span two GPUs.
        return min(room, int(node.gpus) * int(1 / gpus) if gpus < 1 else int(node.gpus // gpus))

    def _needed_traits(self, run: Run) -> Mapping[str, str]:
        """Returns the traits of nodes on which a run continues bit for bit; {} for any node."""
        if self._allow_inexact_resume:
            return {}
        checkpoints = sorted((run.folder / "checkpoints").glob("step-*"))
        return saved_traits(checkpoints[-1]) if checkpoints else {}

    def _remind(self, run: Run) -> None:
        if time.monotonic() - self._reminded.get(run.folder, -_REMIND_SECONDS) >= _REMIND_SECONDS:
            self._reminded[run.folder] = time.monotonic()
            self._say(
                f"{run.name} waits for a node with the package versions and vector instructions "
                "of the node that wrote its checkpoint (--allow_inexact_resume lets it continue "
                "on any node)"
            )

    def _examine_nodes(self) -> None:
        """Examines nodes that have joined, and forgets those that have left."""
        self._examined_at = time.monotonic()
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node_id in self._memory.keys() - alive.keys():
            del self._memory[node_id]
        for node_id in self._nodes.keys() - alive.keys():
            self._say(f"node {self._nodes.pop(node_id).name} has left the cluster")
        waiting = {x for x, (_, until) in self._refused.items() if until > self._examined_at}
        for node_id in alive.keys() - self._nodes.keys() - self._probes.keys() - waiting:
            if alive[node_id]["Resources"].get("CPU"):  # A head may only manage.
                self._examine(node_id)
        for node_id, (probe, since) in list(self._probes.items()):
            has_ended, has_left = bool(ray.wait([probe], timeout=0)[0]), node_id not in alive
            limit = _RETRY_SECONDS if has_ended else _PROBE_SECONDS
            if has_left or (has_ended and self._note(node_id, alive[node_id], probe)):
                del self._probes[node_id]
                continue
            if time.monotonic() - since <= limit:
                continue
            ray.cancel(probe, force=True)  # It may hang for ever, as a mount may.
            if node_id in self._nodes:
                self._examine(node_id)
            else:
                del self._probes[node_id]
                self._refuse(
                    node_id,
                    alive[node_id]["NodeName"],
                    f"it did not answer within {_PROBE_SECONDS:g} s. Restart Ray there",
                )

    def _examine(self, node_id: str) -> None:
        """Starts the check of a node, on which no run is started until the node has answered."""
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task: Any = ray.remote(examine)
        task = task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        own = f"{self._file}-{node_id}"
        probe = task.remote(str(self._folder), self._file, self._lock.name, own)
        self._probes[node_id] = probe, time.monotonic()

    def _note(self, node_id: str, node: dict[str, Any], probe: Any) -> bool:
        """Reads a node's answer, and says what is wrong with the node.

        Returns:
          False if a node that could train does not answer now.
        """
        address, known = node["NodeName"], self._nodes.get(node_id)
        try:
            answer: Probe = ray.get(probe)
        except ray.exceptions.RayError as error:
            if known:
                return False
            self._refuse(
                node_id,
                address,
                f"it cannot run this package ({last_line(error)}). Install the same revision "
                "there, in the environment in which you run ray start",
            )
            return True
        name = f"{answer.host} ({address}, {node_id[:6]})"
        resources = node["Resources"]
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        memory = min(answer.free_memory, resources.get("memory", 0.0))
        memory = self._memory.get(node_id, memory)  # Later, runs use a part of it.
        found = Node(node_id, name, cpus, gpus, memory, answer.traits)
        if why := self._why_refused(answer, found):
            self._refuse(node_id, name, why)
        elif not known:
            self._nodes[node_id] = found
            self._memory[node_id] = memory
            self._refused.pop(node_id, None)
            self._say(f"node {name}: {found.resources}; parallel runs: {self._room_of(found)}")
            if answer.niceness > 0:
                self._say(
                    f"node {name}: its runs have low priority (nice {answer.niceness}). Set "
                    "RAY_worker_niceness=0 in the environment in which you run ray start"
                )
            self._say_what_differs(found)
        return True

    def _why_refused(self, answer: Probe, node: Node) -> str:
        """Returns why a node cannot train, and the fix; "" if it can."""
        folder = self._folder
        if not answer.sees_file or not (folder / f"{self._file}-{node.id}").exists():
            return f"it does not share {folder} with this machine. Mount the same folder there"
        if not answer.is_locked_out:
            return (
                f"locks in {folder} have no effect there, so that two processes could train "
                "in one folder. Use a file system with locks, such as NFS 4 or Lustre"
            )
        if answer.source_sha256 != source_revision.source_sha256():
            return "it has another revision of this package. Install the same revision there"
        if self._room_of(node):
            return ""
        need = self._options
        return (
            f"it has {node.resources}, but a run needs {need['num_cpus']:g}, {need['num_gpus']:g} "
            f"and {need.get('memory', 0.0) / 2**30:g}. Decrease --cpus_per_run, --gpus_per_run or "
            "--memory_per_run"
        )

    def _say_what_differs(self, node: Node) -> None:
        """Says if runs cannot move bit for bit between a node and those before it."""
        first = next(iter(self._nodes.values()))
        differences = sorted({key for key, _ in node.traits.items() ^ first.traits.items()})
        if differences:
            self._say(
                f"node {node.name} differs from {first.name} ({', '.join(differences)}): a run "
                "that started on one of them may be unable to continue on the other, unless "
                "--allow_inexact_resume is set"
            )

    def _refuse(self, node_id: str, name: str, why: str) -> None:
        """Leaves a node out for some minutes, because what is wrong may be mended or pass."""
        self._nodes.pop(node_id, None)
        before, _ = self._refused.get(node_id, ("", 0.0))
        self._refused[node_id] = why, time.monotonic() + _REFUSED_SECONDS
        if why != before:
            self._say(f"node {name} is not used: {why}")


def thread_bindings(cpus_per_run: int) -> list[str]:
    """Returns the bindings with which a run uses as many threads as it has processors.

    Results depend on the number of threads, which would otherwise be that of a node's cores.
    """
    return [f"configure_tensorflow.{kind}_op = {cpus_per_run}" for kind in ("intra", "inter")]
