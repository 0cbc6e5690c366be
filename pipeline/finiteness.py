"""Which tensor of training was the first to be NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tensorflow as tf

from pipeline.agents.agent import Agent
from pipeline.errors import UserError
from pipeline.experience import Experience

_ADVICE = "lower the learning rate, or clip gradients or rewards"


def _bad_weights(agent: Agent) -> list[str]:
    """The first trained variable of each network that holds NaN or infinity."""
    first = {name: _first_bad(network) for name, network in agent.trained.items()}
    return [f"the weights of {name} ({variable})" for name, variable in first.items() if variable]


def unsound_weights(agent: Agent) -> str:
    """What to add to the error of an environment in which the agent acts; "" if all are finite."""
    bad = _bad_weights(agent)
    if not bad:
        return ""
    return (
        f". What acted was not sound: {' and '.join(bad)} hold NaN or infinity. "
        f"{_ADVICE.capitalize()}."
    )


def check_losses(
    loss_sums: Mapping[str, tf.Tensor], agent: Agent, experience: Experience, env_steps: int
) -> None:
    """Raises UserError if a loss is not finite; names what feeds the losses first."""
    bad = [name for name, total in loss_sums.items() if not math.isfinite(float(total))]
    if bad:
        raise _not_finite([*experience.bad_columns(), *bad, *_bad_weights(agent)], agent, env_steps)


def check_weights(agent: Agent, env_steps: int) -> None:
    """Raises UserError if a weight is not finite.

    A loss is taken before the update that it makes: weights may be bad where losses are not.
    """
    if bad := _bad_weights(agent):
        raise _not_finite(bad, agent, env_steps)


def _not_finite(bad: list[str], agent: Agent, env_steps: int) -> UserError:
    """The error that ends a run.

    Args:
      bad: what is not finite, in the order in which one makes the next so.
      agent: counts the updates.
      env_steps: that the run has taken.
    """
    first, *others = bad
    then = f", then {', '.join(others)}" if others else ""
    return UserError(
        f"NaN or infinite after {env_steps:_} environment steps and "
        f"{int(agent.train_step_counter):_} updates: {first}{then}. If the environment's "
        f"observations and rewards are sound, {_ADVICE}."
    )


def _first_bad(module: tf.Module) -> str:
    bad = (v.name for v in module.trainable_variables if not tf.reduce_all(tf.math.is_finite(v)))
    return next(bad, "")
