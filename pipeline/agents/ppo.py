"""Implements proximal policy optimisation with the clipped objective (Schulman et al. 2017).

Each term of the loss equals that of TF-Agents' `PPOClipAgent`, which a test checks. The inputs of
the loss (rows, advantages and value targets) differ; see `on_policy`. If policy and value share an
encoder, it is evaluated once for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.a2c import A2CAgent
from pipeline.agents.agent import agent_factory
from pipeline.networks.actor_critic import ActorCritic
from pipeline.ops.batches import first_rows, masked_mean, row_weights, standardize
from pipeline.ops.normalizers import RewardScaler
from pipeline.ops.optimizers import Adam
from pipeline.ops.schedules import Schedule, as_schedule
from pipeline.utils.constraints import (
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
)


def clipped_surrogate_loss(
    log_prob: tf.Tensor, old_log_prob: tf.Tensor, advantage: tf.Tensor, clip: tf.Tensor | float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes -min(ratio A, clip(ratio, 1 - e, 1 + e) A) of Schulman et al. 2017, eq. 7.

    Returns:
      The loss [B], and [B] float32 that is 1 where the ratio was clipped and 0 elsewhere.
    """
    ratio = tf.exp(log_prob - old_log_prob)
    clipped = tf.clip_by_value(ratio, 1.0 - clip, 1.0 + clip)
    loss = -tf.minimum(ratio * advantage, clipped * advantage)
    return loss, tf.cast(tf.abs(ratio - 1.0) > clip, tf.float32)


def value_loss(
    value: tf.Tensor, old_value: tf.Tensor, target: tf.Tensor, clip: float | None
) -> tf.Tensor:
    """Computes the squared error [B] of the value.

    With `clip`, it is the larger of the squared errors of the value and of the clipped value, which
    differs from the old value by at most `clip`.
    """
    loss = (target - value) ** 2
    if clip is None:
        return loss
    moved = old_value + tf.clip_by_value(value - old_value, -clip, clip)
    return tf.maximum(loss, (target - moved) ** 2)


class PPOAgent(A2CAgent):
    """Implements the PPO agent; see `create_ppo_agent`."""

    needs_whole_rollouts = False

    loss_names = (
        "loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "approximate_kl",
        "gradient_norm",
    )  # fmt: skip

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        clip_ratio: Callable[[], tf.Tensor],
        value_clip: float | None,
        normalize_advantages: str | None,
        **kwargs,
    ):
        self._clip_ratio = clip_ratio
        self._value_clip = value_clip
        self._normalize_advantages = normalize_advantages
        super().__init__(
            time_step_spec,
            action_spec,
            standardize_advantages=normalize_advantages == "rollout",
            **kwargs,
        )

    def _loss(self, experience: Trajectory, weights=None, **unused) -> tf_agent.LossInfo:
        """Computes the mean loss of rows [B, 1]; boundary rows have weight 0."""
        weights = row_weights(experience, weights)
        rows = first_rows(experience)
        info = rows.policy_info
        advantage = info.advantage
        if self._normalize_advantages == "minibatch":
            advantage = standardize(advantage, weights)
        distribution, value = self.actor_critic(rows.observation)
        log_prob = distribution.log_prob(rows.action)
        surrogate, was_clipped = clipped_surrogate_loss(
            log_prob, info.log_probability, advantage, self._clip_ratio()
        )
        policy = masked_mean(surrogate, weights)
        value = masked_mean(
            value_loss(value, info.value, info.value_target, self._value_clip), weights
        )
        entropy = masked_mean(distribution.entropy(), weights)
        loss_info = self._sum_of_losses(policy, value, entropy)
        loss_info.extra["clip_fraction"] = masked_mean(was_clipped, weights)
        loss_info.extra["approximate_kl"] = masked_mean(info.log_probability - log_prob, weights)
        return loss_info


@agent_factory
def create_ppo_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    learning_rate: Schedule | NonNegative = 3e-4,  # scheduled by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = Adam,  # optimizer class
    clip_ratio: Schedule | NonNegative = 0.2,  # clip range of the probability ratio
    value_clip: Positive | None = None,  # clip range of value changes in a rollout; None: no limit
    value_coefficient: NonNegative = 0.5,  # weight of the squared value error
    entropy_coefficient: NonNegative = 0.0,  # weight of the entropy bonus
    discount: Probability = 0.99,  # gamma
    gae_lambda: Probability = 0.95,  # lambda
    normalize_advantages: Literal["minibatch", "rollout"] | None = "minibatch",
    normalize_returns: bool = False,  # scale rewards with `RewardScaler`
    gradient_clip_norm: Positive | None = 0.5,  # maximum global norm; None: no limit
    accumulate_updates: PositiveInt = 1,  # minibatches whose gradients make one update
    agent_class: Callable[..., PPOAgent] | None = None,  # a subclass; None: PPOAgent
) -> PPOAgent:
    """Creates a PPO-clip agent for discrete or continuous actions; its network is an `ActorCritic`.

    The first five arguments are those of `agent.agent_factory`.

    Args:
      normalize_advantages: Rows over which advantages are standardised: "minibatch", "rollout",
        or None to leave them as they are.

    Raises:
      UserError: If a value is out of its range or is not one of the choices.
    """
    check_arguments(create_ppo_agent, locals())
    del seed
    rate_schedule, clip_schedule = as_schedule(learning_rate), as_schedule(clip_ratio)
    agent = (agent_class or PPOAgent)(
        time_step_spec,
        action_spec,
        actor_critic=ActorCritic(time_step_spec.observation, action_spec),
        optimizer=optimizer(learning_rate=lambda: rate_schedule(env_steps)),
        reward_scaler=RewardScaler(num_envs, discount) if normalize_returns else None,
        clip_ratio=lambda: clip_schedule(env_steps),
        value_clip=value_clip,
        value_coefficient=value_coefficient,
        entropy_coefficient=entropy_coefficient,
        discount=discount,
        gae_lambda=gae_lambda,
        normalize_advantages=normalize_advantages,
        gradient_clip_norm=gradient_clip_norm,
    )
    agent.schedules = {"learning_rate": rate_schedule, "clip_ratio": clip_schedule}
    agent.accumulate(accumulate_updates)
    return agent
