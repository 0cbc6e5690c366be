"""The ranges of what gin binds to the factories of several agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pipeline.errors import check_number, check_whole, check_wholes, check_within

_chance = partial(check_within, least=0, at_most=1)
_not_negative = partial(check_within, least=0)
_positive = partial(check_number, above=0)

# By the parameter's name; called with the name to tell, and the value.
_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "accumulate_updates": check_whole,
    "actor_units": check_wholes,
    "clip_ratio": _not_negative,
    "critic_units": check_wholes,
    "discount": _chance,
    "entropy_coefficient": _not_negative,
    "epsilon": _chance,
    "gae_lambda": _chance,
    "gradient_clip_norm": _positive,
    "initial_alpha": _positive,
    "learning_rate": _not_negative,
    "target_update_tau": partial(check_number, above=0, at_most=1),
    "value_clip": _positive,
    "value_coefficient": _not_negative,
}
_SCHEDULES = {"clip_ratio", "epsilon", "learning_rate"}  # or a number
_LIMITS = {"gradient_clip_norm", "value_clip"}  # or None


def check_settings(factory: str, parameters: Mapping[str, Any]) -> None:
    """Raises UserError unless each parameter that is named here is in its range.

    What a schedule gives later is not looked at.

    Args:
      factory: of the agent, as gin calls it: `create_dqn_agent`.
      parameters: all of the factory's, by name.
    """
    for name, check in _CHECKS.items():
        value = parameters.get(name)
        is_schedule = name in _SCHEDULES and callable(value)
        is_no_limit = name in _LIMITS and value is None
        if name in parameters and not is_schedule and not is_no_limit:
            check(f"{factory}.{name}", value)
