"""Optimizers that gin can name.

The legacy Keras classes run one fused kernel a variable; Keras 2's newer ones build the same
formula from many small ops and are a third slower on CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import gin
import tensorflow as tf

# Agents pass their own, a schedule; one that is bound here would be read by nothing.
_DENYLIST = ["learning_rate"]

Adam = gin.external_configurable(tf.keras.optimizers.legacy.Adam, name="Adam", denylist=_DENYLIST)


@gin.configurable(denylist=_DENYLIST)
class RMSprop(tf.keras.optimizers.legacy.RMSprop):
    """ms = rho ms + (1 - rho) g^2;  w = w - rate g / sqrt(ms + epsilon).

    Tieleman & Hinton 2012, with epsilon inside the root as in TensorFlow 1 and in Mnih et al. 2016.
    Keras runs its fused kernel only with momentum, and puts epsilon outside the root without it.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[], tf.Tensor] = 7e-4,
        rho: float = 0.99,
        epsilon: float = 1e-5,
        initial_ms: float = 0.0,
    ):
        """`initial_ms`: the mean square before the first update; TensorFlow 1 begins with 1."""
        # A momentum that is a function, though of value 0, selects the fused kernel.
        super().__init__(
            learning_rate, rho=rho, momentum=lambda: 0.0, epsilon=epsilon, name="RMSprop"
        )
        self._initial_ms = initial_ms

    def _create_slots(self, var_list):
        initializer = tf.keras.initializers.Constant(self._initial_ms)
        for variable in var_list:
            self.add_slot(variable, "rms", initializer)
            self.add_slot(variable, "momentum")


@gin.configurable(denylist=_DENYLIST)
class CenteredRMSprop(tf.keras.optimizers.legacy.RMSprop):
    """RMSProp that divides by the gradient's standard deviation (Graves 2013, equations 38 to 43).

        g <- rho g + (1 - rho) dw
        g2 <- rho g2 + (1 - rho) dw^2
        w <- w - learning_rate dw / sqrt(g2 - g^2 + epsilon)

    with g and g2 from 0, as DeepMind's Lua program has it (`NeuralQLearner:qLearnMinibatch`; there
    dw points uphill). The legacy class adds epsilon to the root instead, unless it has momentum.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[], tf.Tensor] = 2.5e-4,
        rho: float = 0.95,
        epsilon: float = 0.01,
    ):
        super().__init__(
            learning_rate, rho=rho, momentum=lambda: 0.0, epsilon=epsilon, centered=True,
            name="CenteredRMSprop",
        )  # fmt: skip


def build_slots(optimizer: tf.keras.optimizers.legacy.Optimizer, variables: list) -> None:
    """Creates the optimizer's slots now, so that a checkpoint can be restored into them."""
    optimizer.iterations  # noqa: B018  (creating it is the effect)
    optimizer._create_all_weights(variables)
