"""Prints properties of a machine as JSON, in the process that a run would have there.

    python -m pipeline.benchmarks.node_probe FOLDER FILE LOCK OWN

FOLDER is the shared folder. FILE is a file that another machine has written there, LOCK one that it
has locked, and OWN the name of a file to write.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import socket
import sys
from typing import IO

from pipeline.checkpointing.exactness import traits
from pipeline.runs import source_revision
from pipeline.utils.memory import free_memory


def main(folder: str, file: str, lock: str, own: str) -> None:
    """Prints the fields of `cluster.Probe`."""
    shared = pathlib.Path(folder)
    sees_file, is_locked_out = (shared / file).exists(), False
    try:
        (shared / own).touch()
        with (shared / lock).open("a") as held:
            is_locked_out = _is_locked_out(held)
    except OSError:
        sees_file = False
    probe = {
        "host": socket.gethostname(),
        "source_sha256": source_revision.source_sha256(),
        "traits": traits(),
        "niceness": os.nice(0),
        "free_memory": free_memory(),
        "sees_file": sees_file,
        "is_locked_out": is_locked_out,
    }
    print(json.dumps(probe))


def _is_locked_out(file: IO[str]) -> bool:
    """Returns True if a lock of another process is respected; a folder may not support locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
