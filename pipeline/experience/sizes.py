"""Sizes that a user chooses, checked before anything is allocated."""

from __future__ import annotations

from fractions import Fraction

import tensorflow as tf
from tf_agents.trajectories import trajectory

from pipeline.errors import UserError, check_number, check_whole
from pipeline.experience import storage

_MOST_UPDATES = 1_000  # of an iteration of several vector steps


def iteration_sizes(env_steps_per_update: int | float, num_envs: int) -> tuple[int, int]:
    """The fewest (vector steps, updates) that keep the ratio of environment steps to updates.

    `updates * env_steps_per_update == vector steps * num_envs`, exactly.

    Raises:
        UserError: the ratio is not a positive number, or takes iterations of too many updates.
    """
    name = "ReplayBuffer.env_steps_per_update"
    check_number(name, env_steps_per_update, 0)
    # Through the decimal notation: 0.1 means a tenth, not the nearest binary fraction.
    ratio = Fraction(str(env_steps_per_update)) / num_envs
    if ratio.numerator > 1 and ratio.denominator > _MOST_UPDATES:
        raise UserError(
            f"{name} = {env_steps_per_update} is kept with {num_envs} environments by iterations "
            f"of {ratio.numerator:_} vector steps and {ratio.denominator:_} updates, and a run can "
            "be stopped between iterations only: choose a simpler ratio, such as "
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
        capacity: rows over all streams.
        num_envs: streams.
        needs: rows of a stream that must be held together, by what needs them.
        older_frames: rows before these whose frames belong to the first one's stack.
        stored_spec: of a row.

    Raises:
        UserError: the capacity is no whole number, too small, or takes more memory than the
            machine has.
    """
    check_whole("ReplayBuffer.capacity", capacity)
    what = max(needs, key=lambda name: needs[name])
    rows = needs[what] + older_frames
    if capacity // num_envs < rows:
        raise UserError(
            f"ReplayBuffer.capacity = {capacity:_} gives each of the {num_envs} environments "
            f"{capacity // num_envs} rows, but the {needs[what]} of one {what} and {older_frames} "
            f"older frames need {rows}: set it to {rows * num_envs:_} or more"
        )
    row = sum(map(storage.row_bytes, tf.nest.flatten(stored_spec)))
    memory = storage.physical_memory()
    if capacity * row > memory:
        raise UserError(
            f"ReplayBuffer.capacity = {capacity:_} rows of {row:_} bytes needs "
            f"{capacity * row / 2**30:.1f} GiB, but this machine has {memory / 2**30:.1f} GiB: "
            f"lower ReplayBuffer.capacity below {memory // row:_}"
        )


def check_minibatches(num_steps: int, num_envs: int, minibatch_size: int, num_epochs: int) -> None:
    """Checks that a rollout splits into minibatches.

    Raises:
        UserError: a size is not a whole number from 1 on, or `minibatch_size` does not divide
            `num_steps * num_envs`.
    """
    sizes = {"num_steps": num_steps, "minibatch_size": minibatch_size, "num_epochs": num_epochs}
    for name, value in sizes.items():
        check_whole(f"Rollout.{name}", value)
    rows = num_steps * num_envs
    if rows % minibatch_size:
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        below = max(d for d in divisors if d < minibatch_size)
        above = min((d for d in divisors if d > minibatch_size), default=below)
        nearest = f"{below} or {above}" if above > below else f"{below}"
        raise UserError(
            f"Rollout.minibatch_size = {minibatch_size} does not divide the {rows} rows of a "
            f"rollout (Rollout.num_steps = {num_steps} x {num_envs} environments): set it to "
            f"{nearest}, or change Rollout.num_steps"
        )
