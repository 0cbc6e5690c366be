"""Keeps Python's thread state of threads that TensorFlow created."""

from __future__ import annotations

import ctypes
import threading


class _KeptState(threading.local):
    """Keeps a thread's state; each thread creates its own at its first access."""

    def __init__(self) -> None:
        # Never released, so that the reference count of the thread's state does not fall to zero.
        ctypes.pythonapi.PyGILState_Ensure()
        self.is_kept = True


_kept_state = _KeptState()


def keep_thread_state() -> bool:
    """Keeps Python's state of the calling thread until the thread ends.

    Otherwise, in a thread that Python did not start, each call from a graph would create that
    state, map memory for its stack, and free both. This takes as long as a step of CartPole.

    Returns:
      True.
    """
    return _kept_state.is_kept
