"""Checks the parameters that gin binds to the encoders, and layers that users write."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tf_agents.typing import types

from pipeline.networks.initializers import check_unseeded
from pipeline.utils.constraints import PositiveInt, check
from pipeline.utils.errors import UserError

_layers_of_encoders: weakref.WeakSet[tf.keras.layers.Layer] = weakref.WeakSet()


def check_layers(
    encoder: str,
    activation: str,
    filters: Sequence[tuple[int, int, int]] | None = None,
) -> None:
    """Checks that Keras can create layers with these parameters.

    Args:
      encoder: Name of the encoder in gin, for error messages.
      activation: Keras name of an activation.
      filters: (channels, kernel, stride) of each convolution; None without convolutions.

    Raises:
      UserError: If a parameter is invalid.
    """
    if filters is not None and not filters:
        raise UserError(
            f"{encoder}.filters = {filters!r}: must have at least one convolution. For none, bind "
            "create_encoder.layers = @mlp_encoder."
        )
    for place, sizes in enumerate(filters or ()):
        name = f"{encoder}.filters[{place}]"
        check(name, sizes, Sequence[PositiveInt])
        if len(sizes) != 3:
            raise UserError(f"{name} = {sizes!r}: must be (channels, kernel, stride).")
    try:
        tf.keras.activations.get(activation)
    except ValueError:
        raise UserError(
            f"{encoder}.activation = {activation!r}: Keras has no activation of this name. Use "
            "'relu', 'tanh', 'elu', 'gelu', 'selu', 'swish' or another of its activations."
        ) from None


def check_sizes(filters: Sequence[tuple[int, int, int]], sides: Sequence[int]) -> None:
    """Checks that each convolution without padding gets an input at least as large as its kernel.

    Args:
      filters: (channels, kernel, stride) of each convolution.
      sides: Height and width of the image, in pixels.

    Raises:
      UserError: If an input is too small.
    """
    for place, (_, kernel, stride) in enumerate(filters):
        if kernel > min(sides):
            height, width = sides
            raise UserError(
                f"nature_cnn_encoder.filters[{place}] has a kernel of {kernel}, but its input has "
                f"only {height} x {width} pixels. Make the kernels or the strides smaller."
            )
        sides = [(side - kernel) // stride + 1 for side in sides]


def check_new_layers(name: str, layers: Sequence[tf.keras.layers.Layer]) -> None:
    """Checks that the items are Keras layers.

    Args:
      name: Name of the layers, for error messages.
      layers: Layers of a new encoder.

    Raises:
      UserError: If something is not a layer.
    """
    for layer in layers:
        if not isinstance(layer, tf.keras.layers.Layer):
            raise UserError(
                f"{name} returns {layer!r:.80}, which is not a Keras layer. Return a flat list of "
                "layers, such as [tf.keras.layers.Dense(64)]; wrap functions in "
                "tf.keras.layers.Lambda."
            )


def check_features(
    name: str, encoder: tf.keras.Sequential, observation_spec: types.NestedTensorSpec
) -> None:
    """Checks that an encoder turns each observation of a batch into a vector, on its own.

    Args:
      name: Name of the encoder's layers, for error messages.
      encoder: Encoder, which is called here for the first time.
      observation_spec: Spec of the observations.

    Raises:
      UserError: If the features are not one vector for each observation, depend on the other
        observations of the batch or not on the weights, if a call changes variables or computes
        otherwise with `training=True`, if another encoder has one of its layers with weights, or if
        there are regularizers or seeds.
    """
    first, second = _observation(observation_spec, 0.25), _observation(observation_spec, 100.0)
    features = encoder(first)
    _check_parts(name, encoder)
    if features.shape.rank != 2:
        raise UserError(
            f"{name} turns an observation into features of shape {features.shape[1:]}. They must "
            "be one vector: end with tf.keras.layers.Flatten."
        )
    with tf.GradientTape() as tape:
        together = _checked_batch(name, encoder, first, second)
    trained = encoder.trainable_variables
    gradients = tape.gradient(together, trained)
    if none := [v.name for v, gradient in zip(trained, gradients, strict=True) if gradient is None]:
        raise UserError(f"{name}: the features have no gradient for {', '.join(none)}.")
    if encoder.losses:
        raise UserError(
            f"{name}: a layer has a regularizer or adds a loss, which no agent minimises. Leave it "
            "out."
        )


def _check_parts(name: str, encoder: tf.keras.Sequential) -> None:
    """Checks that no layer, however deep, has a seed, or belongs to another encoder.

    Raises:
      UserError: If one does.
    """
    parts = [x for x in encoder.submodules if isinstance(x, tf.keras.layers.Layer)]
    for initializer in (x for part in parts for x in vars(part).values()):
        if isinstance(initializer, tf.keras.initializers.Initializer):
            check_unseeded(initializer)
    with_weights = {part for part in parts if part.weights}
    if not with_weights.isdisjoint(_layers_of_encoders):
        raise UserError(
            f"{name} returns a layer that another encoder has. Networks would share its "
            "weights, and a target network would be none. Create new layers in each call."
        )
    _layers_of_encoders.update(with_weights)


def _checked_batch(
    name: str,
    encoder: tf.keras.Sequential,
    first: types.NestedTensor,
    second: types.NestedTensor,
) -> tf.Tensor:
    """Returns the features of a batch of two observations.

    Raises:
      UserError: If they depend on each other or on `training`, or if a call changes variables.
    """
    before = [variable.numpy() for variable in encoder.variables]
    together = encoder(tf.nest.map_structure(lambda *x: tf.concat(x, 0), first, second))
    alone = tf.concat([encoder(first), encoder(second)], 0)
    # A batch of another size may be computed in another way, with other rounding.
    tolerance = 0.05 * float(tf.reduce_max(tf.abs(alone)))
    is_same = together.shape == alone.shape and np.allclose(
        together, alone, 0.05, tolerance, equal_nan=True
    )
    if not is_same:
        raise UserError(
            f"{name}: the features of an observation depend on the rest of its batch. Layers "
            "receive a batch [B, ...], and must treat each of its rows on its own."
        )
    if not all(map(np.array_equal, before, encoder.variables)):
        raise UserError(
            f"{name}: a call changes variables. Layers must compute the same in training and "
            "evaluation; normalise observations with normalize_observations of the agent instead."
        )
    trained_on = tf.concat([encoder(x, training=True) for x in (first, second)], 0)
    if not np.allclose(alone, trained_on, equal_nan=True):
        raise UserError(
            f"{name}: a layer computes otherwise with training=True, as Dropout and "
            "BatchNormalization do. No agent passes it, so the layer would have no effect. Leave "
            "it out."
        )
    return together


def _observation(spec: types.NestedTensorSpec, value: float) -> types.NestedTensor:
    """Returns a batch of one observation, of the value in the range nearest to `value`."""

    def array(leaf: tf.TensorSpec) -> tf.Tensor:
        low, high = getattr(leaf, "minimum", value), getattr(leaf, "maximum", value)
        numbers = np.clip(np.full(leaf.shape, value), low, high)
        return tf.constant(numbers[np.newaxis].astype(leaf.dtype.as_numpy_dtype))

    return tf.nest.map_structure(array, spec)
