"""Target networks that are copied whole when the count of environment steps says so."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class PeriodicCopy(tf.Module):
    """Copies weights whenever environment steps have crossed a multiple of a period.

    Mnih et al. 2015 and 2016 count the target network's age in steps of the environment, not in
    updates. What was copied when is a variable, which a checkpoint holds.
    """

    def __init__(
        self,
        online: Sequence[tf.Variable],
        target: Sequence[tf.Variable],
        period: int,
        env_steps: tf.Variable,
    ):
        """Makes `target` equal to `online`.

        Args:
          online: the weights that are trained.
          target: theirs, in the same order.
          period: environment steps.
          env_steps: int64 counter of environment steps.
        """
        super().__init__(name="periodic_copy")
        self._pairs = list(zip(online, target, strict=True))
        self._period = period
        self._env_steps = env_steps
        self._copied_at = tf.Variable(0, dtype=tf.int64, trainable=False, name="copied_at")
        self._copy()

    def update(self) -> None:
        """Copies if a multiple of the period has been crossed since the last time."""
        due = self._env_steps // self._period > self._copied_at // self._period
        tf.cond(due, self._copy, tf.no_op)

    def _copy(self) -> tf.Operation:
        for online, target in self._pairs:
            target.assign(online)
        self._copied_at.assign(self._env_steps)
        return tf.no_op()
