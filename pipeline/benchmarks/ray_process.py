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
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.benchmarks.planned_runs import Run
from pipeline.benchmarks.train_process import STOPPED, LocalProcess
from pipeline.runs.run_folder import BUSY
from pipeline.utils.errors import RETRY_CODE, last_line
from pipeline.utils.ray_connection import reason_of

_POLL_SECONDS = 0.5
_START_SECONDS = 60.0  # after which a process that has not started is reported
_LOCK_SECONDS = 10.0  # between attempts to take over a run
_STOPPED_CODE = 128 + signal.SIGTERM
_WAITS = (
    "another process still trains in its folder, perhaps on a node that lost its connection; "
    f"retrying every {_LOCK_SECONDS:g} seconds"
)


def environment(has_gpu: bool) -> dict[str, str]:
    """Returns the environment variables of a run on this node.

    Args:
      has_gpu: Whether the run may use the GPUs that Ray has chosen. Otherwise, it sees none.
    """
    # Ray's variables are for its workers: one of them would slow the training down.
    of_ray = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(of_ray)}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "") if has_gpu else ""
    return variables | {"CUDA_VISIBLE_DEVICES": gpus}


def working_folder(folder: str) -> str:
    """Returns the working directory of a run: the folder of all runs, if this node has it."""
    return folder if os.path.isdir(folder) else "/"


class ProcessActor:
    """Starts a process on its node and observes it, as a Ray actor.

    The process is started in the constructor, because it ends with the thread that starts it, and
    the constructor and methods of an actor without concurrency run in the main thread.
    """

    def __init__(self, arguments: Sequence[str], log: str, folder: str, has_gpu: bool):
        """Starts the process.

        Args:
          arguments: Arguments of this node's Python.
          log: File to which the output is appended.
          folder: Folder of all runs.
          has_gpu: Whether the process may use the GPUs that Ray has chosen.
        """
        self._environment = environment(has_gpu)
        self._arguments = [sys.executable, *arguments]
        self._log, self._folder = pathlib.Path(log), folder
        self._waits_until: float | None = None
        self._is_stopping = False
        self._start()

    def poll(self) -> tuple[int | None, str]:
        """Returns the exit code, or None while the process runs, and why the run has to wait."""
        if self._waits_until is None and self._process.poll() is not None:
            if BUSY not in self._process.error():
                return self._process.poll(), ""
            self._waits_until = time.monotonic() + _LOCK_SECONDS
        if self._waits_until is not None:
            if self._is_stopping:
                return _STOPPED_CODE, ""
            if time.monotonic() < self._waits_until:
                return None, _WAITS
            self._start()
        return None, ""

    def stop(self) -> None:
        """Asks the process to write a checkpoint and exit."""
        self._is_stopping = True
        self._process.stop()

    def error(self) -> str:
        """Returns why the process failed."""
        return self._process.error()

    def _start(self) -> None:
        self._waits_until = None
        self._process = LocalProcess(
            self._arguments, self._log, self._environment, working_folder(self._folder)
        )


class RayTrainProcess:
    """Runs training in a process on a node of a cluster; implements `Process`."""

    def __init__(
        self,
        run: Run,
        node_id: str,
        node_name: str,
        options: dict[str, Any],
        say: Callable[[str], None],
        folder: str,
        train: Sequence[str],
    ):
        """Starts the process.

        Args:
          run: The run to train or to resume.
          node_id: Node of the cluster on which it is trained.
          node_name: Name of the node in messages.
          options: Ray's options of the actor: num_cpus, num_gpus and the like.
          say: Function that shows a message.
          folder: Folder of all runs.
          train: Python arguments that run the training program.
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
        self.started = self._asked = time.monotonic()
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        remote_class: Any = ray.remote(ProcessActor)
        actor = remote_class.options(max_restarts=0, scheduling_strategy=on_node, **options)
        has_gpu = bool(options.get("num_gpus"))
        arguments = [*train, *run.arguments]
        self._actor = actor.remote(arguments, str(run.log.absolute()), folder, has_gpu)
        self._answer = self._actor.poll.remote()
        self._has_answered = False
        self._is_late = False
        self._is_read = False  # whether `_answer` has been read

    def poll(self) -> int | None:
        """Returns the exit code; see `Process.poll`. It does not wait for the node."""
        if self._is_read and time.monotonic() - self._asked < _POLL_SECONDS:
            return self._code
        if self._code is None and ray.wait([self._answer], timeout=0)[0]:
            self._read_answer()
        if not (self._has_answered or self._is_late) and self._code is None:
            self._is_late = time.monotonic() - self.started >= _START_SECONDS
            if self._is_late:
                why = "other programs may use the CPUs there"
                self._say(f"{self.run.name} waits on {self._node_name}: {why}")
        return self._code

    def _read_answer(self) -> None:
        code, why = None, ""
        self._is_read = True
        try:
            code, why = ray.get(self._answer)
            self._has_answered = True
        except ActorUnavailableError:
            pass  # The node may answer again; the errors below are final.
        except (RayActorError, ActorUnschedulableError) as error:
            self.is_lost = True  # Its node is examined before it gets another run.
            if getattr(error, "actor_init_failed", False):  # because of the node or the folder
                why = f"the process cannot be started on {self._node_name}: {last_line(error)}"
                self._end(RETRY_CODE, why)
            else:
                why = f"the process on node {self._node_name} was lost ({reason_of(error)})"
                self._end(-signal.SIGKILL, why)
        except RayTaskError as error:
            self.is_lost = True
            self._end(RETRY_CODE, f"node {self._node_name}: {last_line(error)}")
        except RayError:
            pass  # Ray itself may recover; if the node is lost, one of the errors above follows.
        if self._code is not None:
            return
        if why and why != self._waits_because:
            self._say(f"{self.run.name} waits on {self._node_name}: {why}")
        self._waits_because = why
        if code is not None:
            try:
                self._end(code, ray.get(self._actor.error.remote(), timeout=30))
            except RayError as error:
                self._end(code, f"exit code {code}\n{error}")
        elif time.monotonic() - self._asked >= _POLL_SECONDS:
            self._asked = time.monotonic()
            if self._is_stopping:
                self._actor.stop.remote()  # again, because a node that was away has missed it
            self._answer = self._actor.poll.remote()
            self._is_read = False

    def _end(self, code: int, error: str) -> None:
        self._code, self._error = code, error
        ray.kill(self._actor)  # frees what it has reserved on its node

    def was_stopped(self) -> bool:
        """Returns True if the process has ended because `stop` asked it to."""
        return self._is_stopping and self._code in STOPPED

    def stop(self) -> None:
        """Asks the process to write a checkpoint and exit; see `Process.stop`."""
        if not self._is_stopping:
            self._is_stopping = True
            if self._has_answered:
                self._actor.stop.remote()
            else:  # It has not begun, for instance because other programs use the node.
                self._end(_STOPPED_CODE, "stopped before it began")

    def wait(self) -> None:
        """Waits until the process has ended or its node is lost."""
        while self.poll() is None:
            time.sleep(_POLL_SECONDS)

    def error(self) -> str:
        """Returns why the process failed; see `Process.error`."""
        return self._error
