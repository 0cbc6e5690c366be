"""Values that change during training, as pure functions of a counter.

A schedule keeps no state of its own, so a resumed run goes on with exactly the value it stopped at.
Which counter it is called with (environment steps, updates) is said where a schedule is bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import gin
import tensorflow as tf

from pipeline.errors import UserError

Schedule = Callable[[tf.Tensor], tf.Tensor]
"""Maps an int64 counter [] to a float32 value [], in the graph or eagerly."""


@gin.configurable
def linear_schedule(
    initial: float = gin.REQUIRED,
    final: float = gin.REQUIRED,
    num_steps: int = gin.REQUIRED,
    start: int = 0,
) -> Schedule:
    """`initial` up to count `start`, then a straight line that reaches `final` num_steps later.

    Raises:
        UserError: num_steps is not positive.
    """
    if num_steps <= 0:
        raise UserError(f"linear_schedule.num_steps must be positive, not {num_steps}.")

    def value(counter: tf.Tensor) -> tf.Tensor:
        # float32 cannot tell neighbouring counts apart beyond 2**24.
        fraction = tf.cast(counter - start, tf.float64) / num_steps
        fraction = tf.clip_by_value(fraction, 0.0, 1.0)
        return tf.cast((1.0 - fraction) * initial + fraction * final, tf.float32)

    return value


@gin.configurable
def constant_schedule(value: float = gin.REQUIRED) -> Schedule:
    """The same value at every count."""
    return lambda counter: tf.constant(value, tf.float32)


def as_schedule(value: Schedule | float) -> Schedule:
    """A number as a constant schedule; a schedule as it is.

    Raises:
        UserError: what is given makes schedules instead of being one.
    """
    if not callable(value):
        return constant_schedule(value)
    try:
        first = value(tf.constant(0, tf.int64))
    except (TypeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _makes_schedules(value):
            raise  # it is gin's, of a schedule with a parameter that is not bound
        reason = str(error).partition("\n")[0]
        raise UserError(_not_a_schedule(value, reason)) from error
    if callable(first):
        raise UserError(_not_a_schedule(value, "called with a counter, it gives no number"))
    return value


def _makes_schedules(value: Callable) -> bool:
    makers = (linear_schedule, constant_schedule)
    return getattr(value, "__name__", "") in [maker.__name__ for maker in makers]


def _not_a_schedule(value: Callable, reason: str) -> str:
    name = getattr(value, "__name__", repr(value))
    return (
        f"@{name} is no schedule ({reason}). If it makes schedules, write it with parentheses: "
        f"@{name}(), or in a scope of yours @epsilon/{name}()."
    )


@gin.configurable
def whole_run() -> int:
    """`train.num_env_steps`, for schedules that span the run."""
    # gin resolves a macro when its reference is copied.
    return copy.deepcopy(gin.query_parameter("train.num_env_steps"))
