"""Accumulates episode statistics in the graph, and makes records of metrics.jsonl from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tf_agents.trajectories import time_step as ts

from pipeline.environments.episodes import WINDOW
from pipeline.ops.batches import ordered_sum
from pipeline.utils.jsonl import plain


class EpisodeStatistics(NamedTuple):
    """Returns and lengths of episodes, as tensors that a graph loop carries.

    Attributes:
      episode_return: [N] float64, sum of the undiscounted raw rewards of each unfinished episode.
      episode_length: [N] int64, environment steps of each unfinished episode.
      last_returns: [100] float32, returns of the last 100 finished episodes, newest last; NaN in
        unused places.
      last_lengths: [100] int64, their lengths in environment steps; 0 in unused places.
      episodes: [] int64, number of finished episodes.
      return_sum: [] float64, sum of the returns of all finished episodes.
      env_steps: [] int64, number of environment steps.
    """

    episode_return: tf.Tensor
    episode_length: tf.Tensor
    last_returns: tf.Tensor
    last_lengths: tf.Tensor
    episodes: tf.Tensor
    return_sum: tf.Tensor
    env_steps: tf.Tensor


def initial_statistics(num_envs: int) -> EpisodeStatistics:
    """Returns the statistics of `num_envs` environments (N) before their first step."""
    return EpisodeStatistics(
        episode_return=tf.zeros([num_envs], tf.float64),
        episode_length=tf.zeros([num_envs], tf.int64),
        last_returns=tf.fill([WINDOW], tf.constant(math.nan, tf.float32)),
        last_lengths=tf.zeros([WINDOW], tf.int64),
        episodes=tf.zeros([], tf.int64),
        return_sum=tf.zeros([], tf.float64),
        env_steps=tf.zeros([], tf.int64),
    )


def update_statistics(
    statistics: EpisodeStatistics,
    step_type: tf.Tensor,
    next_step_type: tf.Tensor,
    reward: tf.Tensor,
) -> EpisodeStatistics:
    """Returns the statistics updated with new rows.

    The result does not depend on how the rows are divided among calls, except for the rounding of
    sums of float64. An episode ends with the row that leads to a LAST step. Boundary rows (LAST to
    FIRST) are ignored. Finished episodes join the window in order of time, then of environment.

    Args:
      statistics: Statistics of all previous rows.
      step_type: [T, N] int32.
      next_step_type: [T, N] int32.
      reward: [T, N] float32, raw rewards.
    """
    # Most calls see no end of an episode; plain sums are then enough, and cheaper.
    has_last = tf.reduce_any(tf.equal(tf.maximum(step_type, next_step_type), ts.StepType.LAST))
    changed = tf.cond(
        has_last,
        lambda: _across_episodes(statistics, step_type, next_step_type, reward),
        lambda: _within_episodes(statistics, reward),
    )
    return EpisodeStatistics(*changed)


def _within_episodes(statistics: EpisodeStatistics, reward: tf.Tensor) -> EpisodeStatistics:
    num_rows = tf.shape(reward, out_type=tf.int64)[0]
    added = tf.reduce_sum(tf.cast(reward, tf.float64), axis=0)
    return statistics._replace(
        episode_return=statistics.episode_return + added,
        episode_length=statistics.episode_length + num_rows,
        env_steps=statistics.env_steps + tf.size(reward, out_type=tf.int64),
    )


def _across_episodes(
    statistics: EpisodeStatistics,
    step_type: tf.Tensor,
    next_step_type: tf.Tensor,
    reward: tf.Tensor,
) -> EpisodeStatistics:
    """Updates the statistics with rows in which episodes end.

    Rewards and steps are summed by episode. The episodes of environment n have the ids n(T+1),
    n(T+1)+1, ... in this call.
    """
    counts = tf.not_equal(step_type, ts.StepType.LAST)
    ended = counts & tf.equal(next_step_type, ts.StepType.LAST)
    ended_before = tf.cumsum(tf.cast(ended, tf.int64), exclusive=True)
    num_rows, num_envs = tf.unstack(tf.shape(reward, out_type=tf.int64))
    first_id = tf.range(num_envs) * (num_rows + 1)
    ids = first_id + ended_before

    def sums(in_flight: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        values = tf.where(counts, values, tf.zeros_like(values))
        return tf.math.unsorted_segment_sum(
            tf.concat([in_flight[None], values], axis=0),
            tf.concat([first_id[None], ids], axis=0),
            num_envs * (num_rows + 1),
        )

    returns = sums(statistics.episode_return, tf.cast(reward, tf.float64))
    lengths = sums(statistics.episode_length, tf.ones_like(reward, tf.int64))
    finished = tf.boolean_mask(ids, ended)  # row-major: by time, then by environment
    of_finished = tf.gather(returns, finished)
    current = ids[-1] + tf.cast(ended[-1], tf.int64)
    return EpisodeStatistics(
        episode_return=tf.gather(returns, current),
        episode_length=tf.gather(lengths, current),
        last_returns=_append(statistics.last_returns, tf.cast(of_finished, tf.float32)),
        last_lengths=_append(statistics.last_lengths, tf.gather(lengths, finished)),
        episodes=statistics.episodes + tf.size(finished, out_type=tf.int64),
        return_sum=statistics.return_sum + tf.reduce_sum(of_finished),
        env_steps=statistics.env_steps + tf.math.count_nonzero(counts),
    )


def with_empty_window(statistics: EpisodeStatistics) -> EpisodeStatistics:
    """Returns the statistics without the returns and lengths of the last finished episodes."""
    empty = initial_statistics(1)
    return statistics._replace(last_returns=empty.last_returns, last_lengths=empty.last_lengths)


def merge_statistics(
    actors: Sequence[EpisodeStatistics], before: EpisodeStatistics
) -> EpisodeStatistics:
    """Merges the statistics of several actors.

    Args:
      actors: Statistics of each actor. Their windows hold the episodes that the actors finished
        during the same period.
      before: Statistics whose window holds the episodes finished earlier; only the window is used.
        The episodes of `actors` are appended to it, oldest first, one of each actor in turn.
    """
    # The windows are filled from the end, so episodes at the same place are of similar age.
    lengths = tf.reshape(tf.stack([actor.last_lengths for actor in actors], axis=1), [-1])
    returns = tf.reshape(tf.stack([actor.last_returns for actor in actors], axis=1), [-1])
    return EpisodeStatistics(
        episode_return=tf.concat([actor.episode_return for actor in actors], axis=0),
        episode_length=tf.concat([actor.episode_length for actor in actors], axis=0),
        last_returns=_append(before.last_returns, returns[lengths > 0]),
        last_lengths=_append(before.last_lengths, lengths[lengths > 0]),
        episodes=ordered_sum([actor.episodes for actor in actors]),
        return_sum=ordered_sum([actor.return_sum for actor in actors]),
        env_steps=ordered_sum([actor.env_steps for actor in actors]),
    )


def _append(window: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.concat([window, values], axis=0)[-WINDOW:], [WINDOW])


def metrics_record(
    statistics: EpisodeStatistics,
    *,
    updates: int,
    wall_seconds: float,
    env_steps_per_second: float,
    **scalars: Any,
) -> dict[str, Any]:
    """Returns one record of metrics.jsonl.

    Args:
      statistics: Statistics of all environment steps so far.
      updates: Number of optimizer steps so far.
      wall_seconds: Seconds of training so far, over all processes of the run.
      env_steps_per_second: Environment steps per second since the last record.
      **scalars: Losses, values of schedules and shares of time, as Python, NumPy or TensorFlow
        scalars, or None if there is no value yet. Lists, such as the counts of a histogram, are
        kept as they are.

    Returns:
      A dict of plain Python numbers. Means over no episodes, NaN and infinities become None,
      because JSON cannot represent them.
    """
    returns = np.asarray(statistics.last_returns)
    lengths = np.asarray(statistics.last_lengths)
    known = lengths > 0
    record = {
        "env_steps": int(statistics.env_steps),
        "updates": int(updates),
        "episodes": int(statistics.episodes),
        "wall_seconds": wall_seconds,
        "env_steps_per_second": env_steps_per_second,
        "return_mean_100": returns[known].mean(dtype=np.float64) if known.any() else math.nan,
        "episode_length_mean_100": lengths[known].mean() if known.any() else math.nan,
        "return_sum": statistics.return_sum,
        **scalars,
    }
    return plain(record)
