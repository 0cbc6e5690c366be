"""What the terminal shows of a benchmark: one live line, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.benchmarks.records import FAILED, FINISHED
from pipeline.progress import duration

RUNNING, LEFT = "running", "left"
STATES = (FINISHED, RUNNING, FAILED, LEFT)


class RunStatus(NamedTuple):
    """How one run stands.

    Attributes:
        state: one of `STATES`.
        experiment: its name; runs of one experiment are about equally fast.
        num_env_steps: the budget, in environment steps.
        env_steps: taken so far.
        seconds: that these took; 0 if unknown.
    """

    state: str
    experiment: str
    num_env_steps: int
    env_steps: int = 0
    seconds: float = 0.0

    @property
    def steps_done(self) -> int:
        """Environment steps of the budget that were taken."""
        is_whole = self.state == FINISHED
        return self.num_env_steps if is_whole else min(self.env_steps, self.num_env_steps)

    @property
    def steps_left(self) -> int:
        """Environment steps that are still to be taken; a failed run takes no more."""
        is_over = self.state in (FINISHED, FAILED)
        return 0 if is_over else max(self.num_env_steps - self.env_steps, 0)


def seconds_left(runs: Sequence[RunStatus], workers: int) -> float | None:
    """Until all runs are over, as far as speeds are known; None if none is.

    A run takes the steps that it has left at the speed of its experiment so far, or at that of all
    runs together where its experiment has not been measured. Runs share `workers` evenly, but none
    can be split.
    """
    overall = _seconds_per_step(runs)
    if overall is None:
        return None
    paces = {}
    for name in {run.experiment for run in runs}:
        measured = _seconds_per_step([run for run in runs if run.experiment == name])
        paces[name] = overall if measured is None else measured
    times = [run.steps_left * paces[run.experiment] for run in runs]
    return max(sum(times) / workers, max(times))


def _seconds_per_step(runs: Sequence[RunStatus]) -> float | None:
    measured = [run for run in runs if run.env_steps and run.seconds]
    if not measured:
        return None
    return sum(run.seconds for run in measured) / sum(run.env_steps for run in measured)


def line(runs: Sequence[RunStatus], workers: int) -> str:
    """Counts of runs, the share of the environment steps that is done, and the time left."""
    counts = Counter(run.state for run in runs)
    fields = [f"{counts[state]} {state}" for state in STATES]
    done = sum(run.steps_done for run in runs)
    total = sum(run.num_env_steps for run in runs)
    fields.append(f"{100 * done // max(total, 1)}% of {total:,} steps")
    seconds = seconds_left(runs, workers)
    if seconds:
        fields.append(f"{duration(seconds)} to go")
    return "  ".join(fields)


class Status:
    """A context manager that shows how the runs of a benchmark stand.

    Args:
        title: in front of the line.
        workers: runs at once.
        console: where to write; standard output by default. Its `is_terminal` decides between the
            live line and plain ones.
        plain_interval: seconds between plain lines.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        title: str,
        workers: int,
        *,
        console: Console | None = None,
        plain_interval: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Asked of the file itself: rich calls a pipe a terminal under FORCE_COLOR.
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._title = title
        self._workers = workers
        self._plain_interval = plain_interval
        self._clock = clock
        self._printed_at = clock()
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Status:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, runs: Sequence[RunStatus], *, at_once: bool = False) -> None:
        """Shows how the runs stand now.

        Args:
            runs: all of them.
            at_once: prints a plain line before its time, too.
        """
        text = f"{self._title}: {line(runs, self._workers)}"
        if self._live:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif at_once or self._clock() - self._printed_at >= self._plain_interval:
            self._printed_at = self._clock()
            self.message(text)

    def message(self, text: str) -> None:
        """Prints `text` on lines of its own, above the live line."""
        self._console.print(Text(text), soft_wrap=True)
