"""Becomes another program that ends when the process that started this one ends.

    python -m pipeline.benchmarks.die_with_parent PARENT COMMAND ARGUMENT ...

PARENT is the process id of the caller. However the caller dies, by kill -9 included, Linux then
kills the command, too (prctl(2), PR_SET_PDEATHSIG, which holds across exec). So nothing trains on
unseen, and a benchmark that is called again finds its runs unlocked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command(program: Sequence[str]) -> list[str]:
    """Returns the command to start instead of `program`, so that it ends with this process."""
    return [sys.executable, "-m", "pipeline.benchmarks.die_with_parent", str(os.getpid()), *program]


def main(parent: int, command: list[str]) -> None:
    """Replaces this process by `command`; does not return."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    # If the parent has died already, nobody would send the signal.
    if os.getppid() == parent:
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
