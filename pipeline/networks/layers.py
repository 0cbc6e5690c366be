"""Keras layers that prepare observations for encoders, and those of encoders in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.ops.observations import CategoricalSpec, is_of_bytes, num_categories
from pipeline.utils.execution import HOST, accelerator
from pipeline.utils.processor import has_bfloat16


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


class OneHot(tf.keras.layers.Layer):
    """Encodes categories [B, ...] as float32 [B, sum of the numbers of categories].

    Args:
      observation_spec: Spec of one observation.
    """

    def __init__(self, observation_spec: CategoricalSpec):
        super().__init__(autocast=False)
        first = observation_spec.minimum.astype(np.int64)
        self._first = np.broadcast_to(first, observation_spec.shape)
        self._sizes = num_categories(observation_spec).ravel().tolist()

    def call(self, categories: tf.Tensor) -> tf.Tensor:
        places = tf.cast(categories, tf.int64) - self._first
        # LiteRT cannot split int64.
        places = tf.cast(tf.reshape(places, [-1, len(self._sizes)]), tf.int32)
        if len(set(self._sizes)) == 1:
            width = len(self._sizes) * self._sizes[0]
            return tf.reshape(tf.one_hot(places, self._sizes[0]), [-1, width])
        of_each = zip(tf.unstack(places, axis=1), self._sizes, strict=True)
        return tf.concat([tf.one_hot(place, size) for place, size in of_each], -1)


class EncodeArrays(tf.keras.layers.Layer):
    """Encodes each array of an observation, and concatenates the results: [B, features] float32.

    Args:
      encoders: An encoder for each array of the observation, in the order of `tf.nest.flatten`.
    """

    def __init__(self, encoders: Sequence[tf.keras.Sequential]):
        super().__init__(autocast=False)
        self.encoders = list(encoders)

    def call(self, observation: Any) -> tf.Tensor:
        arrays = zip(self.encoders, tf.nest.flatten(observation), strict=True)
        return tf.concat([encoder(array) for encoder, array in arrays], -1)


class Apply(tf.keras.layers.Layer):
    """Applies a function to a nest of tensors. The layer has no variables of its own."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__(autocast=False)
        self._function = function

    def call(self, observation: Any) -> Any:
        return self._function(observation)


@tf.custom_gradient
def _add_bias(outputs: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Adds a bias to [..., channels]. Its gradient is summed in float32."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.cast(tf.reshape(upstream, [-1, upstream.shape[-1]]), tf.float32)
        return upstream, tf.cast(tf.reduce_sum(rows, axis=0), bias.dtype)

    return tf.nn.bias_add(outputs, bias), gradient


class Dense(tf.keras.layers.Dense):
    """Dense layer that sums the gradient of its bias in float32 when it computes in bfloat16.

    TensorFlow's kernels for CPUs sum in bfloat16, in which a sum of ones stays at 256.
    """

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if self.compute_dtype != "bfloat16":
            return super().call(inputs)
        outputs = tf.matmul(inputs, self.kernel)
        return self.activation(_add_bias(outputs, tf.convert_to_tensor(self.bias)))


class Conv2D(tf.keras.layers.Conv2D):
    """Convolution that sums its gradients in float32; see `Dense`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Without oneDNN, the gradient of the kernel would be summed in bfloat16, too.
        is_float32 = accelerator() == HOST and not has_bfloat16()
        self._convolution_dtype = tf.float32 if is_float32 else tf.bfloat16

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if self.compute_dtype != "bfloat16":
            return super().call(inputs)
        operands = (tf.cast(x, self._convolution_dtype) for x in (inputs, self.kernel))
        outputs = tf.cast(self.convolution_op(*operands), tf.bfloat16)
        return self.activation(_add_bias(outputs, tf.convert_to_tensor(self.bias)))


def to_float(observation_spec: tf.TensorSpec) -> tf.keras.layers.Layer:
    """Creates the layer that converts an array to float32.

    It scales bytes to [0, 1], and encodes categories one-hot.
    """
    if isinstance(observation_spec, CategoricalSpec):
        return OneHot(observation_spec)
    return ToFloat(1 / 255 if is_of_bytes(observation_spec) else 1.0)
