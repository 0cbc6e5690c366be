"""Defines kernel initialisers that gin can configure, and bias initialisers that belong to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

from pipeline.utils.constraints import NonNegativeInt, Positive, check_arguments
from pipeline.utils.errors import UserError

Initializer = Callable[[], tf.keras.initializers.Initializer]

GlorotUniform = gin.external_configurable(tf.keras.initializers.GlorotUniform, name="GlorotUniform")
HeUniform = gin.external_configurable(tf.keras.initializers.HeUniform, name="HeUniform")


@gin.configurable
class Orthogonal(tf.keras.initializers.Orthogonal):
    """Draws an orthogonal matrix, times `gain` (Saxe et al. 2014)."""

    def __init__(self, gain: Positive = 1.0, seed: NonNegativeInt | None = None) -> None:
        check_arguments(Orthogonal, locals())
        super().__init__(gain=gain, seed=seed)


@gin.configurable
class TorchUniform(tf.keras.initializers.Initializer):
    """Draws a layer's kernel and biases uniformly within +-1 / sqrt(inputs of a unit).

    Lua Torch's `nn.Linear:reset` and `nn.SpatialConvolution:reset` do the same. Do not share an
    instance between layers: it draws biases from the range of the last kernel that it drew.
    """

    limit = 0.0

    def __call__(self, shape: Any, dtype: Any = None, **unused: Any) -> tf.Tensor:
        """Draws a kernel of shape [..., inputs, units]."""
        self.limit = 1 / math.sqrt(math.prod(shape[:-1]))
        return self.bias_initializer(shape, dtype)

    def bias_initializer(self, shape: Any, dtype: Any = None, **unused: Any) -> tf.Tensor:
        """Draws a tensor from the range of the kernel."""
        return tf.keras.initializers.RandomUniform(-self.limit, self.limit)(shape, dtype)


def check_unseeded(initializer: Any) -> None:
    """Checks that an initialiser has no seed of its own.

    Raises:
      UserError: If it has one. Layers of the same shape, such as twin critics, would begin with
        equal weights, and so would runs with different seeds.
    """
    if getattr(initializer, "seed", None) is not None:
        raise UserError(
            f"the initializer {type(initializer).__name__} has a seed of its own. Layers of "
            "the same shape would begin with equal weights. Leave it out: --seed seeds all weights."
        )


def layer_initializers(create: Initializer) -> dict[str, Any]:
    """Returns the initialisers of a Keras layer, as keyword arguments.

    Biases start at 0, unless the kernel's initialiser has a `bias_initializer`.

    Raises:
      UserError: If the initialiser has a seed of its own.
    """
    kernel = create()
    check_unseeded(kernel)
    bias = getattr(kernel, "bias_initializer", "zeros")
    return {"kernel_initializer": kernel, "bias_initializer": bias}
