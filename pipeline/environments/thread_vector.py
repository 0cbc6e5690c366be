"""Vector of environments that live in a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.environments.saved_states import State
from pipeline.environments.vectors import Outcome, Vector


class ThreadVector:
    """Builds, resets, steps, renders and closes a vector in one thread.

    Graphs call Python from threads of TensorFlow that change from call to call, which databases,
    OpenGL contexts and event loops, for example, do not allow.
    """

    def __init__(self, build: Callable[[], Vector]):
        """Starts the thread and builds the vector in it; exceptions of `build` are passed on."""
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
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
        self.observation_space = self.vector.observation_space
        self.action_space = self.vector.action_space
        self.renders = self.vector.renders
        self.render_fps = self.vector.render_fps
        self.notes = self.vector.notes

    def reset(self, seeds: Sequence[int], mask: np.ndarray | None = None) -> np.ndarray:
        """Resets environments; see `Vector.reset`."""
        return self._call(lambda: self.vector.reset(seeds, mask))

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Outcome:
        """Steps environments; see `Vector.step`."""
        return self._call(lambda: self.vector.step(actions, live))

    def render(self) -> Any:
        """Returns the first environment's current frame."""
        return self._call(self.vector.render)

    def offers_states(self) -> bool:
        """Returns True if the environments and their wrappers offer their states."""
        return self._call(self.vector.offers_states)

    def get_states(self) -> list[State]:
        """Returns the state of every environment."""
        return self._call(self.vector.get_states)

    def set_states(self, states: Sequence[State]) -> None:
        """Restores the state of every environment."""
        self._call(lambda: self.vector.set_states(states))

    def close(self) -> None:
        """Closes the vector and ends the thread."""
        if not self._thread.is_alive():
            return
        try:
            self._call(self.vector.close)
        finally:
            self._calls.put(None)
            self._thread.join()

    def _call(self, function: Callable[[], Any]) -> Any:
        self._calls.put(function)
        result, error = self._results.get()
        if error is not None:
            raise error
        return result

    def _serve(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:  # raised again in the thread that called
                self._results.put((None, error))
