"""Optimizers that gin can configure.

The legacy Keras classes run one fused kernel per variable. The newer classes of Keras 2 build the
same formula from many small ops and are a third slower on CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import gin
import tensorflow as tf

from pipeline.utils.constraints import DecayRate, NonNegative, Positive, check_arguments

# Agents pass a schedule as the learning rate, so a binding of it would have no effect.
_DENYLIST = ["learning_rate"]


@gin.configurable(denylist=_DENYLIST)
class Adam(tf.keras.optimizers.legacy.Adam):
    """Adam (Kingma & Ba 2015), with the correction of both biases in the learning rate.

        m <- beta_1 m + (1 - beta_1) g
        v <- beta_2 v + (1 - beta_2) g^2
        w <- w - learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)

    t is the number of the update, from 1. This is the form at the end of section 2 of the paper, so
    `epsilon` is the epsilon hat there.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[], tf.Tensor] = 1e-3,
        beta_1: DecayRate = 0.9,
        beta_2: DecayRate = 0.999,
        epsilon: Positive = 1e-7,
        amsgrad: bool = False,
    ):
        """Initializes the optimizer.

        Args:
          learning_rate: Learning rate, or a function that returns it.
          beta_1: Decay rate of the mean gradient m.
          beta_2: Decay rate of the mean square v.
          epsilon: Value added to the root of the mean square.
          amsgrad: Whether to divide by the largest v so far (Reddi, Kale & Kumar 2018).

        Raises:
          UserError: If a value is out of its range.
        """
        check_arguments(Adam, locals())
        super().__init__(
            learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad,
            name="Adam",
        )  # fmt: skip


@gin.configurable(denylist=_DENYLIST)
class RMSprop(tf.keras.optimizers.legacy.RMSprop):
    """RMSProp with epsilon inside the square root, as in TensorFlow 1 and in Mnih et al. 2016.

        ms <- rho ms + (1 - rho) g^2
        w <- w - learning_rate g / sqrt(ms + epsilon)

    See Tieleman & Hinton 2012. Keras runs its fused kernel only with momentum. Without momentum it
    adds epsilon outside of the square root.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[], tf.Tensor] = 7e-4,
        rho: DecayRate = 0.99,
        epsilon: Positive = 1e-5,
        initial_ms: NonNegative = 0.0,
    ):
        """Initializes the optimizer.

        Args:
          learning_rate: Learning rate, or a function that returns it.
          rho: Decay rate of the mean square.
          epsilon: Value added to the mean square.
          initial_ms: Mean square before the first update. TensorFlow 1 begins with 1.

        Raises:
          UserError: If a value is out of its range.
        """
        check_arguments(RMSprop, locals())
        # Keras selects the fused kernel if the momentum is a function, even one that returns 0.
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

    g and g2 start at 0, as in DeepMind's Lua program (`NeuralQLearner:qLearnMinibatch`, where dw
    has the opposite sign). Without momentum, Keras' legacy class instead adds epsilon outside
    of the square root.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[], tf.Tensor] = 2.5e-4,
        rho: DecayRate = 0.95,
        epsilon: Positive = 0.01,
    ):
        """Initializes the optimizer.

        Args:
          learning_rate: Learning rate, or a function that returns it.
          rho: Decay rate of the mean gradient and of the mean square.
          epsilon: Value added to the variance of the gradient.

        Raises:
          UserError: If a value is out of its range.
        """
        check_arguments(CenteredRMSprop, locals())
        super().__init__(
            learning_rate, rho=rho, momentum=lambda: 0.0, epsilon=epsilon, centered=True,
            name="CenteredRMSprop",
        )  # fmt: skip


def build_slots(optimizer: tf.keras.optimizers.legacy.Optimizer, variables: list) -> None:
    """Creates the optimizer's slots now, so that a checkpoint can be restored into them."""
    optimizer.iterations  # noqa: B018  (reading the property creates the variable)
    optimizer._create_all_weights(variables)
