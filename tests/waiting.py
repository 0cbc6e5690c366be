"""Waits for what other threads and processes do."""

import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_for(
    is_reached: Callable[[], Any], seconds: float = 60.0, process: subprocess.Popen | None = None
) -> None:
    """Waits until `is_reached()`, while the process runs if there is one."""
    deadline = time.monotonic() + seconds
    while not is_reached():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
