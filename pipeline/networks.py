"""Encoders chosen from the observation spec, and the heads that agents put on them.

| observation | encoder |
|---|---|
| rank 0 or 1 | multilayer perceptron |
| stack of uint8 frames of 36 pixels or more a side | Nature CNN (Mnih et al. 2015) |
| any other rank 3 | small CNN of 3x3 filters |
| any other rank | flattened into the multilayer perceptron |

Bytes of the whole range, 0 to 255, are scaled to [0, 1] first.

Widths, activations and initialisers are gin bindings of the three encoders.
"""

from __future__ import annotations

from collections.abc import Sequence

import gin
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tf_agents.networks import network
from tf_agents.specs import tensor_spec
from tf_agents.typing import types

from pipeline.errors import check_choice
from pipeline.initializers import GlorotUniform, HeUniform, Initializer, layer_initializers
from pipeline.layers import check_layers
from pipeline.observations import is_frame_stack, is_image, is_of_bytes


@gin.configurable
def encoder_precision(policy: str = "float32") -> str:
    """The Keras dtype policy of encoders, "float32" or "mixed_bfloat16".

    Mixed: their layers compute in bfloat16, while their weights, their features and all that comes
    after stay float32. It pays only on processors with bfloat16 instructions.

    Raises:
      UserError: it is neither.
    """
    check_choice("encoder_precision.policy", policy, ("float32", "mixed_bfloat16"))
    return policy


@gin.configurable
def mlp_encoder(
    units: Sequence[int] = (64, 64),
    activation: str = "relu",
    kernel_initializer: Initializer = GlorotUniform,
) -> list[tf.keras.layers.Layer]:
    """Dense layers on the flattened observation."""
    check_layers("mlp_encoder", units, activation)
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
    units: Sequence[int] = (512,),
    activation: str = "relu",
    kernel_initializer: Initializer = HeUniform,
    first_padding: int = 0,
) -> list[tf.keras.layers.Layer]:
    """Mnih et al. 2015, "Methods", Model architecture. `filters`: (channels, kernel, stride).

    `first_padding`: zero pixels around each frame; 1 in the program published with the paper.
    """
    check_layers("nature_cnn_encoder", units, activation, filters)
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
    units: Sequence[int] = (128,),
    activation: str = "relu",
    kernel_initializer: Initializer = HeUniform,
    largest_side: int = 24,
) -> list[tf.keras.layers.Layer]:
    """3x3 filters for grids [height, width, channels], in the manner of MinAtar's network.

    Convolutions of stride 2 come first until the longer `side` is at most `largest_side`, so that
    the dense layer does not outgrow everything else on larger images.
    """
    check_layers("small_cnn_encoder", units, activation, filters)
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
    """[B, frames, height, width] -> [B, height, width, frames]: CPU convolutions need NHWC.

    Floats, because a transposition of bytes takes twice as long as that of four times as many.
    """

    def call(self, frames: tf.Tensor) -> tf.Tensor:
        return tf.transpose(frames, [0, 2, 3, 1])


class ToFloat(tf.keras.layers.Layer):
    """Any dtype to float32, integers times `scale`: bytes from [0, 255] to [0, 1].

    Floats are left as they are, for the pixels of an image that has been normalised come as such.
    Written as a product because the graph optimizer rewrites a division to it, which would make
    eager and graph results differ in the last bit.
    """

    def __init__(self, scale: float = 1.0):
        super().__init__(autocast=False)
        self._scale = scale

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        outputs = tf.cast(inputs, tf.float32)
        scaled = inputs.dtype.is_integer and self._scale != 1.0
        return outputs * self._scale if scaled else outputs


def to_float(observation_spec: tf.TensorSpec) -> ToFloat:
    """The layer that makes floats of one observation: bytes come out in [0, 1]."""
    return ToFloat(1 / 255 if is_of_bytes(observation_spec) else 1.0)


def create_encoder(observation_spec: tf.TensorSpec) -> tf.keras.Sequential:
    """The encoder for one observation spec: [B, *observation] -> [B, features] float32.

    Raises:
      ValueError: the spec is a nest: one tensor is needed.
    """
    if not isinstance(observation_spec, tf.TensorSpec):
        raise ValueError(f"One observation tensor is needed, not {observation_spec}.")
    if is_frame_stack(observation_spec):
        layers = nature_cnn_encoder()
    elif is_image(observation_spec):
        layers = small_cnn_encoder(max(observation_spec.shape[:2]))
    else:
        layers = mlp_encoder()
    return tf.keras.Sequential([to_float(observation_spec), *layers, ToFloat()])


class Network(network.Network):
    """TF-Agents' network, which makes its variables from an observation of zeros.

    TF-Agents' own draws one, which TensorFlow cannot for every dtype that a Box may have.
    """

    _network_output_spec: types.NestedTensorSpec | None

    def create_variables(self, input_tensor_spec=None, **kwargs):
        """Makes the variables, once; returns the spec of the tensors computed of an observation."""
        if self._network_output_spec is None:
            spec = self.input_tensor_spec if input_tensor_spec is None else input_tensor_spec
            outputs, _ = self(tensor_spec.zero_spec_nest(spec, outer_dims=[1]), **kwargs)
            self._network_output_spec = tf.nest.map_structure(
                lambda x: tf.TensorSpec(x.shape[1:], x.dtype), outputs
            )
        return self._network_output_spec


class HeadedNetwork(Network):
    """A head on an encoder: [B, *observation] -> what the head makes of [B, features]."""

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
        del step_type, training  # no recurrent or train-only layers
        return self.head(self.encoder(observation)), network_state


@gin.configurable(denylist=["num_actions"])
class QHead(tf.keras.layers.Layer):
    """[B, features] -> Q-values [B, actions] float32."""

    def __init__(self, num_actions: int, kernel_initializer: Initializer = GlorotUniform):
        super().__init__()
        self.q_values = tf.keras.layers.Dense(num_actions, **layer_initializers(kernel_initializer))

    def call(self, features: tf.Tensor) -> tf.Tensor:
        return self.q_values(features)


class ValueHead(tf.keras.layers.Layer):
    """[B, features] -> state values [B] float32."""

    def __init__(self, kernel_initializer: Initializer = GlorotUniform):
        super().__init__()
        self.value = tf.keras.layers.Dense(1, **layer_initializers(kernel_initializer))

    def call(self, features: tf.Tensor) -> tf.Tensor:
        return tf.squeeze(self.value(features), -1)


class CategoricalHead(tf.keras.layers.Layer):
    """[B, features] -> a distribution over the actions 0 .. n-1."""

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
    """[B, features] -> a diagonal Gaussian whose standard deviation does not depend on the state.

    Schulman et al. 2017, section 6.1. Actions are not squashed: the collect driver clips what
    the environment gets. The deviation is learnt, from exp(initial_log_std) on.
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
    """A categorical head for discrete actions, a Gaussian one for continuous actions."""
    head = CategoricalHead if tensor_spec.is_discrete(action_spec) else GaussianHead
    return head(action_spec, kernel_initializer)


def num_actions(action_spec: tensor_spec.BoundedTensorSpec) -> int:
    """How many actions a discrete spec [0, n-1] has."""
    return int(action_spec.maximum - action_spec.minimum) + 1
