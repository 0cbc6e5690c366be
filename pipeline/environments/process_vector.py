"""Runs the environments of a vector in processes of their own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import gymnasium
import numpy as np

from pipeline.environments.saved_states import State
from pipeline.environments.single_env import RemoteError, SingleEnv, describe, shared_description
from pipeline.environments.vectors import Arrays, Outcome, gather, new_observations
from pipeline.utils import die_with_parent
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import kept_handlers

Sent = Sequence[bytes]  # bytes of each array of an observation

_ALIVE_SECONDS = 1.0  # between checks that a process which does not answer still exists
_CLOSE_SECONDS = 10.0  # after which a process that does not end is killed

# A forked process knows the gin bindings of wrappers and ids that were registered by hand; a
# spawned one would know neither.
_CONTEXT = multiprocessing.get_context("fork")


class ProcessDied(UserError):
    """Raised if the process of an environment has ended."""


class ProcessVector:
    """Steps its environments at the same time, each in a process of its own.

    Results, checks and messages are those of `SyncVector`. The processes may have children. They
    end when this process ends.

    Attributes:
      num_envs: Number of environments.
      processes: Process of every environment.
    """

    thread = 0

    def __init__(self, makes: Sequence[Callable[[], gymnasium.Env]]):
        """Starts the processes, which build their environments."""
        self.processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        # Without it, Python would wait at its end for processes that were never closed.
        self._finalizer = multiprocessing.util.Finalize(
            self, _kill, args=(self.processes,), exitpriority=10
        )
        try:
            for make in makes:
                self._start(make)
        except OSError as error:
            self._finalizer()
            raise UserError(
                f"the process of environment {len(self.processes)} of {len(makes)} cannot be "
                f"started ({error.strerror}). Each takes one process and three open files: raise "
                "the limits (ulimit -u, ulimit -n), or lower gymnasium_environment.num_envs."
            ) from error
        self.num_envs = len(self.processes)
        self._asked = [0] * self.num_envs  # number of the last question to each process
        try:
            self.description = shared_description(self._receive(range(self.num_envs)))
        except BaseException:
            self._finalizer()
            raise
        self._observation = new_observations(self.description.observation_space, self.num_envs)

    def _start(self, make: Callable[[], gymnasium.Env]) -> None:
        connection, of_child = _CONTEXT.Pipe()
        self._connections.append(connection)
        seed = int(np.random.randint(2**32, dtype=np.uint64))
        # The kernel ties a process to the thread that starts it. Other threads may end early.
        is_bound = threading.current_thread() is threading.main_thread()
        with of_child:
            process = _CONTEXT.Process(
                target=_serve,
                args=(of_child, make, os.getpid(), is_bound, seed),
                name="environment",
            )
            process.start()
        self.processes.append(process)

    def reset(self, seeds: Sequence[int], mask: np.ndarray | None = None) -> Arrays:
        """Resets environments; see `Vector.reset`."""
        indices = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        for index in indices:
            self._send(index, "reset", seeds[index])
        self._observation = [array.copy() for array in self._observation]
        self._receive(indices, self._observation)
        return self._observation

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Outcome:
        """Steps environments; see `Vector.step`."""
        indices = range(self.num_envs) if live is None else np.flatnonzero(live).tolist()
        for index in indices:
            self._send(index, "step", actions[index])
        new = np.empty_like if live is None else np.copy
        observation = self._observation = [new(array) for array in self._observation]
        answers = self._receive(indices, observation)
        return gather(observation, self.num_envs, zip(indices, answers, strict=True))

    def render(self) -> Any:
        """Returns the first environment's current frame."""
        return self._ask([0], "render")[0]

    def get_states(self) -> list[State]:
        """Returns the state of every environment."""
        return self._ask(range(self.num_envs), "get_state")

    def set_states(self, states: Sequence[State]) -> None:
        """Restores the state of every environment."""
        for index, state in zip(range(self.num_envs), states, strict=True):
            self._send(index, "set_state", state)
        self._receive(range(self.num_envs))

    def close(self) -> None:
        """Closes all environments and ends their processes, also if one raises."""
        alive = [index for index, process in enumerate(self.processes) if process.is_alive()]
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            self._ask(alive, "close", deadline)
        finally:
            for process in self.processes:  # which end their own children
                process.join(max(0.0, deadline - time.monotonic()))
            self._finalizer()

    def _ask(self, indices: Sequence[int], method: str, deadline: float | None = None) -> list[Any]:
        for index in indices:
            self._send(index, method)
        return self._receive(indices, deadline=deadline)

    def _send(self, index: int, method: str, *arguments: Any) -> None:
        """Asks a process to call a method of its `SingleEnv`."""
        self._asked[index] += 1
        try:
            self._connections[index].send((self._asked[index], method, *arguments))
        except OSError as error:
            raise self._died(index) from error

    def _receive(
        self,
        indices: Sequence[int],
        observation: Arrays = (),
        deadline: float | None = None,
    ) -> list[Any]:
        """Receives an answer from every process of `indices`.

        All answers are received before the first failure is raised.

        Args:
          indices: Numbers of the processes.
          observation: Arrays [N, ...] that observations are copied to, if any are sent.
          deadline: Time (`time.monotonic`) at which to stop waiting; None for no limit. A missing
            answer is then not an error.
        """
        answers: list[Any] = []
        errors: list[Exception] = []
        for index in indices:
            try:
                answer = self._answer(index, deadline)
            except (EOFError, OSError):
                errors.append(self._died(index))
                continue
            if answer is None:
                continue
            kind, content, sent = answer
            if kind != _OK:
                errors.append((UserError if kind == _USER_ERROR else RemoteError)(content))
                continue
            answers.append(content)
            for array, of_env in zip(observation, sent, strict=True):
                row = array[index, ...].reshape(-1)
                row[...] = np.frombuffer(of_env, array.dtype)
        if errors:
            raise errors[0]
        return answers

    def _answer(self, index: int, deadline: float | None) -> tuple[str, Any, Sent] | None:
        """Returns the answer to the last question to a process, or None after the deadline.

        Answers to earlier questions, whose calls were interrupted, are dropped.
        """
        while self._has_sent(index, deadline):
            number, *answer = self._connections[index].recv()
            if number == self._asked[index]:
                return tuple(answer)
        return None

    def _has_sent(self, index: int, deadline: float | None) -> bool:
        """Waits for a message of a process; returns False after the deadline.

        Raises:
          EOFError: If the process has ended. Children of the process may keep its connection open.
        """
        messages = select.poll()  # much faster than the connection's own `poll`
        messages.register(self._connections[index], select.POLLIN)
        wait = _ALIVE_SECONDS
        while True:
            if deadline is not None:
                wait = min(_ALIVE_SECONDS, max(0.0, deadline - time.monotonic()))
            if messages.poll(1_000 * wait):
                return True
            if not self.processes[index].is_alive() and not messages.poll(0):
                raise EOFError
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _died(self, index: int) -> ProcessDied:
        self.processes[index].join(timeout=1.0)
        code = self.processes[index].exitcode or 0
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        cause = _CAUSES.get(-code, "")
        return ProcessDied(f"the process of environment {index} has died ({end}){cause}")


# A call of TensorFlow that lasts longer is taken to wait for threads that do not exist.
_TENSORFLOW_SECONDS = 5
_NO_TENSORFLOW = (
    "the environment uses TensorFlow, which does not work in a forked process. Bind "
    'gymnasium_environment.vectorization_mode = "sync".'
)
# TensorFlow aborts a forked process if its parent uses a GPU.
_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", perhaps because the machine ran out of memory",
    signal.SIGABRT: (
        ", perhaps because the environment uses TensorFlow, which does not work in a forked "
        'process. If it does, bind gymnasium_environment.vectorization_mode = "sync"'
    ),
}
_OK, _USER_ERROR, _ERROR = "ok", "user error", "error"


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _serve(
    connection: Connection,
    make: Callable[[], gymnasium.Env],
    parent: int,
    is_bound: bool,
    seed: int,
) -> None:
    """Runs an environment in its process: answers one message after the other."""
    # `_watch` cannot run while C code keeps Python's lock; the kernel can.
    if is_bound and not die_with_parent.bind(parent):
        return
    # Forked processes would otherwise draw the same numbers from NumPy's global generator.
    np.random.seed(seed)
    random.seed(seed)
    asked = [0]  # A list, because the watching thread reads the number of the current message.
    threading.Thread(target=_watch, args=[parent, connection, asked], daemon=True).start()
    # A signal to a group of processes stops the run only when its parent has written a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup asks for, and for children too
        signal.signal(signal.SIGHUP, lambda *_: None)
    # Children of the environment end at a SIGTERM as usual, also at one that arrives at once.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=_unblock,
        after_in_child=_end_at_sigterm,
    )
    method = ""
    try:
        with kept_handlers():
            env = SingleEnv(make)
        arrays = new_observations(env.env.observation_space, 1)
        observation = [array[0, ...] for array in arrays]
        connection.send((0, _OK, env.description, ()))
    except Exception as error:
        connection.send((0, *_failure(error)))
        return
    while method != "close":
        try:
            asked[0], method, *arguments = connection.recv()
        except (EOFError, OSError):
            return
        observes = method in ("reset", "step")
        try:
            answer = getattr(env, method)(*arguments, *([observation] if observes else []))
            sent = [array.tobytes() for array in observation] if observes else ()
            reply: tuple[str, Any, Sent] = _OK, answer, sent
        except Exception as error:
            reply = _failure(error)
        try:
            connection.send((asked[0], *reply))
        except BrokenPipeError:
            return


def _failure(error: Exception) -> tuple[str, str, Sent]:
    if isinstance(error, UserError):
        return _USER_ERROR, str(error), ()
    return _ERROR, describe(error), ()


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_at_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


def _watch(parent: int, connection: Connection, asked: Sequence[int]) -> None:
    """Ends this process when its parent ends, or its environment waits for TensorFlow for seconds.

    In the latter case, it sends an error first. A forked process does not have TensorFlow's
    threads, so a call of TensorFlow may never return.
    """
    seconds, before = 0, None
    while os.getppid() == parent and seconds < _TENSORFLOW_SECONDS:
        time.sleep(1.0)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        is_in_tensorflow = frame and "/tensorflow/python/" in frame.f_code.co_filename
        now = (asked[0], frame, frame.f_lasti if frame else 0)
        seconds = seconds + 1 if is_in_tensorflow and now == before else 0
        before = now
    if seconds:
        connection.send((asked[0], _USER_ERROR, _NO_TENSORFLOW, ()))
    os._exit(1)
