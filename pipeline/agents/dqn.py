"""Implements DQN (Mnih et al. 2015) and Double DQN (van Hasselt et al. 2015) with n-step targets.

The agent is TF-Agents' `DqnAgent` with another loss. In the original loss, the n-step sum continues
across the end of a truncated episode into the next episode, and the target network is evaluated
twice per update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.agents.dqn import dqn_agent
from tf_agents.policies import q_policy
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.acting.policies import EpsilonGreedyPolicy, GreedyPolicy
from pipeline.agents.agent import Agent, Gradients, agent_factory
from pipeline.agents.q_learning import (
    check_td_loss,
    create_q_network,
    huber_loss,
    need_discrete_actions,
    select_action,
)
from pipeline.agents.target_network import PeriodicTarget
from pipeline.networks.encoders import QNetwork
from pipeline.ops.batches import masked_mean, row_weights, rows_at
from pipeline.ops.normalizers import ObservationNormalizer, create_normalizer
from pipeline.ops.optimizers import Adam, build_slots
from pipeline.ops.returns import n_step_targets, take_rows
from pipeline.ops.schedules import Schedule, as_schedule
from pipeline.utils.constraints import (
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
)
from pipeline.utils.errors import UserError


class DqnAgent(Agent, dqn_agent.DqnAgent):
    """Implements the DQN agent; see `create_dqn_agent`."""

    loss_names = ("loss", "q_mean", "gradient_norm")

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        optimizer: tf.keras.optimizers.legacy.Optimizer,
        epsilon: Callable[[], tf.Tensor],
        td_loss: Callable[[tf.Tensor], tf.Tensor],
        double_q: bool,
        gradient_clip_norm: float | None,
        sum_losses: bool,
        normalizer: ObservationNormalizer | None,
        target_update_env_steps: int | None,
        env_steps: tf.Variable,
        **kwargs,
    ):
        self._epsilon = epsilon
        self._td_loss_fn = td_loss
        self._double_q = double_q
        self._gradient_clip_norm = gradient_clip_norm
        self.takes_mean = not sum_losses
        self.normalizer = normalizer
        specs = time_step_spec.observation, action_spec
        super().__init__(
            time_step_spec,
            action_spec,
            q_network=create_q_network(*specs, normalizer, "q_network"),
            target_q_network=create_q_network(*specs, normalizer, "target_q_network"),
            optimizer=optimizer,
            **kwargs,
        )
        self.initialize()
        self.trained = {"q_network": self._q_network} | self.normalizers()
        build_slots(optimizer, self._q_network.trainable_weights)
        self._periodic_target: PeriodicTarget | None = None
        if target_update_env_steps is not None:  # as in DQN 3.0
            self._periodic_target = PeriodicTarget(
                self.q_network, self.target_q_network, target_update_env_steps, env_steps.read_value
            )

    @property
    def q_network(self) -> QNetwork:
        """Returns the online network, which maps observations to Q-values."""
        return self._q_network

    @property
    def target_q_network(self) -> QNetwork:
        """Returns the target network."""
        return self._target_q_network

    def _setup_policy(self, time_step_spec, action_spec, *unused):
        policy = q_policy.QPolicy(time_step_spec, action_spec, q_network=self._q_network)
        return GreedyPolicy(policy), EpsilonGreedyPolicy(policy, self._epsilon)

    def _loss(self, experience: Trajectory, weights=None, **unused) -> tf_agent.LossInfo:
        """Computes the temporal-difference loss of sequences [B, n+1].

        Sequences that start at a boundary row have weight 0.
        """
        weights = row_weights(experience, weights)
        returns, discounts, last_index = n_step_targets(
            tf.transpose(experience.reward),
            tf.transpose(experience.discount),
            tf.transpose(experience.step_type),
            self._gamma,
        )
        bootstrap_observation = self._bootstrap_observation(experience, last_index)
        target = returns + discounts * self._bootstrap_value(bootstrap_observation)
        q_values, _ = self._q_network(rows_at(experience.observation, 0))
        q_taken = select_action(q_values, experience.action[:, 0])
        td_error = tf.stop_gradient(target) - q_taken
        losses = self._td_loss_fn(td_error)
        loss = masked_mean(losses, weights) if self.takes_mean else tf.reduce_sum(losses * weights)
        extra = {"loss": loss, "q_mean": masked_mean(q_taken, weights), "td_error": td_error}
        return tf_agent.LossInfo(loss, extra)

    def _bootstrap_observation(self, experience: Trajectory, index: tf.Tensor) -> Any:
        if self.train_sequence_length == 2:
            return rows_at(experience.observation, 1)  # the index is 1 unless the row is masked
        return take_rows(experience.observation, index)

    def _bootstrap_value(self, observation: Any) -> tf.Tensor:
        target_q_values, _ = self.target_q_network(observation)
        if not self._double_q:
            return tf.reduce_max(target_q_values, -1)
        q_values, _ = self._q_network(observation)
        return select_action(target_q_values, tf.argmax(q_values, -1))

    def _train(self, experience: Trajectory, weights: tf.Tensor) -> tf_agent.LossInfo:
        if self._periodic_target is not None:
            self._periodic_target.update(self.accumulator)
        return super()._train(experience, weights)

    def apply(self, gradients: Gradients) -> None:
        super().apply(gradients)
        self._update_target()


@agent_factory
def create_dqn_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    epsilon: Schedule | Probability = 0.1,  # probability of a random action
    learning_rate: Schedule | NonNegative = 1e-4,  # scheduled by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = Adam,  # optimizer class
    double_q: bool = False,  # Double DQN: the online network chooses the bootstrap action
    n_step: PositiveInt = 1,  # rewards before the bootstrap value; fewer if the episode ends
    discount: Probability = 0.99,  # gamma
    td_loss: Callable[[tf.Tensor], tf.Tensor] = huber_loss,  # loss of each error
    sum_losses: bool = False,  # sum the losses of a batch instead of averaging them
    target_update_period: PositiveInt | None = 10_000,
    target_update_env_steps: PositiveInt | None = None,  # environment steps between whole copies
    target_update_tau: Fraction = 1.0,  # weight of the online network in a target update
    normalize_observations: bool = False,  # by their running mean and variance
    gradient_clip_norm: Positive | None = None,  # maximum global norm; None: no limit
    accumulate_updates: PositiveInt = 1,  # batches whose gradients make one update
    agent_class: Callable[..., DqnAgent] | None = None,  # a subclass; None: DqnAgent
) -> DqnAgent:
    """Creates a DQN agent or, with `double_q`, a Double DQN agent.

    The first five arguments are those of `agent.agent_factory`.

    Args:
      target_update_period: Updates between updates of the target network, or None to count
        environment steps instead (`target_update_env_steps`).

    Raises:
      UserError: If the actions are not discrete, a number is out of its range, `td_loss` is no loss
        of errors [B], or the settings of target updates contradict each other.
    """
    check_arguments(create_dqn_agent, locals())
    del num_envs, seed
    _check_target(target_update_period, target_update_env_steps, target_update_tau)
    need_discrete_actions(action_spec, "DQN")
    check_td_loss(td_loss, "create_dqn_agent.td_loss")
    epsilon_schedule, rate_schedule = as_schedule(epsilon), as_schedule(learning_rate)
    agent = (agent_class or DqnAgent)(
        time_step_spec,
        action_spec,
        optimizer=optimizer(learning_rate=lambda: rate_schedule(env_steps)),
        epsilon=lambda: epsilon_schedule(env_steps),
        td_loss=td_loss,
        double_q=double_q,
        target_update_period=target_update_period,
        target_update_env_steps=target_update_env_steps,
        target_update_tau=target_update_tau,
        env_steps=env_steps,
        sum_losses=sum_losses,
        normalizer=create_normalizer(time_step_spec.observation, normalize_observations),
        n_step_update=n_step,
        gamma=discount,
        gradient_clip_norm=gradient_clip_norm,
    )
    agent.schedules = {"epsilon": epsilon_schedule, "learning_rate": rate_schedule}
    agent.accumulate(accumulate_updates)
    return agent


def _check_target(period: int | None, env_steps: int | None, tau: float) -> None:
    if (period is None) == (env_steps is None):
        raise UserError(
            "Bind one of create_dqn_agent.target_update_period (in updates) and "
            "create_dqn_agent.target_update_env_steps to a number, and the other to None."
        )
    if env_steps is not None and tau != 1:
        raise UserError(
            f"create_dqn_agent.target_update_tau = {tau}, but with target_update_env_steps all "
            "weights are copied to the target network. Bind target_update_tau to 1, or bind "
            "target_update_period instead of target_update_env_steps."
        )
