"""Implements collectors in processes of a Ray cluster; imported only if they are asked for."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import tensorflow as tf
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from pipeline import configuration
from pipeline.environments.saved_spaces import to_json
from pipeline.environments.training_environment import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.watchdog import Watched
from pipeline.runs.source_revision import own_modules
from pipeline.training.collector import (
    Identity,
    Message,
    Request,
    check_messages,
    join_stacks,
    machine_traits,
    source_digests,
    split_stacks,
)
from pipeline.training.collector_places import CollectorLost
from pipeline.training.components import closed_on_error
from pipeline.utils.errors import UserError, last_line
from pipeline.utils.execution import Execution
from pipeline.utils.ray_connection import connect, reason_of
from pipeline.utils.tensorflow_import import ONEDNN

_CLOSE_SECONDS = 10.0  # after which collectors are killed


def _actor_class() -> Any:
    """Returns the class of the actors.

    A class that is defined in a function is sent to the workers, which would otherwise import this
    module and TensorFlow before the actor has configured it. For the same reason, the arguments
    hold no object of this package.
    """

    class CollectorActor:
        def __init__(
            self,
            onednn: str | None,
            statements: Any,
            execution: str,
            identity: tuple[int, ...],
            num_steps: int,
        ):
            import os

            if onednn is not None:  # as in the learner
                os.environ["TF_ENABLE_ONEDNN_OPTS"] = onednn
            from pipeline import configuration
            from pipeline.utils.tensorflow_import import import_tensorflow

            import_tensorflow(configuration.uses_onednn(statements), freeze=True)
            from pipeline.ops.randomness import stream_key
            from pipeline.training.collector import Collector, Identity
            from pipeline.training.components import configure_tensorflow, seed_generators
            from pipeline.training.train_loop import bound
            from pipeline.utils.execution import Execution

            configuration.apply(statements)
            configure_tensorflow(execution=Execution(execution))
            factories = bound("create_environment"), bound("create_agent")
            number, restarts, _, seed = identity
            seed_generators(stream_key(seed, "collector process", number, restarts))
            self._collector = Collector(Identity(*identity), *factories, num_steps)

        def call(self, method: str, *arguments: Any) -> Any:
            return getattr(self._collector, method)(*arguments)

    return CollectorActor


class _Waits:
    """Records waits for collectors, so that a `Watchdog` can end a run that hangs in one of them.

    It implements `Watched`.
    """

    limits_itself = True

    def __init__(self) -> None:
        self.complaint = ""
        self.usual_seconds = 0.0
        self.calls = 0
        self.crossing = 0

    @contextlib.contextmanager
    def __call__(self, complaint: str, is_usual: bool = True) -> Iterator[None]:
        self.complaint = complaint
        self.calls += 1
        self.crossing = -1  # not a thread, so the watchdog reports no line
        started = time.monotonic()
        try:
            yield
            if is_usual:
                self.usual_seconds = max(self.usual_seconds, time.monotonic() - started)
        finally:
            self.crossing = 0


class OverRay:
    """Holds collectors as actors of a Ray cluster; see `collector_places.InProcess`."""

    environments: Sequence[VectorEnvironment] = ()

    def __init__(
        self,
        address: str,
        num_collectors: int,
        seed: int,
        like: Message,
        sample: TrainingEnvironment,
        in_flight: int,
        in_turns: bool,
        timeout: float,
    ):
        """Connects to the cluster and starts the collectors.

        Args:
          address: Address of the cluster, as `ray.init` takes it.
          num_collectors: Number of collectors.
          seed: Seed of the run.
          like: Message of the structure, shapes and dtypes of all messages.
          sample: Environment like theirs, which may be closed.
          in_flight: Messages that each collector is asked for in advance.
          in_turns: Whether messages are taken in turns, so that machines should be equal.
          timeout: Longest wait for an answer, in seconds.

        Raises:
          UserError: If there is no such cluster, or it cannot store the messages.
        """
        self._like = like
        self._spaces = [to_json(sample.observation_space), to_json(sample.action_space)]
        self._in_flight = in_flight
        self._num_collectors = num_collectors
        self._seed = seed
        self._timeout = timeout
        self._in_turns = in_turns
        self._restores: dict[int, Any] = {}
        self._calls: list[deque[Any]] = [deque() for _ in range(num_collectors)]
        self._since = [0.0] * num_collectors  # when the wait for the oldest message began
        self._seconds = [0.0] * num_collectors
        self._weights: tuple[int, Any] = -1, None
        self._last = 0
        self._waiting = _Waits()
        self.watched: Sequence[Watched] = (self._waiting,)
        self._machines: dict[int, Any] = {}  # of collectors that have not answered yet
        self._traits = machine_traits()
        self._digests = source_digests()
        self._actors: list[Any] = []
        connect(address)
        with closed_on_error(self):
            missing = self._missing_cpus(ray.cluster_resources)
            self._must_check_stores = bool(missing)  # when all nodes have joined
            if missing:
                self._note(f"{missing}. More nodes must join within {timeout:g} s")
            else:
                self._check_object_stores()
                if missing := self._missing_cpus(ray.available_resources, "free "):
                    self._note(f"{missing}. The others must become free within {timeout:g} s")
            self._actors.extend(self._start(number, 0) for number in range(num_collectors))

    def _start(self, number: int, restarts: int) -> Any:
        remote_class: Any = ray.remote(_actor_class())
        options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        identity = tuple(Identity(number, restarts, self._num_collectors, self._seed))
        num_steps = self._like.rows.step_type.shape[0]
        actor = remote_class.options(**options).remote(
            os.environ.get(ONEDNN),
            configuration.applied(),
            Execution.current().value,
            identity,
            num_steps,
        )
        self._machines[number] = actor.call.remote("machine")
        return actor

    def _note(self, text: str) -> None:
        print(f"note: {text} (distributed_runner.timeout).", file=sys.stderr)

    def _missing_cpus(self, read: Callable[[], dict[str, float]], kind: str = "") -> str:
        """Returns a sentence if the cluster has too few CPUs for all collectors, else ""."""
        resources = self._resources(read)
        cpus = resources.get("CPU", 0.0)
        if not resources or cpus >= self._num_collectors:
            return ""
        return f"the Ray cluster has {kind}CPUs for {cpus:g} of {self._num_collectors} collectors"

    def _check_object_stores(self) -> None:
        if resources := self._resources(ray.cluster_resources):
            check_messages(
                split_stacks(self._like),  # as it is sent
                self._num_collectors,
                self._in_flight,
                resources.get("object_store_memory", 0.0),
                "the object stores of the Ray cluster have",
                ", or give them more memory: ray start --object-store-memory=BYTES",
            )

    def _resources(self, read: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Returns the cluster's resources, or {} if it is lost, which other calls report."""
        try:
            with self._waiting("the Ray cluster has not answered"):
                return read()
        except RayError:
            return {}

    def _check_machine(self, number: int, since: float) -> None:
        """Compares the machine of a collector with this one, before its first answer is used.

        Args:
          number: Number of the collector.
          since: When the wait for its answer began.

        Raises:
          CollectorLost: If it is lost or does not answer in time.
          UserError: If it has another revision of this package, of the environment or of another
            module of the user's own, or if the object stores of nodes that had to join first are
            too small.
        """
        if number not in self._machines:
            return
        # A start takes longer than a message.
        answer = self._answer(number, self._machines[number], since, is_usual=False)
        host, others, spaces, digests = answer
        del self._machines[number]
        # Modules may be imported late. Files that are edited later are not what this process runs.
        here = self._digests = own_modules() | self._digests
        if edited := [x for x in here if digests.get(x, here[x]) != here[x]]:
            raise UserError(
                f"collector {number} is on {host}, which has another revision of "
                f"{', '.join(edited)}. Install the same revision there."
            )
        if spaces != self._spaces:
            raise UserError(
                f"collector {number} is on {host}, where the environment has other spaces. Install "
                "the same version of the environment there."
            )
        if self._must_check_stores and not self._machines:
            self._must_check_stores = False
            self._check_object_stores()
        differences = sorted({name for name, _ in self._traits.items() ^ others.items()})
        if differences and self._in_turns:
            print(
                f"note: collector {number} is on {host}, which differs from this machine "
                f"({', '.join(differences)}). Results may depend on where the collectors are.",
                file=sys.stderr,
            )

    @property
    def seconds(self) -> float:
        """Returns the mean over the collectors of the seconds that their environments took."""
        return sum(self._seconds) / len(self._seconds)

    def submit(self, number: int, request: Request) -> None:
        """Asks a collector for a message. Weights are stored once for all collectors.

        Raises:
          UserError: If the weights cannot be stored.
        """
        weights = None
        if request.weights is not None:
            if self._weights[0] != request.version:
                self._weights = request.version, _put(list(request.weights))
            weights = self._weights[1]
        call = self._actors[number].call.remote("collect_leaves", weights, *request[1:])
        if not self._calls[number]:
            self._since[number] = time.monotonic()
        self._calls[number].append(call)

    def take(self, number: int) -> Message:
        """Waits for the oldest message that a collector was asked for.

        Raises:
          CollectorLost: If the collector is lost or does not answer in time.
          UserError: If the collector fails.
        """
        since = self._since[number] = time.monotonic()
        self._check_machine(number, since)
        call = self._calls[number].popleft()
        leaves, is_split, seconds = self._answer(number, call, since)
        self._since[number] = time.monotonic()
        self._seconds[number] += seconds
        like = self._like
        if is_split:
            rows = like.rows
            like = like._replace(rows=rows._replace(observation=(rows.observation,) * 2))
        message = tf.nest.pack_sequence_as(like, leaves)
        return join_stacks(message) if is_split else message

    def first(self) -> int:
        """Waits for a message of any collector; returns the number of the collector to take.

        Raises:
          CollectorLost: If a collector does not answer in time.
        """
        last = self._last + 1
        numbers = [*range(last, len(self._calls)), *range(last)]  # no collector is always first
        oldest = {number: self._calls[number][0] for number in numbers if self._calls[number]}
        calls = [*oldest.values()]
        while True:
            slowest = min(oldest, key=self._since.__getitem__)
            wait = self._since[slowest] + self._timeout - time.monotonic()
            # A start takes longer than a message.
            with self._waiting("no collector has answered", is_usual=not self._machines):
                if not ray.wait(calls, timeout=max(wait, 0.0), fetch_local=False)[0]:
                    raise self._no_answer(slowest)
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
            late = time.monotonic() - self._timeout
            for number, call in oldest.items():
                if call not in ready and self._since[number] < late:
                    raise self._no_answer(number)
            if ready:
                self._last = next(number for number, call in oldest.items() if call in ready)
                return self._last

    def replace(self, number: int, restarts: int) -> None:
        """Starts a new collector, and kills the old one; see `InProcess.replace`."""
        ray.kill(self._actors[number])
        self._calls[number].clear()
        self._actors[number] = self._start(number, restarts)

    def save(self, number: int) -> dict[str, bytes]:
        """Returns the files of a collector."""
        since = time.monotonic()
        self._check_machine(number, since)
        return self._answer(number, self._actors[number].call.remote("save"), since)

    def begin_restore(self, number: int, saved: dict[str, bytes]) -> None:
        """Gives a collector its files, so that all collectors are restored at the same time."""
        self._restores[number] = self._actors[number].call.remote("restore", saved)

    def restored(self, number: int) -> str:
        """Waits for a collector to be restored; see `InProcess.restored`."""
        since = time.monotonic()
        self._check_machine(number, since)
        call = self._restores.pop(number)
        return self._answer(number, call, since, is_usual=False)  # it repeats steps

    def _no_answer(self, number: int) -> CollectorLost:
        """Returns the error for a collector that has not answered in time."""
        limit = f"it has not answered for {self._timeout:g} s (distributed_runner.timeout)"
        advice = "raise the limit if it needs longer"
        if self._in_turns:
            advice += (
                ". If its environment hangs, the same command without --ray_address names the place"
            )
        if number in self._machines:  # it has not started
            taken = "raise the limit, or end other programs that use the CPUs of the cluster"
            advice = self._missing_cpus(ray.cluster_resources) or taken
        return CollectorLost(number, f"{limit}; {advice}")

    def _answer(self, number: int, call: Any, since: float, is_usual: bool = True) -> Any:
        try:
            with self._waiting(f"collector {number} has not answered", is_usual):
                return ray.get(call, timeout=max(since + self._timeout - time.monotonic(), 0.0))
        except GetTimeoutError as error:
            raise self._no_answer(number) from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ValueError | UserError):
                raise type(cause)(*cause.args) from error
            if isinstance(cause, OSError):  # A full disk is retried, as on this machine.
                where = f"on the machine of collector {number}"
                raise OSError(cause.errno, f"{cause.strerror} ({where})") from error
            raise UserError(f"collector {number} failed: {last_line(error)}") from error
        except RayError as error:
            if getattr(error, "actor_init_failed", False):  # it would fail again
                raise UserError(f"collector {number} cannot start: {last_line(error)}") from error
            raise CollectorLost(number, reason_of(error)) from error

    def failure_message(self) -> str:
        """Returns "", because the error of a message names the environment's failure."""
        return ""

    def close(self) -> None:
        """Closes the environments, ends the collectors, and ends the connection."""
        started = (x for number, x in enumerate(self._actors) if number not in self._machines)
        try:
            if calls := [actor.call.remote("close") for actor in started]:
                ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_SECONDS)
        except RayError:
            pass  # A lost cluster has no environments.
        finally:
            ray.shutdown()


def _put(value: Any) -> Any:
    """Stores a value once for all receivers.

    Raises:
      UserError: If the object store is full.
    """
    try:
        return ray.put(value)
    except RayError as error:
        raise UserError(
            f"Ray cannot store the weights ({last_line(error)}). Give the object store more memory "
            "or disk: ray start --object-store-memory=BYTES."
        ) from error
