"""Retries failed file writes, so that training continues for some time if writing fails."""

from __future__ import annotations

import time
from collections.abc import Callable

import gin

from pipeline.utils.constraints import NonNegative, check_arguments
from pipeline.utils.errors import WriteError

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds


@gin.configurable(denylist=["say", "check_stop"])
class Patience:
    """Retries failed writes. The wait doubles after each failure, up to 60 s.

    If nothing could be written for `give_up_after` seconds, the failure is raised. A retry writes
    the latest state, so the waits have no effect on the results of a run.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        check_stop: Callable[[], None],
        *,
        give_up_after: NonNegative = 600.0,
    ):
        """Initializes the retries.

        Args:
          say: Function that shows a message to the user.
          check_stop: Function that is called while `insist` waits. Whatever it raises ends the
            wait.
          give_up_after: Seconds from the first failure until giving up; 0 gives up at once.

        Raises:
          UserError: If `give_up_after` is negative.
        """
        check_arguments(Patience, locals())
        self._say = say
        self._check_stop = check_stop
        self._give_up_after = give_up_after
        self._failing_since: float | None = None
        self._next_try = 0.0
        self._wait = _FIRST_WAIT

    def attempt(self, write: Callable[[], object]) -> bool:
        """Calls `write`, unless a wait is in progress.

        Returns:
          True if `write` was called and succeeded.

        Raises:
          WriteError: If `write` fails and writes have failed for too long.
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
        """Calls `attempt` if the last attempt failed. Call it often.

        Raises:
          WriteError: If `write` fails and writes have failed for too long.
        """
        if self.is_failing:
            self.attempt(write)

    def insist(self, write: Callable[[], object]) -> None:
        """Calls `write` until it succeeds.

        Raises:
          WriteError: If `write` fails and writes have failed for too long.
        """
        self._next_try = 0.0
        while not self.attempt(write):
            while time.monotonic() < self._next_try:
                self._check_stop()
                time.sleep(0.1)

    @property
    def is_failing(self) -> bool:
        """Returns True if the last attempt failed, so that something remains to be written."""
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
            f"warning: {error}\nTraining continues. The next attempt is in {wait:.0f} s. The run "
            f"stops if no attempt succeeds within {left:.0f} s (Patience.give_up_after)."
        )

    def _succeed(self) -> None:
        if self._failing_since is not None:
            seconds = time.monotonic() - self._failing_since
            self._say(f"writing works again, after {seconds:.0f} s; no record is missing.")
            self._failing_since = None
