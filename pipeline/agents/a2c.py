"""Implements advantage actor-critic, a synchronous A3C (Mnih et al. 2016, "Asynchronous methods").

All environments step together for `Rollout.num_steps`. The whole rollout makes one update, computed
with the weights that collected it. With gae_lambda = 1 the advantages are those of the paper: the
n-step returns to the end of the rollout minus the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.agent import agent_factory
from pipeline.agents.on_policy import OnPolicyAgent
from pipeline.networks.actor_critic import ActorCritic
from pipeline.ops.batches import first_rows, masked_mean, row_weights
from pipeline.ops.normalizers import RewardScaler
from pipeline.ops.optimizers import RMSprop
from pipeline.ops.schedules import Schedule, as_schedule
from pipeline.utils.constraints import (
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
)


class A2CAgent(OnPolicyAgent):
    """Implements the A2C agent; see `create_a2c_agent`."""

    loss_names: tuple[str, ...] = (
        "loss", "policy_loss", "value_loss", "entropy", "gradient_norm",
    )  # fmt: skip
    needs_whole_rollouts = True

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        value_coefficient: float,
        entropy_coefficient: float,
        **kwargs,
    ):
        self._value_coefficient = value_coefficient
        self._entropy_coefficient = entropy_coefficient
        super().__init__(time_step_spec, action_spec, **kwargs)

    def _loss(self, experience: Trajectory, weights=None, **unused) -> tf_agent.LossInfo:
        """Computes the mean of -log pi(a|s) A + c_v (R - V(s))^2 - c_e H over rows [B, 1].

        See Mnih et al. 2016, algorithm S3. Boundary rows have weight 0.
        """
        weights = row_weights(experience, weights)
        rows = first_rows(experience)
        distribution, value = self.actor_critic(rows.observation)
        policy_loss = masked_mean(
            -distribution.log_prob(rows.action) * rows.policy_info.advantage, weights
        )
        value_loss = masked_mean((rows.policy_info.value_target - value) ** 2, weights)
        entropy = masked_mean(distribution.entropy(), weights)
        return self._sum_of_losses(policy_loss, value_loss, entropy)

    def _sum_of_losses(
        self, policy_loss: tf.Tensor, value_loss: tf.Tensor, entropy: tf.Tensor
    ) -> tf_agent.LossInfo:
        """Computes policy_loss + c_v value_loss - c_e entropy, and logs all four scalars."""
        loss = policy_loss + self._value_coefficient * value_loss
        loss -= self._entropy_coefficient * entropy
        extra = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return tf_agent.LossInfo(loss, {"loss": loss, **extra})


@agent_factory
def create_a2c_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    learning_rate: Schedule | NonNegative = 7e-4,  # scheduled by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = RMSprop,  # optimizer class
    value_coefficient: NonNegative = 0.5,  # weight of the squared value error
    entropy_coefficient: NonNegative = 0.0,  # weight of the entropy bonus
    discount: Probability = 0.99,  # gamma
    gae_lambda: Probability = 1.0,  # 1: n-step returns
    normalize_advantages: Literal["rollout"] | None = None,  # over the transitions of a rollout
    normalize_returns: bool = False,  # scale rewards with `RewardScaler`
    gradient_clip_norm: Positive | None = 0.5,  # maximum global norm; None: no limit
    accumulate_updates: PositiveInt = 1,  # rollouts whose gradients make one update
    agent_class: Callable[..., A2CAgent] | None = None,  # a subclass; None: A2CAgent
) -> A2CAgent:
    """Creates an A2C agent for discrete or continuous actions; its network is an `ActorCritic`.

    The first five arguments are those of `agent.agent_factory`.

    Raises:
      UserError: If a value is out of its range or is not one of the choices.
    """
    check_arguments(create_a2c_agent, locals())
    del seed
    rate_schedule = as_schedule(learning_rate)
    agent = (agent_class or A2CAgent)(
        time_step_spec,
        action_spec,
        actor_critic=ActorCritic(time_step_spec.observation, action_spec),
        optimizer=optimizer(learning_rate=lambda: rate_schedule(env_steps)),
        gradient_clip_norm=gradient_clip_norm,
        reward_scaler=RewardScaler(num_envs, discount) if normalize_returns else None,
        value_coefficient=value_coefficient,
        entropy_coefficient=entropy_coefficient,
        discount=discount,
        gae_lambda=gae_lambda,
        standardize_advantages=normalize_advantages == "rollout",
    )
    agent.schedules = {"learning_rate": rate_schedule}
    agent.accumulate(accumulate_updates)
    return agent
