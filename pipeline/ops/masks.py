"""Restricts actions to those that an action mask allows (see `observations.action_mask`)."""

from __future__ import annotations

import tensorflow as tf

# Low enough that a forbidden action is never chosen. It is not lower, because its square must be
# finite in float32.
_FORBIDDEN = -1e9


def _allowed(mask: tf.Tensor) -> tf.Tensor:
    """Returns True for allowed actions; bool, in the shape of `mask` [B, actions].

    Where the mask forbids all actions, as some environments do at the end of an episode, all are
    allowed.
    """
    is_allowed = tf.cast(mask, tf.bool)
    return is_allowed | ~tf.reduce_any(is_allowed, -1, keepdims=True)


def mask_out(scores: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Replaces the Q-values or logits [B, actions] of forbidden actions by -1e9.

    Args:
      scores: float32 [B, actions].
      mask: [B, actions] of any dtype, 0 for forbidden actions, or None to forbid none.
    """
    return scores if mask is None else tf.where(_allowed(mask), scores, _FORBIDDEN)


def uniform_action(draws: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Chooses each allowed action with the same probability.

    Args:
      draws: float32 [B], uniform in [0, 1).
      mask: [B, actions] of any dtype, 0 for forbidden actions.

    Returns:
      Actions, int64 [B].
    """
    ordinals = tf.cumsum(tf.cast(_allowed(mask), tf.float32), axis=-1)
    rank = tf.floor(draws * ordinals[:, -1])
    return tf.argmax(ordinals > rank[:, tf.newaxis], axis=-1)
