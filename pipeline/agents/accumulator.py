"""Gradients of several batches that make one update, without leaving the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Accumulator(tf.Module):
    """Sums gradients and valid rows in variables; every `num_batches`-th call applies them.

    The gradient of a mean over the rows of all batches is the mean of the batches' gradients,
    weighted with their numbers of valid rows: the update is the one that a batch of all those rows
    would make. A checkpoint between two calls holds what has been summed so far.
    """

    def __init__(self, variables: Any, num_batches: int, *, of_means: bool = True):
        """Args:
        variables: nest of the variables that are trained.
        num_batches: that make one update.
        of_means: whether losses are means over rows; otherwise they are sums, and so are updates.
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
        """Takes in the gradients of a loss over `num_rows` rows.

        Args:
          gradients: nest like the variables; None where a variable has no gradient.
          num_rows: float32 [], valid ones; of 0 rows nothing is taken in.
          apply: called in the graph with those of all rows, after every `num_batches` calls.
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
            return self._clear()

        tf.cond(full, flush, tf.no_op)

    def _clear(self) -> tf.Operation:
        for variable in (*self._sums, self._rows, self.summed):
            variable.assign(tf.zeros_like(variable))
        return tf.no_op()
