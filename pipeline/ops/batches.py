"""Computes rows, means and sums of batches, checks numbers, and limits the norm of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tf_agents.trajectories.trajectory import Trajectory

from pipeline.ops.returns import valid_mask


def are_finite(tensors: Any) -> bool:
    """Returns True if a nest of tensors or arrays has neither NaN nor infinity in float32."""
    floats = (x for x in tf.nest.flatten(tensors) if tf.as_dtype(x.dtype).is_floating)
    # Networks compute in float32, where a large number of float64 is infinite.
    return all(tf.reduce_all(tf.math.is_finite(tf.cast(x, tf.float32))) for x in floats)


def masked_mean(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns the mean of `values` [B] with `weights` [B], or 0 if all weights are 0."""
    return tf.math.divide_no_nan(tf.reduce_sum(values * weights), tf.reduce_sum(weights))


def row_weights(experience: Trajectory, weights: tf.Tensor | None) -> tf.Tensor:
    """Returns the weights [B] of sequences [B, T], with 0 where the first row is a boundary row."""
    valid = valid_mask(experience.step_type[:, 0])
    return valid if weights is None else valid * weights


def first_rows(experience: Trajectory) -> Trajectory:
    """Returns the rows [B, ...] of sequences [B, 1, ...]."""
    return tf.nest.map_structure(lambda t: tf.squeeze(t, 1), experience)


def rows_at(sequences: Any, index: int) -> Any:
    """Returns row `index` of sequences [B, T, ...], for every tensor of a nest."""
    return tf.nest.map_structure(lambda x: x[:, index], sequences)


def standardize(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Shifts and scales `values` [B] to mean 0 and variance 1 with `weights` [B], which are 0 or 1.

    A single value with weight 1 has no variance. It stays as it is, because 0 would teach nothing.
    """
    centred = values - masked_mean(values, weights)
    scaled = centred * tf.math.rsqrt(masked_mean(centred**2, weights) + 1e-8)
    return tf.where(tf.reduce_sum(weights) > 1.0, scaled, values)


def clip_by_global_norm(gradients: list, norm: float | None) -> list:
    """Scales `gradients` so that their global norm is at most `norm`; None for no limit."""
    return gradients if norm is None else tf.clip_by_global_norm(gradients, norm)[0]


def ordered_sum(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors of the same shape and dtype in a fixed order.

    `tf.add_n`, into which TensorFlow's optimiser also turns `a + b + c`, begins with the first term
    whose memory it can reuse. Which one that is depends on the timing of other operations, and so
    do the last bits of a sum of three or more.
    """
    return tf.reduce_sum(tf.stack(terms), axis=0)
