"""Implements batched one-step and n-step Q-learning of the A3C paper (Mnih et al. 2016).

All environments step together for `Rollout.num_steps`, the paper's t_max. The whole rollout makes
one update. The target of a transition sums the rewards to the end of the rollout or of the episode,
and bootstraps there with the target network (algorithm S2). In one-step Q-learning it bootstraps
after one step (algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.policies import q_policy
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import StepType, TimeStep, Trajectory

from pipeline.acting.policies import EpsilonGreedyPolicy, GreedyPolicy
from pipeline.agents.agent import Agent, agent_factory
from pipeline.agents.q_learning import (
    check_td_loss,
    create_q_network,
    need_discrete_actions,
    select_action,
    squared_loss,
)
from pipeline.agents.target_network import PeriodicTarget
from pipeline.ops.batches import first_rows, masked_mean, row_weights
from pipeline.ops.normalizers import ObservationNormalizer, create_normalizer
from pipeline.ops.optimizers import RMSprop, build_slots
from pipeline.ops.returns import discounted_returns, one_step_targets, valid_mask
from pipeline.ops.schedules import Schedule, as_schedule
from pipeline.utils.constraints import (
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
)


class QLearningInfo(NamedTuple):
    """Targets that `prepare` adds to the training rows, as their policy info."""

    value_target: tf.Tensor | tf.TensorSpec  # float32


class NStepQAgent(Agent):
    """Implements the agent of one-step and n-step Q-learning; see `create_nstep_q_agent`."""

    loss_names = ("loss", "q_mean", "gradient_norm")
    needs_whole_rollouts = True
    learns_off_policy = True  # the paper's actors collect with older weights, too

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        optimizer: tf.keras.optimizers.legacy.Optimizer,
        epsilon: Callable[[], tf.Tensor],
        td_loss: Callable[[tf.Tensor], tf.Tensor],
        one_step: bool,
        discount: float,
        target_update_env_steps: int,
        gradient_clip_norm: float | None,
        env_steps: tf.Variable,
        normalizer: ObservationNormalizer | None,
    ):
        self.normalizer = normalizer
        specs = time_step_spec.observation, action_spec
        self.q_network = create_q_network(*specs, normalizer, "q_network")
        self.target_q_network = create_q_network(*specs, normalizer, "target_q_network")
        for network in (self.q_network, self.target_q_network):
            network.create_variables()
        self._optimizer = optimizer
        self._td_loss_fn = td_loss
        self._one_step = one_step
        self._discount = discount
        self._gradient_clip_norm = gradient_clip_norm
        policy = q_policy.QPolicy(time_step_spec, action_spec, q_network=self.q_network)
        collect_policy = EpsilonGreedyPolicy(policy, epsilon)
        super().__init__(
            time_step_spec,
            action_spec,
            GreedyPolicy(policy),
            collect_policy,
            train_sequence_length=1,
            training_data_spec=collect_policy.trajectory_spec.replace(
                policy_info=QLearningInfo(tf.TensorSpec((), tf.float32))
            ),
        )
        self.trained = {"q_network": self.q_network} | self.normalizers()
        self._periodic_target = PeriodicTarget(
            self.q_network, self.target_q_network, target_update_env_steps, env_steps.read_value
        )
        self.target_q_network.set_weights(self.q_network.get_weights())
        build_slots(optimizer, self.gradient_variables())

    def share_target(self, shared: Agent) -> None:
        """Uses the target network of `shared`; see `Agent.share_target`."""
        assert isinstance(shared, NStepQAgent)
        self.target_q_network = shared.target_q_network
        self._periodic_target = shared._periodic_target

    def prepare(self, rows: Trajectory, final_time_step: TimeStep) -> Trajectory:
        """Updates the target network if a copy is due, and adds the targets to a rollout [T, N]."""
        self._periodic_target.update(self.accumulator)
        find = self._all_values if self._one_step else self._values_at_ends
        values, final_value = find(rows, final_time_step.observation)
        discounts = self._discount * rows.discount
        if self._one_step:
            targets = one_step_targets(rows.reward, discounts, values, final_value)
        else:
            valid = valid_mask(rows.step_type)
            targets = discounted_returns(rows.reward, discounts, final_value, valid, values)
        return rows.replace(policy_info=QLearningInfo(targets))

    def _all_values(self, rows: Trajectory, final: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes max_a Q_target of every row [T, N] and of the final time step [N]."""

        def together(of_rows: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
            return tf.concat([tf.reshape(of_rows, [-1, *last.shape[1:]]), last], 0)

        values = self._target_value(tf.nest.map_structure(together, rows.observation, final))
        num_rows = rows.step_type.shape.num_elements()
        return tf.reshape(values[:num_rows], rows.step_type.shape), values[num_rows:]

    def _values_at_ends(self, rows: Trajectory, final: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes the values that n-step targets read.

        The result is that of `_all_values`, with 0 on all rows that are not boundary rows.
        """
        ends = tf.where(rows.step_type == StepType.LAST)

        def together(of_rows: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
            return tf.concat([last, tf.gather_nd(of_rows, ends)], 0)

        values = self._target_value(tf.nest.map_structure(together, rows.observation, final))
        num_envs = rows.step_type.shape[1]
        at_ends = tf.scatter_nd(ends, values[num_envs:], tf.shape(rows.step_type, tf.int64))
        return tf.ensure_shape(at_ends, rows.step_type.shape), values[:num_envs]

    def _target_value(self, observation: Any) -> tf.Tensor:
        q_values, _ = self.target_q_network(observation)
        return tf.reduce_max(q_values, -1)

    def _loss(self, experience: Trajectory, weights=None, **unused) -> tf_agent.LossInfo:
        """Computes the mean temporal-difference loss of rows [B, 1].

        Boundary rows have weight 0.
        """
        weights = row_weights(experience, weights)
        rows = first_rows(experience)
        q_values, _ = self.q_network(rows.observation)
        q_taken = select_action(q_values, rows.action)
        loss = masked_mean(self._td_loss_fn(rows.policy_info.value_target - q_taken), weights)
        extra = {"loss": loss, "q_mean": masked_mean(q_taken, weights)}
        return tf_agent.LossInfo(loss, extra)


@agent_factory
def create_nstep_q_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    epsilon: Schedule | Probability = 0.1,  # probability of a random action
    learning_rate: Schedule | NonNegative = 7e-4,  # scheduled by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = RMSprop,  # optimizer class
    one_step: bool = False,  # bootstrap after one step, not at the end of rollout or episode
    discount: Probability = 0.99,  # gamma
    td_loss: Callable[[tf.Tensor], tf.Tensor] = squared_loss,  # loss of each error
    target_update_env_steps: PositiveInt = 10_000,  # environment steps between copies
    normalize_observations: bool = False,  # by their running mean and variance
    gradient_clip_norm: Positive | None = None,  # maximum global norm; None: no limit
    accumulate_updates: PositiveInt = 1,  # rollouts whose gradients make one update
    agent_class: Callable[..., NStepQAgent] | None = None,  # a subclass; None: NStepQAgent
) -> NStepQAgent:
    """Creates an agent of n-step Q-learning or, with `one_step`, of one-step Q-learning.

    The first five arguments are those of `agent.agent_factory`.

    Raises:
      UserError: If the actions are not discrete, a number is out of its range, or `td_loss` is no
        loss of errors [B].
    """
    check_arguments(create_nstep_q_agent, locals())
    del num_envs, seed
    need_discrete_actions(action_spec, "n-step Q-learning")
    check_td_loss(td_loss, "create_nstep_q_agent.td_loss")
    epsilon_schedule, rate_schedule = as_schedule(epsilon), as_schedule(learning_rate)
    agent = (agent_class or NStepQAgent)(
        time_step_spec,
        action_spec,
        optimizer=optimizer(learning_rate=lambda: rate_schedule(env_steps)),
        epsilon=lambda: epsilon_schedule(env_steps),
        td_loss=td_loss,
        one_step=one_step,
        discount=discount,
        target_update_env_steps=target_update_env_steps,
        gradient_clip_norm=gradient_clip_norm,
        env_steps=env_steps,
        normalizer=create_normalizer(time_step_spec.observation, normalize_observations),
    )
    agent.schedules = {"epsilon": epsilon_schedule, "learning_rate": rate_schedule}
    agent.accumulate(accumulate_updates)
    return agent
