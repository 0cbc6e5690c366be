"""Where collected rows wait until they are learnt from: replay buffers and `Rollout`.

`ReplayBuffer`, `BlockReplayBuffer` and `Rollout` implement `Experience`, and the train loop knows
nothing else about them. An iteration is

    add(stream_ids, rows)       once or more, `collect_steps` vector steps in all
    begin(prepare)
    num_batches times:
        next_batch() -> trajectory, weights, keys
        feedback(keys, loss_info)
    end(finish)

A *row* is one `Trajectory` of one environment: (step_type, observation, action, policy_info) of a
time step and (next_step_type, reward, discount) of what the action led to. A *stream* is one
environment's sequence of rows. A *boundary row* (step_type LAST) holds an episode's final
observation; its action led nowhere.

Memory layout, one variable a column (a leaf of the data spec), the first axis counting rows:

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
from typing import Any, Protocol

import tensorflow as tf
from tf_agents.trajectories import trajectory


class Experience(Protocol):
    """Constructed as `create_experience(data_spec, num_envs, *, sequence_length, training_spec,
    seed)`, where the specs are `Trajectory` tuples of unbatched specs: `data_spec` of the rows
    collected, `training_spec` of the rows learnt from. An implementation may ignore either of
    `sequence_length` and `training_spec`.

    `add`, `begin`, `next_batch`, `feedback` and `end` run inside a `tf.function`.
    """

    @property
    def keeps_rows(self) -> bool:
        """Whether rows stay for later iterations, so that a random policy may fill it first."""

    @property
    def collect_steps(self) -> int:
        """Vector steps collected in an iteration."""

    @property
    def num_batches(self) -> int:
        """Batches handed out in an iteration, each for an update, or for a part of one."""

    @property
    def size(self) -> tf.Tensor:
        """Rows held now, over all streams: int64 []."""

    def add(self, stream_ids: tf.Tensor, rows: trajectory.Trajectory) -> None:
        """Appends `rows` [T, S, ...], the next T rows of the streams `stream_ids` [S] (int)."""

    def begin(self, prepare: Callable[[trajectory.Trajectory], trajectory.Trajectory]) -> None:
        """Starts the updates of an iteration; `prepare` maps collected to training rows."""

    def next_batch(self) -> tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor]:
        """A batch to learn from.

        Returns:
            The trajectory [B, T, ...]; weights [B] float32, 0 where the first row is a boundary
            row and 1 elsewhere; keys [B] int64, which name the first rows.
        """

    def feedback(self, keys: tf.Tensor, loss_info: Any) -> None:
        """Tells how the learner fared with the rows that `keys` [B] name."""

    def end(self, finish: Callable[[trajectory.Trajectory], Any]) -> None:
        """Ends an iteration; a store that empties itself calls `finish` with its rows first."""

    def truncate(self) -> None:
        """Cuts the episodes in flight off, because no environment will continue them (eager)."""

    def check_ready(self) -> None:
        """Raises UserError if the rows collected so far give no batch (eager)."""

    def bad_columns(self) -> list[str]:
        """Names of columns where a row that may be learnt from is NaN or infinite (eager)."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes everything that `restore` needs into the empty `folder`."""

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote; raises ValueError naming what does not match."""
