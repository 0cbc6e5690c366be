"""Defines values that change during training, as pure functions of a counter.

A schedule has no state of its own, so a resumed run continues with exactly the value at which it
stopped. The parameter that takes a schedule documents its counter (environment steps, updates).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

from pipeline.utils.constraints import ENDS, Positive, check_arguments
from pipeline.utils.errors import UserError

Schedule = Callable[[tf.Tensor], tf.Tensor]
"""Maps an int64 counter [] to a float32 value [], in a graph or eagerly."""


_COUNTER = tf.TensorSpec([], tf.int64)


@gin.configurable
def linear_schedule(
    initial: float = gin.REQUIRED,
    final: float = gin.REQUIRED,
    num_steps: Positive = gin.REQUIRED,
    start: int = 0,
) -> Schedule:
    """Returns a schedule that moves linearly from `initial` to `final` and then stays there.

    Args:
      initial: Value up to the count `start`.
      final: Value from the count `start + num_steps` on.
      num_steps: Number of counts from `start` until the value reaches `final`.
      start: Count at which the change begins.

    Raises:
      UserError: If a value is out of its range.
    """
    check_arguments(linear_schedule, locals())

    def value(counter: tf.Tensor) -> tf.Tensor:
        # In float32, neighbouring counts above 2**24 cannot be told apart.
        fraction = tf.cast(counter - start, tf.float64) / num_steps
        fraction = tf.clip_by_value(fraction, 0.0, 1.0)
        return tf.cast((1.0 - fraction) * initial + fraction * final, tf.float32)

    setattr(value, ENDS, (initial, final))  # which the parameter that takes the schedule checks
    return value


def as_schedule(value: Schedule | float) -> Schedule:
    """Converts a number to a schedule of this value, and returns a schedule of float32 unchanged.

    Raises:
      UserError: If `value` is a function that creates schedules instead of a schedule, or one that
        cannot be part of a graph.
    """
    if not callable(value):
        return lambda counter: tf.constant(value, tf.float32)
    if hasattr(value, ENDS):
        return value  # a `linear_schedule`, which needs no check
    try:
        first = value(tf.constant(0, tf.int64))
    except Exception as error:  # whatever the user's function raises
        makes_schedules = getattr(value, "__name__", "") == linear_schedule.__name__
        if isinstance(error, RuntimeError) and not makes_schedules:
            raise  # gin raised it because a parameter of the schedule is not bound
        reason = str(error).partition("\n")[0]
        raise UserError(_not_a_schedule(value, reason)) from error
    if callable(first) or not _is_number(first):
        raise UserError(_not_a_schedule(value, "called with a counter, it returns no number"))
    try:
        traced = tf.function(lambda counter: value(counter), [_COUNTER], autograph=False)
        dtype = traced.get_concrete_function().structured_outputs.dtype
    except Exception as error:  # whatever the user's function raises
        reason = str(error).partition("\n")[0]
        reason = f"it needs TensorFlow's operations: {reason}"
        raise UserError(_not_a_schedule(value, reason)) from error
    return value if dtype == tf.float32 else lambda counter: tf.cast(value(counter), tf.float32)


def _is_number(value: Any) -> bool:
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return False
    return tensor.shape.rank == 0 and (tensor.dtype.is_floating or tensor.dtype.is_integer)


def _not_a_schedule(value: Callable, reason: str) -> str:
    name = getattr(value, "__name__", repr(value))
    return (
        f"@{name} is not a schedule ({reason}). If it creates schedules, write it with "
        f"parentheses: @{name}(), or @epsilon/{name}() to use the gin scope epsilon."
    )


@gin.configurable
def whole_run() -> int:
    """Returns `train.num_env_steps`, for schedules that span the whole run."""
    # gin resolves a reference to a macro when the reference is deep-copied.
    return copy.deepcopy(gin.query_parameter("train.num_env_steps"))
