"""Converts gymnasium spaces to TensorFlow specs, and policy actions to actions of a space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import tensorflow as tf
import tree
from gymnasium import spaces
from tf_agents.specs import tensor_spec

from pipeline.ops.observations import CategoricalSpec, action_mask, without_mask
from pipeline.utils.errors import UserError

ActionConverter = Callable[[np.ndarray], np.ndarray]

# Fraction of an action's range by which float arithmetic may exceed a bound.
_ROUNDING = 1e-5
# Maximum number of categories, because networks have an input or an output for each.
_MOST_CATEGORIES = 10_000


class Leaf(NamedTuple):
    """Describes a part of an observation space that is neither a Dict nor a Tuple.

    Attributes:
      path: Keys and indices of the part; () if it is the whole observation.
      space: Its space.
    """

    path: tuple[str | int, ...]
    space: gymnasium.Space

    @property
    def is_array(self) -> bool:
        """Returns True if it is an array of at least one number."""
        arrays = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
        return isinstance(self.space, arrays) and 0 not in (self.space.shape or ())

    @property
    def name(self) -> str:
        """Returns the name of the leaf in messages, such as `observation['position'][0]`."""
        if not self.path:
            return "the observation"
        return "observation" + "".join(f"[{key!r}]" for key in self.path)

    def of(self, observation: Any) -> Any:
        """Returns this part of an observation.

        Raises:
          KeyError, IndexError or TypeError: If the observation has no such part.
        """
        for key in self.path:
            observation = observation[key]
        return observation


def arrays(space: gymnasium.Space) -> list[Leaf]:
    """Returns the leaves of an observation space that are arrays, ordered as `tf.nest.flatten`."""
    return [leaf for leaf in _leaves(space) if leaf.is_array]


def look_the_same(space: gymnasium.Space, other: gymnasium.Space) -> bool:
    """Returns True if two spaces differ at most in parts that agents do not see."""
    return arrays(space) == arrays(other)


def are_observed_alike(space: gymnasium.Space, other: gymnasium.Space) -> bool:
    """Returns True if one network can take the observations of both spaces.

    The bounds of Boxes may differ.
    """

    def signature(leaf: Leaf) -> tuple[Any, ...]:
        is_box = isinstance(leaf.space, spaces.Box)
        return leaf.path, leaf.space.shape, leaf.space.dtype, is_box or repr(leaf.space)

    return [*map(signature, arrays(space))] == [*map(signature, arrays(other))]


def notes_of_omitted(space: gymnasium.Space) -> list[str]:
    """Returns a note for each part of an observation space that is no array, such as Text."""
    return [
        f"agents do not see {leaf.name}: its space ({type(leaf.space).__name__}) is not an array "
        "of numbers"
        for leaf in _leaves(space)
        if not leaf.is_array
    ]


def _leaves(space: gymnasium.Space) -> list[Leaf]:
    return [Leaf(*leaf) for leaf in tree.flatten_with_path(_nest(space, only_arrays=False))]


def _nest(space: gymnasium.Space, only_arrays: bool) -> Any:
    """Converts Dict and Tuple spaces to dicts and tuples of spaces.

    Raises:
      UserError: If a key of a Dict is not a string.
    """

    def is_kept(part: gymnasium.Space) -> bool:
        is_nested = isinstance(part, spaces.Dict | spaces.Tuple)
        return is_nested or not only_arrays or Leaf((), part).is_array

    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise UserError(f"the keys of the observation space {space} must be strings.")
        items = space.spaces.items()
        return {key: _nest(part, only_arrays) for key, part in items if is_kept(part)}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(part, only_arrays) for part in space.spaces if is_kept(part))
    return space


def observation_spec(space: gymnasium.Space, environment: str) -> Any:
    """Returns the spec of one environment's observation, a nest for Dict and Tuple spaces.

    Arrays keep their shapes and dtypes. Discrete and MultiDiscrete become a `CategoricalSpec`.

    Args:
      space: Observation space of one environment.
      environment: Name of the environment, for messages.

    Raises:
      UserError: If the space contains no array of numbers, an array with too many categories, or
        keys with slashes that give two arrays the same path.
    """
    parts = arrays(space)
    if not parts:
        raise UserError(
            f"{environment}: the observation space {space} is not supported. Supported spaces are "
            "Box, Discrete, MultiDiscrete and MultiBinary with at least one number, and Dict and "
            "Tuple of these. Convert it with a wrapper (gymnasium_environment.wrappers)."
        )
    by_path: dict[str, Leaf] = {}
    for leaf in parts:
        path = "/".join(map(str, leaf.path))
        if (other := by_path.setdefault(path, leaf)) is not leaf:
            raise UserError(
                f"{environment}: {other.name} and {leaf.name} have the same path {path!r} in a "
                "checkpoint. Rename a key with a wrapper (gymnasium_environment.wrappers)."
            )
    specs = [_array_spec(leaf, environment) for leaf in parts]
    return tf.nest.pack_sequence_as(_nest(space, only_arrays=True), specs)


def _array_spec(leaf: Leaf, environment: str) -> tf.TensorSpec:
    space, name = leaf.space, "observation"
    if isinstance(space, spaces.MultiBinary):
        return tensor_spec.BoundedTensorSpec(space.shape, space.dtype, 0, 1, name)
    if values := categories(space):
        first, count = values
        _check_number(np.sum(count), f"{environment}: the space {space} of {leaf.name}")
        return CategoricalSpec(space.shape, space.dtype, first, first + count - 1, name)
    assert isinstance(space, spaces.Box)
    try:
        tf.as_dtype(space.dtype)
    except TypeError as error:  # such as np.longdouble
        raise UserError(
            f"{environment}: the space {space} of {leaf.name} has a dtype that TensorFlow lacks. "
            "Convert it with a wrapper (gymnasium_environment.wrappers)."
        ) from error
    if space.dtype == np.bool_:
        return tf.TensorSpec(space.shape, tf.bool, name)
    minimum, maximum = _smallest_bound(space.low), _smallest_bound(space.high)
    return tensor_spec.BoundedTensorSpec(space.shape, space.dtype, minimum, maximum, name)


def categories(space: gymnasium.Space) -> tuple[Any, Any] | None:
    """Returns the first category and the number of categories of each number of a space.

    Returns:
      Numbers for Discrete, int64 arrays in the space's shape for MultiDiscrete and MultiBinary, and
      None for other spaces.
    """
    match space:
        case spaces.Discrete():
            return space.start.item(), space.n.item()
        case spaces.MultiDiscrete():
            return space.start.astype(np.int64), space.nvec.astype(np.int64)
        case spaces.MultiBinary():
            return np.zeros(space.shape, np.int64), np.full(space.shape, 2)
    return None


def are_in(categories: tuple[Any, Any] | None, array: np.ndarray) -> bool:
    """Returns True if an array holds only these `categories`, or if there are none."""
    if categories is None:
        return True
    first, count = categories
    return bool(((array >= first) & (array < first + count)).all())


def _check_number(number: Any, what: str) -> None:
    if number > _MOST_CATEGORIES:
        raise UserError(
            f"{what} has {int(number):,} categories; the limit is {_MOST_CATEGORIES:,}. Convert it "
            "with a wrapper (gymnasium_environment.wrappers), for example to a Box."
        )


def action_spec(space: gymnasium.Space, environment: str) -> tensor_spec.BoundedTensorSpec:
    """Returns the spec of one environment's action.

    Discrete becomes one int32 in [0, n - 1]. MultiDiscrete, MultiBinary and a Box of integers
    become an int32 array of this kind. A Box of floats becomes float32, in which networks compute,
    and keeps its shape and bounds.

    Args:
      space: Action space of one environment.
      environment: Name of the environment, for messages.

    Raises:
      UserError: If the space is of another kind, or has too many actions.
    """
    is_empty = 0 in (space.shape or ())
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and not is_empty:
        low, high = _float32_bounds(space)
        return tensor_spec.BoundedTensorSpec(space.shape, tf.float32, low, high, "action")
    choices = _choices(space)
    if choices is None or is_empty:
        raise UserError(
            f"{environment}: the action space {space} is not supported. Supported spaces are "
            "Discrete, MultiDiscrete, MultiBinary, and Box of floats or integers, with at least "
            "one number. Convert it with a wrapper (gymnasium_environment.wrappers)."
        )
    _, counts = choices
    _check_number(np.sum(counts), f"{environment}: the action space {space}")
    return tensor_spec.BoundedTensorSpec(space.shape, tf.int32, 0, counts - 1, "action")


def _choices(space: gymnasium.Space) -> tuple[Any, Any] | None:
    """Returns the `categories` of an action space, also those of a Box of integers."""
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        # In 64 bits, differences are exact also where a bound is too large for a float or an int64.
        size = space.high.astype(np.uint64) - space.low.astype(np.uint64)
        return space.low.astype(np.int64), size.astype(np.float64) + 1
    return categories(space)


def check_mask(observation: Any, action: tensor_spec.BoundedTensorSpec, environment: str) -> None:
    """Checks that an action mask, if there is one, suits the observation and the action.

    Args:
      observation: Spec of one observation.
      action: Spec of one action.
      environment: Name of the environment, for messages.

    Raises:
      UserError: If it does not.
    """
    mask = action_mask(observation)
    if mask is None:
        return
    is_one_action = action.dtype.is_integer and action.shape.rank == 0
    if not tf.nest.flatten(without_mask(observation)):
        raise UserError(
            f"{environment}: the observation has an action mask, but no other array of numbers."
        )
    if not is_one_action:
        raise UserError(
            f"{environment}: observation['action_mask'] needs a Discrete action space. Change the "
            "action space, or rename the key if it is not a mask."
        )
    count = int(action.maximum) + 1
    is_mask = isinstance(mask, tf.TensorSpec) and tuple(mask.shape) == (count,)
    if is_mask and mask.dtype.is_floating:
        bounds = getattr(mask, "minimum", -np.inf), getattr(mask, "maximum", np.inf)
        is_mask = bool(np.all(bounds[0] == 0) and np.all(bounds[1] == 1))
    if not is_mask:
        raise UserError(
            f"{environment}: observation['action_mask'] must be an array of integers, bools, or "
            f"floats from 0 to 1, with one entry for each of the {count} actions. Change its "
            "space, or rename the key if it is not a mask."
        )


def action_converter(space: gymnasium.Space) -> ActionConverter:
    """Returns a function from actions [N, ...] of `action_spec` to actions of the space.

    The function raises a ValueError if an action is out of range or not a number. Its result shares
    no memory with its argument, so that an environment which changes its action in place cannot
    change the recorded one.
    """
    choices = _choices(space)
    if choices is not None:
        return _integer_converter(*choices, space.dtype)
    assert isinstance(space, spaces.Box)
    return _box_converter(space)


def actions_in_space(actions: tf.Tensor, space: gymnasium.Space) -> tf.Tensor:
    """Converts actions [N, ...] of `action_spec` to actions of the space, in a graph.

    The actions must be within their bounds.
    """
    choices = _choices(space)
    if choices is not None:
        return tf.cast(tf.cast(actions, tf.int64) + tf.cast(choices[0], tf.int64), space.dtype)
    assert isinstance(space, spaces.Box)
    low, high = _float32_bounds(space)
    low = np.where(low < space.low, np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(high > space.high, np.nextafter(high, np.float32(-np.inf)), high)
    if (low <= high).all():  # LiteRT clips only float32
        return tf.cast(tf.clip_by_value(tf.cast(actions, tf.float32), low, high), space.dtype)
    return tf.clip_by_value(tf.cast(actions, space.dtype), space.low, space.high)


def _integer_converter(start: Any, count: Any, dtype: Any) -> ActionConverter:
    def convert(actions: np.ndarray) -> np.ndarray:
        # A negative int32 is a huge uint32, so one comparison checks both bounds.
        inside = actions.view(np.uint32) < count
        if not inside.all():
            raise _out_of_range(actions, inside, f"[0, {count - 1}]")
        return np.add(actions, start, dtype=np.int64).astype(dtype, copy=False)

    return convert


def _float32_bounds(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds as float32. Rounding may have moved a bound of float64 outwards."""
    with np.errstate(over="ignore"):
        return space.low.astype(np.float32), space.high.astype(np.float32)


def _box_converter(space: spaces.Box) -> ActionConverter:
    low, high = space.low, space.high
    with np.errstate(over="ignore"):
        size = high.astype(np.float64) - low
    # A half-open range has no finite size, so the magnitude of its finite bound replaces it.
    bound = np.fmax(*(np.where(np.isfinite(end), np.abs(end), 0.0) for end in (low, high)))
    slack = _ROUNDING * np.where(np.isfinite(size), size, bound)
    lowest, highest = _float32_bounds(space)
    lowest, highest = np.minimum(low - slack, lowest), np.maximum(high + slack, highest)
    is_bounded = np.isfinite([low, high]).all()
    bounds = "" if is_bounded else "the finite numbers of "
    bounds += f"[{low}, {high}]"

    def convert(actions: np.ndarray) -> np.ndarray:
        # Every comparison with NaN is false, so that NaN counts as outside here.
        if is_bounded and ((actions >= low) & (actions <= high)).all():
            return actions.astype(space.dtype)
        inside = (actions >= lowest) & (actions <= highest) & np.isfinite(actions)
        if not inside.all():
            raise _out_of_range(actions, inside, bounds)
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
