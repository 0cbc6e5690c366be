"""Ends a program whose environment does not return from a step or a reset."""

from __future__ import annotations

import contextlib
import multiprocessing
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import gin
import tensorflow as tf

from pipeline.environments.single_env import is_pythons_own
from pipeline.environments.training_environment import named_failures
from pipeline.utils.constraints import NonNegative, check_arguments
from pipeline.utils.errors import USER_ERROR_CODE
from pipeline.utils.processor import tensorflow_threads
from pipeline.utils.shutdown import StopSignal, exit_at_once

if TYPE_CHECKING:
    from pipeline.environments.vector_environment import VectorEnvironment

_TICK = 1.0  # seconds
# Waits for environments in other processes.
_PROCESS_VECTOR = str(pathlib.Path(__file__).with_name("process_vector.py"))


# A program ends within ten seconds of a signal, unless its environments are slow.
_STOP_SECONDS = 8.0
# A graph call of an environment that has not returned after this time waits for ever if TensorFlow
# has one thread.
_GRAPH_SECONDS = 20.0


class Watched(Protocol):
    """Episodes of a vector, or another object whose calls may never return."""

    calls: int  # number of calls so far
    crossing: int  # identifier of the thread that is inside a call now, or 0 if none is
    complaint: str  # what has not happened if a call does not return, for messages
    usual_seconds: float  # how long a call may take although a signal has arrived
    limits_itself: bool  # whether its calls end without a watchdog unless there is a signal


@gin.configurable(denylist=["environments", "advice", "stop"])
class Watchdog:
    """Ends the process from a thread when a call into an environment takes too long.

    A call cannot be interrupted. Waiting time is counted in the thread's own ticks, so that hours
    in which the process was suspended (SIGSTOP) do not count. The thread needs the GIL: an
    environment that hangs in C code without releasing it is not noticed.
    `faulthandler.dump_traceback_later` would notice it, but would also end a process that continues
    after a suspension.
    """

    def __init__(
        self,
        environments: Sequence[Watched],
        advice: Callable[[], str],
        stop: StopSignal,
        *,
        timeout: NonNegative = 300.0,
    ):
        """Initializes the watchdog and starts its thread.

        Args:
          environments: Environments to watch.
          advice: Returns the last line of the message.
          stop: Signal to stop. A call that is under way 8 s after it arrived, and has taken 8 s
            longer than any before, ends the process.
          timeout: Longest allowed reset or vector step in seconds; 0 for no limit.

        Raises:
          UserError: If the timeout is negative or not a number.
        """
        check_arguments(Watchdog, locals())
        self._environments = environments
        self._advice = advice
        self._stop = stop
        self._timeout = timeout
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()

    def _watch(self) -> None:
        calls = [0] * len(self._environments)
        ticks = [0] * len(self._environments)
        tick = min(_TICK, self._timeout / 4) or _TICK
        since_stop = 0
        while not self._closed.wait(tick):
            since_stop += self._stop.requested
            for index, environment in enumerate(self._environments):
                waits = environment.crossing and environment.calls == calls[index]
                ticks[index] = ticks[index] + 1 if waits else 0
                calls[index] = environment.calls
                if waits:
                    self._check(environment, ticks[index] * tick, since_stop * tick)

    def _check(self, environment: Watched, seconds: float, since_stop: float) -> None:
        place = _place(environment.crossing)
        longest = _STOP_SECONDS + environment.usual_seconds
        if since_stop >= _STOP_SECONDS and seconds >= longest:
            self._end(environment, place, seconds, "", 128 + (self._stop.signal or 0))
        elif environment.limits_itself:
            return
        elif self._timeout and seconds >= self._timeout:
            self._end(environment, place, seconds, " (Watchdog.timeout)")
        elif place and seconds >= _GRAPH_SECONDS and _waits_for_a_thread(place):
            why = ": it uses TensorFlow, which needs a second thread. Bind "
            self._end(environment, place, seconds, f"{why}configure_tensorflow.inter_op = 2")

    def _end(
        self,
        environment: Watched,
        place: traceback.FrameSummary | None,
        seconds: float,
        why: str,
        code: int = USER_ERROR_CODE,
    ) -> None:
        where = f"; it is at {place.filename}:{place.lineno}, in {place.name}" if place else ""
        reason = f"error: {environment.complaint} for {seconds:g} s{why}{where}."
        try:
            print(reason, file=sys.stderr, flush=True)
            for process in multiprocessing.active_children():
                process.kill()
            print(self._advice(), file=sys.stderr, flush=True)  # last, because it may fail
        finally:
            exit_at_once(code)


def _place(thread: int) -> traceback.FrameSummary | None:
    """Returns where the thread with this identifier is, outside of Python's standard library.

    Returns None if it waits for an environment in another process, or if Python cannot tell.
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame else []
    place = next((x for x in reversed(stack) if not is_pythons_own(x.filename)), None)
    return place if place and place.filename != _PROCESS_VECTOR else None


def _waits_for_a_thread(place: traceback.FrameSummary) -> bool:
    """Returns True if a graph of the environment waits for the thread that waits for it."""
    is_in_tensorflow = "/tensorflow/python/" in place.filename
    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    return is_in_tensorflow and tensorflow_threads("inter_op", chosen) == 1


@contextlib.contextmanager
def watched(environment: VectorEnvironment, stop: StopSignal) -> Iterator[None]:
    """Watches an environment outside a run, names it if it fails, and closes it in the end.

    Raises:
      UserError: If the environment raised within the context.
    """
    with (
        contextlib.closing(environment),
        contextlib.closing(Watchdog([environment.episodes], str, stop)),
        named_failures(environment),
    ):
        yield
