"""Defines parts of a natural-gradient step: flat vectors, conjugate gradients, Fisher products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import gin
import tensorflow as tf

from pipeline.utils.constraints import Fraction, Positive, PositiveInt, check_arguments


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """Settings of a policy step of TRPO.

    Attributes:
      max_kl: Bound on the mean KL divergence of the old policy from the new one, in nats.
      cg_iterations: Maximum number of conjugate gradient iterations.
      cg_damping: Value added to the diagonal of the Fisher matrix.
      fisher_fraction: Fraction of a rollout's rows used for products with the Fisher matrix.
      line_search_steps: Maximum number of steps that the line search tries.
      line_search_shrink: Ratio of the length of each tried step to that of the one before.

    Raises:
      UserError: If a value is out of its range.
    """

    max_kl: Positive = 0.01
    cg_iterations: PositiveInt = 15
    cg_damping: Positive = 0.1
    fisher_fraction: Fraction = 1.0
    line_search_steps: PositiveInt = 10
    line_search_shrink: Fraction = 0.8

    def __post_init__(self):
        check_arguments(TrustRegion, vars(self))


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates all entries of the tensors into one vector [n]."""
    return tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)


def unflatten(vector: tf.Tensor, like: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Splits a vector [n] into tensors with the shapes of `like`; the inverse of `flatten`."""
    parts = tf.split(vector, [x.shape.num_elements() for x in like])
    return [tf.reshape(part, x.shape) for part, x in zip(parts, like, strict=True)]


class StepOutcome(NamedTuple):
    """Outcome of a policy step, as float32 scalars.

    Attributes:
      surrogate: Mean of ratio times advantage, minus its value before the step.
      kl: Mean KL divergence of the old policy from the new one.
      accepted: 1 if the policy has changed, else 0.
      fraction: Length of the step, as a fraction of the longest step that the bound allows.
    """

    surrogate: tf.Tensor
    kl: tf.Tensor
    accepted: tf.Tensor
    fraction: tf.Tensor


def line_search(
    region: TrustRegion,
    variables: Sequence[tf.Variable],
    longest: tf.Tensor,
    evaluate: Callable[[], tuple[tf.Tensor, tf.Tensor]],
) -> StepOutcome:
    """Shortens the step until the surrogate improves and the KL is within the bound.

    If no tried step does, the variables are restored bit for bit.

    Args:
      region: Settings of the search.
      variables: The variables to move, with n entries in all.
      longest: The first step that is tried, [n] float32.
      evaluate: Returns the improvement of the surrogate and the KL divergence at the present
        values of the variables.
    """
    old = [tf.identity(variable) for variable in variables]

    def move(fraction: tf.Tensor) -> None:
        steps = unflatten(fraction * longest, variables)
        for variable, start, step in zip(variables, old, steps, strict=True):
            variable.assign(start + step)

    def attempt(i, _):
        fraction = region.line_search_shrink ** tf.cast(i, tf.float32)
        move(fraction)
        improvement, kl = evaluate()
        accepted = tf.cast((improvement > 0.0) & (kl <= region.max_kl), tf.float32)
        return i + 1, StepOutcome(improvement, kl, accepted, fraction)

    def unfinished(i, outcome):
        return (i < region.line_search_steps) & (outcome.accepted == 0.0)

    zero = tf.constant(0.0)
    nothing = StepOutcome(zero, zero, zero, zero)
    state = (tf.constant(0), nothing)
    _, step = tf.while_loop(unfinished, attempt, state, parallel_iterations=1)

    def put_back() -> StepOutcome:
        for variable, start in zip(variables, old, strict=True):
            variable.assign(start)
        return nothing

    return tf.cond(step.accepted > 0.0, lambda: step, put_back)


def conjugate_gradient(
    product: Callable[[tf.Tensor], tf.Tensor],
    b: tf.Tensor,
    num_iterations: int,
    tolerance: float = 1e-10,
) -> tf.Tensor:
    """Solves A x = b approximately, starting at x = 0 (Hestenes & Stiefel 1952).

    Args:
      product: Maps v [n] to A v, where A is symmetric and positive definite.
      b: Right-hand side, [n] float32.
      num_iterations: Maximum number of iterations.
      tolerance: The iterations end when the squared residual, relative to that of x = 0, is at
        most this.

    Returns:
      x, [n] float32.
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
    """Computes (F + damping I) v, where F is the Hessian of the mean KL divergence at its minimum.

    See Schulman et al. 2015, appendix C.1. The product uses double back-propagation (Pearlmutter
    1994).

    Args:
      mean_kl: Returns the mean KL divergence, a scalar that is 0 at the present values of the
        variables.
      variables: The variables that F refers to, with n entries in all.
      vector: v, [n] float32.
      damping: Value added to the diagonal of F.

    Returns:
      The product, [n] float32.
    """
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            divergence = mean_kl()
        slope = tf.tensordot(flatten(inner.gradient(divergence, variables)), vector, 1)
    return flatten(outer.gradient(slope, variables)) + damping * vector
