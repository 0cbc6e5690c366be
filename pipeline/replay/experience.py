"""Defines the interface of the stores for collected rows: replay buffers and `Rollout`.

`ReplayBuffer`, `BlockReplayBuffer` and `Rollout` implement `Experience`. The train loop uses them
only through this interface. One iteration makes these calls:

    add(stream_ids, rows)       once or more, `collect_steps` vector steps in total
    begin(prepare)
    num_batches times:
        next_batch() -> trajectory, weights, keys
    end(finish)

A *row* is one `Trajectory` of one environment: (step_type, observation, action, policy_info) of a
time step, and (next_step_type, reward, discount) that result from the action. A *stream* is one
environment's sequence of rows. A *boundary row* (step_type LAST) holds an episode's final
observation; its action has no effect.

Memory layout: each column (a leaf of the data spec) is one variable, whose first axis counts rows.

    ReplayBuffer, C = capacity // num_envs       Rollout, N = num_envs

    key 0      +-----------------+               key 0  +--------------------+
               | ring, stream 0  |                      | step 0, streams 0… |
    key C      +-----------------+               key N  +--------------------+
               | ring, stream 1  |                      | step 1, streams 0… |
    key 2C     +-----------------+               key 2N +--------------------+
               | …               |                      | …                  |

    row p of stream s: key s * C + p % C         row t of stream s: key t * N + s
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf
from tf_agents.trajectories import trajectory


@runtime_checkable
class Experience(Protocol):
    """Stores collected rows and returns batches of them for training.

    The constructor is called as `create_experience(data_spec, num_envs, *, sequence_length,
    training_spec, seed)`. The specs are `Trajectory` tuples of unbatched specs: `data_spec` of the
    collected rows, `training_spec` of the rows used for training. An implementation may ignore
    `sequence_length` or `training_spec`.

    `add`, `begin`, `next_batch` and `end` run inside a `tf.function`.
    """

    @property
    def keeps_rows(self) -> bool:
        """Returns True if rows outlast an iteration, so that a random policy may add them first."""

    @property
    def collect_steps(self) -> int:
        """Returns the number of vector steps collected in an iteration."""

    @property
    def num_batches(self) -> int:
        """Returns the number of batches in an iteration, each for an update or a part of one."""

    @property
    def size(self) -> tf.Tensor:
        """Returns the number of rows stored over all streams, int64 []."""

    def add(self, stream_ids: tf.Tensor, rows: trajectory.Trajectory) -> None:
        """Appends `rows` [T, S, ...], the next T rows of the streams `stream_ids` [S] (int).

        A store that does not keep rows as they are compares them with those that it would return
        for training. `check_rows` reports a difference.
        """

    def begin(self, prepare: Callable[[trajectory.Trajectory], trajectory.Trajectory]) -> None:
        """Starts the updates of an iteration; `prepare` maps collected rows to training rows."""

    def next_batch(self) -> tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor]:
        """Returns the next batch to train on.

        Returns:
          The trajectory [B, T, ...]; weights [B] float32, 0 for sequences that begin
          with a boundary row and 1 for others; keys [B] int64, which identify the first rows.
        """

    def end(self, finish: Callable[[trajectory.Trajectory], Any]) -> None:
        """Ends an iteration; a store that empties itself calls `finish` with its rows first."""

    def truncate(self, stream_ids: tf.Tensor | None = None) -> None:
        """Truncates unfinished episodes that no environment will continue. Runs eagerly.

        The next row of each of the streams `stream_ids` [S] int64 (None for all) must hold the
        final observation.
        """

    def check_rows(self) -> None:
        """Checks that the rows collected so far can be trained on. Runs eagerly.

        Raises:
          UserError: If `add` found a difference.
        """

    def check_ready(self) -> None:
        """Checks that the rows collected so far suffice for a batch. Runs eagerly.

        Raises:
          UserError: If more rows are needed.
        """

    def bad_columns(self) -> list[str]:
        """Describes the columns with NaN or infinity in a row to train on. Runs eagerly."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes everything that `restore` needs into the empty `folder`."""

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote.

        Raises:
          ValueError: If the saved state does not match. The message names the mismatch.
        """
