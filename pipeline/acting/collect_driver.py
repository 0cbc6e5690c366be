"""Defines the collect driver that all agents share."""

from __future__ import annotations

from typing import Any, NamedTuple

import gin
import tensorflow as tf
from tf_agents.policies import tf_policy
from tf_agents.trajectories import StepType, TimeStep, Trajectory, trajectory

from pipeline.acting.episode_statistics import (
    EpisodeStatistics,
    initial_statistics,
    update_statistics,
)
from pipeline.acting.policies import clip_action
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.ops.randomness import stateless_seed, stream_key
from pipeline.utils.errors import UserError
from pipeline.utils.execution import HOST, accelerator

_MAX_UNROLLED_STEPS = 8  # building a longer unrolled graph takes more time than it saves


class Carry(NamedTuple):
    """State of the collect driver between calls.

    The training loop owns the carry and saves it in checkpoints.

    Attributes:
      time_step: TimeStep [N] that the next action responds to.
      policy_state: Nest [N, ...] of the policy's state, or () if the policy is not recurrent.
      vector_steps: int64 number of vector steps taken, which also numbers the policy's random
        draws. A scalar, or [K] for K actors between calls.
      statistics: Episode statistics over unclipped rewards.
    """

    time_step: TimeStep
    policy_state: Any
    vector_steps: tf.Tensor
    statistics: EpisodeStatistics


def initial_carry(environment: VectorEnvironment, policy: tf_policy.TFPolicy) -> Carry:
    """Resets the environment and returns the carry of a run that has taken no steps."""
    return Carry(
        environment.reset(),
        policy.get_initial_state(environment.batch_size),
        tf.zeros([], tf.int64),
        initial_statistics(environment.batch_size),
    )


def interrupt_episodes(carry: Carry) -> Carry:
    """Returns a carry in which the unfinished episodes count as truncated.

    Use it when the environments start new episodes. The time steps become LAST, so that an ordinary
    LAST -> FIRST boundary follows. The returns of the unfinished episodes are dropped.
    """
    time_step = carry.time_step
    fresh = initial_statistics(time_step.step_type.shape[0])
    return carry._replace(
        time_step=time_step._replace(step_type=tf.fill(time_step.step_type.shape, StepType.LAST)),
        statistics=carry.statistics._replace(
            episode_return=fresh.episode_return, episode_length=fresh.episode_length
        ),
    )


@gin.configurable(denylist=["environment", "seed", "ends_with_episode"])
class CollectDriver:
    """Steps N environments with a policy inside the graph.

    The driver is stateless: all state is in the `Carry`.
    """

    def __init__(
        self,
        environment: VectorEnvironment,
        *,
        seed: int,
        reward_range: tuple[float, float] | None = None,
        ends_with_episode: bool = False,
    ):
        """Initializes the driver.

        Args:
          environment: Environment to step.
          seed: Seed of the run.
          reward_range: Range (low, high) to which the rewards that learners see are clipped, or
            None for no clipping. Statistics use unclipped rewards.
          ends_with_episode: If True, a single environment whose episode ends waits for the next
            call of `run`, which then begins with a reset. The rows that remain in the call are
            boundary rows and do not count as steps.

        Raises:
          UserError: If `reward_range` is neither None nor a range (low, high).
          ValueError: If `ends_with_episode` is True and there are several environments.
        """
        _check_reward_range(reward_range)
        if ends_with_episode and environment.batch_size != 1:
            raise ValueError(
                f"ends_with_episode requires a single environment, not {environment.batch_size}."
            )
        self.environment = environment
        self._key = stream_key(seed, "collect")
        self._reward_range = reward_range
        self._ends_with_episode = ends_with_episode

    def run(
        self, policy: tf_policy.TFPolicy, carry: Carry, num_steps: int
    ) -> tuple[Carry, Trajectory]:
        """Takes `num_steps` vector steps.

        Returns:
          The new carry, and the rows [num_steps, N, ...] with clipped rewards.
        """
        with tf.device(HOST):
            loop_vars = (self._first(carry.time_step), carry.policy_state, carry.vector_steps)
            collect = self._unrolled_steps if num_steps <= _MAX_UNROLLED_STEPS else self._steps
            (time_step, policy_state, vector_steps), rows = collect(policy, loop_vars, num_steps)
            statistics = update_statistics(
                carry.statistics, rows.step_type, rows.next_step_type, rows.reward
            )
            if self._reward_range is not None:
                rows = rows.replace(reward=tf.clip_by_value(rows.reward, *self._reward_range))
            return Carry(time_step, policy_state, vector_steps, statistics), rows

    def _first(self, time_step: TimeStep) -> TimeStep:
        if not self._ends_with_episode:
            return time_step
        spec = self.environment.action_spec()
        ignored = clip_action(tf.zeros([1, *spec.shape], spec.dtype), spec)
        return tf.cond(
            time_step.is_last()[0], lambda: self.environment.step(ignored), lambda: time_step
        )

    def _step(self, policy, time_step, policy_state, vector_steps):
        seed = stateless_seed(self._key, vector_steps)
        with tf.device(accelerator()):
            policy_step = policy.action(time_step, policy_state, seed)
        action = clip_action(policy_step.action, self.environment.action_spec())
        next_time_step = self._next_time_step(action, time_step)
        row = trajectory.from_transition(time_step, policy_step, next_time_step)
        return (next_time_step, policy_step.state, vector_steps + 1), row

    def _next_time_step(self, action: tf.Tensor, time_step: TimeStep) -> TimeStep:
        if not self._ends_with_episode:
            return self.environment.step(action)
        return tf.cond(
            time_step.is_last()[0], lambda: time_step, lambda: self.environment.step(action)
        )

    def _unrolled_steps(self, policy, loop_vars, num_steps: int):
        rows = []
        for _ in range(num_steps):
            loop_vars, row = self._step(policy, *loop_vars)
            rows.append(row)
        return loop_vars, tf.nest.map_structure(lambda *steps: tf.stack(steps), *rows)

    def _steps(self, policy, loop_vars, num_steps: int):
        spec = policy.trajectory_spec
        arrays = [
            tf.TensorArray(
                s.dtype, num_steps, element_shape=[loop_vars[0].step_type.shape[0], *s.shape]
            )
            for s in tf.nest.flatten(spec)
        ]

        def body(step, loop_vars, arrays):
            loop_vars, row = self._step(policy, *loop_vars)
            values = tf.nest.flatten(row)
            return (
                step + 1,
                loop_vars,
                [array.write(step, value) for array, value in zip(arrays, values, strict=True)],
            )

        _, loop_vars, arrays = tf.while_loop(
            lambda step, *_: step < num_steps,
            body,
            (tf.constant(0), loop_vars, arrays),
            parallel_iterations=1,
            maximum_iterations=num_steps,
        )
        return loop_vars, tf.nest.pack_sequence_as(spec, [array.stack() for array in arrays])


def _check_reward_range(reward_range: Any) -> None:
    is_pair = isinstance(reward_range, tuple | list) and len(reward_range) == 2
    is_range = (
        is_pair
        and all(isinstance(limit, int | float) for limit in reward_range)
        and reward_range[0] < reward_range[1]
    )
    if reward_range is not None and not is_range:
        raise UserError(
            f"CollectDriver.reward_range = {reward_range!r}: must be (low, high) with low below "
            "high, as in (-1.0, 1.0), or None."
        )
