"""Advantage actor-critic, the synchronous form (Mnih et al. 2016, "Asynchronous methods", A3C).

All environments step together for `Rollout.num_steps`, and the whole rollout makes one update, with
the weights that collected it. With gae_lambda = 1 the advantages are those of the paper, n-step
returns to the rollout's end minus the value.
"""

from __future__ import annotations

from collections.abc import Callable

import gin
import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.actor_critic import ActorCritic
from pipeline.agents.agent import Agent, Gradients, first_rows, masked_mean, row_weights
from pipeline.agents.on_policy import OnPolicyAgent, actor_critic_loss
from pipeline.agents.settings import check_settings
from pipeline.errors import UserError, check_choice
from pipeline.normalizers import RewardScaler
from pipeline.optimizers import RMSprop
from pipeline.schedules import Schedule, as_schedule


class A2CAgent(OnPolicyAgent):
    """See `create_a2c_agent`."""

    loss_names = ("loss", "policy_loss", "value_loss", "entropy", "gradient_norm")
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

    def learn_for(self, shared: Agent, send: Callable[[Gradients], None]) -> None:
        """See `Agent.learn_for`.

        Raises:
          UserError: it normalises by statistics, of which every actor would have its own.
        """
        if self._reward_scaler or self._actor_critic.observation_moments is not None:
            raise UserError(
                "Asynchronous actors share weights, and no statistics of observations or rewards: "
                "bind ActorCritic.normalize_observations and create_a2c_agent.normalize_returns to "
                "False."
            )
        super().learn_for(shared, send)

    def _loss(self, experience: Trajectory, weights=None, **unused) -> tf_agent.LossInfo:
        """-log pi(a|s) A + c_v (R - V(s))^2 - c_e H of rows [B, 1]; boundary rows weigh nothing.

        Mnih et al. 2016, algorithm S3.
        """
        weights = row_weights(experience, weights)
        rows = first_rows(experience)
        distribution, value = self._actor_critic(rows.observation)
        policy_loss = masked_mean(
            -distribution.log_prob(rows.action) * rows.policy_info.advantage, weights
        )
        value_loss = masked_mean((rows.policy_info.value_target - value) ** 2, weights)
        entropy = masked_mean(distribution.entropy(), weights)
        loss, extra = actor_critic_loss(
            policy_loss, value_loss, entropy, self._value_coefficient, self._entropy_coefficient
        )
        return tf_agent.LossInfo(loss, extra)


@gin.configurable(denylist=["time_step_spec", "action_spec", "num_envs", "seed", "env_steps"])
def create_a2c_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    learning_rate: Schedule | float = 7e-4,  # by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = RMSprop,
    value_coefficient: float = 0.5,  # of the squared value error
    entropy_coefficient: float = 0.0,  # of the entropy bonus
    discount: float = 0.99,  # gamma
    gae_lambda: float = 1.0,  # 1: n-step returns
    normalize_advantages: str | None = None,  # or over the transitions of a "rollout"
    normalize_returns: bool = False,  # scales rewards: see `normalizers.RewardScaler`
    gradient_clip_norm: float | None = 0.5,  # global norm; None: no limit
    accumulate_updates: int = 1,  # rollouts whose gradients make one update
) -> A2CAgent:
    """A2C for discrete and continuous actions; networks: see `actor_critic.ActorCritic`.

    Args:
      time_step_spec: unbatched, from the environment.
      action_spec: one discrete action in [0, n-1], or continuous actions.
      num_envs: environments collected from at once.
      seed: unused; the only randomness is the collect policy's, which the driver seeds.
      env_steps: int64 counter of environment steps, which schedules read.

    Raises:
      UserError: a value is out of its range, or none of those that there are.
    """
    check_settings("create_a2c_agent", locals())
    check_choice("create_a2c_agent.normalize_advantages", normalize_advantages, ("rollout", None))
    del seed
    rate_schedule = as_schedule(learning_rate)
    agent = A2CAgent(
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
