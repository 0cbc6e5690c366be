"""Gets and sets the states of environments that offer them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

from pipeline.utils.errors import UserError

State = dict[str, np.ndarray]
"""Everything that an environment's future depends on, except the actions, by name."""

_KNOWN = (wrappers.OrderEnforcing, wrappers.PassiveEnvChecker, wrappers.TimeLimit)
_ELAPSED = "_elapsed_steps"  # attribute of wrappers.TimeLimit, the whole state of these wrappers


def are_offered(env: gymnasium.Env) -> bool:
    """Returns True if the environment and all of its wrappers have a state.

    An environment or a wrapper has a state if it defines `get_state() -> dict[str, array]` and
    `set_state(state)`. The state must contain the state of `np_random`, and no array of objects.
    gymnasium's OrderEnforcing, PassiveEnvChecker and TimeLimit need not define these methods. A
    class that inherits from them must, because it may have more state.
    """
    return all(_has_state(layer) or type(layer) in _KNOWN for layer in layers(env))


def get(env: gymnasium.Env) -> State:
    """Returns the state of an environment that offers it.

    Raises:
      UserError: If a state is not a dict, or if an entry is an object, or a text that NumPy would
        shorten.
    """
    return {
        f"{depth}/{name}": _array(layer, name, value)
        for depth, layer in enumerate(layers(env))
        for name, value in _state_of(layer).items()
    }


def set_state(env: gymnasium.Env, state: State) -> None:
    """Restores the state of an environment, which must have been reset before."""
    for depth, layer in enumerate(layers(env)):
        prefix = f"{depth}/"
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        if _has_state(layer):
            layer.set_state(own)
        elif isinstance(layer, wrappers.TimeLimit):
            setattr(layer, _ELAPSED, int(own[_ELAPSED]))


def _array(layer: Any, name: str, value: Any) -> np.ndarray:
    array = np.array(value)
    is_text = isinstance(value, bytes | str)  # NumPy drops zeros at its end
    if array.dtype.hasobject or (is_text and array.item() != value):
        raise UserError(
            f"{type(layer).__name__}.get_state() returns {name!r} as {type(value).__name__}, but a "
            "checkpoint holds only arrays of numbers or text. Convert it to such an array, bytes "
            "with np.frombuffer(value, np.uint8)."
        )
    return array


def layers(env: gymnasium.Env | gymnasium.vector.VectorEnv) -> list[Any]:
    """Returns the environment and its wrappers, the outermost first."""
    found: list[Any] = [env]
    while isinstance(found[-1], gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        found.append(found[-1].env)
    return found


def _has_state(layer: Any) -> bool:
    return hasattr(layer, "get_state") and hasattr(layer, "set_state")


def _state_of(layer: Any) -> dict[str, Any]:
    if not _has_state(layer):
        return {_ELAPSED: layer._elapsed_steps} if isinstance(layer, wrappers.TimeLimit) else {}
    state = layer.get_state()
    if not isinstance(state, dict):
        raise UserError(
            f"{type(layer).__name__}.get_state() returns {type(state).__name__}, not a dict."
        )
    return state
