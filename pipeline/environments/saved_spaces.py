"""Converts gymnasium's spaces to JSON and back, so that a policy needs no environment."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


def to_json(space: gymnasium.Space) -> dict[str, Any]:
    """Returns a space as a JSON object.

    For spaces that agents do not use, such as Text, only the name of the type is stored.
    """
    match space:
        case spaces.Dict():
            return {"Dict": {key: to_json(part) for key, part in space.spaces.items()}}
        case spaces.Tuple():
            return {"Tuple": [to_json(part) for part in space.spaces]}
        case spaces.Discrete():
            n, start, dtype = space.n.item(), space.start.item(), str(space.dtype)
            return {"Discrete": {"n": n, "start": start, "dtype": dtype}}
        case spaces.MultiDiscrete():
            nvec, start, dtype = space.nvec.tolist(), space.start.tolist(), str(space.dtype)
            return {"MultiDiscrete": {"nvec": nvec, "start": start, "dtype": dtype}}
        case spaces.MultiBinary():
            return {"MultiBinary": {"n": np.asarray(space.n).tolist()}}
        case spaces.Box():
            bounds = {"low": _shortest(space.low), "high": _shortest(space.high)}
            return {"Box": bounds | {"shape": list(space.shape), "dtype": str(space.dtype)}}
    return {type(space).__name__: {}}


def from_json(data: Any) -> gymnasium.Space:
    """Creates a space from the output of `to_json`.

    Raises:
      ValueError: If `data` is not such an output.
    """
    try:
        ((kind, content),) = data.items()
        return _space(kind, content)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a saved gymnasium space: {data!r:.100}") from error


def _space(kind: str, content: Any) -> gymnasium.Space:
    match kind:
        case "Dict":
            return spaces.Dict({key: from_json(part) for key, part in content.items()})
        case "Tuple":
            return spaces.Tuple([from_json(part) for part in content])
        case "Discrete":
            return spaces.Discrete(content["n"], start=content["start"], dtype=content["dtype"])
        case "MultiDiscrete":
            nvec, start = np.array(content["nvec"]), np.array(content["start"])
            return spaces.MultiDiscrete(nvec, content["dtype"], start=start)
        case "MultiBinary":
            return spaces.MultiBinary(content["n"])
        case "Box":
            shape, dtype = tuple(content["shape"]), np.dtype(content["dtype"])
            low, high = (np.full(shape, content[end], dtype) for end in ("low", "high"))
            return spaces.Box(low, high, shape, dtype)
    # A placeholder: agents ignore this space, but the indices of a Tuple must not change.
    return spaces.Text(1)


def _shortest(bound: np.ndarray) -> Any:
    """Returns one entry if all numbers of the bound are equal, otherwise nested lists.

    Infinite numbers become text, because JSON has no infinity.
    """
    if not bound.size:
        return 0
    are_equal = (bound == bound.flat[0]).all()
    return _without_infinity(bound.flat[0].item() if are_equal else bound.tolist())


def _without_infinity(entries: Any) -> Any:
    if isinstance(entries, list):
        return [_without_infinity(entry) for entry in entries]
    return entries if math.isfinite(entries) else str(entries)
