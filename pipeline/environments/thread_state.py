"""Keeping Python's state of a thread that TensorFlow made."""

from __future__ import annotations

import ctypes
import threading


class _KeptState(threading.local):
    """One for each thread, made when the thread first asks for it."""

    def __init__(self) -> None:
        # Never released: the count of those who hold the thread's state does not fall to zero.
        ctypes.pythonapi.PyGILState_Ensure()
        self.is_kept = True


_kept_state = _KeptState()


def keep_thread_state() -> bool:
    """Keeps Python's state of the calling thread until the thread ends; True.

    For a thread that Python did not start, each call from a graph would make that state, map memory
    for its stack, and drop both: as long as a step of CartPole takes.
    """
    return _kept_state.is_kept
