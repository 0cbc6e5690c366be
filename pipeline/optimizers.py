"""Optimizers that gin can name.

The legacy Keras classes run one fused kernel a variable; Keras 2.15's new ones build the same
formula from many small ops and are a third slower on CPU.
"""

from __future__ import annotations

import gin
import tensorflow as tf

Adam = gin.external_configurable(tf.keras.optimizers.legacy.Adam, name="Adam")
RMSprop = gin.external_configurable(tf.keras.optimizers.legacy.RMSprop, name="RMSprop")


def build_slots(optimizer: tf.keras.optimizers.legacy.Optimizer, variables: list) -> None:
    """Creates the optimizer's slots now, so that a checkpoint can be restored into them."""
    optimizer.iterations  # noqa: B018  (creating it is the effect)
    optimizer._create_all_weights(variables)
