"""Stopping on Ctrl-C and SIGTERM, also while the main thread is inside a graph call.

Exit codes, for the binaries: a run that stopped cleanly after the first signal returns
`128 + stop.signal` (130 for Ctrl-C, 143 for SIGTERM), as a shell reports a process that the signal
ended; so does the process that a second signal ends at once. A run that came to its end returns 0
even if a signal arrived in its last moments and there was nothing left to stop.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import types
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` sends its signal to the process and then to its group, and a terminal's Ctrl-C reaches
# forked children too: within this many seconds of the first, a signal is an echo, not a second one.
ECHO_SECONDS = 0.3
MESSAGE = "stopping: writing a checkpoint (Ctrl-C again to exit at once)"

_active: StopSignal | None = None


class Stopped(Exception):
    """A signal has asked the run to stop, and its checkpoint has been written."""


class StopSignal:
    """A context manager in which the first SIGINT or SIGTERM only sets a flag.

    A second signal ends the process at once, without any cleaning up. Python's own handlers run
    only when the main thread returns to bytecode, which may be seconds away; the number of a signal
    is therefore also written to a socket (`signal.set_wakeup_fd`), and a thread reads it there.
    It needs the GIL, which TensorFlow's and NumPy's long calls release.

    On exit the previous handlers and file descriptor are back. Only the main thread may set
    handlers: used in another, the object installs nothing and never becomes requested. A forked
    child ignores Ctrl-C, which the terminal sends to it as well, and dies of SIGTERM.

    Attributes:
        requested: whether a signal arrived. Poll it between graph calls; no KeyboardInterrupt is
            raised.
        signal: the number of the first signal, or None.
    """

    def __init__(self, message: str = MESSAGE) -> None:
        """`message` goes to standard error when the first signal arrives."""
        self.requested = False
        self.signal: int | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        # A thread of its own: output that blocks must not keep the second signal waiting.
        self._announcer = threading.Thread(target=_announce, args=[message], daemon=True)

    def __enter__(self) -> StopSignal:
        global _active
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, _wake_up)
            # System calls inside C libraries, which may not expect to be interrupted, go on.
            signal.siginterrupt(number, False)
        self._thread = threading.Thread(target=self._watch, name="stop-signal", daemon=True)
        self._thread.start()
        _active = self
        return self

    def __exit__(self, *exception: object) -> None:
        global _active
        if not self._previous:
            return
        _active = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        if self.requested:
            self._announcer.join(timeout=1)

    def _watch(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                # Other signals that Python handles arrive here too.
                if number in SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        if not self.requested:
            self._since = time.monotonic()
            self.signal = number
            self.requested = True
            self._announcer.start()
        elif time.monotonic() - self._since > ECHO_SECONDS:
            exit_at_once(128 + number)


def _wake_up(number: int, frame: types.FrameType | None) -> None:
    """Does nothing: that a handler exists is what makes Python write to the wakeup descriptor."""


def _announce(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def exit_at_once(code: int) -> None:
    """Ends the process without any cleaning up, but leaves the terminal usable."""
    stdout = sys.__stdout__
    if stdout is not None and stdout.isatty():
        os.write(stdout.fileno(), b"\x1b[?25h\n")  # a live display has hidden the cursor
    os._exit(code)


def _leave_to_parent() -> None:
    """In a forked child: the socket is shared, and whatever it wrote would stop the parent."""
    if _active is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_parent)
