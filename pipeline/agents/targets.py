"""Target networks that follow the count of environment steps instead of updates."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


class PeriodicTarget(tf.Module):
    """Copies a network's weights to its target network once in `period` environment steps.

    The copy is due when the count has crossed a multiple of `period` since the last one, however
    many steps an iteration takes; when that was is a variable, and so part of a checkpoint.
    """

    def __init__(
        self, online: tf.Module, target: tf.Module, period: int, count: Callable[[], tf.Tensor]
    ):
        """Args:
        online, target: with the same variables, in the same order.
        period: environment steps.
        count: gives the environment steps taken before this iteration, int64 [].
        """
        super().__init__("periodic_target")
        self._online, self._target = online, target
        self._period = period
        self._count = count
        self._copied_at = tf.Variable(0, dtype=tf.int64, trainable=False, name="copied_at")

    def update(self) -> tf.Operation:
        """Copies if it is due. Call it before an update's gradients are taken.

        The count is that at which the iteration began: the updates up to that count have been made,
        those of this iteration come after the crossing.
        """
        count = tf.convert_to_tensor(self._count())
        due = count // self._period > self._copied_at // self._period
        return tf.cond(due, lambda: self._copy(count), tf.no_op)

    def _copy(self, count: tf.Tensor) -> tf.Operation:
        pairs = zip(self._online.variables, self._target.variables, strict=True)
        copies = [target.assign(online, read_value=False) for online, target in pairs]
        return tf.group(*copies, self._copied_at.assign(count, read_value=False))
