"""Keeps Python's thread state of threads that TensorFlow created."""

from __future__ import annotations

import ctypes
import threading

_thread_local = threading.local()


def keep_thread_state() -> None:
    """Keeps Python's state of the calling thread until the thread ends.

    Otherwise, in a thread that Python did not start, each call from a graph would create that
    state, map memory for its stack, and free both. This takes as long as a step of CartPole.
    """
    if not hasattr(_thread_local, "is_kept"):
        # Never released, so that the reference count of the thread's state does not fall to zero.
        ctypes.pythonapi.PyGILState_Ensure()
        _thread_local.is_kept = True
