"""Runs the environments of a vector in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.environments.saved_states import State
from pipeline.environments.vectors import Arrays, Outcome, Vector

_CLOSE_SECONDS = 10.0  # some simulators take long to shut down


class ThreadVector:
    """Builds, resets, steps, renders and closes a vector in one thread.

    Graphs call Python from threads of TensorFlow that change from call to call, which databases,
    OpenGL contexts and event loops, for example, do not allow.
    """

    def __init__(self, build: Callable[[], Vector]):
        """Starts the thread and builds the vector in it; exceptions of `build` are passed on."""
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = (
            queue.SimpleQueue()
        )
        self._called = 0
        self._thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self.thread = self._thread.ident
        try:
            self.vector = self._call(build)
        except BaseException:
            self._calls.put(None)
            raise
        self.num_envs = self.vector.num_envs
        self.description = self.vector.description

    def reset(self, seeds: Sequence[int], mask: np.ndarray | None = None) -> Arrays:
        """Resets environments; see `Vector.reset`."""
        return self._call(lambda: self.vector.reset(seeds, mask))

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Outcome:
        """Steps environments; see `Vector.step`."""
        return self._call(lambda: self.vector.step(actions, live))

    def render(self) -> Any:
        """Returns the first environment's current frame."""
        return self._call(self.vector.render)

    def get_states(self) -> list[State]:
        """Returns the state of every environment."""
        return self._call(self.vector.get_states)

    def set_states(self, states: Sequence[State]) -> None:
        """Restores the state of every environment."""
        self._call(lambda: self.vector.set_states(states))

    def close(self) -> None:
        """Closes the vector and ends the thread.

        Raises:
          TimeoutError: If an environment has not returned after 10 s. The thread is left behind.
        """
        if not self._thread.is_alive():
            return
        try:
            self._call(self.vector.close, _CLOSE_SECONDS)
        except queue.Empty as error:
            raise TimeoutError(f"it has not returned after {_CLOSE_SECONDS:g} s") from error
        finally:
            self._calls.put(None)
        self._thread.join()

    def _call(self, function: Callable[[], Any], timeout: float | None = None) -> Any:
        if not self._thread.is_alive():  # It would never answer. A fork has no threads either.
            raise RuntimeError("the environments are closed, or belong to another process")
        self._called += 1
        self._calls.put((self._called, function))
        number = 0
        while number != self._called:  # Results of earlier calls that were interrupted are dropped.
            number, result, error = self._results.get(timeout=timeout)
        if error is not None:
            raise error
        return result

    def _serve(self) -> None:
        with contextlib.ExitStack() as opened:
            # The main thread has an event loop, which environments may expect. It takes files.
            with contextlib.suppress(OSError):
                loop = opened.enter_context(contextlib.closing(asyncio.new_event_loop()))
                asyncio.set_event_loop(loop)
            while (call := self._calls.get()) is not None:
                number, function = call
                try:
                    self._results.put((number, function(), None))
                except BaseException as error:  # raised again in the thread that called
                    self._results.put((number, None, error))
