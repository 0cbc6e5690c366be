"""Accumulates gradients over several batches, inside the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Accumulator(tf.Module):
    """Sums gradients and numbers of valid rows in variables, and applies them every few batches.

    The gradient of a mean over the rows of all batches is the mean of the batches' gradients,
    weighted by their numbers of valid rows. The update therefore equals that of one batch with all
    these rows. The sums are variables, so a checkpoint between two calls includes them.
    """

    def __init__(self, variables: Any, num_batches: int, *, of_means: bool = True):
        """Initializes the sums to 0.

        Args:
          variables: Nest of the variables that are trained.
          num_batches: Number of batches per update.
          of_means: Whether losses are means over rows. Otherwise losses are sums over rows, and
            the update uses the sum of the gradients.
        """
        super().__init__(name="accumulator")
        self.num_batches = num_batches
        self._of_means = of_means
        self._sums = [
            tf.Variable(tf.zeros_like(v), trainable=False) for v in tf.nest.flatten(variables)
        ]
        self._rows = tf.Variable(0.0, trainable=False)
        self.summed = tf.Variable(0, dtype=tf.int64, trainable=False, name="summed")

    def add(self, gradients: Any, num_rows: tf.Tensor, apply: Callable[[Any], None]) -> None:
        """Adds the gradients of one batch, and calls `apply` after every `num_batches` batches.

        Args:
          gradients: Nest like the variables, with None where a variable has no gradient.
          num_rows: Number of valid rows in the batch, float32 []. A batch with 0 valid rows adds
            nothing to the sums, but counts as a batch.
          apply: Called in the graph with the gradients of all rows.
        """
        for total, gradient in zip(self._sums, tf.nest.flatten(gradients), strict=True):
            if gradient is not None:
                total.assign_add(num_rows * gradient if self._of_means else gradient)
        self._rows.assign_add(num_rows)
        full = self.summed.assign_add(1) >= self.num_batches

        def flush() -> tf.Operation:
            divisor = self._rows if self._of_means else 1.0
            together = [
                None if gradient is None else tf.math.divide_no_nan(total, divisor)
                for total, gradient in zip(self._sums, tf.nest.flatten(gradients), strict=True)
            ]
            apply(tf.nest.pack_sequence_as(gradients, together))
            self.begin_anew()
            return tf.no_op()

        tf.cond(full, flush, tf.no_op)

    def begin_anew(self) -> None:
        """Sets the sums to 0."""
        for variable in (*self._sums, self._rows, self.summed):
            variable.assign(tf.zeros_like(variable))
