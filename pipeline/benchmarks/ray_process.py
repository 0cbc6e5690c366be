"""Trains a run in a process that a Ray actor starts on a node of a cluster."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.benchmarks.planned_runs import Run
from pipeline.benchmarks.train_process import LocalProcess

_POLL_SECONDS = 0.5
_LOCKED = "another process is training in"  # runs/run_folder.py
_LOCK_SECONDS = 10.0  # between attempts to take over a run
_STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)


class ProcessActor:
    """Actor that starts a process on its node and observes it.

    The process is started in the constructor, because it ends with the thread that starts it, and
    the constructor and methods of an actor without concurrency run in the main thread.
    """

    def __init__(self, arguments: Sequence[str], log: str, waits_for_lock: bool, has_gpu: bool):
        """Starts the process.

        Args:
          arguments: Arguments of this node's Python.
          log: File to which the output is appended.
          waits_for_lock: Whether to try again if another process still trains in the folder.
          has_gpu: Whether the process may use the GPUs that Ray has chosen.
        """
        # Ray's variables are for its workers: one of them would slow the training down.
        of_ray = ("RAY_", "OMP_NUM_THREADS", *(() if has_gpu else ("CUDA_VISIBLE_DEVICES",)))
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(of_ray)}
        self._arguments = [sys.executable, *arguments]
        self._log = pathlib.Path(log)
        self._waits_for_lock = waits_for_lock
        self._waits_until: float | None = None
        self._why = ""
        self._start()

    def poll(self) -> tuple[int | None, str]:
        """Returns the exit code, or None while the process runs, and why the run has to wait."""
        if self._waits_until is not None:
            if time.monotonic() < self._waits_until:
                return None, self._why
            self._start()
        code = self._process.poll()
        if code is None or not self._waits_for_lock or _LOCKED not in self._process.error():
            return code, ""
        self._waits_until = time.monotonic() + _LOCK_SECONDS
        self._why = "its folder is still locked by the process that was lost"
        return None, self._why

    def stop(self) -> None:
        """Asks the process to write a checkpoint and exit."""
        self._process.stop()

    def error(self) -> str:
        """Returns why the process failed."""
        return self._process.error()

    def _start(self) -> None:
        self._waits_until = None
        self._process = LocalProcess(self._arguments, self._log, self._environment)


class RayTrainProcess:
    """`Process` on a node of a cluster."""

    def __init__(
        self,
        run: Run,
        node_id: str,
        node_name: str,
        options: dict[str, Any],
        say: Callable[[str], None],
        waits_for_lock: bool = False,
        module: Sequence[str] = ("-m", "pipeline.train"),
    ):
        """Starts the process.

        Args:
          run: The run to train or to resume.
          node_id: Node of the cluster on which it is trained.
          node_name: Name of the node in messages.
          options: Ray's options of the actor: num_cpus, num_gpus and the like.
          say: Called with messages.
          waits_for_lock: Whether the run was lost, so that its lost process may still train.
          module: Arguments of Python that train.
        """
        self.run = run
        self.node_id = node_id
        self.is_lost = False
        self._say = say
        self._waits_because = ""
        self._node_name = node_name
        self._code: int | None = None
        self._error = ""
        self._is_stopping = False
        self._started = self._asked = time.monotonic()
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        remote_class: Any = ray.remote(ProcessActor)
        actor = remote_class.options(max_restarts=0, scheduling_strategy=on_node, **options)
        has_gpu = bool(options.get("num_gpus"))
        arguments = [*module, *run.arguments]
        self._actor = actor.remote(arguments, str(run.log.absolute()), waits_for_lock, has_gpu)
        self._answer = self._actor.poll.remote()

    @property
    def seconds(self) -> float:
        """Returns the seconds since the process was started."""
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Returns the exit code; see `Process.poll`. It does not wait for the node."""
        if self._code is None and ray.wait([self._answer], timeout=0)[0]:
            self._read_answer()
        return self._code

    def _read_answer(self) -> None:
        try:
            code, why = ray.get(self._answer)
        except ActorUnavailableError:
            code = None  # The node may answer again; only the errors below are final.
        except RayActorError as error:
            self._end(-signal.SIGKILL, f"node {self._node_name} was lost")
            self.is_lost = not getattr(error, "actor_init_failed", False)
            if not self.is_lost:
                self._error = f"the process cannot be started on {self._node_name}: {error}"
            return
        except RayTaskError as error:
            self._end(1, f"node {self._node_name}: {error}")
            return
        else:
            if why and why != self._waits_because:
                self._say(f"{self.run.name} waits on {self._node_name}: {why}")
            self._waits_because = why
        if code is not None:
            try:
                self._end(code, ray.get(self._actor.error.remote(), timeout=30))
            except ray.exceptions.RayError as error:
                self._end(code, f"exit code {code}\n{error}")
            return
        if time.monotonic() - self._asked >= _POLL_SECONDS:
            self._asked = time.monotonic()
            self._answer = self._actor.poll.remote()

    def _end(self, code: int, error: str) -> None:
        self._code, self._error = code, error
        ray.kill(self._actor)  # frees what it has reserved on its node

    def was_stopped(self) -> bool:
        """Returns True if the process has ended because `stop` asked it to."""
        return self._is_stopping and self._code in _STOPPED

    def stop(self) -> None:
        """Asks the process to write a checkpoint and exit; see `Process.stop`."""
        if not self._is_stopping:
            self._is_stopping = True
            self._actor.stop.remote()

    def wait(self) -> None:
        """Waits until the process has ended or its node is lost."""
        while self.poll() is None:
            time.sleep(_POLL_SECONDS)

    def error(self) -> str:
        """Returns why the process failed; see `Process.error`."""
        return self._error
