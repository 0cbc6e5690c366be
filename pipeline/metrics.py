"""What a run measures of itself: episode statistics, kept in the graph, and records of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tf_agents.trajectories import time_step as ts

WINDOW = 100  # finished episodes


class EpisodeStatistics(NamedTuple):
    """Returns and lengths of episodes, as tensors that a graph loop carries.

    Attributes:
        episode_return: [N] float32, undiscounted raw rewards of the episodes in flight.
        episode_length: [N] int64, environment steps of the episodes in flight.
        last_returns: [100] float32, the last 100 finished episodes, newest last; NaN where none.
        last_lengths: [100] int64, their lengths in environment steps; 0 where none.
        episodes: [] int64, finished episodes.
        return_sum: [] float64, the sum of their returns.
        env_steps: [] int64, environment steps.
    """

    episode_return: tf.Tensor
    episode_length: tf.Tensor
    last_returns: tf.Tensor
    last_lengths: tf.Tensor
    episodes: tf.Tensor
    return_sum: tf.Tensor
    env_steps: tf.Tensor


def initial_statistics(num_envs: int) -> EpisodeStatistics:
    """Statistics of `num_envs` environments (N) before their first step."""
    return EpisodeStatistics(
        episode_return=tf.zeros([num_envs], tf.float32),
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
    """Counts rows that follow those already counted; how rows are cut into calls is immaterial.

    An episode ends with the row that leads to a LAST step. Boundary rows (LAST to FIRST) count for
    nothing. Episodes join the window in order of time, then of environment.

    Args:
        statistics: of the rows before.
        step_type: [T, N] int32.
        next_step_type: [T, N] int32.
        reward: [T, N] float32, raw.
    """
    # Almost always the rows lie within episodes, and sums are all there is to do.
    has_last = tf.reduce_any(tf.equal(tf.maximum(step_type, next_step_type), ts.StepType.LAST))
    changed = tf.cond(
        has_last,
        lambda: _across_episodes(statistics, step_type, next_step_type, reward),
        lambda: _within_episodes(statistics, reward),
    )
    return EpisodeStatistics(*changed)


def _within_episodes(statistics: EpisodeStatistics, reward: tf.Tensor) -> EpisodeStatistics:
    num_rows = tf.shape(reward, out_type=tf.int64)[0]
    return statistics._replace(
        episode_return=statistics.episode_return + tf.reduce_sum(reward, axis=0),
        episode_length=statistics.episode_length + num_rows,
        env_steps=statistics.env_steps + tf.size(reward, out_type=tf.int64),
    )


def _across_episodes(
    statistics: EpisodeStatistics,
    step_type: tf.Tensor,
    next_step_type: tf.Tensor,
    reward: tf.Tensor,
) -> EpisodeStatistics:
    """Sums by episode: those of environment n get the ids n(T+1), n(T+1)+1, ... in this call."""
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

    returns = sums(statistics.episode_return, reward)
    lengths = sums(statistics.episode_length, tf.ones_like(reward, tf.int64))
    finished = tf.boolean_mask(ids, ended)  # row-major: by time, then by environment
    of_finished = tf.gather(returns, finished)
    current = ids[-1] + tf.cast(ended[-1], tf.int64)
    return EpisodeStatistics(
        episode_return=tf.gather(returns, current),
        episode_length=tf.gather(lengths, current),
        last_returns=_append(statistics.last_returns, of_finished),
        last_lengths=_append(statistics.last_lengths, tf.gather(lengths, finished)),
        episodes=statistics.episodes + tf.size(finished, out_type=tf.int64),
        return_sum=statistics.return_sum + tf.reduce_sum(tf.cast(of_finished, tf.float64)),
        env_steps=statistics.env_steps + tf.math.count_nonzero(counts),
    )


def with_empty_window(statistics: EpisodeStatistics) -> EpisodeStatistics:
    """The statistics without the last finished episodes."""
    empty = initial_statistics(1)
    return statistics._replace(last_returns=empty.last_returns, last_lengths=empty.last_lengths)


def merge_statistics(
    actors: Sequence[EpisodeStatistics], before: EpisodeStatistics
) -> EpisodeStatistics:
    """The statistics of several actors together.

    Args:
        actors: their windows hold what each has finished at the same time.
        before: its window holds what was finished earlier; the newest of each actor in turn follow.
    """

    def together(values: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.concat(values, axis=0)

    # Windows end with their newest episodes.
    lengths = tf.reshape(tf.stack([actor.last_lengths for actor in actors], axis=1), [-1])
    returns = tf.reshape(tf.stack([actor.last_returns for actor in actors], axis=1), [-1])
    return EpisodeStatistics(
        episode_return=together([actor.episode_return for actor in actors]),
        episode_length=together([actor.episode_length for actor in actors]),
        last_returns=_append(before.last_returns, returns[lengths > 0]),
        last_lengths=_append(before.last_lengths, lengths[lengths > 0]),
        episodes=tf.add_n([actor.episodes for actor in actors]),
        return_sum=tf.add_n([actor.return_sum for actor in actors]),
        env_steps=tf.add_n([actor.env_steps for actor in actors]),
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
    """One record of metrics.jsonl.

    Args:
        statistics: of all environment steps so far.
        updates: optimizer steps so far.
        wall_seconds: seconds of training so far, over all processes of the run.
        env_steps_per_second: since the last record.
        **scalars: losses, values of schedules, shares of time; Python's, NumPy's, TensorFlow's, or
            None where there is nothing to tell yet. Lists, such as counts of a histogram, are kept.

    Returns:
        Plain Python numbers. Means over no episode, NaN and inf are None, as they are in JSON.
    """
    returns = np.asarray(statistics.last_returns)
    lengths = np.asarray(statistics.last_lengths)
    known = lengths > 0
    measured = {
        "wall_seconds": wall_seconds,
        "env_steps_per_second": env_steps_per_second,
        "return_mean_100": returns[known].mean(dtype=np.float64) if known.any() else math.nan,
        "episode_length_mean_100": lengths[known].mean() if known.any() else math.nan,
        "return_sum": statistics.return_sum,
        **scalars,
    }
    return {
        "env_steps": int(statistics.env_steps),
        "updates": int(updates),
        "episodes": int(statistics.episodes),
        **{key: _finite(value) for key, value in measured.items()},
    }


def _finite(value: Any) -> float | list | None:
    if isinstance(value, list):
        return value
    return float(value) if value is not None and math.isfinite(value) else None
