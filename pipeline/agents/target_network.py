"""Updates target networks by the number of environment steps instead of updates."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from pipeline.agents.accumulator import Accumulator


class PeriodicTarget(tf.Module):
    """Copies a network's weights to its target network every `period` environment steps.

    A copy is due when the count has crossed a multiple of `period` since the last copy, however
    many steps an iteration takes. The count of the last copy is a variable, so it is part of a
    checkpoint.
    """

    def __init__(
        self, online: tf.Module, target: tf.Module, period: int, count: Callable[[], tf.Tensor]
    ):
        """Initializes the count of the last copy to 0.

        Args:
          online: Network whose weights are copied.
          target: Network with the same variables, in the same order.
          period: Environment steps between copies.
          count: Returns the number of environment steps before this iteration, int64 [].
        """
        super().__init__("periodic_target")
        self._online, self._target = online, target
        self._period = period
        self._count = count
        self._copied_at = tf.Variable(0, dtype=tf.int64, trainable=False, name="copied_at")

    def begin_anew(self) -> None:
        """Prepares for a run whose count begins at 0 again."""
        self._copied_at.assign(0)

    def update(self, accumulator: Accumulator | None = None) -> None:
        """Copies the weights if a copy is due. Call it before the gradients of an update.

        The count is the one at which the iteration began. All updates up to that count have been
        made, and the updates of this iteration come after the crossing.

        Args:
          accumulator: Of the agent's gradients. While gradients in it wait for their update, no
            weights are copied.
        """
        count = tf.convert_to_tensor(self._count())
        due = count // self._period > self._copied_at // self._period
        if accumulator is not None:
            due &= tf.equal(accumulator.summed, 0)
        tf.cond(due, lambda: self._copy(count), tf.no_op)

    def _copy(self, count: tf.Tensor) -> tf.Operation:
        pairs = zip(self._online.variables, self._target.variables, strict=True)
        copies = [target.assign(online, read_value=False) for online, target in pairs]
        return tf.group(*copies, self._copied_at.assign(count, read_value=False))
