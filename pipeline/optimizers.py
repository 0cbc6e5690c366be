"""Optimizers that gin can name.

The legacy Keras classes run one fused kernel a variable; Keras 2.15's new ones build the same
formula from many small ops and are a third slower on CPU.
"""

from __future__ import annotations

import gin
import tensorflow as tf

Adam = gin.external_configurable(tf.keras.optimizers.legacy.Adam, name="Adam")


@gin.configurable
class RMSprop(tf.keras.optimizers.legacy.RMSprop):
    """ms = rho ms + (1 - rho) g^2;  w = w - rate g / sqrt(ms + epsilon).

    Tieleman & Hinton 2012, with epsilon inside the root as in TensorFlow 1 and in Mnih et al. 2016.
    Keras runs its fused kernel only with momentum, and puts epsilon outside the root without it.
    """

    def __init__(
        self, learning_rate=7e-4, rho: float = 0.99, epsilon: float = 1e-5, initial_ms: float = 0.0
    ):
        """`initial_ms`: the mean square before the first update; TensorFlow 1 begins with 1."""
        super().__init__(learning_rate, rho=rho, epsilon=epsilon, name="RMSprop")
        self._initial_ms = initial_ms
        self._momentum = True  # selects the fused kernel; the momentum itself is 0

    def _create_slots(self, var_list):
        initializer = tf.keras.initializers.Constant(self._initial_ms)
        for variable in var_list:
            self.add_slot(variable, "rms", initializer)
            self.add_slot(variable, "momentum")


def build_slots(optimizer: tf.keras.optimizers.legacy.Optimizer, variables: list) -> None:
    """Creates the optimizer's slots now, so that a checkpoint can be restored into them."""
    optimizer.iterations  # noqa: B018  (creating it is the effect)
    optimizer._create_all_weights(variables)
