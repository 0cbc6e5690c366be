"""Ends a process, or a command, when the process that started it ends.

    python die_with_parent.py PARENT COMMAND ARGUMENT ...

PARENT is the process id of the caller. When the caller dies, even by kill -9, Linux also kills the
command (prctl(2), PR_SET_PDEATHSIG, which is kept across exec). So no training continues in the
background, and a benchmark that is started again finds its runs unlocked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def python() -> list[str]:
    """Returns the command of this Python, which searches the current folder if this process does.

    `python -m` searches it first, and the user may have another `pipeline` there. A command such as
    pipeline-benchmark does not search it.
    """
    return [sys.executable, *([] if {"", os.getcwd()}.intersection(sys.path) else ["-P"])]


def command(program: Sequence[str]) -> list[str]:
    """Returns the command that runs `program` so that it ends with the current process."""
    # -I and -S: looking for installed packages would take longer than all else.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


def bind(parent: int) -> bool:
    """Lets the kernel kill the current process when the thread that has started it ends.

    Args:
      parent: Process id of the parent.

    Returns:
      False if the parent has already died, after which the signal would never be sent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    return os.getppid() == parent


if __name__ == "__main__" and bind(int(sys.argv[1])):
    os.execv(sys.argv[2], sys.argv[2:])
