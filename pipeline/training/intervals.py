"""Defines the length of a run and its warm-up, and the intervals of logs and checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import gin

from pipeline.replay import Experience, ReplayBuffer
from pipeline.utils.constraints import NonNegativeInt, check_arguments
from pipeline.utils.errors import UserError


class Plan(NamedTuple):
    """Length of a run and its intervals; `train` describes the fields, which are its arguments."""

    num_env_steps: int
    log_interval: int
    eval_interval: int
    checkpoint_interval: int
    num_eval_episodes: int
    num_final_episodes: int

    def next_stop(self, env_steps: int) -> int:
        """Returns the next multiple of an interval after `env_steps`, or the end of the run."""
        intervals = (self.log_interval, self.eval_interval, self.checkpoint_interval)
        stops = [(env_steps // i + 1) * i for i in intervals if i]
        return min([self.num_env_steps, *stops])


@gin.configurable
def initialize_replay_buffer(num_env_steps: NonNegativeInt = 0) -> int:
    """Returns the length of the warm-up, in which a random policy fills the replay buffer.

    Args:
      num_env_steps: Environment steps of the warm-up; 0 for on-policy agents, which need none.
    """
    check_arguments(initialize_replay_buffer, locals())
    return num_env_steps


def check_warm_up(warm_up: int, plan: Plan) -> None:
    """Checks that a warm-up leaves environment steps of `plan` to train.

    Raises:
      UserError: If it leaves none.
    """
    if warm_up >= plan.num_env_steps:
        raise UserError(
            f"train.num_env_steps = {plan.num_env_steps:_} includes the warm-up, and "
            f"initialize_replay_buffer.num_env_steps = {warm_up:_} leaves nothing to train: raise "
            "the former or lower the latter."
        )


def check_store(warm_up: int, experience: Experience, is_new: bool = True) -> None:
    """Checks that `experience` keeps the rows of a warm-up until they are learnt from.

    Raises:
      UserError: If there is a warm-up and `experience` does not keep rows, or not as many.
    """
    if warm_up and not experience.keeps_rows:
        raise UserError(
            f"initialize_replay_buffer.num_env_steps = {warm_up:_}, but this agent uses a rollout, "
            "which has no warm-up. Bind initialize_replay_buffer.num_env_steps to 0."
        )
    # An earlier run may be past its warm-up.
    if is_new and isinstance(experience, ReplayBuffer) and warm_up > experience.capacity:
        raise UserError(
            f"initialize_replay_buffer.num_env_steps = {warm_up:_}, but ReplayBuffer.capacity = "
            f"{experience.capacity:_} keeps only the last of these. Lower the former or raise the "
            "latter."
        )
