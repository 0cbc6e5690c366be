"""Becomes another program, which ends when the process that started this one does.

    python -m pipeline.benchmarks.leash PARENT COMMAND ARGUMENT ...

PARENT is the process id of the caller. However that dies, kill -9 included, Linux then kills the
command as well (prctl(2), PR_SET_PDEATHSIG; it holds across exec). Nothing trains on unseen, and a
benchmark called again finds its runs unlocked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command(program: Sequence[str]) -> list[str]:
    """What to start instead of `program`, so that it ends with this process."""
    return [sys.executable, "-m", "pipeline.benchmarks.leash", str(os.getpid()), *program]


def main(parent: int, command: list[str]) -> None:
    """Does not return."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    # The parent may have died before: then nobody would send the signal.
    if os.getppid() == parent:
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
