"""Normalises observations and rewards by running statistics, which the agent's checkpoint holds."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

from pipeline.ops.batches import ordered_sum
from pipeline.ops.observations import CategoricalSpec, action_mask
from pipeline.ops.returns import discounted_returns
from pipeline.utils.constraints import Positive, check_arguments

_PRECISE = (tf.float64, tf.int32, tf.int64, tf.uint32, tf.uint64)  # more precise than float32


class RunningMoments(tf.Module):
    """Computes the mean and variance of all values seen, batch by batch (Chan et al. 1979).

    Args:
      shape: Shape of one value.
      name: Name of the module.

    Attributes:
      is_precise: Whether `normalize` subtracts the mean from float64 values and from 32- and 64-bit
        integers in float64.
    """

    is_precise = True

    def __init__(self, shape: tuple[int, ...], name: str):
        super().__init__(name=name)
        self.mean = tf.Variable(tf.zeros(shape, tf.float64), trainable=False)
        self.variance = tf.Variable(tf.ones(shape, tf.float64), trainable=False)
        self.count = tf.Variable(tf.zeros((), tf.float64), trainable=False)

    def update(self, values: tf.Tensor, weights: tf.Tensor) -> None:
        """Updates the moments with `values` [B, *shape], weighted by `weights` [B]."""
        values = tf.cast(values, tf.float64)
        weights = tf.reshape(tf.cast(weights, tf.float64), [-1] + [1] * self.mean.shape.rank)
        batch_count = tf.reduce_sum(weights)
        batch_mean = tf.math.divide_no_nan(tf.reduce_sum(values * weights, 0), batch_count)
        squares = tf.reduce_sum(weights * (values - batch_mean) ** 2, 0)
        total = self.count + batch_count
        shift = batch_mean - self.mean
        of_shift = shift**2 * self.count * batch_count / total
        squares = ordered_sum([squares, self.variance * self.count, of_shift])
        self.mean.assign_add(shift * batch_count / total)
        self.variance.assign(squares / total)
        self.count.assign(total)

    def normalize(self, values: tf.Tensor, clip: float) -> tf.Tensor:
        """Returns (values - mean) / std as float32, clipped to [-clip, clip]."""
        # Large numbers that differ little, such as timestamps, would be equal in float32.
        dtype = tf.float64 if self.is_precise and values.dtype in _PRECISE else tf.float32
        centred = tf.cast(values, dtype) - tf.cast(self.mean, dtype)
        scaled = tf.cast(centred, tf.float32) / self.standard_deviation()
        return tf.clip_by_value(scaled, -clip, clip)

    def standard_deviation(self) -> tf.Tensor:
        """Returns the standard deviation as float32, in the shape of one value."""
        return tf.cast(tf.sqrt(self.variance + 1e-8), tf.float32)


@gin.configurable(denylist=["observation_spec"])
class ObservationNormalizer(tf.Module):
    """Normalises the numbers of observations by their running mean and variance.

    Categories and action masks stay as they are.
    """

    def __init__(self, observation_spec: Any, clip: Positive = 10.0):
        """Initializes the statistics.

        Args:
          observation_spec: Nest of the specs of one observation.
          clip: Bound on the absolute value of a normalised number.

        Raises:
          UserError: If `clip` is out of its range.
        """
        check_arguments(ObservationNormalizer, locals())
        super().__init__(name="observation_normalizer")
        self._clip = clip
        mask = action_mask(observation_spec)
        self.moments = [
            None
            if spec is mask or isinstance(spec, CategoricalSpec)
            else RunningMoments(tuple(spec.shape), "observation_moments")
            for spec in tf.nest.flatten(observation_spec)
        ]

    def __call__(self, observation: Any) -> Any:
        """Normalises observations [B, ...]. Numbers become float32."""
        arrays = [
            moments.normalize(array, self._clip) if moments else array
            for moments, array in zip(self.moments, tf.nest.flatten(observation), strict=True)
        ]
        return tf.nest.pack_sequence_as(observation, arrays)

    def update(self, observation: Any, weights: tf.Tensor) -> None:
        """Updates the statistics with observations [T, N, ...], weighted by `weights` [T, N]."""
        weights = tf.reshape(weights, [-1])
        for moments, array in zip(self.moments, tf.nest.flatten(observation), strict=True):
            if moments:
                moments.update(tf.reshape(array, [-1, *array.shape[2:]]), weights)


def create_normalizer(observation_spec: Any, is_wanted: bool) -> ObservationNormalizer | None:
    """Creates an `ObservationNormalizer`, or returns None if it is not wanted."""
    return ObservationNormalizer(observation_spec) if is_wanted else None


@gin.configurable(denylist=["num_envs", "discount"])
class RewardScaler(tf.Module):
    """Divides rewards by the standard deviation of running discounted returns.

    A running return ends with the return that the agent learns: at a termination, a truncation, or
    a lost life that has a discount of 0.

    See Engstrom et al. 2020, "Implementation matters in deep policy gradients", and `VecNormalize`
    of OpenAI Baselines. TF-Agents' PPO instead uses the variance of the rewards themselves.
    """

    def __init__(self, num_envs: int, discount: float, clip: Positive = 10.0):
        """Initializes the scaler.

        Args:
          num_envs: Number of environments, N.
          discount: Discount factor of the running returns.
          clip: Bound on the absolute value of a scaled reward.

        Raises:
          UserError: If `clip` is out of its range.
        """
        check_arguments(RewardScaler, locals())
        super().__init__(name="reward_scaler")
        self._discount = discount
        self._clip = clip
        self._moments = RunningMoments((), "return_moments")
        self._running_returns = tf.Variable(tf.zeros([num_envs]), trainable=False)

    def begin_anew(self) -> None:
        """Prepares for new episodes."""
        self._running_returns.assign(tf.zeros_like(self._running_returns))

    def scale(self, rewards: tf.Tensor, discounts: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
        """Updates the statistics with `rewards` and returns the rewards scaled.

        Args:
          rewards: [T, N] float32. They must follow the rewards of the previous call.
          discounts: [T, N] float32, 0 where the environment has ended a return.
          valid: [T, N] float32, 0 on boundary rows (see `returns.valid_mask`).

        Returns:
          The scaled rewards, [T, N] float32.
        """
        goes_on = tf.cast(discounts > 0, tf.float32)
        goes_on_tm1 = tf.concat([tf.ones_like(goes_on[:1]), goes_on[:-1]], axis=0)
        # A discounted sum over the past is a return in reversed time. The reward of a boundary row,
        # which may have been clipped to another value than 0, is part of no return.
        backwards = discounted_returns(
            (valid * rewards)[::-1],
            (self._discount * valid * goes_on_tm1)[::-1],
            self._running_returns,
        )
        self._running_returns.assign(goes_on[-1] * backwards[0])
        self._moments.update(tf.reshape(backwards[::-1], [-1]), tf.reshape(valid, [-1]))
        scaled = rewards / self._moments.standard_deviation()
        return tf.clip_by_value(scaled, -self._clip, self._clip)
