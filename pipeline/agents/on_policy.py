"""Computes advantages and updates statistics in the base class of PPO, A2C, IMPALA and TRPO."""

from __future__ import annotations

import tensorflow as tf
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.acting.policies import GreedyPolicy
from pipeline.agents.agent import Agent
from pipeline.networks.actor_critic import ActorCritic, ActorCriticPolicy, OnPolicyInfo
from pipeline.ops.batches import standardize
from pipeline.ops.normalizers import RewardScaler
from pipeline.ops.optimizers import build_slots
from pipeline.ops.returns import generalized_advantage_estimation, valid_mask


class OnPolicyAgent(Agent):
    """Trains an actor-critic on whole rollouts with generalised advantages.

    Advantages bootstrap with the value of the state after the last row. Where an
    episode was truncated, they bootstrap with the value of its final observation. Rows with a
    return of zero are kept. With reward normalisation, rewards are divided by the standard
    deviation of returns, not of rewards (Engstrom et al. 2020).
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        actor_critic: ActorCritic,
        optimizer: tf.keras.optimizers.legacy.Optimizer,
        gradient_clip_norm: float | None,
        reward_scaler: RewardScaler | None,
        discount: float,
        gae_lambda: float,
        standardize_advantages: bool,
    ):
        """Initializes the agent, its policies and the slots of its optimizer.

        Args:
          time_step_spec: Unbatched spec from the environment.
          action_spec: Spec of one discrete action in [0, n-1], or of continuous actions.
          actor_critic: Network that acts and is trained.
          optimizer: Optimizer of `gradient_variables`.
          gradient_clip_norm: Maximum global norm of the gradients, or None for no limit.
          reward_scaler: Scaler of the rewards, or None for unscaled rewards.
          discount: Discount factor, gamma.
          gae_lambda: Lambda of generalised advantages, in [0, 1]. With 1, value targets are the
            returns of the rollout.
          standardize_advantages: Whether to standardise advantages over the transitions of a
            rollout.
        """
        self.actor_critic = actor_critic
        self._optimizer = optimizer
        self._gradient_clip_norm = gradient_clip_norm
        self._reward_scaler = reward_scaler
        self._discount = discount
        self._lambda = gae_lambda
        self._standardize_advantages = standardize_advantages
        collect_policy = ActorCriticPolicy(time_step_spec, action_spec, actor_critic, True)
        policy = ActorCriticPolicy(time_step_spec, action_spec, actor_critic, False)
        scalar = tf.TensorSpec((), tf.float32)
        super().__init__(
            time_step_spec,
            action_spec,
            GreedyPolicy(policy),
            collect_policy,
            train_sequence_length=1,
            training_data_spec=collect_policy.trajectory_spec.replace(
                policy_info=OnPolicyInfo(scalar, scalar, scalar, scalar)
            ),
        )
        self.trained = {"actor_critic": actor_critic}
        self.normalizer = actor_critic.normalizer
        build_slots(optimizer, self.gradient_variables())

    def prepare(self, rows: Trajectory, final_time_step: TimeStep) -> Trajectory:
        """Adds advantages and value targets to a rollout [T, N].

        It is called once per rollout, with the weights that collected it. See Schulman et al. 2016,
        eq. 16. A boundary row holds the value of the final observation of its episode, with which
        a truncated episode bootstraps (see `returns`).
        """
        valid = valid_mask(rows.step_type)
        info = rows.policy_info
        scaler = self._reward_scaler
        advantage = generalized_advantage_estimation(
            scaler.scale(rows.reward, rows.discount, valid) if scaler else rows.reward,
            self._discount * rows.discount,
            info.value,
            self.actor_critic.value(final_time_step.observation),
            self._lambda,
            valid,
        )
        value_target = advantage + info.value
        if self._standardize_advantages:
            flat = standardize(tf.reshape(advantage, [-1]), tf.reshape(valid, [-1]))
            advantage = tf.reshape(flat, advantage.shape)
        info = info._replace(advantage=advantage, value_target=value_target)
        return rows.replace(policy_info=info)

    def observe(self, rows: Trajectory) -> None:
        """Does nothing, because `finish` updates the normaliser."""

    def finish(self, rows: Trajectory) -> None:
        """Updates the observation statistics.

        All updates of the rollout therefore use the same statistics as the collect policy.
        """
        super().observe(rows)
