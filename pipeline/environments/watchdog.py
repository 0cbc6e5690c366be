"""Ends a run whose environment never returns from a step."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

import gin

from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.utils.constraints import NonNegative, check_arguments
from pipeline.utils.errors import USER_ERROR_CODE
from pipeline.utils.shutdown import exit_at_once

_TICK = 1.0  # seconds


@gin.configurable(denylist=["environments", "advice"])
class Watchdog:
    """Thread that ends the process when a call into an environment takes too long.

    The main thread is inside that call and cannot be interrupted. Waiting time is counted in the
    thread's own ticks, so that hours in which the process was suspended do not count. The thread
    needs the GIL: an environment that hangs in C code without releasing it is not noticed.
    """

    def __init__(
        self,
        environments: Sequence[VectorEnvironment],
        advice: Callable[[], str],
        *,
        timeout: NonNegative = 300.0,
    ):
        """Initializes the watchdog and starts its thread, unless `timeout` is 0.

        Args:
          environments: Environments to watch.
          advice: Returns the last line of the message.
          timeout: Longest allowed reset or vector step in seconds; 0 for no limit.

        Raises:
          UserError: If the timeout is negative or not a number.
        """
        check_arguments(Watchdog, locals())
        self._environments = environments
        self._advice = advice
        self._timeout = timeout
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if timeout:
            self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()

    def _watch(self) -> None:
        calls = [0] * len(self._environments)
        ticks = [0] * len(self._environments)
        tick = min(_TICK, self._timeout / 4)
        while not self._closed.wait(tick):
            for index, environment in enumerate(self._environments):
                waits = environment.crossing and environment.calls == calls[index]
                ticks[index] = ticks[index] + 1 if waits else 0
                calls[index] = environment.calls
                if ticks[index] * tick >= self._timeout:
                    self._end(environment)

    def _end(self, environment: VectorEnvironment) -> None:
        reason = (
            f"error: environment {environment.name} has not returned from a step or reset for "
            f"{self._timeout:g} s (Watchdog.timeout){_whereabouts(environment.crossing)}."
        )
        try:
            print(reason, file=sys.stderr, flush=True)
            for process in multiprocessing.active_children():
                process.kill()
            print(self._advice(), file=sys.stderr, flush=True)  # last, because it may fail
        finally:
            exit_at_once(USER_ERROR_CODE)


def _whereabouts(thread: int) -> str:
    """Returns where the thread with this identifier is, or "" if Python cannot tell."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f"; it is at {innermost.filename}:{innermost.lineno}, in {innermost.name}"
