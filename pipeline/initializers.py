"""Initial weights that gin can name, and what biases start from beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

Initializer = Callable[[], tf.keras.initializers.Initializer]

GlorotUniform = gin.external_configurable(tf.keras.initializers.GlorotUniform, name="GlorotUniform")
HeUniform = gin.external_configurable(tf.keras.initializers.HeUniform, name="HeUniform")
Orthogonal = gin.external_configurable(tf.keras.initializers.Orthogonal, name="Orthogonal")


@gin.configurable
class TorchUniform(tf.keras.initializers.Initializer):
    """Uniform in +-1 / sqrt(inputs of a unit), for a layer's kernel and for its biases.

    What Lua Torch's `nn.Linear:reset` and `nn.SpatialConvolution:reset` draw. One for each layer:
    the range of the biases is that of the kernel drawn before.
    """

    def __init__(self) -> None:
        self.bias_initializer = _SameRange(self)
        self.limit = 0.0

    def __call__(self, shape: Any, dtype: Any = None, **unused: Any) -> tf.Tensor:
        """A kernel [..., inputs, units]."""
        self.limit = 1 / math.sqrt(math.prod(shape[:-1]))
        return self.draw(shape, dtype)

    def draw(self, shape: Any, dtype: Any) -> tf.Tensor:
        """From the range of the kernel."""
        return tf.keras.initializers.RandomUniform(-self.limit, self.limit)(shape, dtype)


class _SameRange(tf.keras.initializers.Initializer):
    def __init__(self, kernel: TorchUniform):
        self._kernel = kernel

    def __call__(self, shape: Any, dtype: Any = None, **unused: Any) -> tf.Tensor:
        return self._kernel.draw(shape, dtype)


def layer_initializers(create: Initializer) -> dict[str, Any]:
    """Keyword arguments of a Keras layer: biases are 0 unless the kernel's initialiser has them."""
    kernel = create()
    bias = getattr(kernel, "bias_initializer", "zeros")
    return {"kernel_initializer": kernel, "bias_initializer": bias}
