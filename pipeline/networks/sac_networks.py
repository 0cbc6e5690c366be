"""Defines networks of SAC: a squashed Gaussian actor, and critics that may share an encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tf_agents.policies import tf_policy
from tf_agents.trajectories.policy_step import PolicyStep

from pipeline.networks.encoders import Network
from pipeline.networks.initializers import Initializer, layer_initializers

LOG_STD_RANGE = (-20.0, 2.0)


def squashed_gaussian(
    mean: tf.Tensor, log_std: tf.Tensor, noise: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes a = tanh(mean + std * noise), [B, A] in [-1, 1], and its log-density [B].

    See Haarnoja et al. 2018, appendix C, eq. 26. Here log(1 - tanh(u)^2) is computed in a form that
    does not overflow: 2 (log 2 - u - softplus(-2u)).
    """
    u = mean + tf.exp(log_std) * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    log_det = 2.0 * (np.log(2.0) - u - tf.nn.softplus(-2.0 * u))
    return tf.tanh(u), tf.reduce_sum(log_normal - log_det, -1)


class SquashedGaussian(tfp.distributions.TransformedDistribution):
    """Uses the transformed mean of a transformed Gaussian as its mode."""

    def _mode(self):
        return self.bijector.forward(self.distribution.mode())


class SquashedGaussianHead(tf.keras.layers.Layer):
    """Computes a policy's Gaussian, which is squashed into the bounds of the action spec.

    It maps [B, features] to the mean and the log standard deviation before squashing.
    """

    def __init__(self, action_spec, units: Sequence[int], kernel_initializer: Initializer):
        super().__init__()
        self._spec = action_spec
        self.action_size = int(np.prod(action_spec.shape))
        self.hidden = _dense_stack(units, kernel_initializer)
        self.parameters = tf.keras.layers.Dense(
            2 * self.action_size, **layer_initializers(kernel_initializer)
        )

    def call(self, features: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean and log standard deviation before squashing, each [B, action size]."""
        mean, log_std = tf.split(self.parameters(self.hidden(features)), 2, -1)
        return mean, tf.clip_by_value(log_std, *LOG_STD_RANGE)

    def from_action(self, action: tf.Tensor) -> tf.Tensor:
        """Maps actions from the bounds of the action spec to [-1, 1], flat [B, action size]."""
        low, high = self._spec.minimum, self._spec.maximum
        squashed = (action - low) / (high - low) * 2.0 - 1.0
        return tf.reshape(squashed, [-1, self.action_size])

    def distribution(self, mean: tf.Tensor, log_std: tf.Tensor) -> SquashedGaussian:
        """Returns the distribution of actions [B, *action] within the bounds of the action spec."""
        shape = [-1, *self._spec.shape]
        normal = tfp.distributions.Normal(
            tf.reshape(mean, shape), tf.reshape(tf.exp(log_std), shape)
        )
        low, high = tf.constant(self._spec.minimum), tf.constant(self._spec.maximum)
        scale, shift = tfp.bijectors.Scale((high - low) / 2), tfp.bijectors.Shift((high + low) / 2)
        return SquashedGaussian(
            tfp.distributions.Independent(normal, len(self._spec.shape)),
            tfp.bijectors.Chain([shift, scale, tfp.bijectors.Tanh()]),
        )


class ActorNetwork(Network):
    """Computes mean and log standard deviation of the actor from observations.

    The encoder belongs to the critics, so the actor passes no gradient to it.
    """

    def __init__(self, observation_spec, encoder, head: SquashedGaussianHead):
        super().__init__(observation_spec, state_spec=(), name="actor")
        self.encoder = encoder
        self.head = head

    def call(self, observation, step_type=None, network_state=(), training=False):
        del step_type, training
        return self.head(tf.stop_gradient(self.encoder(observation))), network_state


class ActorPolicy(tf_policy.TFPolicy):
    """Acts with an `ActorNetwork`; TF-Agents' `SacAgent` determines the constructor's arguments."""

    def __init__(self, time_step_spec, action_spec, actor_network: ActorNetwork, training: bool):
        del training  # no layer behaves differently in training
        super().__init__(time_step_spec, action_spec, clip=False)
        self._actor_network = actor_network

    def _variables(self):
        return self._actor_network.variables

    def _distribution(self, time_step, policy_state):
        parameters, _ = self._actor_network(time_step.observation)
        return PolicyStep(self._actor_network.head.distribution(*parameters), policy_state)


class CriticNetwork(Network):
    """Computes Q-values [B] of observations and actions.

    Actions within the bounds of the action spec are flattened and mapped to [-1, 1] first.
    """

    def __init__(self, input_spec, encoder, actor_head, units, kernel_initializer, name):
        super().__init__(input_spec, state_spec=(), name=name)
        self.encoder = encoder
        self._from_action = actor_head.from_action
        self.layers_on_features = _dense_stack([*units, 1], kernel_initializer, linear_last=True)

    def value(self, features: tf.Tensor, squashed_action: tf.Tensor) -> tf.Tensor:
        """Computes Q-values [B] from features [B, F] and actions in [-1, 1], [B, A]."""
        inputs = tf.concat([features, squashed_action], -1)
        return tf.squeeze(self.layers_on_features(inputs), -1)

    def call(self, inputs, step_type=None, network_state=(), training=False):
        del step_type, training
        observation, action = inputs
        return self.value(self.encoder(observation), self._from_action(action)), network_state


def _dense_stack(
    units: Sequence[int], kernel_initializer: Initializer, linear_last: bool = False
) -> tf.keras.Sequential:
    """Creates dense layers [B, F] -> [B, units[-1]] with ReLU activations.

    With `linear_last`, the last layer has no activation.
    """
    activations = ["relu"] * len(units)
    if linear_last:
        activations[-1] = "linear"
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(n, activation, **layer_initializers(kernel_initializer))
            for n, activation in zip(units, activations, strict=True)
        ]
    )
