"""Holds the collectors of a learner in its own process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.watchdog import Watched
from pipeline.training.collector import Collector, Message, Request
from pipeline.training.components import closed_on_error


class CollectorLost(Exception):
    """Raised for a collector that has died or does not answer.

    Attributes:
      number: Number of the collector.
    """

    def __init__(self, number: int, reason: str):
        super().__init__(f"collector {number} was lost: {reason}")
        self.number = number


class InProcess:
    """Holds collectors in this process, numbered from 0. A message is collected when it is taken.

    `ray_collectors.OverRay` has the same methods, of which `take`, `first`, `save` and `restored`
    raise `CollectorLost`.
    """

    def __init__(self, num_collectors: int, create: Callable[[int, int], Collector]):
        """Creates the collectors.

        Args:
          num_collectors: Number of collectors.
          create: Creates a collector, given its number and how often it has been replaced.
        """
        self._create = create
        self._collectors: list[Collector] = []
        with closed_on_error(self):
            self._collectors.extend(create(number, 0) for number in range(num_collectors))
        self._requests: list[deque[Request]] = [deque() for _ in range(num_collectors)]
        self._submitted: deque[int] = deque()
        self._saved: dict[int, dict[str, bytes]] = {}  # of collectors that are being restored

    @property
    def environments(self) -> Sequence[VectorEnvironment]:
        """Returns the environments that are in this process."""
        return [collector.environment for collector in self._collectors]

    @property
    def watched(self) -> Sequence[Watched]:
        """Returns the objects that may hang: the environments, or the waits for collectors."""
        return [collector.environment.episodes for collector in self._collectors]

    @property
    def seconds(self) -> float:
        """Returns the seconds spent in environments: the mean if collectors run in parallel."""
        return sum(collector.environment.seconds for collector in self._collectors)

    def submit(self, number: int, request: Request) -> None:
        """Asks a collector for a message; it does not wait."""
        self._requests[number].append(request)
        self._submitted.append(number)

    def take(self, number: int) -> Message:
        """Waits for the oldest message that a collector was asked for, and returns it."""
        self._submitted.remove(number)
        return self._collectors[number].collect(self._requests[number].popleft())

    def first(self) -> int:
        """Waits for a message of any collector; returns the number of the collector to take."""
        return self._submitted[0]

    def replace(self, number: int, restarts: int) -> None:
        """Puts a new collector in the place of one that was lost.

        Args:
          number: Number of the collector.
          restarts: How often this collector has been replaced, with this time.
        """
        self._collectors[number].close()
        self._collectors[number] = self._create(number, restarts)
        self._requests[number].clear()
        self._submitted = deque(other for other in self._submitted if other != number)

    def save(self, number: int) -> dict[str, bytes]:
        """Returns the files of a collector that has no message under way."""
        return self._collectors[number].save()

    def begin_restore(self, number: int, saved: dict[str, bytes]) -> None:
        """Gives a collector the files that `save` returned; it does not wait."""
        self._saved[number] = saved

    def restored(self, number: int) -> str:
        """Waits for a collector to be restored.

        Returns:
          Why its episodes cannot be continued, or "" if they can.
        """
        return self._collectors[number].restore(self._saved.pop(number))

    def failure_message(self) -> str:
        """Returns what environments raised, one line for each, or "" if none raised."""
        messages = [collector.environment.failure_message() for collector in self._collectors]
        return "\n".join(filter(None, messages))

    def close(self) -> None:
        """Closes the environments."""
        for collector in self._collectors:
            collector.close()
