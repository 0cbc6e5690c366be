"""What happens when files cannot be written: training goes on, for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

import gin

from pipeline.errors import WriteError, check_number

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds


@gin.configurable(denylist=["say", "look_around"])
class Patience:
    """Tries to write, and after a failure again, each time after a wait twice as long.

    When nothing could be written for `give_up_after` seconds, the failure is raised. What is tried
    again is the latest state, so nothing but time depends on the waits.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        look_around: Callable[[], None],
        *,
        give_up_after: float = 600.0,
    ):
        """Args:
        say: tells the user.
        look_around: called while `insist` waits; whatever it raises ends the wait.
        give_up_after: seconds from the first failure; 0: at once.

        Raises:
          UserError: `give_up_after` is negative.
        """
        if give_up_after:
            check_number("Patience.give_up_after", give_up_after, 0)
        self._say = say
        self._look_around = look_around
        self._give_up_after = give_up_after
        self._failing_since: float | None = None
        self._next_try = 0.0
        self._wait = _FIRST_WAIT

    def attempt(self, write: Callable[[], object]) -> bool:
        """Calls `write`, unless a wait is under way; whether it has written.

        Raises:
          WriteError: it fails, and has failed for too long.
        """
        if self.is_failing and time.monotonic() < self._next_try:
            return False
        try:
            write()
        except WriteError as error:
            self._fail(error)
            return False
        self._succeed()
        return True

    def retry(self, write: Callable[[], object]) -> None:
        """`attempt`, if the last one failed; to be called often.

        Raises:
          WriteError: it has failed for too long.
        """
        if self.is_failing:
            self.attempt(write)

    def insist(self, write: Callable[[], object]) -> None:
        """Calls `write` until it succeeds.

        Raises:
          WriteError: it has failed for too long.
        """
        self._next_try = 0.0
        while not self.attempt(write):
            while time.monotonic() < self._next_try:
                self._look_around()
                time.sleep(0.1)

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed, so that something is still to be written."""
        return self._failing_since is not None

    def _fail(self, error: WriteError) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since, self._wait = now, _FIRST_WAIT
        left = self._failing_since + self._give_up_after - now
        if left <= 0:
            raise error
        wait = min(self._wait, left)
        self._next_try = now + wait
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._say(
            f"warning: {error}\nThe run goes on. The next try is in {wait:.0f} s; the run stops if"
            f" none succeeds within {left:.0f} s (Patience.give_up_after)."
        )

    def _succeed(self) -> None:
        if self._failing_since is not None:
            seconds = time.monotonic() - self._failing_since
            self._say(f"writing works again, after {seconds:.0f} s; no record is missing.")
            self._failing_since = None
