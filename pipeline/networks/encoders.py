"""Encoders, which are chosen by the observation spec, and the networks that hold them.

| observation | encoder |
|---|---|
| rank 0 or 1 | multilayer perceptron |
| stack of uint8 frames of at least 36 pixels a side | Nature CNN (Mnih et al. 2015) |
| any other observation of rank 3 | small CNN with 3x3 filters, on channels-last |
| stack of colour images, rank 4 | small CNN with 3x3 filters, on all frames' channels |
| any other rank | multilayer perceptron on the flattened observation |
| several arrays (Dict, Tuple) | images as above, then multilayer perceptron on the concatenation |

Bytes with the whole range, 0 to 255, are scaled to [0, 1] first, and categories are encoded
one-hot. Action masks are not encoded.

The widths, activations and initialisers of the three encoders are gin parameters, and
`create_encoder.layers` replaces them, by `layer_norm_cnn_encoder` or by layers of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import gin
import numpy as np
import tensorflow as tf
from tf_agents.networks import network
from tf_agents.specs import tensor_spec
from tf_agents.typing import types

from pipeline.networks.encoder_checks import (
    check_features,
    check_layers,
    check_new_layers,
    check_sizes,
)
from pipeline.networks.initializers import (
    GlorotUniform,
    HeUniform,
    Initializer,
    Orthogonal,
    layer_initializers,
)
from pipeline.networks.layers import (
    Apply,
    ColourFramesToChannels,
    Conv2D,
    Dense,
    EncodeArrays,
    ToFloat,
    to_float,
)
from pipeline.ops.masks import mask_out
from pipeline.ops.normalizers import ObservationNormalizer
from pipeline.ops.observations import (
    action_mask,
    has_pixels,
    is_channels_first,
    is_colour_stack,
    is_frame_stack,
    is_image,
    without_mask,
)
from pipeline.utils.constraints import NonNegativeInt, PositiveInt, check_arguments
from pipeline.utils.errors import UserError
from pipeline.utils.execution import HOST, accelerator
from pipeline.utils.processor import has_bfloat16


@gin.configurable
def encoder_precision(policy: Literal["float32", "mixed_bfloat16", "auto"] = "float32") -> str:
    """Returns the Keras dtype policy of encoders, "float32" or "mixed_bfloat16".

    Args:
      policy: With "mixed_bfloat16" the layers of an encoder compute in bfloat16. Its weights, its
        features and all layers after it stay float32. This is faster only on processors with
        bfloat16 instructions. "auto" is "mixed_bfloat16" if networks run with oneDNN on such a
        processor, and else "float32".

    Raises:
      UserError: If `policy` is none of the three.
    """
    check_arguments(encoder_precision, locals())
    if policy != "auto":
        return policy
    return "mixed_bfloat16" if accelerator() == HOST and has_bfloat16() else "float32"


@gin.configurable
def mlp_encoder(
    units: Sequence[PositiveInt] = (64, 64),  # widths of the layers
    activation: str = "relu",  # Keras name of the activation of all layers
    kernel_initializer: Initializer = GlorotUniform,  # initialiser of all kernels
) -> list[tf.keras.layers.Layer]:
    """Creates dense layers for the flattened observation."""
    check_arguments(mlp_encoder, locals())
    check_layers("mlp_encoder", activation)
    policy = encoder_precision()
    layers: list[tf.keras.layers.Layer] = [tf.keras.layers.Flatten(dtype=policy)]
    layers += [
        Dense(n, activation, dtype=policy, **layer_initializers(kernel_initializer)) for n in units
    ]
    return layers


@gin.configurable(denylist=["sides"])
def nature_cnn_encoder(
    filters: Sequence[tuple[int, int, int]] = ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    units: Sequence[PositiveInt] = (512,),
    activation: str = "relu",
    kernel_initializer: Initializer = HeUniform,
    first_padding: NonNegativeInt = 0,
    sides: Sequence[int] | None = None,
) -> list[tf.keras.layers.Layer]:
    """Creates the convolutional network of DQN for stacks of frames.

    See Mnih et al. 2015, "Methods", Model architecture.

    Args:
      filters: (channels, kernel, stride) of each convolution.
      units: Widths of the dense layers.
      activation: Keras name of the activation of all layers.
      kernel_initializer: Initialiser of all kernels.
      first_padding: Zero pixels around each frame; 1 in the program published with the paper.
      sides: Height and width of a frame in pixels, or None if they are not known. The filters are
        then not compared with them.

    Raises:
      UserError: If a value is out of its range, or a filter is larger than its input.
    """
    check_arguments(nature_cnn_encoder, locals())
    check_layers("nature_cnn_encoder", activation, filters)
    if sides is not None:
        check_sizes(filters, [n + 2 * first_padding for n in sides])
    padding = [tf.keras.layers.ZeroPadding2D(first_padding, dtype=encoder_precision())]
    return [
        # Convolutions on the CPU need NHWC. Transposing uint8 values would take twice as long.
        tf.keras.layers.Permute((2, 3, 1)),
        *(padding if first_padding else []),
        *_convolutions(filters, activation, kernel_initializer),
        *mlp_encoder(units, activation, kernel_initializer),
    ]


@gin.configurable
def layer_norm_cnn_encoder(
    units: PositiveInt = 50, kernel_initializer: Initializer = Orthogonal
) -> list[tf.keras.layers.Layer]:
    """Creates the convolutions of `nature_cnn_encoder`, and normalises their features to [-1, 1].

    A dense layer, layer normalisation and tanh follow the convolutions, as in the encoder of SAC
    for images (Yarats et al. 2021, appendix B). Bind it to `create_encoder.layers`.

    Args:
      units: Number of features.
      kernel_initializer: Initialiser of the dense layer's kernel.

    Raises:
      UserError: If a value is out of its range.
    """
    check_arguments(layer_norm_cnn_encoder, locals())
    return [
        *nature_cnn_encoder(units=()),
        *mlp_encoder((units,), "linear", kernel_initializer),
        tf.keras.layers.LayerNormalization(),
        tf.keras.layers.Activation("tanh"),
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
    policy = encoder_precision()
    return [
        Conv2D(
            channels, kernel, stride, padding, activation=activation,
            dtype=policy, **layer_initializers(kernel_initializer),
        )
        for channels, kernel, stride in filters
    ]  # fmt: skip


@gin.configurable(denylist=["observation_spec", "normalizer", "of_vectors"])
def create_encoder(
    observation_spec: types.NestedTensorSpec,
    normalizer: ObservationNormalizer | None = None,
    layers: Callable[[], Sequence[tf.keras.layers.Layer]] | None = None,
    image_layers: Callable[[], Sequence[tf.keras.layers.Layer]] | None = None,
    of_vectors: Callable[[], Sequence[tf.keras.layers.Layer]] = mlp_encoder,
) -> tf.keras.Sequential:
    """Creates the encoder for an observation spec: [B, *observation] -> [B, features] float32.

    If the spec is a nest, each image has its own encoder. The features of the images and the other
    arrays, flattened, are concatenated and passed to the layers of `layers` or `of_vectors`.

    Args:
      observation_spec: Spec of one observation, without the batch dimension.
      normalizer: Normalises the observations. Its statistics do not belong to the encoder.
      layers: Function that creates the layers of the encoder. Their input is the float32
        observation, or the concatenation for a nest. None chooses `nature_cnn_encoder` for stacks
        of grey frames, `small_cnn_encoder` for other images, and otherwise the encoder of the
        agent, which is `mlp_encoder` unless the agent is SAC.
      image_layers: Function that creates the layers for each image or stack of images of a nest.
        Their input is the float32 image in the shape of its space. None chooses as above.
      of_vectors: Function that creates the layers for observations that are not images, if `layers`
        is None.

    Raises:
      UserError: If `layers` or `image_layers` does not create layers for these observations that
        end with one vector, or if there is no image for `image_layers`.
    """
    # A layer that held the normaliser would have its statistics copied to target networks.
    first = [] if normalizer is None else [Apply(lambda observation: normalizer(observation))]
    encoded = without_mask(observation_spec)
    first += [] if encoded is observation_spec else [Apply(without_mask)]
    is_array = isinstance(encoded, tf.TensorSpec)
    if is_array:
        first += [to_float(encoded)]
    else:
        arrays = tf.nest.flatten(encoded)
        first += [EncodeArrays([_array_encoder(spec, image_layers) for spec in arrays])]
    if image_layers is not None and (is_array or not any(map(has_pixels, arrays))):
        raise UserError(
            "create_encoder.image_layers is for the images of a Dict or Tuple, and this "
            "observation has none. For an observation that is an image, bind create_encoder.layers."
        )
    if layers is not None:
        return _encoder_of("layers", layers, first, observation_spec)
    chosen = (_image_encoder(encoded) if is_array else None) or of_vectors()
    return tf.keras.Sequential([*first, *chosen, ToFloat()])


def _array_encoder(
    spec: tf.TensorSpec, image_layers: Callable[[], Sequence[tf.keras.layers.Layer]] | None
) -> tf.keras.Sequential:
    """Creates the encoder of one of several arrays, [B, ...] -> [B, features] float32."""
    if image_layers is not None and has_pixels(spec):
        return _encoder_of("image_layers", image_layers, [to_float(spec)], spec)
    layers = _image_encoder(spec) or [tf.keras.layers.Flatten()]
    return tf.keras.Sequential([to_float(spec), *layers, ToFloat()])


def _image_encoder(spec: tf.TensorSpec) -> Sequence[tf.keras.layers.Layer] | None:
    """Creates the layers for an image or a stack of images; None if `spec` is neither."""
    if is_frame_stack(spec):
        return nature_cnn_encoder(sides=spec.shape[1:])
    if is_colour_stack(spec):
        return [ColourFramesToChannels(), *small_cnn_encoder(max(spec.shape[1:3]))]
    if is_channels_first(spec):
        return [tf.keras.layers.Permute((2, 3, 1)), *small_cnn_encoder(max(spec.shape[1:]))]
    if is_image(spec):
        return small_cnn_encoder(max(spec.shape[:2]))
    return None


def _encoder_of(
    parameter: str,
    layers: Callable[[], Sequence[tf.keras.layers.Layer]],
    first: Sequence[tf.keras.layers.Layer],
    observation_spec: types.NestedTensorSpec,
) -> tf.keras.Sequential:
    """Creates an encoder with a user's `layers` after the `first` ones, and checks it."""
    name = f"create_encoder.{parameter} = @{getattr(layers, '__name__', repr(layers))}"
    try:
        made = list(layers())
        check_new_layers(name, made)
        encoder = tf.keras.Sequential([*first, *made, ToFloat()])
        check_features(name, encoder, observation_spec)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise UserError(
            f"{name} cannot encode {observation_spec}: {type(error).__name__}: {error}"
        ) from error
    return encoder


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


class QNetwork(Network):
    """Network of an encoder and a head: [B, *observation] -> [B, features] -> [B, actions].

    The Q-value of an action that the observation's mask forbids is -1e9.
    """

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
        q_values = self.head(self.encoder(observation))
        return mask_out(q_values, action_mask(observation)), network_state
