"""Shows the progress of many runs: a live line on a terminal, otherwise a line every minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich import progress
from rich.console import Console
from rich.text import Text

_SHOW_SECONDS = 1.0
_PLAIN_SECONDS = 60.0  # between lines without a terminal
_SPEED_SECONDS = 1800.0  # over which the speed is averaged, because slow runs log every minute


class Display:
    """Shows progress in environment steps, as a context manager."""

    def __init__(self, title: str) -> None:
        """Initializes the display.

        Args:
          title: Beginning of the line.
        """
        # Check the file itself, because rich takes a pipe for a terminal if FORCE_COLOR is set.
        self._console = Console(force_terminal=sys.stdout.isatty())
        self._has_bar = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[counts]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._has_bar,
            speed_estimate_period=_SPEED_SECONDS,
        )
        self._title = title
        self._task = self._progress.add_task(title, counts="")
        self._shown_at = 0.0
        self._printed_at = time.monotonic()

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """Prints `text` on lines of its own, above the live line."""
        self._console.print(Text(text), soft_wrap=True)

    def show(self, state: Callable[[], tuple[int, int, str]]) -> None:
        """Shows the progress, at most once a second.

        Args:
          state: Returns the environment steps done and planned, and a text to show with them.
        """
        now = time.monotonic()
        if now - self._shown_at < _SHOW_SECONDS:
            return
        self._shown_at = now
        done, total, text = state()
        self._progress.update(self._task, completed=done, total=total, counts=text)
        if not self._has_bar and now - self._printed_at >= _PLAIN_SECONDS:
            self._printed_at = now
            self.message(f"{self._title}: {text}, {100 * done // total}% of {total:,} steps")
