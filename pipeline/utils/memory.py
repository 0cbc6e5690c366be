"""Reads how much memory this process may use, and how much of it is free (Linux)."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

_CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Returns the memory that this process may use, in bytes.

    It is this machine's memory, or the limit of one of the control groups of the process, such as a
    container's, if that is lower.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _limit_files():
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit: "max"
            limits.append(int(path.read_text()))
    return min(limits)


def _limit_files() -> Iterator[pathlib.Path]:
    """Yields the files that may hold memory limits of the process's control groups."""
    try:
        groups = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"  # version 1, version 2
        folder = _CONTROL_GROUPS / controllers
        path = folder / group.lstrip("/")
        yield from (parent / name for parent in (path, *path.parents))


def free_memory() -> int:
    """Returns the bytes of memory that a new process can use without swapping."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return min(1024 * int(kibibytes), available_memory())
