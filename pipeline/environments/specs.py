"""Converts gymnasium's spaces to TensorFlow's specs, and a policy's actions to the spaces."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np
import tensorflow as tf
from tf_agents.specs import tensor_spec

from pipeline.utils.errors import UserError

ActionConverter = Callable[[np.ndarray], np.ndarray]

# Fraction of an action's range by which float arithmetic may exceed a bound.
_ROUNDING = 1e-5


def observation_spec(space: gymnasium.Space, environment: str) -> tf.TensorSpec:
    """Returns the spec of one environment's observation, with the space's shape and dtype.

    Args:
      space: Observation space of one environment.
      environment: Name of the environment, for messages.

    Raises:
      UserError: If the space is not a Box.
    """
    if not isinstance(space, gymnasium.spaces.Box):
        raise UserError(
            f"{environment}: the observation space {space} is not supported, only Box is. Convert"
            " it with a wrapper (gymnasium.wrappers:FlattenObservation suits most spaces)."
        )
    if space.dtype == np.bool_:
        return tf.TensorSpec(space.shape, tf.bool, "observation")
    minimum, maximum = _smallest_bound(space.low), _smallest_bound(space.high)
    return tensor_spec.BoundedTensorSpec(space.shape, space.dtype, minimum, maximum, "observation")


def action_spec(space: gymnasium.Space, environment: str) -> tensor_spec.BoundedTensorSpec:
    """Returns the spec of one environment's action.

    Discrete(n, start) becomes int32 in [0, n - 1]. A Box of floats becomes float32, because
    networks compute in it, and keeps its shape and bounds.

    Args:
      space: Action space of one environment.
      environment: Name of the environment, for messages.

    Raises:
      UserError: If the space is neither Discrete nor a Box of floats.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return tensor_spec.BoundedTensorSpec((), tf.int32, 0, space.n.item() - 1, "action")
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        with np.errstate(over="ignore"):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return tensor_spec.BoundedTensorSpec(space.shape, tf.float32, low, high, "action")
    raise UserError(
        f"{environment}: the action space {space} is not supported, only Discrete and Box of"
        " floats are. Convert it with a wrapper (gymnasium_environment.wrappers)."
    )


def action_converter(space: gymnasium.Space) -> ActionConverter:
    """Returns a function from actions [N, ...] of `action_spec` to actions of the space.

    The function raises a ValueError if an action is out of range or not a number. Its result shares
    no memory with its argument, so that an environment which changes its action in place cannot
    change the recorded one.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return _discrete_converter(space)
    assert isinstance(space, gymnasium.spaces.Box)
    return _box_converter(space)


def _discrete_converter(space: gymnasium.spaces.Discrete) -> ActionConverter:
    count, start = space.n.item(), space.start.item()

    def convert(actions: np.ndarray) -> np.ndarray:
        # A negative int32 is a huge uint32, so one comparison checks both bounds.
        inside = actions.view(np.uint32) < count
        if not inside.all():
            raise _out_of_range(actions, inside, f"[0, {count - 1}]")
        return np.add(actions, start, dtype=np.int64)

    return convert


def _box_converter(space: gymnasium.spaces.Box) -> ActionConverter:
    low, high = space.low, space.high
    with np.errstate(over="ignore"):
        size = high.astype(np.float64) - low
    # A half-open range has no finite size, so the magnitude of its finite bound replaces it.
    bound = np.fmax(*(np.where(np.isfinite(end), np.abs(end), 0.0) for end in (low, high)))
    slack = _ROUNDING * np.where(np.isfinite(size), size, bound)

    def convert(actions: np.ndarray) -> np.ndarray:
        # Every comparison with NaN is false, so that NaN counts as outside here.
        if ((actions >= low) & (actions <= high)).all():
            return actions.astype(space.dtype)
        inside = (actions >= low - slack) & (actions <= high + slack)
        if not inside.all() or not np.isfinite(actions).all():
            raise _out_of_range(actions, inside, f"[{low}, {high}]")
        return np.clip(actions, low, high).astype(space.dtype)

    return convert


def _out_of_range(actions: np.ndarray, inside: np.ndarray, bounds: str) -> ValueError:
    index = int(np.argmin(inside.reshape(len(actions), -1).all(axis=1)))
    return ValueError(
        f"action {actions[index].tolist()} for environment {index} is outside {bounds}"
    )


def _smallest_bound(bound: np.ndarray) -> np.ndarray:
    """Returns a single number if all bounds are equal, else `bound`.

    A spec is stored and printed in many places, where a single number is shorter.
    """
    first = bound.reshape(-1)[:1]
    return first[0] if bound.size and np.all(bound == first) else bound
