"""Names the first tensor of training that is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tensorflow as tf
from tf_agents.trajectories import TimeStep

from pipeline.agents.agent import Agent
from pipeline.ops.batches import are_finite
from pipeline.replay import Experience
from pipeline.utils.errors import UserError

#: Beginnings of the names of columns that the environment fills.
FROM_ENVIRONMENT = ("observation", "reward")
_ADVICE = "lower the learning rate, or clip gradients or rewards"


def _bad_weights(agent: Agent) -> list[str]:
    """Names the first variable of each network, and of its gradients, that is not finite."""
    modules = {f"the weights of {name}": network for name, network in agent.trained.items()}
    if agent.accumulator is not None:
        modules["the accumulated gradients"] = agent.accumulator
    first = {name: _first_bad(module) for name, module in modules.items()}
    return [f"{name} ({variable})" for name, variable in first.items() if variable]


def unsound_weights(agent: Agent, experience: Experience) -> str:
    """Returns a sentence about weights that are not finite, or "" if all are finite.

    The sentence completes the error of an environment in which the agent acts. It begins with what
    an environment, perhaps of another actor, has returned that is not finite.
    """
    bad = _bad_weights(agent)
    if not bad:
        return ""
    causes = [x for x in experience.bad_columns() if x.startswith(FROM_ENVIRONMENT)]
    return (
        f". The agent that acted is broken: {' and '.join([*causes, *bad])} hold NaN or infinity. "
        f"{_ADVICE.capitalize()}."
    )


def check_losses(
    loss_sums: Mapping[str, tf.Tensor],
    agent: Agent,
    experience: Experience,
    env_steps: int,
    source: str,
) -> None:
    """Checks that all losses are finite.

    Args:
      loss_sums: Sums of the losses.
      agent: Agent that the losses belong to.
      experience: Rows that the agent learns from.
      env_steps: Environment steps that the run has taken.
      source: Classes of the environments and of their wrappers; see `Description.source`.

    Raises:
      UserError: If a loss is NaN or infinite. The message lists the causes before the losses.
    """
    if bad := [name for name, total in loss_sums.items() if not math.isfinite(float(total))]:
        raise _not_finite(experience.bad_columns(), bad, agent, env_steps, source)


def check_state(
    time_step: TimeStep, agent: Agent, experience: Experience, env_steps: int, source: str
) -> None:
    """Checks that weights, rows and the current time step are finite, before they are saved.

    A loss is computed before its update, and of some rows only. So all of them may be NaN although
    all losses are finite.

    Raises:
      UserError: If one is NaN or infinite; see `check_losses`.
    """
    columns = experience.bad_columns()
    if not are_finite(time_step):
        columns.append("observation or reward of the current time step")
    if columns or _bad_weights(agent):
        raise _not_finite(columns, [], agent, env_steps, source)


def _not_finite(
    columns: list[str], losses: list[str], agent: Agent, env_steps: int, source: str
) -> UserError:
    """Returns the error that ends a run; see `check_losses`."""
    advice = f"If the environment's observations and rewards are sound, {_ADVICE}"
    if columns and columns[0].startswith(FROM_ENVIRONMENT) and source:
        advice = f"Check the environment's class {source}. {advice}"
    first, *others = [*columns, *losses, *_bad_weights(agent)]  # each is a cause of the next
    then = f", then {', '.join(others)}" if others else ""
    return UserError(
        f"NaN or infinite after {env_steps:_} environment steps and "
        f"{int(agent.train_step_counter):_} updates: {first}{then}. {advice}."
    )


def _first_bad(module: tf.Module) -> str:
    # Not `are_finite`: the statistics of a normaliser are float64, and may exceed float32.
    floats = (v for v in module.variables if v.dtype.is_floating)
    return next((v.name for v in floats if not tf.reduce_all(tf.math.is_finite(v))), "")
