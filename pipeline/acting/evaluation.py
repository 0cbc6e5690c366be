"""Evaluates policies on whole episodes, and records videos of them."""

from __future__ import annotations

import errno
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import cv2
import gin
import imageio.v2 as imageio
import imageio_ffmpeg
import numpy as np
import tensorflow as tf
from tf_agents.policies import tf_policy
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import StepType

from pipeline.acting.collect_driver import Carry, CollectDriver, initial_carry
from pipeline.acting.policies import EpsilonGreedyPolicy
from pipeline.environments.training_environment import named_failures
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.utils.constraints import PositiveInt, Probability, check_arguments
from pipeline.utils.errors import UserError, WriteError
from pipeline.utils.execution import int64
from pipeline.utils.files import error_kind, replacing

T = TypeVar("T")

STEPS_PER_CALL = 32  # vector steps; few enough to respond to Ctrl-C, enough to be fast


# Training never reaches this number of resets, so that evaluations in the training environment have
# seeds of their own.
_SHARED = 2**32


@gin.configurable(
    denylist=["environment", "policy", "stochastic_policy", "seed", "shares_environment"]
)
class Evaluator:
    """Plays whole episodes, usually in environments of its own, with unclipped rewards.

    Each environment plays a quota of episodes. Counting the first episodes to finish in any
    environment instead would favour short episodes.

    With `num_env_steps`, the environments instead share that number of environment steps, and
    episodes that are unfinished at the end do not count (Mnih et al. 2015). This favours short
    episodes, especially if `num_env_steps` allows few episodes. The mean of no episodes is None,
    and such an evaluation does not make its checkpoint the best.

    Attributes:
      environment: Environment in which the episodes are played.
      policy: Policy that is evaluated.
      shares_environment: Whether the environment is that of training.
      max_episode_steps: Environment steps after which an episode is truncated, or None.
    """

    def __init__(
        self,
        environment: VectorEnvironment,
        policy: tf_policy.TFPolicy,
        stochastic_policy: tf_policy.TFPolicy,
        *,
        seed: int,
        shares_environment: bool = False,
        greedy: bool = True,
        epsilon: Probability | None = None,
        num_env_steps: PositiveInt | None = None,
        max_episode_steps: PositiveInt | None = 100_000,
    ):
        """Initializes the evaluator.

        Args:
          environment: Environment in which the episodes are played.
          policy: The agent's greedy policy.
          stochastic_policy: The agent's collect policy.
          seed: Seed of the evaluated policy's random draws.
          shares_environment: True if the environment is that of training. Its episodes are then
            abandoned at each evaluation, and new ones begin afterwards.
          greedy: True to evaluate the greedy policy, False to evaluate that of training, which
            samples or explores.
          epsilon: Probability of a uniformly random action instead of the greedy one, or None for
            no random actions.
          num_env_steps: Environment steps of an evaluation, over all environments. It replaces the
            number of episodes.
          max_episode_steps: Environment steps after which an episode of an evaluation is truncated,
            also if the environment has no limit of its own: a policy may never end an episode. None
            for no limit.

        Raises:
          UserError: If `epsilon` is not a probability, `epsilon` is used without `greedy` or with
            continuous actions, or a number of steps is not a whole number of at least 1.
        """
        check_arguments(Evaluator, locals())
        self.shares_environment = shares_environment
        self.max_episode_steps = max_episode_steps
        self.environment = environment
        self.policy = policy if greedy else stochastic_policy
        if epsilon is not None:
            _check_epsilon(epsilon, greedy, policy)
            self.policy = EpsilonGreedyPolicy(policy, lambda: tf.constant(epsilon, tf.float32))
        self.num_env_steps = num_env_steps
        # Overrides the binding of training, because evaluation counts the environment's own points.
        self._driver = CollectDriver(environment, seed=seed, reward_range=None)
        self._play = tf.function(self._play_steps, autograph=False)

    def _play_steps(self, carry: Carry):
        carry, rows = self._driver.run(self.policy, carry, STEPS_PER_CALL)
        return carry, rows.step_type, rows.next_step_type, rows.reward

    def run(
        self,
        num_episodes: int,
        index: int,
        on_progress: Callable[[int, int, int], bool] = lambda *_: False,
    ) -> dict[str, Any] | None:
        """Plays `num_episodes` episodes, or `num_env_steps` environment steps if that is set.

        Args:
          num_episodes: Episodes over all environments. Ignored if the evaluator has
            `num_env_steps`.
          index: Number of this evaluation. The random draws of the environments and of the policy
            depend on it and on the seed.
          on_progress: Function that is called every 32 vector steps and at the end: with the
            number of episodes (of environment steps if the evaluator has `num_env_steps`) so far,
            their number at the end, and the steps of the longest unfinished episode. If it returns
            True, the evaluation stops.

        Returns:
          A dict with the keys "return_mean", "return_std" and "returns", and "truncated", the
          number of episodes that `max_episode_steps` has truncated, if there are any; None if
          interrupted.

        Raises:
          UserError: If the environment fails, or a return is not finite.
        """
        length = num_episodes if self.num_env_steps is None else self.num_env_steps
        kind = EpisodeTally if self.num_env_steps is None else _StepTally
        tally = kind(_shares(length, self.environment.batch_size))
        number = index + (_SHARED if self.shares_environment else 0)
        episodes = self.environment.episodes
        with episodes.unrecorded(number, self.max_episode_steps):
            if not self._play_all(
                tally, index, lambda: on_progress(tally.done, length, tally.longest)
            ):
                return None
            returns = tally.returns(episodes.own_returns)
            truncated = sum(x for of_env in tally.counted(episodes.endings) for x in of_env)
        if not np.isfinite(returns).all():
            bad = next(x for x in returns if not np.isfinite(x))
            raise UserError(
                f"environment {self.environment.name}: an episode of an evaluation returned {bad}, "
                "because a reward is NaN or infinite. Check the class of the environment."
            )
        return summarize(returns) | ({"truncated": truncated} if truncated else {})

    def _play_all(self, tally: EpisodeTally, index: int, on_progress: Callable[[], bool]) -> bool:
        """Plays until the tally is complete; returns False if interrupted."""
        with named_failures(self.environment):
            carry = initial_carry(self.environment, self.policy)
        carry = carry._replace(vector_steps=int64(index << 32))
        while not tally.complete:
            if on_progress():
                return False
            with named_failures(self.environment):
                carry, *rows = self._play(carry)
            tally.add(*(row.numpy() for row in rows))
        on_progress()
        return True

    def close(self) -> None:
        """Closes the environments."""
        self.environment.close()


def _shares(total: int, num_envs: int) -> np.ndarray:
    shares = np.full(num_envs, total // num_envs)
    shares[: total % num_envs] += 1
    return shares


def _check_epsilon(epsilon: float, greedy: bool, policy: tf_policy.TFPolicy) -> None:
    spec = policy.action_spec
    if not greedy or not tensor_spec.is_discrete(spec) or spec.shape.rank:
        raise UserError(
            f"Evaluator.epsilon = {epsilon} needs a single discrete action and Evaluator.greedy = "
            "True; otherwise, bind Evaluator.epsilon to None."
        )


class EpisodeTally:
    """Collects the returns of the first `quota[i]` episodes of environment i."""

    def __init__(self, quota: np.ndarray):
        self._quota = quota
        self._in_flight = np.zeros(len(quota), np.float64)
        self._lengths = np.zeros(len(quota), np.int64)
        self._returns: list[list[float]] = [[] for _ in quota]

    @property
    def complete(self) -> bool:
        """Returns True if every environment has played its quota."""
        return all(len(r) >= q for r, q in zip(self._returns, self._quota, strict=True))

    @property
    def done(self) -> int:
        """Returns the number of episodes that count so far."""
        return len(self.returns())

    @property
    def longest(self) -> int:
        """Returns the number of steps of the longest unfinished episode."""
        return max(self._lengths.tolist(), default=0)

    def add(self, step_type: np.ndarray, next_step_type: np.ndarray, reward: np.ndarray) -> None:
        """Adds rows [T, N] in time order. Boundary rows are ignored."""
        for valid, ends, rewards in zip(
            step_type != StepType.LAST, next_step_type == StepType.LAST, reward, strict=True
        ):
            self._in_flight += np.where(valid, rewards, 0.0)
            self._lengths = np.where(ends, 0, self._lengths + valid)
            for env in np.flatnonzero(valid & ends):
                self._returns[env].append(float(self._in_flight[env]))
                self._in_flight[env] = 0.0

    def returns(self, own_returns: Iterable[tuple[int, float]] = ()) -> list[float]:
        """Returns the return of each episode, environment by environment.

        Args:
          own_returns: Number of the environment and return of episodes, in the order of time. They
            replace the sums of rewards of environments in which all episodes have one.
        """
        summed = [r[:q] for r, q in zip(self._returns, self._quota, strict=True)]
        return [
            x
            for of_env, own in zip(summed, self.counted(own_returns), strict=True)
            for x in (own if len(own) == len(of_env) else of_env)
        ]

    def counted(self, values: Iterable[tuple[int, T]]) -> list[list[T]]:
        """Returns the values of the episodes that count, of each environment.

        Args:
          values: Number of the environment and value of each episode, in the order of time.
        """
        of_envs: list[list[T]] = [[] for _ in self._returns]
        for env, value in values:
            if len(of_envs[env]) < min(len(self._returns[env]), self._quota[env]):
                of_envs[env].append(value)
        return of_envs


class _StepTally(EpisodeTally):
    """Collects the returns of episodes that end within `num_steps[i]` steps of environment i."""

    def __init__(self, num_steps: np.ndarray):
        super().__init__(np.full(len(num_steps), sys.maxsize))
        self._steps_left = num_steps.copy()
        self._num_steps = num_steps.sum()

    @property
    def complete(self) -> bool:
        """Returns True if every environment has taken its steps."""
        return not self._steps_left.any()

    @property
    def done(self) -> int:
        """Returns the number of steps taken."""
        return int(self._num_steps - self._steps_left.sum())

    def add(self, step_type: np.ndarray, next_step_type: np.ndarray, reward: np.ndarray) -> None:
        """Adds rows as `EpisodeTally.add` does. Boundary rows do not count as steps."""
        is_step = step_type != StepType.LAST
        counts = is_step & (np.cumsum(is_step, axis=0) <= self._steps_left)
        self._steps_left -= counts.sum(axis=0)
        super().add(np.where(counts, step_type, StepType.LAST), next_step_type, reward)


def summarize(returns: list[float]) -> dict[str, Any]:
    """Returns the mean, the population standard deviation and the returns themselves.

    The mean and the standard deviation of no returns are None.
    """
    if not returns:
        return {"return_mean": None, "return_std": None, "returns": []}
    return {
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "returns": returns,
    }


def record_video(
    environment: VectorEnvironment,
    policy: tf_policy.TFPolicy,
    path: pathlib.Path,
    seed: int,
    on_progress: Callable[[int], bool] = lambda _: False,
    max_episode_steps: int | None = None,
) -> float | None:
    """Plays one episode and writes it as an H.264 MP4 file, which browsers can play.

    Args:
      environment: A single environment built with `render=True`, which nothing else steps.
      policy: Any policy with the environment's specs.
      path: File to write. It appears only once it is complete.
      seed: Seed of the policy's random draws.
      on_progress: Function that is called at every environment step with the number of steps taken
        so far. If it returns True, the recording stops.
      max_episode_steps: Steps after which the episode is truncated; None for no limit.

    Returns:
      The episode's return, or None if interrupted.

    Raises:
      UserError: If the environment fails or cannot render, or if the file cannot be written.
    """
    unrecorded = environment.episodes.unrecorded(0, max_episode_steps)
    try:
        with replacing(path) as temporary, unrecorded, named_failures(environment):
            temporary.touch()  # ffmpeg would not say why it cannot be written
            episode_return = _film(environment, policy, temporary, seed, on_progress)
            if episode_return is None:
                temporary.unlink()
            elif environment.episodes.own_returns:
                _, episode_return = environment.episodes.own_returns[-1]
    except OSError as error:
        if error.errno is None:  # imageio's, with the command line of ffmpeg
            raise WriteError(f"cannot write {path}: ffmpeg ended; is the disk full?") from error
        raise error_kind(error)(f"cannot write {path}: {error.strerror}") from error
    return episode_return


def _film(
    environment: VectorEnvironment,
    policy: tf_policy.TFPolicy,
    path: pathlib.Path,
    seed: int,
    on_progress: Callable[[int], bool],
) -> float | None:
    driver = CollectDriver(environment, seed=seed, reward_range=None)
    step = tf.function(lambda carry: driver.run(policy, carry, 1)[0], autograph=False)
    carry = initial_carry(environment, policy)
    first_frame = environment.render()
    num_frames = 1
    writer: Any  # imageio declares only a base class
    with imageio.get_writer(
        path,
        fps=environment.render_fps,
        codec="libx264",
        pixelformat="yuv420p",
        macro_block_size=2,
        output_params=["-movflags", "+faststart"],  # can be played before it is fully loaded
    ) as writer:
        writer.append_data(_even(first_frame))
        while int(carry.statistics.episodes) == 0:
            if on_progress(int(carry.vector_steps)):
                return None
            carry = step(carry)
            frame = environment.render()
            if frame.shape != first_frame.shape:  # a video has one size
                frame = cv2.resize(frame, first_frame.shape[1::-1])
            writer.append_data(_even(frame))
            num_frames += 1
    _check_video(path, num_frames)
    return float(carry.statistics.last_returns[-1])


def _check_video(path: pathlib.Path, num_frames: int) -> None:
    """Checks that a video is complete, because imageio ignores the exit code of ffmpeg.

    Raises:
      OSError: If it is not, for example because the disk is full.
    """
    try:
        written, _ = imageio_ffmpeg.count_frames_and_secs(path)
    except RuntimeError:  # It is no video.
        written = 0
    if written != num_frames:
        reason = f"only {written} of {num_frames} frames were written; is the disk full?"
        raise OSError(errno.ENOSPC, reason)


def _even(frame: np.ndarray) -> np.ndarray:
    """Pads a frame to even sides by repeating its last row or column.

    The pixel format yuv420p halves the resolution of colour, so it needs even sides.
    """
    height, width, _ = frame.shape
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
