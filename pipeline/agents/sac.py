"""Implements soft actor-critic (Haarnoja et al. 2018) for continuous actions.

The agent is TF-Agents' `SacAgent` with other losses. The original losses include boundary rows,
draw from stateful random ops and evaluate the actor three times per update. Here each loss is a
mean over transitions only, the number of the update seeds every draw, and the actor is evaluated
twice.

With images, the twin critics share one encoder, which only the loss of the critics trains. The
actor reads its features through `stop_gradient` (Yarats et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.agents.sac import sac_agent
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline import configuration
from pipeline.acting.policies import GreedyPolicy, SampledPolicy
from pipeline.agents.agent import Agent, Gradients, agent_factory
from pipeline.networks.encoders import create_encoder
from pipeline.networks.initializers import GlorotUniform, Initializer
from pipeline.networks.sac_networks import (
    ActorNetwork,
    ActorPolicy,
    CriticNetwork,
    SquashedGaussianHead,
    squashed_gaussian,
)
from pipeline.ops.batches import clip_by_global_norm, masked_mean, ordered_sum, row_weights, rows_at
from pipeline.ops.normalizers import ObservationNormalizer, create_normalizer
from pipeline.ops.optimizers import Adam, build_slots
from pipeline.ops.randomness import stateless_seed, stream_key
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


def _flatten() -> list[tf.keras.layers.Layer]:
    """Flattens vectors without an encoder; critics and actor have dense layers of their own."""
    return [tf.keras.layers.Flatten()]


def _module_of(variable: tf.Variable) -> tf.Module:
    module = tf.Module(name="alpha")
    module.log_alpha = variable
    return module


class SacAgent(Agent, sac_agent.SacAgent):
    """Implements SAC; see `create_sac_agent`."""

    loss_names = ("critic_loss", "actor_loss", "entropy", "alpha", "q_mean")

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        seed: int,
        actor_units: Sequence[int],
        critic_units: Sequence[int],
        kernel_initializer: Initializer,
        normalizer: ObservationNormalizer | None,
        **kwargs,
    ):
        self.normalizer = normalizer
        observation_spec = time_step_spec.observation
        encoder, target_encoder = (
            create_encoder(observation_spec, normalizer, of_vectors=_flatten) for _ in range(2)
        )
        head = SquashedGaussianHead(action_spec, actor_units, kernel_initializer)

        def critic(name: str, encoder: tf.keras.Sequential) -> CriticNetwork:
            spec = (observation_spec, action_spec)
            return CriticNetwork(spec, encoder, head, critic_units, kernel_initializer, name)

        super().__init__(
            time_step_spec,
            action_spec,
            critic_network=critic("critic_1", encoder),
            critic_network_2=critic("critic_2", encoder),
            target_critic_network=critic("target_critic_1", target_encoder),
            target_critic_network_2=critic("target_critic_2", target_encoder),
            actor_network=ActorNetwork(observation_spec, encoder, head),
            actor_policy_ctor=ActorPolicy,
            **kwargs,
        )
        self.initialize()
        self._noise_key = stream_key(seed, "sac")
        self._policy = GreedyPolicy(self._train_policy)
        self._collect_policy = SampledPolicy(self._train_policy)
        self.trained = {
            "encoder": encoder,
            "critic_1": self._critic_network_1.layers_on_features,
            "critic_2": self._critic_network_2.layers_on_features,
            "actor": head,
            "alpha": _module_of(self._log_alpha),
        } | self.normalizers()
        for name, optimizer in self._optimizers().items():
            build_slots(optimizer, self.gradient_variables()[name])

    @property
    def actor_network(self) -> ActorNetwork:
        """Returns the actor, which maps observations to distributions of actions."""
        return self._actor_network

    @property
    def critics(self) -> tuple[CriticNetwork, CriticNetwork]:
        """Returns both critics, which map observations and actions to Q-values [B]."""
        return self._critic_network_1, self._critic_network_2

    @property
    def target_critics(self) -> tuple[CriticNetwork, CriticNetwork]:
        """Returns the target networks of both critics."""
        return self._target_critic_network_1, self._target_critic_network_2

    def _optimizers(self) -> dict[str, tf.keras.optimizers.legacy.Optimizer]:
        return {
            "critic": self._critic_optimizer,
            "actor": self._actor_optimizer,
            "alpha": self._alpha_optimizer,
        }

    def gradient_variables(self) -> dict[str, list[tf.Variable]]:
        return {
            "critic": [
                *self.trained["encoder"].trainable_weights,
                *self.trained["critic_1"].trainable_weights,
                *self.trained["critic_2"].trainable_weights,
            ],
            "actor": self.actor_network.head.trainable_weights,
            "alpha": [self._log_alpha],
        }

    def _act(self, features: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mean, log_std = self.actor_network.head(features)
        return squashed_gaussian(mean, log_std, noise)

    def _noise(self, batch_size: tf.Tensor) -> tf.Tensor:
        """Draws standard normal noise, [2, B, action size].

        Accumulated batches draw the same noise as one batch with all their rows.
        """
        seed = stateless_seed(self._noise_key, self.train_step_counter)
        size = self.actor_network.head.action_size
        if self.accumulator is None:
            return tf.random.stateless_normal([2, batch_size, size], seed)
        whole = [2, self.accumulator.num_batches * batch_size, size]
        # An inexact resume may have restored more sums than there are batches now.
        number = tf.cast(self.accumulator.summed, tf.int32) % self.accumulator.num_batches
        first = number * batch_size
        return tf.random.stateless_normal(whole, seed)[:, first : first + batch_size]

    def _target(self, experience: Trajectory, noise: tf.Tensor) -> tf.Tensor:
        """Computes r + gamma d (min_i Q_target_i(s', a') - alpha log pi(a'|s')), [B].

        See equations 5 and 6 of the paper.
        """
        next_observation = rows_at(experience.observation, 1)
        next_action, log_prob = self._act(self.actor_network.encoder(next_observation), noise)
        target_features = self.target_critics[0].encoder(next_observation)
        next_value = tf.minimum(
            self.target_critics[0].value(target_features, next_action),
            self.target_critics[1].value(target_features, next_action),
        )
        soft_value = next_value - tf.exp(self._log_alpha) * log_prob
        return experience.reward[:, 0] + self._gamma * experience.discount[:, 0] * soft_value

    def gradients(
        self, experience: Trajectory, weights: tf.Tensor
    ) -> tuple[Gradients, tf_agent.LossInfo]:
        """Computes the gradients of all three losses at the same weights.

        The reference implementation instead updates the networks one after another.
        """
        weights = row_weights(experience, weights)
        variables = self.gradient_variables()
        noise = self._noise(tf.shape(weights)[0])
        target = self._target(experience, noise[0])
        action = self.actor_network.head.from_action(experience.action[:, 0])

        with tf.GradientTape() as tape:
            features = self.actor_network.encoder(rows_at(experience.observation, 0))
            q_1 = self.critics[0].value(features, action)
            q_2 = self.critics[1].value(features, action)
            critic_loss = masked_mean(0.5 * ((q_1 - target) ** 2 + (q_2 - target) ** 2), weights)
        gradients = {"critic": tape.gradient(critic_loss, variables["critic"])}

        features = tf.stop_gradient(features)
        with tf.GradientTape() as tape:
            new_action, log_prob = self._act(features, noise[1])
            value = tf.minimum(
                self.critics[0].value(features, new_action),
                self.critics[1].value(features, new_action),
            )
            alpha = tf.exp(self._log_alpha)
            actor_loss = masked_mean(alpha * log_prob - value, weights)
        gradients["actor"] = tape.gradient(actor_loss, variables["actor"])

        # The gradient of -log(alpha) (log pi + target entropy) with respect to log(alpha): eq. 18
        # in its usual form with log(alpha).
        entropy = -masked_mean(log_prob, weights)
        excess = -masked_mean(log_prob + self._target_entropy, weights)
        gradients["alpha"] = [tf.reshape(excess, self._log_alpha.shape)]
        extra = {
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "entropy": entropy,
            "alpha": alpha,
            "q_mean": masked_mean(q_1, weights),
            "td_error": target - q_1,
        }
        loss = ordered_sum([critic_loss, actor_loss])
        return gradients, tf_agent.LossInfo(loss, extra)

    def apply(self, gradients: Gradients) -> None:
        variables = self.gradient_variables()
        for name, optimizer in self._optimizers().items():
            clipped = clip_by_global_norm(gradients[name], self._gradient_clipping)
            optimizer.apply_gradients(zip(clipped, variables[name], strict=True))
        self.train_step_counter.assign_add(1)
        self._update_target()


@agent_factory
def create_sac_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    learning_rate: Schedule | NonNegative = 3e-4,  # scheduled by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = Adam,  # optimizer class
    actor_units: Sequence[PositiveInt] = (256, 256),  # hidden layers on the encoder's features
    critic_units: Sequence[PositiveInt] = (256, 256),  # hidden layers on features and action
    kernel_initializer: Initializer = GlorotUniform,  # of actor and critics
    discount: Probability = 0.99,  # gamma
    target_update_tau: Fraction = 0.005,  # weight of the online networks in a target update
    target_update_period: PositiveInt = 1,  # updates between two target updates
    initial_alpha: Positive = 1.0,  # initial temperature
    alpha_learning_rate: Schedule | NonNegative | None = None,  # 0: fixed; None: learning_rate
    target_entropy: float | None = None,  # nats, of actions in [-1, 1]; None: minus the action size
    normalize_observations: bool = False,  # by their running mean and variance
    gradient_clip_norm: Positive | None = None,  # global norm of each of the three; None: no limit
    accumulate_updates: PositiveInt = 1,  # batches whose gradients make one update
    agent_class: Callable[..., SacAgent] | None = None,  # a subclass; None: SacAgent
) -> SacAgent:
    """Creates a SAC agent with twin critics and a learnt or fixed temperature, alpha.

    The first five arguments are those of `agent.agent_factory`.

    Raises:
      UserError: If the actions are discrete or unbounded, a number is out of its range, or no
        policy can have the target entropy.
    """
    check_arguments(create_sac_agent, locals())
    del num_envs
    check_actions(action_spec)
    size = int(np.prod(action_spec.shape))
    target_entropy = -float(size) if target_entropy is None else target_entropy
    _check_target_entropy(target_entropy, size)
    if alpha_learning_rate == 0:
        reason = "create_sac_agent.alpha_learning_rate = 0 fixes the temperature"
        configuration.without_effect["create_sac_agent.target_entropy"] = reason
    schedule = as_schedule(learning_rate)
    alpha_schedule = schedule if alpha_learning_rate is None else as_schedule(alpha_learning_rate)
    new_optimizer = partial(optimizer, learning_rate=lambda: schedule(env_steps))
    agent = (agent_class or SacAgent)(
        time_step_spec,
        action_spec,
        seed=seed,
        actor_units=actor_units,
        critic_units=critic_units,
        kernel_initializer=kernel_initializer,
        normalizer=create_normalizer(time_step_spec.observation, normalize_observations),
        critic_optimizer=new_optimizer(),
        actor_optimizer=new_optimizer(),
        alpha_optimizer=optimizer(learning_rate=lambda: alpha_schedule(env_steps)),
        gamma=discount,
        target_update_tau=target_update_tau,
        target_update_period=target_update_period,
        initial_log_alpha=float(np.log(initial_alpha)),
        target_entropy=target_entropy,
        gradient_clipping=gradient_clip_norm,
    )
    agent.schedules = {"learning_rate": schedule}
    if alpha_learning_rate is not None:
        agent.schedules["alpha_learning_rate"] = alpha_schedule
    agent.accumulate(accumulate_updates)
    return agent


def check_actions(action_spec: tensor_spec.BoundedTensorSpec) -> None:
    """Checks that SAC can take the actions.

    Raises:
      UserError: If they are discrete, or their bounds are infinite or coincide.
    """
    if tensor_spec.is_discrete(action_spec):
        raise UserError(
            "SAC needs continuous actions, but the environment's are discrete. Use an agent "
            "for discrete actions (agents/dqn, agents/ppo, ...), or bind a continuous variant of "
            "the environment if there is one."
        )
    with np.errstate(over="ignore"):  # the ends of float32 are a range that float32 cannot hold
        size = np.subtract(action_spec.maximum, action_spec.minimum, dtype=np.float32)
    if not (np.isfinite(size) & (size > 0)).all():
        raise UserError(
            "SAC squashes its actions into the environment's bounds, but in the action space "
            f"[{action_spec.minimum}, {action_spec.maximum}] they are infinite or coincide. Use "
            "agents/ppo, or change the action space with a wrapper of your own (a "
            "gymnasium.ActionWrapper): bound the actions, or remove those with only one value."
        )


def _check_target_entropy(target_entropy: float, size: int) -> None:
    """Checks that policies of `size` actions in [-1, 1] can exceed this entropy.

    Raises:
      UserError: If none can. The temperature would rise without end.
    """
    largest = size * np.log(2.0)
    if target_entropy >= largest:
        raise UserError(
            f"create_sac_agent.target_entropy = {target_entropy:g}: must be below {largest:g}, "
            "the entropy of uniform actions in [-1, 1], in nats. The usual target is minus the "
            f"action size, {-size}."
        )
