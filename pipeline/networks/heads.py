"""Heads that agents put on encoders: Q-values, state values and policies."""

from __future__ import annotations

import gin
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tf_agents.specs import tensor_spec

from pipeline.networks.initializers import GlorotUniform, Initializer, layer_initializers
from pipeline.ops.masks import mask_out


@gin.configurable(denylist=["num_actions"])
class QHead(tf.keras.layers.Layer):
    """Head for Q-values: [B, features] -> [B, actions] float32.

    Args:
      num_actions: Number of discrete actions.
      kernel_initializer: Initialiser of the kernel.
    """

    def __init__(self, num_actions: int, kernel_initializer: Initializer = GlorotUniform):
        super().__init__()
        self.q_values = tf.keras.layers.Dense(num_actions, **layer_initializers(kernel_initializer))

    def call(self, features: tf.Tensor) -> tf.Tensor:
        return self.q_values(features)


class ValueHead(tf.keras.layers.Layer):
    """Head for state values: [B, features] -> [B] float32."""

    def __init__(self, kernel_initializer: Initializer = GlorotUniform):
        super().__init__()
        self.value = tf.keras.layers.Dense(1, **layer_initializers(kernel_initializer))

    def call(self, features: tf.Tensor) -> tf.Tensor:
        return tf.squeeze(self.value(features), -1)


class CategoricalHead(tf.keras.layers.Layer):
    """Policy head for one or several discrete actions: [B, features] -> a distribution.

    Several actions are independent of each other. Each has its own logits.
    """

    def __init__(self, action_spec: tensor_spec.BoundedTensorSpec, kernel_initializer: Initializer):
        super().__init__()
        self._dtype_of_action = action_spec.dtype
        sizes = np.broadcast_to(action_spec.maximum + 1, action_spec.shape)
        self._shape = [*action_spec.shape, int(sizes.max(initial=1))]
        # All actions have as many logits as the largest one. The unused logits are masked.
        self._exists = np.arange(self._shape[-1]) < sizes[..., np.newaxis]
        self.logits = tf.keras.layers.Dense(
            int(np.prod(self._shape)), **layer_initializers(kernel_initializer)
        )

    def call(
        self, features: tf.Tensor, mask: tf.Tensor | None = None
    ) -> tfp.distributions.Distribution:
        rank = len(self._shape) - 1
        logits = tf.reshape(self.logits(features), [-1, *self._shape])
        # Environments with a mask have a single discrete action.
        logits = mask_out(logits, self._exists if rank else mask)
        actions = tfp.distributions.Categorical(logits, dtype=self._dtype_of_action)
        return tfp.distributions.Independent(actions, rank) if rank else actions


@gin.configurable(denylist=["action_spec", "kernel_initializer"])
class GaussianHead(tf.keras.layers.Layer):
    """Policy head for continuous actions: [B, features] -> a diagonal Gaussian.

    See Schulman et al. 2017, section 6.1. The standard deviation is learnt and does not depend on
    the state. Actions are not squashed. The collect driver clips the actions that it passes to the
    environment.

    Args:
      action_spec: Spec of the actions.
      kernel_initializer: Initialiser of the kernel of the mean.
      initial_log_std: Logarithm of the standard deviation at the start.
      scale_actions: Whether to scale the mean and the standard deviation to the bounds of the
        action, so that -1 and 1 are the bounds. Actions without finite bounds are not scaled:
        for these, a mean of 0 is the value within the bounds that is nearest to 0.
    """

    def __init__(
        self,
        action_spec: tensor_spec.BoundedTensorSpec,
        kernel_initializer: Initializer,
        initial_log_std: float = 0.0,
        scale_actions: bool = True,
    ):
        super().__init__()
        self._shape = action_spec.shape
        self._units = _units(action_spec) if scale_actions else None
        size = int(np.prod(action_spec.shape))
        self.mean = tf.keras.layers.Dense(size, **layer_initializers(kernel_initializer))
        self.log_std = self.add_weight(
            "log_std", (size,), initializer=tf.keras.initializers.Constant(initial_log_std)
        )

    def call(
        self, features: tf.Tensor, mask: tf.Tensor | None = None
    ) -> tfp.distributions.Distribution:
        del mask  # environments with a mask have a single discrete action
        shape = [-1, *self._shape]
        mean = tf.reshape(self.mean(features), shape)
        std = tf.reshape(tf.exp(self.log_std), self._shape)
        if self._units is not None:
            half, middle = self._units
            mean, std = middle + half * mean, half * std
        normal = tfp.distributions.Normal(mean, tf.broadcast_to(std, tf.shape(mean)))
        return tfp.distributions.Independent(normal, len(self._shape))


def _units(action_spec: tensor_spec.BoundedTensorSpec) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns half of the distance between the bounds, and their middle.

    Returns:
      float32 arrays that broadcast to the action. Where the distance is 0, or its square overflows,
      they are 1 and the value within the bounds that is nearest to 0. None if no action is scaled
      or moved.
    """
    low, high = action_spec.minimum, action_spec.maximum
    with np.errstate(over="ignore", invalid="ignore"):
        half, middle = (high - low) / 2, (high + low) / 2
        has_units = np.isfinite(np.square(half, dtype=np.float32)) & (half > 0)
    half, middle = np.where(has_units, half, 1), np.where(has_units, middle, np.clip(0, low, high))
    if (half == 1).all() and (middle == 0).all():
        return None
    return half.astype(np.float32), middle.astype(np.float32)
