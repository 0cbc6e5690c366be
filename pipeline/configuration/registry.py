"""Looks up what gin can bind: configurables by name, and their parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gin import config as gin_config

from pipeline.configuration.statements import Binding, Reference, suggest, value_of
from pipeline.utils.errors import UserError

#: Prefix of the selectors of TF-Agents' own configurables. Importing TF-Agents registers them, and
#: this package calls its base classes with values of its own. Nothing may be bound there.
TF_AGENTS = "tf_agents."

#: Parameters that gin may not bind because a flag of the binaries sets them.
FLAGS = {
    "root_dir": "--root_dir",
    "seed": "--seed",
    "restart_behavior": "--restart_behavior",
    "dry_run": "--explain",
    "execution": "--eager or --exact_graph",
}

# What to bind instead of other parameters that gin may not bind.
_INSTEAD = {
    "learning_rate": "bind that of the agent, such as create_dqn_agent.learning_rate",
    "num_envs": "bind that of the environment, such as gymnasium_environment.num_envs",
    "render": "pipeline.evaluate --video=FILE.mp4 renders an episode",
}


def registered(selector: str) -> gin_config.Configurable | None:
    """Returns the configurable that `selector` matches, or None if it matches none or several."""
    matches = gin_config._REGISTRY.matching_selectors(selector)
    return gin_config._REGISTRY[matches[0]] if len(matches) == 1 else None


def need_registered(selector: str, origin: str) -> gin_config.Configurable:
    """Returns the only configurable that `selector` may mean.

    Raises:
      UserError: If it may mean several or none. The message names `origin` and the nearest names.
    """
    if configurable := registered(selector):
        return configurable
    if matches := gin_config._REGISTRY.matching_selectors(selector):
        raise UserError(
            f"{origin}: {selector!r} is ambiguous: write {' or '.join(sorted(matches))}."
        )
    hint = suggest(selector, _short_names())
    raise UserError(
        f"{origin}: no configurable is named {selector!r}.{hint} "
        "To use one of your own, import its module in a gin file."
    )


def _short_names() -> list[str]:
    registry = gin_config._REGISTRY
    selectors = (s for s, _ in registry.items() if not s.startswith(("gin.", TF_AGENTS)))
    return [registry.minimal_selector(selector) for selector in selectors]


def check_parameter(
    configurable: gin_config.Configurable, binding: Binding, macros: Mapping[str, Any]
) -> None:
    """Checks that the configurable has the binding's parameter and that gin may bind it.

    Args:
      configurable: Configurable that the binding names.
      binding: Binding to check.
      macros: Values of all macros by name, which are not circular.

    Raises:
      UserError: If one of these checks fails.
    """
    name = binding.parameter
    known = parameters(configurable)
    value = value_of(binding.value, macros)
    if name == "create_environment" and isinstance(value, Reference) and "/" in value.name:
        raise UserError(
            f"{binding.origin}: {binding.name} = {binding.value!r}: this scope would replace the "
            "scope evaluation. Drop it, and bind the parameters without a scope."
        )
    if configurable.selector.startswith(TF_AGENTS):
        raise UserError(
            f"{binding.origin}: {binding.name} cannot be bound, because this program does not use "
            "TF-Agents' own configurables. Bind the same parameter of the function that "
            "train.create_agent refers to, such as create_dqn_agent."
        )
    if not _is_open(configurable, name):
        how = f"use {FLAGS[name]}" if name in FLAGS else _INSTEAD.get(name, "the program sets it")
        raise UserError(f"{binding.origin}: {binding.name} cannot be bound: {how}.")
    if not gin_config._might_have_parameter(configurable.wrapper, name):
        hint = suggest(name, known) or f" It has: {', '.join(known)}."
        raise UserError(f"{binding.origin}: {binding.selector} has no parameter {name!r}.{hint}")


def _is_open(configurable: gin_config.Configurable, name: str) -> bool:
    if name in (configurable.denylist or ()):
        return False
    return not configurable.allowlist or name in configurable.allowlist


def signature(configurable: gin_config.Configurable) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters by name; {} for a function written in C that does not tell them."""
    return _signature(configurable.wrapped)


@functools.cache  # `inspect` takes a quarter of a millisecond, and every statement asks
def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def parameters(configurable: gin_config.Configurable) -> list[str]:
    """Returns the names of the parameters that gin may bind."""
    return [name for name in signature(configurable) if _is_open(configurable, name)]


def hints(name: str) -> list[str]:
    """Returns what a user may have meant who bound `name` without the name of a function.

    The result is the flag of that name, or else all parameters of this package with that name.
    """
    if name in FLAGS:
        return [FLAGS[name]]
    return sorted(
        f"{gin_config._REGISTRY.minimal_selector(selector)}.{name}"
        for selector, configurable in gin_config._REGISTRY.items()
        if selector.startswith("pipeline.") and name in parameters(configurable)
    )
