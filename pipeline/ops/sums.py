"""Sums whose last bits are the same in every run."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def ordered_sum(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors of the same shape and dtype in a fixed order.

    `tf.add_n`, into which TensorFlow's optimiser also turns `a + b + c`, begins with the first term
    whose memory it can reuse. Which one that is depends on the timing of other operations, and so
    do the last bits of a sum of three or more.
    """
    return tf.reduce_sum(tf.stack(terms), axis=0)
