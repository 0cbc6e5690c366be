"""Checks the sizes that a user chooses, before anything is allocated."""

from __future__ import annotations

from fractions import Fraction

from tf_agents.trajectories import trajectory

from pipeline.replay import columns
from pipeline.utils.errors import UserError
from pipeline.utils.memory import available_memory

_MOST_UPDATES = 1_000  # Limit per iteration, unless the iteration has a single vector step.


def iteration_sizes(env_steps_per_update: int | float, num_envs: int) -> tuple[int, int]:
    """Returns the fewest (vector steps, updates) of an iteration that keep the requested ratio.

    `updates * env_steps_per_update == vector steps * num_envs` holds exactly.

    Raises:
      UserError: If the ratio requires iterations of too many updates.
    """
    # The decimal notation makes 0.1 mean a tenth, not the nearest binary fraction.
    ratio = Fraction(str(env_steps_per_update)) / num_envs
    if ratio.numerator > 1 and ratio.denominator > _MOST_UPDATES:
        raise UserError(
            f"ReplayBuffer.env_steps_per_update = {env_steps_per_update} with {num_envs} "
            f"environments requires iterations of {ratio.numerator:_} vector steps and "
            f"{ratio.denominator:_} updates, which is too long, because a run can be stopped only "
            "between iterations. Choose a simpler ratio, such as "
            f"{max(round(4 * env_steps_per_update) / 4, 0.25)}."
        )
    return ratio.numerator, ratio.denominator


def check_capacity(
    capacity: int,
    num_envs: int,
    needs: dict[str, int],
    older_frames: int,
    stored_spec: trajectory.Trajectory,
) -> None:
    """Checks `ReplayBuffer.capacity`.

    Args:
      capacity: Number of rows over all streams.
      num_envs: Number of streams.
      needs: Maps each purpose to the number of a stream's rows that it needs stored together.
      older_frames: Number of rows before these whose frames belong to the first row's stack.
      stored_spec: Specs of a stored row.

    Raises:
      UserError: If the capacity is too small, or takes more memory than the process may use.
    """
    what = max(needs, key=lambda name: needs[name])
    rows = needs[what] + older_frames
    if capacity // num_envs < rows:
        raise UserError(
            f"ReplayBuffer.capacity = {capacity:_} gives each of the {num_envs} environments "
            f"{capacity // num_envs} rows, but the {needs[what]} rows of one {what} and "
            f"{older_frames} older frames need {rows}. Set it to {rows * num_envs:_} or more."
        )
    check_memory("ReplayBuffer.capacity", capacity, columns.row_bytes(stored_spec))


def check_memory(parameter: str, value: int, unit: int) -> None:
    """Checks that `value` times `unit` bytes fit into the memory that the process may use.

    Raises:
      UserError: If they do not fit.
    """
    memory = available_memory()
    if value * unit > memory:
        raise UserError(
            f"{parameter} = {value:_} needs {value * unit / 2**30:.1f} GiB, {unit:_} bytes for "
            f"each, but this process may use {memory / 2**30:.1f} GiB. Lower {parameter} below "
            f"{memory // unit:_}."
        )


def check_minibatches(num_steps: int, num_envs: int, minibatch_size: int) -> None:
    """Checks that a rollout can be split into minibatches of equal size.

    Raises:
      UserError: If `minibatch_size` does not divide `num_steps * num_envs`.
    """
    rows = num_steps * num_envs
    if rows % minibatch_size:
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        below = max(d for d in divisors if d < minibatch_size)
        above = min((d for d in divisors if d > minibatch_size), default=below)
        nearest = f"{below} or {above}" if above > below else f"{below}"
        raise UserError(
            f"Rollout.minibatch_size = {minibatch_size} does not divide the {rows} rows of a "
            f"rollout (Rollout.num_steps = {num_steps} x {num_envs} environments). Set it to "
            f"{nearest}, or change Rollout.num_steps."
        )
