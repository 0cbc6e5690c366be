"""What a natural-gradient step is made of: flat vectors, conjugate gradients, Fisher products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gin
import tensorflow as tf
import tensorflow_probability as tfp

from pipeline.errors import check_number, check_whole


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """How far a step goes, and how it is found.

    Attributes:
      max_kl: nats, the bound on the mean divergence of the new policy from the old one.
      cg_iterations: of the conjugate gradient.
      cg_damping: added to the diagonal of the Fisher matrix.
      fisher_fraction: of a rollout's rows, for products with the Fisher matrix.
      line_search_steps: tries at most.
      line_search_shrink: factor from one try to the next.

    Raises:
      UserError: a value is out of its range.
    """

    max_kl: float = 0.01
    cg_iterations: int = 15
    cg_damping: float = 0.1
    fisher_fraction: float = 1.0
    line_search_steps: int = 10
    line_search_shrink: float = 0.8

    def __post_init__(self):
        check_number("TrustRegion.max_kl", self.max_kl, 0)
        check_whole("TrustRegion.cg_iterations", self.cg_iterations)
        check_number("TrustRegion.cg_damping", self.cg_damping, 0)
        check_number("TrustRegion.fisher_fraction", self.fisher_fraction, 0, 1)
        check_whole("TrustRegion.line_search_steps", self.line_search_steps)
        check_number("TrustRegion.line_search_shrink", self.line_search_shrink, 0, 1)


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All entries in one vector [n]."""
    return tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)


def unflatten(vector: tf.Tensor, like: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The vector [n] in the shapes of `like`: undoes `flatten`."""
    parts = tf.split(vector, [x.shape.num_elements() for x in like])
    return [tf.reshape(part, x.shape) for part, x in zip(parts, like, strict=True)]


def conjugate_gradient(
    product: Callable[[tf.Tensor], tf.Tensor],
    b: tf.Tensor,
    num_iterations: int,
    tolerance: float = 1e-10,
) -> tf.Tensor:
    """x [n] with A x near b, from x = 0 (Hestenes & Stiefel 1952).

    Args:
      product: maps v [n] to A v, A symmetric and positive definite.
      b: [n] float32.
      num_iterations: at most.
      tolerance: of the squared residual relative to that of x = 0, at which it ends.
    """
    initial = tf.tensordot(b, b, 1)

    def unfinished(i, x, residual, direction, squared):
        return (i < num_iterations) & (squared > tolerance * initial)

    def step(i, x, residual, direction, squared):
        image = product(direction)
        length = tf.math.divide_no_nan(squared, tf.tensordot(direction, image, 1))
        residual = residual - length * image
        new_squared = tf.tensordot(residual, residual, 1)
        ratio = tf.math.divide_no_nan(new_squared, squared)
        return i + 1, x + length * direction, residual, residual + ratio * direction, new_squared

    state = (tf.constant(0), tf.zeros_like(b), b, b, initial)
    return tf.while_loop(unfinished, step, state, parallel_iterations=1)[1]


def fisher_vector_product(
    mean_kl: Callable[[], tf.Tensor],
    variables: Sequence[tf.Variable],
    vector: tf.Tensor,
    damping: float,
) -> tf.Tensor:
    """(F + damping I) v, F the second derivative of the mean KL divergence at its minimum.

    Schulman et al. 2015, appendix C.1, by double back-propagation (Pearlmutter 1994).

    Args:
      mean_kl: a scalar, 0 at the present values of the variables.
      variables: with n entries in all.
      vector: v [n] float32.
      damping: added to F's diagonal.
    """
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            divergence = mean_kl()
        slope = tf.tensordot(flatten(inner.gradient(divergence, variables)), vector, 1)
    return flatten(outer.gradient(slope, variables)) + damping * vector


def frozen(distribution: tfp.distributions.Distribution) -> tfp.distributions.Distribution:
    """The same distribution, through which no gradient flows."""
    if isinstance(distribution, tfp.distributions.Categorical):
        return tfp.distributions.Categorical(
            tf.stop_gradient(distribution.logits), dtype=distribution.dtype
        )
    normal = distribution.distribution
    fixed = tfp.distributions.Normal(tf.stop_gradient(normal.loc), tf.stop_gradient(normal.scale))
    return tfp.distributions.Independent(fixed, len(distribution.event_shape))
