"""Reads how much memory this process may use, and how much of it is free (Linux)."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

_CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")
_PROCESS = pathlib.Path("/proc/self/cgroup")


def available_memory() -> int:
    """Returns the memory that this process may use, in bytes.

    It is this machine's memory, or the limit of one of the control groups of the process, such as a
    container's, if that is lower.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _control_groups())])


def free_memory() -> int:
    """Returns the bytes of memory that a new process can use without swapping."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return min([1024 * int(kibibytes), *(limit - used for limit, used in _control_groups())])


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yields the limit and the use of memory, in bytes, of this process's control groups.

    The use is without the cached files that the system drops when it needs memory.
    """
    try:
        groups = _PROCESS.read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        files, cache = ("memory.max", "memory.current"), "inactive_file"
        if controllers:  # version 1
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        path = _CONTROL_GROUPS / controllers / group.lstrip("/")
        for folder in (path, *path.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no limit: "max"
                limit, used = (int((folder / name).read_text()) for name in files)
                yield limit, used - _statistic(folder / "memory.stat", cache)


def _statistic(path: pathlib.Path, name: str) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return int(dict(line.split() for line in lines).get(name, 0))
