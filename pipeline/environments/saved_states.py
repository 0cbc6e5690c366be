"""Gets and sets the states of environments that offer them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

from pipeline.utils.errors import UserError

State = dict[str, np.ndarray]
"""Everything that an environment's future depends on, except the actions, by name."""

_STATELESS = (wrappers.OrderEnforcing, wrappers.PassiveEnvChecker)
_ELAPSED = "_elapsed_steps"  # attribute of wrappers.TimeLimit


def are_offered(vector_env: gymnasium.vector.VectorEnv) -> bool:
    """Returns True if all environments and their wrappers are in this process and have a state.

    An environment or a wrapper has a state if it defines `get_state() -> dict[str, array]` and
    `set_state(state)`. The state must contain the state of `np_random`, and no array of objects.
    gymnasium's OrderEnforcing, PassiveEnvChecker and TimeLimit need not define these methods.
    """
    envs = getattr(vector_env, "envs", [])
    return bool(envs) and all(
        _has_state(layer) or isinstance(layer, (*_STATELESS, wrappers.TimeLimit))
        for env in envs
        for layer in _layers(env)
    )


def get(vector_env: gymnasium.vector.SyncVectorEnv) -> list[State]:
    """Returns the states of all environments, which must offer them.

    Raises:
      UserError: If a state holds anything but numbers and text.
    """
    return [
        {
            f"{depth}/{name}": _array(layer, name, value)
            for depth, layer in enumerate(_layers(env))
            for name, value in _state_of(layer).items()
        }
        for env in vector_env.envs
    ]


def set_all(vector_env: gymnasium.vector.SyncVectorEnv, states: list[State]) -> None:
    """Restores every environment's state; the environments must have been reset before."""
    for env, state in zip(vector_env.envs, states, strict=True):
        for depth, layer in enumerate(_layers(env)):
            prefix = f"{depth}/"
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            if isinstance(layer, wrappers.TimeLimit):
                setattr(layer, _ELAPSED, int(own[_ELAPSED]))
            elif _has_state(layer):
                layer.set_state(own)


def _array(layer: Any, name: str, value: Any) -> np.ndarray:
    array = np.array(value)
    if array.dtype.hasobject:
        raise UserError(
            f"{type(layer).__name__}.get_state() returns {name!r} as {type(value).__name__}, but a "
            "checkpoint holds only arrays of numbers or text. Convert it to such an array."
        )
    return array


def _layers(env: gymnasium.Env) -> list[Any]:
    """Returns the environment and its wrappers, the outermost first."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _has_state(layer: Any) -> bool:
    return hasattr(layer, "get_state") and hasattr(layer, "set_state")


def _state_of(layer: Any) -> dict[str, Any]:
    if isinstance(layer, wrappers.TimeLimit):
        return {_ELAPSED: layer._elapsed_steps}
    return layer.get_state() if _has_state(layer) else {}
