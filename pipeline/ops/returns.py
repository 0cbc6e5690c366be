"""Computes returns, advantages and n-step targets, by the rules for episode boundaries.

Row t of a trajectory holds the observation o_t and its step_type, the action taken on it, and the
results of that action: reward_t and discount_t. A row whose step_type is LAST is a *boundary row*.
It holds the final observation of an episode, its action is ignored, and the next row belongs to the
next episode. Every other row is a transition. Only transitions enter a loss, a return, an advantage
or a count. The discount of a transition and the next row determine what follows it:

* The discount is 0: nothing follows. Either the episode terminated, or a life was lost. After a
  lost life the episode continues: the next row is MID, and only the return is cut.
* The discount is 1 and the next row is LAST: the episode was truncated. The return continues with
  the value of the final observation, which is the value of the boundary row.
* Otherwise the return of the next row follows.

An example without discounting (V is the value function):

     t  step_type  reward  discount                                     valid  return
     0  FIRST         1        1                                          1    1 + 2
     1  MID           2        0      a life is lost, the game continues  1    2
     2  MID           3        1      the episode is truncated here       1    3 + V(o_3)
     3  LAST          0        1      boundary row                        0    V(o_3)
     4  FIRST         4        0      the episode terminates here         1    4
     5  LAST          0        1      boundary row                        0    V(o_5), never used
     6  FIRST         5        1      the trajectory is cut here          1    5 + final_value

Unless stated otherwise, arguments are time-major, [T, B], where T >= 1 is known when the graph is
built. Gradients flow through the values. A caller that needs targets must stop the gradients.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tf_agents.trajectories import StepType


def valid_mask(step_type: tf.Tensor) -> tf.Tensor:
    """Returns a float32 mask that is 1 on transitions and 0 on boundary rows.

    Args:
      step_type: int32, any shape.
    """
    return tf.cast(tf.not_equal(step_type, StepType.LAST), tf.float32)


def discounted_returns(
    rewards: tf.Tensor,
    discounts: tf.Tensor,
    final_value: tf.Tensor,
    valid: tf.Tensor | None = None,
    values: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes G_t = r_t + d_t G_{t+1} with G_T = final_value; on boundary rows G_t = values_t.

    See Sutton & Barto, "Reinforcement Learning: An Introduction", 2nd edition, equation 3.9.

    Args:
      rewards: [T, B] float32.
      discounts: [T, B] float32, discount factor included.
      final_value: [B] float32, the value of the observation after the last row.
      valid: [T, B] float32, see `valid_mask`. If None, every row is a transition.
      values: [T, B] float32, the value of each row's observation, read on boundary rows only.
        Needed with `valid`.

    Returns:
      The returns, [T, B] float32.

    Raises:
      ValueError: If the shapes do not agree.
    """
    _check_shapes(final_value, rewards, discounts, valid, values)
    if valid is not None:
        rewards = tf.where(valid > 0.0, rewards, values)
        discounts = valid * discounts
    return _linear_recurrence(rewards, discounts, final_value)


def one_step_targets(
    rewards: tf.Tensor, discounts: tf.Tensor, values: tf.Tensor, final_value: tf.Tensor
) -> tf.Tensor:
    """Computes r_t + d_t V_{t+1} with V_T = final_value; do not use it on boundary rows.

    See Sutton & Barto, equation 6.2.

    Args:
      rewards: [T, B] float32.
      discounts: [T, B] float32, discount factor included.
      values: [T, B] float32, the value of each row's observation, boundary rows included.
      final_value: [B] float32, the value of the observation after the last row.

    Returns:
      The targets, [T, B] float32.

    Raises:
      ValueError: If the shapes do not agree.
    """
    _check_shapes(final_value, rewards, discounts, values)
    return rewards + discounts * tf.concat([values[1:], final_value[tf.newaxis]], axis=0)


def generalized_advantage_estimation(
    rewards: tf.Tensor,
    discounts: tf.Tensor,
    values: tf.Tensor,
    final_value: tf.Tensor,
    lambda_: float | tf.Tensor,
    valid: tf.Tensor,
) -> tf.Tensor:
    """Computes A_t = delta_t + d_t lambda A_{t+1} with delta_t = r_t + d_t V_{t+1} - V_t.

    See Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16; V_T is final_value. The
    advantage of a boundary row is 0, so that a truncated episode bootstraps only from the value of
    its final observation.

    Args:
      rewards: [T, B] float32.
      discounts: [T, B] float32, discount factor included.
      values: [T, B] float32, the value of each row's observation, boundary rows included.
      final_value: [B] float32, the value of the observation after the last row.
      lambda_: Decay of the estimator, in [0, 1].
      valid: [T, B] float32, see `valid_mask`.

    Returns:
      The advantages, [T, B] float32. Adding `values` gives the TD(lambda) returns.

    Raises:
      ValueError: If the shapes do not agree.
    """
    _check_shapes(final_value, rewards, valid)
    deltas = valid * (one_step_targets(rewards, discounts, values, final_value) - values)
    return _linear_recurrence(deltas, valid * discounts * lambda_, tf.zeros_like(final_value))


def v_trace(
    rewards: tf.Tensor,
    discounts: tf.Tensor,
    values: tf.Tensor,
    final_value: tf.Tensor,
    ratios: tf.Tensor,
    lambda_: float | tf.Tensor,
    rho_clip: float,
    valid: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes value targets and advantages for rows that another policy has collected.

    With rho_t = min(rho_clip, ratio_t), c_t = lambda min(1, ratio_t) and v_T = V_T = final_value,

        v_t = V_t + rho_t (r_t + d_t V_{t+1} - V_t) + d_t c_t (v_{t+1} - V_{t+1})
        A_t = rho_t (r_t + d_t (lambda v_{t+1} + (1 - lambda) V_{t+1}) - V_t)

    See Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, equation 1, remark 2 and section
    4.2. The paper has no lambda in A_t; here it is as in `rlax.vtrace_td_error_and_advantage`. If
    all ratios are 1 and rho_clip is at least 1, v_t is the TD(lambda) return and A_t = v_t - V_t.
    The target of a boundary row is its value and its advantage is 0, so that a truncated episode
    bootstraps with that value.

    Args:
      rewards: [T, B] float32.
      discounts: [T, B] float32, discount factor included.
      values: [T, B] float32, the value of each row's observation, boundary rows included.
      final_value: [B] float32, the value of the observation after the last row.
      ratios: [T, B] float32, the probability of each action under the learnt policy divided by
        that under the policy that collected it. They are not read on boundary rows.
      lambda_: Decay of the trace, in [0, 1].
      rho_clip: Upper bound of the ratios that weight the TD errors. The targets estimate the values
        of a policy between the collecting and the learnt policy; without a bound, of the latter.
      valid: [T, B] float32, see `valid_mask`.

    Returns:
      The targets and the advantages, both [T, B] float32.

    Raises:
      ValueError: If the shapes do not agree.
    """
    _check_shapes(final_value, rewards, ratios, valid)
    errors = one_step_targets(rewards, discounts, values, final_value) - values
    ratios = tf.where(valid > 0.0, ratios, 0.0)
    weights = tf.minimum(ratios, rho_clip)
    traces = discounts * lambda_ * tf.minimum(ratios, 1.0)
    targets = values + _linear_recurrence(weights * errors, traces, tf.zeros_like(final_value))
    following = lambda_ * targets + (1.0 - lambda_) * values
    errors = one_step_targets(rewards, discounts, following, final_value) - values
    return targets, weights * errors


def n_step_targets(
    rewards: tf.Tensor, discounts: tf.Tensor, step_types: tf.Tensor, gamma: float | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes n-step targets of the first row, with one bootstrap value per sequence.

    See Sutton & Barto, equation 7.1. The sum begins at row 0 and ends after n transitions, or
    earlier at a boundary row. The target is then

        returns, discounts, last_index = n_step_targets(...)
        target = returns + discounts * value(take_rows(observations, last_index))

    Args:
      rewards: [n + 1, B] float32. The last row is not read.
      discounts: [n + 1, B] float32, as the environment returns them, without gamma. The last row is
        not read.
      step_types: [n + 1, B] int32. The last row is not read.
      gamma: Discount factor of one step.

    Returns:
      returns: [B] float32, the discounted sum of the rewards.
      discounts: [B] float32, the weight of the bootstrap value; 0 after termination or a life loss.
      last_index: [B] int32, the row whose observation is used to bootstrap.

      A sequence that starts at a boundary row returns 0, 1 and 0, so its target is the value of its
      own observation. Mask it with `valid_mask`.

    Raises:
      ValueError: If the shapes do not agree or there are fewer than 2 rows.
    """
    _check_shapes(rewards[0], rewards, discounts, step_types)
    if rewards.shape[0] < 2:
        raise ValueError("n-step targets need n + 1 >= 2 rows: n transitions and a bootstrap row.")
    taken = tf.math.cumprod(valid_mask(step_types[:-1]))
    step_discounts = tf.where(taken > 0.0, gamma * discounts[:-1], 1.0)
    weights = taken * tf.math.cumprod(step_discounts, exclusive=True)
    returns = tf.reduce_sum(weights * rewards[:-1], axis=0)
    last_index = tf.cast(tf.reduce_sum(taken, axis=0), tf.int32)
    return returns, tf.reduce_prod(step_discounts, axis=0), last_index


def take_rows(sequences: Any, index: tf.Tensor) -> Any:
    """Returns row index[b] of sequence b, for every tensor of a nest.

    Args:
      sequences: Nest of [B, T, ...] tensors. They are batch-major, as in the batches of experience,
        because transposing image observations would copy all of them to read one row of each.
      index: [B] int32.

    Returns:
      The nest with tensors [B, ...].
    """
    return tf.nest.map_structure(lambda x: tf.gather(x, index, axis=1, batch_dims=1), sequences)


def _linear_recurrence(a: tf.Tensor, b: tf.Tensor, final: tf.Tensor) -> tf.Tensor:
    """Computes x_t = a_t + b_t x_{t+1} with x_T = final, in log2(T) rounds.

    This is the parallel scan of Hillis & Steele (1986). Each round doubles the number of maps
    x -> a + b x that every row has composed. A loop over T (`tf.scan`) takes 6 times as long at
    T = 128 and 40 times as long at T = 2048.
    """
    num_rows = a.shape[0]
    if num_rows is None:
        raise ValueError("The number of rows T must be known when the graph is built.")
    a = tf.concat([a, final[tf.newaxis]], axis=0)
    b = tf.concat([b, tf.zeros_like(final)[tf.newaxis]], axis=0)
    span = 1
    while span <= num_rows:
        padding = [[0, span], [0, 0]]
        a, b = a + b * tf.pad(a[span:], padding), b * tf.pad(b[span:], padding)
        span *= 2
    return a[:-1]


def _check_shapes(final: tf.Tensor, *rows: tf.Tensor | None) -> None:
    """Raises an error for shapes [B, T] or [T, 1], which would otherwise broadcast silently."""
    shapes = [(x, ("T", "B")) for x in rows if x is not None]
    tf.debugging.assert_shapes([(final, ("B",)), *shapes])
