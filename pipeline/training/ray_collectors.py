"""Collectors in processes of a Ray cluster; imported only if they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
import tensorflow as tf
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from pipeline import configuration
from pipeline.acting.collect_driver import CollectDriver
from pipeline.training.collector import Message, Order
from pipeline.utils.errors import UserError
from pipeline.utils.ray_connection import connect, last_line

_LONGEST_SECONDS = 300.0  # for a message, as for a step in this process (Watchdog.timeout)


def _actor_class() -> Any:
    """Returns the class of the actors.

    A class that is defined in a function is sent to the workers, which would otherwise import this
    module and TensorFlow before the actor has configured it.
    """

    class CollectorActor:
        def __init__(self, statements: Any, number: int, seed: int, num_steps: int):
            from pipeline import configuration
            from pipeline.utils.tensorflow_import import import_tensorflow

            import_tensorflow(configuration.uses_onednn(statements))
            from pipeline.training.collector import Collector
            from pipeline.training.components import configure_tensorflow
            from pipeline.training.train_loop import bound

            configuration.apply(statements)
            configure_tensorflow()
            factories = bound("create_environment"), bound("create_agent")
            self._collector = Collector(number, seed, *factories, num_steps)

        def collect(self, weights: Any, *order: Any) -> tuple[list[Any], float]:
            import tensorflow as tf

            from pipeline.training.collector import Order

            message = self._collector.collect(Order(weights, *order))
            return tf.nest.flatten(message), self._collector.environment.seconds

        def save(self) -> dict[str, bytes]:
            from pipeline.training.collector import packed

            return packed(self._collector.save)

        def restore(self, saved: dict[str, bytes]) -> str:
            return self._collector.restore_files(saved)

    return CollectorActor


class OverRay:
    """`Place` in actors of a Ray cluster, one for each collector."""

    drivers: Sequence[CollectDriver] = ()

    def __init__(
        self,
        address: str,
        num_collectors: int,
        seed: int,
        like: Message,
    ):
        """Connects to the cluster and starts the collectors.

        Args:
          address: Address of the cluster, as `ray.init` takes it.
          num_collectors: Number of collectors.
          seed: Seed of the run.
          like: Message of the structure, shapes and dtypes of all messages.

        Raises:
          UserError: If there is no such cluster, or a collector cannot be started.
        """
        self._like = like
        self._calls: list[deque[Any]] = [deque() for _ in range(num_collectors)]
        self._seconds = [0.0] * num_collectors
        self._weights: tuple[int, Any] = -1, None
        connect(address)
        remote_class: Any = ray.remote(_actor_class())
        options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        statements = configuration.applied()
        self._actors = [
            remote_class.options(**options).remote(
                statements, number, seed, like.rows.step_type.shape[0]
            )
            for number in range(num_collectors)
        ]

    @property
    def seconds(self) -> float:
        """Returns the mean over the collectors of the seconds that their environments took."""
        return sum(self._seconds) / len(self._seconds)

    def submit(self, number: int, order: Order) -> None:
        """Asks a collector for a message. Weights are sent once, whatever their receivers."""
        weights = None
        if order.weights is not None:
            if self._weights[0] != order.version:
                self._weights = order.version, ray.put(list(order.weights))
            weights = self._weights[1]
        call = self._actors[number].collect.remote(weights, *order[1:])
        self._calls[number].append(call)

    def take(self, number: int) -> Message:
        """Waits for the oldest message that a collector was asked for.

        Raises:
          UserError: If the collector fails, is lost, or does not answer in time.
        """
        leaves, self._seconds[number] = self._answer(number, self._calls[number].popleft())
        message = tf.nest.pack_sequence_as(self._like, leaves)
        return message._replace(version=int(message.version))

    def save(self, number: int) -> dict[str, bytes]:
        """Returns the files of a collector."""
        return self._answer(number, self._actors[number].save.remote())

    def restore(self, number: int, saved: dict[str, bytes]) -> str:
        """Restores a collector; see `Place.restore`."""
        return self._answer(number, self._actors[number].restore.remote(saved))

    def _answer(self, number: int, call: Any) -> Any:
        try:
            return ray.get(call, timeout=_LONGEST_SECONDS)
        except GetTimeoutError as error:
            raise UserError(
                f"collector {number} has not answered for {_LONGEST_SECONDS:g} s."
            ) from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ValueError | UserError):
                raise type(cause)(*cause.args) from error
            raise UserError(f"collector {number} failed: {last_line(error)}") from error
        except RayActorError as error:
            raise UserError(f"collector {number} was lost: {last_line(error)}") from error
        except RayError as error:
            raise UserError(f"collector {number}: {last_line(error)}") from error

    def failure_message(self) -> str:
        """Returns "", because the error of a message names the environment's failure."""
        return ""

    def close(self) -> None:
        """Ends the collectors and the connection."""
        ray.shutdown()
