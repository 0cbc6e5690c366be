"""Stops a run on Ctrl-C, SIGTERM and SIGHUP, even while the main thread is inside a graph call.

SIGHUP says that the terminal was closed. It is ignored if the program was started with nohup.

Exit codes of the binaries: a run that stops cleanly after the first signal returns
`128 + stop.signal` (130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP), as a shell reports a process
that the signal ended. A process that a second signal ends at once returns 128 plus the number of
that signal. A run that reaches its end returns 0, even if a signal arrived when there was nothing
left to stop.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# `timeout` sends its signal to the process and then to its group, and a terminal's Ctrl-C reaches
# forked children too. Within this many seconds of the first signal, another is only an echo of it.
ECHO_SECONDS = 0.3
MESSAGE = "stopping: writing a checkpoint (Ctrl-C again to exit at once)"

_active: StopSignal | None = None


class Stopped(Exception):
    """Raised after a signal has asked the run to stop and its checkpoint has been written."""


class StopSignal:
    """Makes the first SIGINT, SIGTERM or SIGHUP inside of its context only set a flag.

    A second signal ends the process at once, without any cleanup, unless it is SIGHUP, which the
    shell and the kernel both send when a terminal is closed. Python runs its signal handlers
    only when the main thread returns to bytecode, which may take seconds. Therefore the number of a
    signal is also written to a socket (`signal.set_wakeup_fd`), and a thread reads it there. The
    thread needs the GIL, which TensorFlow and NumPy release during long calls.

    On exit, the previous handlers and file descriptor are restored. Only the main thread may set
    handlers: in another thread, the object installs nothing and `requested` stays False. A forked
    child process ignores Ctrl-C and SIGHUP, which the terminal also sends to it, but SIGTERM ends
    it.

    Attributes:
      requested: True if a signal has arrived. Poll it between graph calls, because no
        KeyboardInterrupt is raised.
      signal: Number of the first signal, or None.
      ends_at_once: True to let the first signal end the process, as long as nothing would be lost.
    """

    def __init__(self, message: str = MESSAGE, ends_at_once: bool = False) -> None:
        """Initializes the context manager.

        Args:
          message: Text that is written to standard error when the first signal arrives.
          ends_at_once: Initial value of the attribute.
        """
        self.requested = False
        self.ends_at_once = ends_at_once
        self.signal: int | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        # A separate thread prints, because blocked output must not delay the second signal.
        self._announcer = threading.Thread(target=_announce, args=[message], daemon=True)

    def __enter__(self) -> StopSignal:
        global _active
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = self.set_wakeup()
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as nohup asks for
            # Python writes to the wakeup descriptor only if a handler exists.
            self._previous[number] = signal.signal(number, lambda *_: None)
            # Restart system calls, because C libraries may not expect them to be interrupted.
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
        # close() alone would not end the thread, because forked children hold copies of the writer.
        self._writer.shutdown(socket.SHUT_WR)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        if self.requested:
            self._announcer.join(timeout=1)

    def set_wakeup(self) -> int:
        """Makes Python write signals' numbers to the socket; returns the descriptor before."""
        return signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def _watch(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                # Other signals that Python handles arrive here too.
                if number in SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        if self.ends_at_once:
            exit_at_once(128 + number)
        elif not self.requested:
            self._since = time.monotonic()
            self.signal = number
            self.requested = True
            self._announcer.start()
        elif number != signal.SIGHUP and time.monotonic() - self._since > ECHO_SECONDS:
            exit_at_once(128 + number)


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """Puts back the handlers of `SIGNALS` and the wakeup descriptor that code within replaces.

    Such code, for example a simulator's constructor, would otherwise decide what happens at a
    signal, and no checkpoint would be written.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # C code may have replaced it, which getsignal does not tell.
                signal.signal(number, handler)
                if _active is not None:
                    signal.siginterrupt(number, False)
        if _active is not None:  # An event loop may have taken the descriptor.
            _active.set_wakeup()


def _announce(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def exit_at_once(code: int) -> None:
    """Ends the process without any cleanup, but leaves the terminal usable."""
    stdout = sys.__stdout__
    # A terminal that takes no output, such as that of a frozen connection, must not delay the end.
    if stdout is not None and stdout.isatty() and select.select([], [stdout], [], 0)[1]:
        with contextlib.suppress(OSError):
            os.write(stdout.fileno(), b"\x1b[?25h\n")  # A live display has hidden the cursor.
    os._exit(code)


def _leave_to_parent() -> None:
    """Resets signal handling in a forked child.

    The child shares the socket, so whatever it wrote there would stop the parent.
    """
    global _active
    if _active is not None:
        _active = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_parent)
