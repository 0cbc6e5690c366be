"""Encoders, which are chosen by the observation spec, and the heads that agents put on them.

| observation | encoder |
|---|---|
| rank 0 or 1 | multilayer perceptron |
| stack of uint8 frames of at least 36 pixels a side | Nature CNN (Mnih et al. 2015) |
| any other observation of rank 3 | small CNN with 3x3 filters, on channels-last |
| stack of colour images, rank 4 | small CNN with 3x3 filters, on all frames' channels |
| any other rank | multilayer perceptron on the flattened observation |

Bytes with the whole range, 0 to 255, are scaled to [0, 1] first.

The widths, activations and initialisers of the three encoders are gin parameters, and
`create_encoder.layers` replaces them by layers of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import gin
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tf_agents.networks import network
from tf_agents.specs import tensor_spec
from tf_agents.typing import types

from pipeline.networks.initializers import GlorotUniform, HeUniform, Initializer, layer_initializers
from pipeline.networks.layers import check_layers
from pipeline.ops.observations import (
    is_channels_first,
    is_colour_stack,
    is_frame_stack,
    is_image,
    is_of_bytes,
)
from pipeline.utils.constraints import PositiveInt, check_arguments
from pipeline.utils.errors import UserError


@gin.configurable
def encoder_precision(policy: Literal["float32", "mixed_bfloat16"] = "float32") -> str:
    """Returns the Keras dtype policy of encoders, "float32" or "mixed_bfloat16".

    Args:
      policy: With "mixed_bfloat16" the layers of an encoder compute in bfloat16. Its weights, its
        features and all layers after it stay float32. This is faster only on processors with
        bfloat16 instructions.

    Raises:
      UserError: If `policy` is neither of the two.
    """
    check_arguments(encoder_precision, locals())
    return policy


@gin.configurable
def mlp_encoder(
    units: Sequence[PositiveInt] = (64, 64),  # of the layers
    activation: str = "relu",  # name of a Keras activation
    kernel_initializer: Initializer = GlorotUniform,  # of all kernels
) -> list[tf.keras.layers.Layer]:
    """Creates dense layers for the flattened observation."""
    check_arguments(mlp_encoder, locals())
    check_layers("mlp_encoder", activation)
    policy = encoder_precision()
    layers: list[tf.keras.layers.Layer] = [tf.keras.layers.Flatten(dtype=policy)]
    layers += [
        tf.keras.layers.Dense(n, activation, dtype=policy, **layer_initializers(kernel_initializer))
        for n in units
    ]
    return layers


@gin.configurable
def nature_cnn_encoder(
    filters: Sequence[tuple[int, int, int]] = ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    units: Sequence[PositiveInt] = (512,),
    activation: str = "relu",
    kernel_initializer: Initializer = HeUniform,
    first_padding: int = 0,
) -> list[tf.keras.layers.Layer]:
    """Creates the convolutional network of DQN for stacks of frames.

    See Mnih et al. 2015, "Methods", Model architecture.

    Args:
      filters: (channels, kernel, stride) of each convolution.
      units: Widths of the dense layers.
      activation: Keras name of the activation of all layers.
      kernel_initializer: Initialiser of all kernels.
      first_padding: Zero pixels around each frame; 1 in the program published with the paper.
    """
    check_arguments(nature_cnn_encoder, locals())
    check_layers("nature_cnn_encoder", activation, filters)
    padding = [tf.keras.layers.ZeroPadding2D(first_padding, dtype=encoder_precision())]
    return [
        FramesToChannels(),
        *(padding if first_padding else []),
        *_convolutions(filters, activation, kernel_initializer),
        *mlp_encoder(units, activation, kernel_initializer),
    ]


@gin.configurable(denylist=["side"])
def small_cnn_encoder(
    side: int,
    filters: Sequence[tuple[int, int, int]] = ((16, 3, 1), (32, 3, 1)),
    units: Sequence[PositiveInt] = (128,),
    activation: str = "relu",
    kernel_initializer: Initializer = HeUniform,
    largest_side: PositiveInt = 24,
) -> list[tf.keras.layers.Layer]:
    """Creates a CNN with 3x3 filters for grids [height, width, channels], like MinAtar's network.

    If the longer side exceeds `largest_side`, convolutions of stride 2 come first, as many as are
    needed to reduce it to `largest_side`. Otherwise the dense layer would dominate the network.

    Args:
      side: Longer side of the image, in pixels.
      filters: (channels, kernel, stride) of each convolution.
      units: Widths of the dense layers.
      activation: Keras name of the activation of all layers.
      kernel_initializer: Initialiser of all kernels.
      largest_side: Longest side that needs no convolution of stride 2, in pixels.
    """
    check_arguments(small_cnn_encoder, locals())
    check_layers("small_cnn_encoder", activation, filters)
    halvings = max(0, int(np.ceil(np.log2(side / largest_side))))
    filters = [(filters[0][0], 3, 2)] * halvings + list(filters)
    return [
        *_convolutions(filters, activation, kernel_initializer, padding="same"),
        *mlp_encoder(units, activation, kernel_initializer),
    ]


def _convolutions(
    filters: Sequence[tuple[int, int, int]],
    activation: str,
    kernel_initializer: Initializer,
    padding: str = "valid",
) -> list[tf.keras.layers.Layer]:
    return [
        tf.keras.layers.Conv2D(
            channels, kernel, stride, padding, activation=activation,
            dtype=encoder_precision(), **layer_initializers(kernel_initializer),
        )
        for channels, kernel, stride in filters
    ]  # fmt: skip


class FramesToChannels(tf.keras.layers.Layer):
    """Transposes [B, frames, height, width] to [B, height, width, frames].

    Convolutions on the CPU need NHWC. The layer transposes float32 values: transposing the original
    uint8 values takes twice as long, although they are four times smaller.
    """

    def call(self, frames: tf.Tensor) -> tf.Tensor:
        return tf.transpose(frames, [0, 2, 3, 1])


class ColourFramesToChannels(tf.keras.layers.Layer):
    """Turns [B, frames, height, width, channels] into [B, height, width, frames * channels]."""

    def call(self, frames: tf.Tensor) -> tf.Tensor:
        _, num_frames, height, width, channels = frames.shape
        last = tf.transpose(frames, [0, 2, 3, 1, 4])
        return tf.reshape(last, [-1, height, width, num_frames * channels])


class ToFloat(tf.keras.layers.Layer):
    """Converts any dtype to float32, and multiplies integers by `scale`.

    With a `scale` of 1 / 255, bytes are scaled from [0, 255] to [0, 1]. Floats are not scaled,
    because they are the pixels of an image that has been normalised already. The layer multiplies
    because the graph optimizer rewrites a division as a product, which would make eager and graph
    results differ in the last bit.
    """

    def __init__(self, scale: float = 1.0):
        super().__init__(autocast=False)
        self._scale = scale

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        outputs = tf.cast(inputs, tf.float32)
        scaled = inputs.dtype.is_integer and self._scale != 1.0
        return outputs * self._scale if scaled else outputs


def to_float(observation_spec: tf.TensorSpec) -> ToFloat:
    """Creates the layer that converts observations to float32 and scales bytes to [0, 1]."""
    return ToFloat(1 / 255 if is_of_bytes(observation_spec) else 1.0)


@gin.configurable(denylist=["observation_spec", "of_vectors"])
def create_encoder(
    observation_spec: tf.TensorSpec,
    layers: Callable[[], Sequence[tf.keras.layers.Layer]] | None = None,
    of_vectors: Callable[[], Sequence[tf.keras.layers.Layer]] = mlp_encoder,
) -> tf.keras.Sequential:
    """Creates the encoder for an observation spec: [B, *observation] -> [B, features] float32.

    Args:
      observation_spec: Spec of one observation, without the batch dimension.
      layers: Function that creates the layers of the encoder, which receive float32 observations.
        None chooses `nature_cnn_encoder` for stacks of grey frames, `small_cnn_encoder` for other
        images and the encoder of the agent for all else, which is `mlp_encoder` unless the agent is
        SAC.
      of_vectors: Function that creates the layers for observations that are no images, if `layers`
        is None.

    Raises:
      UserError: If `layers` does not create layers that end with one vector per observation.
      ValueError: If the spec is a nest instead of one tensor.
    """
    if not isinstance(observation_spec, tf.TensorSpec):
        raise ValueError(f"An observation must be one tensor, but its spec is {observation_spec}.")
    if layers is not None:
        chosen = layers()
    elif is_frame_stack(observation_spec):
        chosen = nature_cnn_encoder()
    elif is_colour_stack(observation_spec):
        chosen = [ColourFramesToChannels(), *small_cnn_encoder(max(observation_spec.shape[1:3]))]
    elif is_channels_first(observation_spec):
        chosen = [FramesToChannels(), *small_cnn_encoder(max(observation_spec.shape[1:]))]
    elif is_image(observation_spec):
        chosen = small_cnn_encoder(max(observation_spec.shape[:2]))
    else:
        chosen = of_vectors()
    encoder = tf.keras.Sequential([to_float(observation_spec), *chosen, ToFloat()])
    if layers is not None:
        _check_features(encoder, observation_spec)
    return encoder


def _check_features(encoder: tf.keras.Sequential, observation_spec: tf.TensorSpec) -> None:
    features = encoder(tf.zeros([1, *observation_spec.shape], observation_spec.dtype))
    if features.shape.rank != 2:
        raise UserError(
            f"create_encoder.layers turns an observation into features of shape "
            f"{features.shape[1:]}. They must be one vector: end with tf.keras.layers.Flatten."
        )


class Network(network.Network):
    """TF-Agents network that creates its variables from an observation of zeros.

    TF-Agents' own class draws a random observation, but TensorFlow cannot draw every dtype that a
    `Box` space may have.
    """

    _network_output_spec: types.NestedTensorSpec | None

    def create_variables(self, input_tensor_spec=None, **kwargs):
        """Creates the variables on the first call. Returns the unbatched spec of the outputs."""
        if self._network_output_spec is None:
            spec = self.input_tensor_spec if input_tensor_spec is None else input_tensor_spec
            outputs, _ = self(tensor_spec.zero_spec_nest(spec, outer_dims=[1]), **kwargs)
            self._network_output_spec = tf.nest.map_structure(
                lambda x: tf.TensorSpec(x.shape[1:], x.dtype), outputs
            )
        return self._network_output_spec


class HeadedNetwork(Network):
    """Network of an encoder and a head: [B, *observation] -> [B, features] -> the head's output."""

    def __init__(
        self,
        observation_spec: types.NestedTensorSpec,
        encoder: tf.keras.layers.Layer,
        head: tf.keras.layers.Layer,
        name: str,
    ):
        super().__init__(input_tensor_spec=observation_spec, state_spec=(), name=name)
        self.encoder = encoder
        self.head = head

    def call(self, observation, step_type=None, network_state=(), training=False):
        del step_type, training  # no layer is recurrent or specific to training
        return self.head(self.encoder(observation)), network_state


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
    """Policy head for discrete actions: [B, features] -> a distribution over 0 .. n-1."""

    def __init__(self, action_spec: tensor_spec.BoundedTensorSpec, kernel_initializer: Initializer):
        super().__init__()
        self._dtype_of_action = action_spec.dtype
        self.logits = tf.keras.layers.Dense(
            num_actions(action_spec), **layer_initializers(kernel_initializer)
        )

    def call(self, features: tf.Tensor) -> tfp.distributions.Distribution:
        return tfp.distributions.Categorical(self.logits(features), dtype=self._dtype_of_action)


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
    """

    def __init__(
        self,
        action_spec: tensor_spec.BoundedTensorSpec,
        kernel_initializer: Initializer,
        initial_log_std: float = 0.0,
    ):
        super().__init__()
        self._shape = action_spec.shape
        size = int(np.prod(action_spec.shape))
        self.mean = tf.keras.layers.Dense(size, **layer_initializers(kernel_initializer))
        self.log_std = self.add_weight(
            "log_std", (size,), initializer=tf.keras.initializers.Constant(initial_log_std)
        )

    def call(self, features: tf.Tensor) -> tfp.distributions.Distribution:
        shape = [-1, *self._shape]
        mean = tf.reshape(self.mean(features), shape)
        std = tf.reshape(tf.exp(self.log_std), self._shape)
        normal = tfp.distributions.Normal(mean, tf.broadcast_to(std, tf.shape(mean)))
        return tfp.distributions.Independent(normal, len(self._shape))


def create_policy_head(
    action_spec: tensor_spec.BoundedTensorSpec, kernel_initializer: Initializer
) -> tf.keras.layers.Layer:
    """Creates a categorical head for discrete actions, or a Gaussian head for continuous ones."""
    head = CategoricalHead if tensor_spec.is_discrete(action_spec) else GaussianHead
    return head(action_spec, kernel_initializer)


def num_actions(action_spec: tensor_spec.BoundedTensorSpec) -> int:
    """Returns the number of actions of a discrete spec [0, n-1]."""
    return int(action_spec.maximum - action_spec.minimum) + 1
