"""Shows the progress of a run or of many: a small live panel in a terminal, plain lines elsewhere.

This module does not import TensorFlow, so that progress can be shown before TensorFlow is loaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

TRAINING = "training"
WARMING_UP = "warming up the replay buffer"
EVALUATING = "evaluating"

_GAP = "  "
_MIN_BAR, _MAX_BAR = 10, 40  # characters
_REFRESHES_PER_SECOND = 2.0
_LONG = 1_000  # The steps of an evaluation's episode are shown from this number on.


class _Field(NamedTuple):
    rank: int  # When there is too little room, the field with the highest rank is dropped first.
    text: str


# Fields of the second line: rank, key of the record and format.
_BODY: tuple[tuple[int, str, Callable[[Any], str]], ...] = (
    (0, "counts", str),
    (0, "episode_steps", "an episode of {:,} steps so far".format),
    (0, "return_mean_100", lambda value: f"return {score_text(value)}"),
    (1, "evaluation_return_mean", lambda value: f"evaluation {score_text(value)}"),
    (2, "epsilon", "epsilon {:.3f}".format),
    (2, "entropy", "entropy {:.3f}".format),
)
_SHARES = {"environment_share": "env", "policy_share": "policy", "update_share": "update"}


class Progress:
    """Shows the records of a run when they arrive, as a context manager.

    It knows these keys of a record. All are optional, and each keeps its last value:
        env_steps, env_steps_per_second, return_mean_100: As in metrics.jsonl.
        epsilon, entropy: Values of the schedule or of the policy.
        counts: Text for many runs: how many of them are in which state.
        evaluation_return_mean: Mean return of the last evaluation.
        episode_steps: Steps so far of the longest episode that an evaluation is playing.
        environment_share, policy_share, update_share: Shares of wall time, in [0, 1]. They are not
            shown during the warm-up, which makes no updates.

    The time left is that of the remaining environment steps, at the speed since training began in
    this process, with evaluations and checkpoints. The final evaluation is not part of it.

    Args:
      num_env_steps: Environment steps at which the run ends.
      console: Console to write to; standard output by default. Its `is_terminal` decides between
        the panel and plain lines.
      plain_interval: Minimum number of seconds between plain lines. The first line of a phase is
        printed without this wait.
      clock: Function that returns a monotonic time in seconds.
    """

    def __init__(
        self,
        num_env_steps: int,
        *,
        console: Console | None = None,
        plain_interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Ask the file itself, because rich takes a pipe for a terminal if FORCE_COLOR is set.
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._has_panel = self._console.is_terminal and not self._console.is_dumb_terminal
        self._num_env_steps = num_env_steps
        self._plain_interval = plain_interval
        self._clock = clock
        self._state: dict[str, Any] = {}
        self._phase = TRAINING
        self._of_phase: tuple[int, int] | None = None
        self._phases_seen: set[str] = set()
        self._printed_at = 0.0
        # Time and environment steps of the first and the last update of training.
        self._began: tuple[float, int] | None = None
        self._reached = (0.0, 0)
        self._is_pending = False
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(
        self,
        record: Mapping[str, Any],
        phase: str = TRAINING,
        of_phase: tuple[int, int] | None = None,
    ) -> None:
        """Shows `record`.

        Args:
          record: Record with the keys that the class lists. Values of None count as missing.
          phase: Short description of what the run is doing.
          of_phase: Finished part and total of this phase, if the environment steps of the run do
            not tell them (rows in the replay buffer, episodes of an evaluation).
        """
        self._state.update({key: value for key, value in record.items() if value is not None})
        self._phase, self._of_phase = phase, of_phase
        if phase == TRAINING and "env_steps" in record:
            self._reached = self._clock(), record["env_steps"]
            self._began = self._began or self._reached
        if self._has_panel:
            self._start_panel()
        else:
            self._print_when_due()

    def message(self, text: str) -> None:
        """Prints `text` on lines of its own, above the panel."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leaves the last state on the screen and restores the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._is_pending:
            self._print_line()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the panel: at most two lines, within the current width of the console."""
        yield self._head_line(options.max_width)
        if body := self._body():
            fields = _GAP.join(_fitting(body, options.max_width))
            yield Text(fields, no_wrap=True, overflow="ellipsis")

    def _start_panel(self) -> None:
        if self._live is None:
            self._live = Live(self, console=self._console, refresh_per_second=_REFRESHES_PER_SECOND)
            self._live.start(refresh=True)

    def _print_when_due(self) -> None:
        self._is_pending = True
        is_new = self._phase not in self._phases_seen
        if is_new or self._clock() - self._printed_at >= self._plain_interval:
            self._print_line()

    def _print_line(self) -> None:
        self._is_pending = False
        self._phases_seen.add(self._phase)
        self._printed_at = self._clock()
        fields = _GAP.join(field.text for field in self._head() + self._body())
        self.message(f"{self._phase}: {fields}")

    def _head_line(self, width: int) -> Table:
        phase = self._phase + _GAP
        fields = _GAP.join(_fitting(self._head(), width - cell_len(phase + _GAP) - _MIN_BAR))
        bar_width = min(_MAX_BAR, width - cell_len(phase + _GAP + fields))
        line = Table.grid()
        cells: list[Text | ProgressBar] = [Text(phase, "bold", no_wrap=True, overflow="ellipsis")]
        if bar_width >= _MIN_BAR:
            done, total = self._done()
            bar = ProgressBar(max(total, 1), done, width=bar_width, complete_style="cyan")
            cells += [bar, Text(_GAP)]
        line.add_row(*cells, Text(fields, no_wrap=True))
        return line

    def _done(self) -> tuple[int, int]:
        return self._of_phase or (self._state.get("env_steps", 0), self._num_env_steps)

    def _head(self) -> list[_Field]:
        done, total = self._done()
        unit = "" if self._of_phase else " steps"
        fields = [
            _Field(0, f"{done:,}/{total:,}{unit}"),
            _Field(3, f"{min(100 * done // max(total, 1), 100)}%"),
        ]
        rate = self._state.get("env_steps_per_second", 0)
        if rate > 0 and not self._of_phase:
            fields.append(_Field(2, f"{rate:,.0f} steps/s"))
        if self._of_phase or self._phase != TRAINING or done >= total:
            return fields
        if self._began and self._began[1] < self._reached[1]:
            # Not by the rate, which leaves out evaluations and checkpoints.
            seconds, steps = (x - y for x, y in zip(self._reached, self._began, strict=True))
            fields.append(_Field(1, f"{duration(seconds * (total - done) / steps)} left"))
        return fields

    def _body(self) -> list[_Field]:
        known = dict(self._state)
        if self._phase != EVALUATING or known.get("episode_steps", 0) < _LONG:
            known.pop("episode_steps", None)
        fields = [_Field(rank, show(known[key])) for rank, key, show in _BODY if key in known]
        shares = [f"{name} {known[key]:.0%}" for key, name in _SHARES.items() if key in known]
        if shares and self._phase != WARMING_UP:
            fields.append(_Field(3, " ".join(shares)))
        return fields


def _fitting(fields: list[_Field], width: int) -> list[str]:
    """Returns the texts of the fields that fit into `width` characters, including gaps.

    The field with the highest rank is dropped first, and of equal ranks the one whose text sorts
    last. At least one field is kept, and the order stays the same.
    """
    fields = list(fields)
    while len(fields) > 1 and cell_len(_GAP.join(field.text for field in fields)) > width:
        fields.remove(max(fields))
    return [field.text for field in fields]


def score_text(value: float) -> str:
    """Formats a return or another score as `score_format` does, but 5 as 5.0."""
    is_round = abs(value) < 1000 and round(value, 1) == value
    return format(value, "z,.1f" if is_round else score_format(value))


def score_format(value: float) -> str:
    """Returns the format of a score, which depends on its size.

    Scores have no decimals from a thousand on, one from ten on, two from one on, and three below
    one, because many environments give returns in [0, 1]. A zero has no sign ("z").
    """
    return f"z,.{score_decimals(value)}f"


def score_decimals(value: float) -> int:
    """Returns the number of decimals of a score; see `score_format`."""
    size = abs(value)
    if size >= 1000:
        return 0
    if size >= 10:
        return 1
    return 2 if size >= 1 else 3


def duration(seconds: float) -> str:
    """Formats a number of seconds for people: 0:05, 12:34, 1:02:03 or 2d 3h."""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
