"""Implements IMPALA: advantage actor-critic with V-trace (Espeholt et al. 2018).

Collectors act with weights that are older than the learner's. V-trace corrects for the difference,
so that the collectors need not wait for the learner. The loss is that of A2C.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.a2c import A2CAgent
from pipeline.agents.agent import agent_factory
from pipeline.networks.actor_critic import ActorCritic
from pipeline.ops.optimizers import RMSprop
from pipeline.ops.returns import v_trace, valid_mask
from pipeline.ops.schedules import Schedule, as_schedule
from pipeline.utils.constraints import (
    AtLeastOne,
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
)


class ImpalaAgent(A2CAgent):
    """Implements the IMPALA agent; see `create_impala_agent`."""

    learns_off_policy = True

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        trace_lambda: float,
        rho_clip: float,
        **kwargs,
    ):
        self._rho_clip = rho_clip
        super().__init__(
            time_step_spec,
            action_spec,
            reward_scaler=None,
            gae_lambda=trace_lambda,
            standardize_advantages=False,
            **kwargs,
        )

    def prepare(self, rows: Trajectory, final_time_step: TimeStep) -> Trajectory:
        """Adds V-trace's advantages and value targets to a rollout [T, N].

        Values and the probabilities of the actions are those of the current weights.
        """
        shape = rows.step_type.shape
        flat = tf.nest.map_structure(
            lambda x: tf.reshape(x, [-1, *x.shape[2:]]), (rows.observation, rows.action)
        )
        distribution, value = self.actor_critic(flat[0])
        log_probability = tf.reshape(distribution.log_prob(flat[1]), shape)
        value_target, advantage = v_trace(
            rows.reward,
            self._discount * rows.discount,
            tf.reshape(value, shape),
            self.actor_critic.value(final_time_step.observation),
            tf.exp(log_probability - rows.policy_info.log_probability),
            self._lambda,
            self._rho_clip,
            valid_mask(rows.step_type),
        )
        info = rows.policy_info._replace(advantage=advantage, value_target=value_target)
        return rows.replace(policy_info=info)


@agent_factory
def create_impala_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    learning_rate: Schedule | NonNegative = 6e-4,  # scheduled by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = RMSprop,  # optimizer class
    value_coefficient: NonNegative = 0.5,  # weight of the squared value error
    entropy_coefficient: NonNegative = 0.01,  # weight of the entropy bonus
    discount: Probability = 0.99,  # gamma
    trace_lambda: Probability = 1.0,  # decay of V-trace
    rho_clip: AtLeastOne = 1.0,  # bound on the ratios that weight an error
    gradient_clip_norm: Positive | None = 0.5,  # maximum global norm; None: no limit
    accumulate_updates: PositiveInt = 1,  # rollouts whose gradients make one update
    agent_class: Callable[..., ImpalaAgent] | None = None,  # a subclass; None: ImpalaAgent
) -> ImpalaAgent:
    """Creates an IMPALA agent for discrete or continuous actions; its network is an `ActorCritic`.

    The first five arguments are those of `agent.agent_factory`.

    Raises:
      UserError: If a value is out of its range.
    """
    check_arguments(create_impala_agent, locals())
    del num_envs, seed
    rate_schedule = as_schedule(learning_rate)
    agent = (agent_class or ImpalaAgent)(
        time_step_spec,
        action_spec,
        actor_critic=ActorCritic(time_step_spec.observation, action_spec),
        optimizer=optimizer(learning_rate=lambda: rate_schedule(env_steps)),
        gradient_clip_norm=gradient_clip_norm,
        value_coefficient=value_coefficient,
        entropy_coefficient=entropy_coefficient,
        discount=discount,
        trace_lambda=trace_lambda,
        rho_clip=rho_clip,
    )
    agent.schedules = {"learning_rate": rate_schedule}
    agent.accumulate(accumulate_updates)
    return agent
