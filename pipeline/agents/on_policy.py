"""What PPO, A2C and TRPO share: a rollout, its advantages, and when statistics move."""

from __future__ import annotations

import tensorflow as tf
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.actor_critic import ActorCritic, ActorCriticPolicy, OnPolicyInfo
from pipeline.agents.agent import Agent, standardize
from pipeline.normalizers import RewardScaler
from pipeline.optimizers import build_slots
from pipeline.policies import GreedyPolicy
from pipeline.returns import generalized_advantage_estimation, valid_mask


def actor_critic_loss(
    policy_loss: tf.Tensor,
    value_loss: tf.Tensor,
    entropy: tf.Tensor,
    value_coefficient: float,
    entropy_coefficient: float,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """policy_loss + c_v value_loss - c_e entropy, scalars, and all four by their names in a log."""
    loss = policy_loss + value_coefficient * value_loss - entropy_coefficient * entropy
    extra = {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
    }
    return loss, extra


class OnPolicyAgent(Agent):
    """An agent of policy and value that learns from one rollout after the other.

    Generalised advantages bootstrap with the value of the state after the last row, and with that
    of the final observation where an episode was truncated; rows with a zero return are kept;
    returns, not rewards, set the scale of reward normalisation (Engstrom et al. 2020).
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
        """Args:
        time_step_spec: unbatched, from the environment.
        action_spec: one discrete action in [0, n-1], or continuous actions.
        actor_critic: what acts and what is trained.
        optimizer: of all that is trained.
        gradient_clip_norm: global norm; None: no limit.
        reward_scaler: None: rewards as they are.
        discount: gamma.
        gae_lambda: lambda of generalised advantages, in [0, 1]; 1 gives the returns of the rollout.
        standardize_advantages: over the transitions of a rollout.
        """
        self._actor_critic = actor_critic
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
            train_step_counter=tf.Variable(0, dtype=tf.int64, name="updates"),
        )
        self.trained = {"actor_critic": actor_critic}
        build_slots(optimizer, self.gradient_variables())

    def prepare(self, rows: Trajectory, final_time_step: TimeStep) -> Trajectory:
        """Adds advantages and value targets to a rollout [T, N]; once, with collecting weights.

        Schulman et al. 2016, eq. 16. A boundary row holds the value of the final observation of
        its episode, which is what a truncated episode bootstraps with (see `returns`).
        """
        valid = valid_mask(rows.step_type)
        info = rows.policy_info
        scaler = self._reward_scaler
        advantage = generalized_advantage_estimation(
            scaler.scale(rows.reward, valid) if scaler else rows.reward,
            self._discount * rows.discount,
            info.value,
            self._actor_critic.value(final_time_step.observation),
            self._lambda,
            valid,
        )
        value_target = advantage + info.value
        if self._standardize_advantages:
            flat = standardize(tf.reshape(advantage, [-1]), tf.reshape(valid, [-1]))
            advantage = tf.reshape(flat, advantage.shape)
        info = info._replace(advantage=advantage, value_target=value_target)
        return rows.replace(policy_info=info)

    def finish(self, rows: Trajectory) -> None:
        """Observation statistics move only now: all updates saw what the collecting policy saw."""
        moments = self._actor_critic.observation_moments
        if moments is not None:
            flat = tf.reshape(rows.observation, [-1, *rows.observation.shape[2:]])
            moments.update(flat, tf.reshape(valid_mask(rows.step_type), [-1]))
