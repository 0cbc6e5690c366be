"""Runs episodes of a vector of environments, and restores saved episodes by repeating actions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tf_agents.trajectories import time_step as ts

from pipeline.environments import specs
from pipeline.environments.action_log import ActionLog
from pipeline.environments.process_vector import ProcessDied
from pipeline.environments.single_env import close_with_warning
from pipeline.environments.vectors import Vector
from pipeline.ops import randomness
from pipeline.ops.batches import are_finite
from pipeline.utils import files
from pipeline.utils.errors import UserError

_STATE_FILE = "environment.json"
WINDOW = 100  # finished episodes

Rows = tuple[np.ndarray, ...]
"""step_type int32 [N], reward float32 [N], discount float32 [N], and arrays of the observation."""


class Episodes:
    """Runs episodes of a vector of environments that depend only on seeds and actions.

    Each reset of all environments seeds each of them from (seed, environment, number of the reset).
    An environment is seeded again at the first episode start that is `anchor_interval` or more
    vector steps later. Its last seeding is its anchor. An environment that is deterministic given
    its seed is thus a function of its anchor's seed and the actions since then: `restore` repeats
    them. If episodes are longer than two intervals and the environments offer their states (see
    `saved_states`), these states serve as anchors.

    Attributes:
      vector: The vector of environments.
      log: Actions since each environment's anchor.
      name: Name of the environment in messages.
      anchor_interval: Vector steps between anchors.
      resets: Number of resets of all environments so far.
      endings: Number of the environment, and whether the limit of `unrecorded` truncated it, for
        each episode that has ended within `unrecorded`; empty if it has no limit.
      divergence: Why the last `restore` could not continue the episodes, or "" if it did.
      own_returns: Number of the environment and return of the last 100 episodes (of all episodes
        within `unrecorded`) of environments that record their returns themselves.
      own_return_sum: Sum of these returns over all episodes.
      error: Exception that an environment raised last, or None.
      seconds: Time spent in steps and resets so far.
      calls: Number of calls into the vector so far.
      crossing: Identifier of the thread that is inside such a call now, or 0 if none is.
      usual_seconds: Time that the longest call so far took.
    """

    limits_itself = False

    def __init__(
        self,
        vector: Vector,
        build: Callable[[], Vector],
        name: str,
        seed: int,
        anchor_interval: int,
    ) -> None:
        """Initializes the episodes.

        Args:
          vector: The vector of environments.
          build: Builds another such vector, for when its environments cannot be reset any more.
          name: Name of the environment in messages.
          seed: Seed of everything that the environments draw.
          anchor_interval: Vector steps between anchors.
        """
        self.vector = vector
        self.name = name
        self.complaint = f"environment {name} has not returned from a step or reset"
        self.resets = 0
        self._max_steps: int | None = None
        self.endings: list[tuple[int, bool]] = []
        self.own_returns: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.own_return_sum = 0.0
        self._returns_so_far: dict[int, float] = {}
        self.divergence = ""
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.calls = 0
        self.crossing = 0
        self.usual_seconds = 0.0
        self._build = build
        self._is_recorded = True
        self._num_envs = self.vector.num_envs
        self._seed = seed
        self.log = ActionLog(self._num_envs)
        self.anchor_interval = anchor_interval
        self._gives_states: bool | None = None  # not known before the first reset
        self._convert_actions = specs.action_converter(self.vector.description.action_space)
        self._pending_reset = True
        self._rows: Rows | None = None
        self._mid = np.full(self._num_envs, ts.StepType.MID, np.int32)
        self._last = np.zeros(self._num_envs, np.bool_)
        self._is_overdue = np.zeros(self._num_envs, np.bool_)
        self._lengths = np.zeros(self._num_envs, np.int64)

    @contextlib.contextmanager
    def unrecorded(self, number: int, max_steps: int | None) -> Iterator[None]:
        """Disables recording within the context.

        The current episodes are abandoned on entry, and those of the context on exit.

        Args:
          number: Number of their first reset, counted from 0, which determines their seeds.
          max_steps: Steps after which an episode is truncated; None for no limit.
        """
        resets, own_returns, own_return_sum = self.resets, self.own_returns, self.own_return_sum
        self.resets, self._max_steps, self._is_recorded = number, max_steps, False
        self.own_returns, self.endings = deque(), []
        self.abandon()
        try:
            yield
        finally:
            self.resets, self._max_steps, self._is_recorded = resets, None, True
            self.own_returns, self.own_return_sum = own_returns, own_return_sum
            self.abandon()

    def abandon(self) -> None:
        """Abandons the current episodes, so that the next `step` or `reset` starts new ones."""
        self._pending_reset = True

    def current(self) -> Rows:
        """Returns the current rows; starts episodes if there are none."""
        if self._pending_reset or self._rows is None:
            return self.reset()
        return self._rows

    def reset(self) -> Rows:
        """Starts a new episode in every environment."""
        self.log.restart(self._num_envs)
        self.resets += 1
        self.error = None
        self._rows = self._timed(self._reset_all)
        self._pending_reset = False
        return self._rows

    def step(self, action: np.ndarray) -> Rows:
        """Takes the actions [N, ...] of the action spec; starts episodes if there are none."""
        if self._pending_reset:
            return self.reset()
        advance = self._recorded if self._is_recorded else self._bounded
        self._rows = self._timed(advance, action)
        return self._rows

    def save(self, folder: pathlib.Path) -> None:
        """Writes the seed, number of resets, action log and a digest of the current rows."""
        rows = None if self._pending_reset or self._rows is None else _sha256(self._rows)
        state = {
            **self._identity(),
            "seed": self._seed,
            "resets": self.resets,
            "rows": rows,
            "own_returns": list(self.own_returns),
            "own_return_sum": self.own_return_sum,
        }
        (folder / _STATE_FILE).write_text(json.dumps(state))
        self.log.save(folder)

    def restore(self, folder: pathlib.Path) -> None:
        """Restores the episodes that `save` wrote, by repeating their actions.

        If the rows then differ from the saved ones, or an environment raises, `divergence` says
        why. The next `step` or `reset` then starts new episodes, with seeds not used before `save`.

        Raises:
          ValueError: If `folder` holds no such state, or the state of another environment.
        """
        identity = self._identity()
        names = *identity, "seed", "resets", "rows", "own_returns", "own_return_sum"
        state = files.read_object(folder / _STATE_FILE, *names)
        if type(state["seed"]) is not int:
            raise ValueError(
                f"the seed in {_STATE_FILE} is not a whole number: {state['seed']!r:.100}"
            )
        saved = {name: state[name] for name in identity}
        if saved != identity:
            raise ValueError(f"the checkpoint's environment is {saved}, but this is {identity}")
        try:
            own_returns = [(int(index), float(value)) for index, value in state["own_returns"]]
            own_return_sum = float(state["own_return_sum"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"the returns in {_STATE_FILE} are not numbers") from error
        self.log.restore(folder)
        self._check_actions()
        self._seed, self.resets = state["seed"], int(files.counts(state["resets"]))
        self._pending_reset = True
        self.divergence = "" if state["rows"] is None else self._repeat(state["rows"])
        self.own_returns.clear()  # from the repeated steps
        self.own_returns.extend(own_returns)
        self.own_return_sum = own_return_sum

    def close(self) -> None:
        """Frees what the environments hold (processes, windows); warns if that fails."""
        close_with_warning(self.vector, self.name)

    def cross(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls the vector, and lets other threads see that the call is under way."""
        self.calls += 1
        self.crossing = self.vector.thread or threading.get_ident()
        started = time.monotonic()
        try:
            return call(*args)
        finally:
            self.crossing = 0
            self.usual_seconds = max(self.usual_seconds, time.monotonic() - started)

    def _timed(self, call: Callable[..., Rows], *args: Any) -> Rows:
        started = time.perf_counter()
        try:
            return call(*args)
        except UserError as error:
            self.error = UserError(f"environment {self.name}: {error}")
            raise self.error from error
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.seconds += time.perf_counter() - started

    def _check_actions(self) -> None:
        """Checks that the recorded actions are in the action space.

        An emulator may hang on actions of another space.

        Raises:
          ValueError: If an action is not in the space.
        """
        spec = specs.action_spec(self.vector.description.action_space, self.name)
        shape, dtype = (self._num_envs, *spec.shape), spec.dtype.as_numpy_dtype
        for action, *_ in self.log.replay():
            is_known = action.shape == shape and action.dtype == dtype
            if is_known and spec.dtype.is_integer:
                is_known = ((action >= spec.minimum) & (action <= spec.maximum)).all()
            if not is_known:
                raise ValueError(f"the saved actions are not in the action space of {self.name}")

    def _repeat(self, rows_sha256: str) -> str:
        """Repeats the recorded actions.

        Args:
          rows_sha256: Digest of the rows that were saved.

        Returns:
          Why the repetition does not end with the saved rows, or "" if it does.
        """
        for is_last in (False, True):  # Memory or a licence may have been short for a moment.
            try:
                rows = self._replayed_rows()
                break
            except Exception as error:
                self._build_again(error)
                if is_last:
                    kind = type(error).__name__
                    return f"{self.name} raised {kind} when its actions were repeated: {error}"
        if _sha256(rows) != rows_sha256:
            return f"{self.name} did not reach its saved state when its actions were repeated"
        self._rows = rows
        self._pending_reset = False
        return ""

    def _replayed_rows(self) -> Rows:
        rows = self._reset_all()
        if self.log.states:
            self.cross(self.vector.set_states, self.log.states)
        for action, live, mask in self.log.replay():
            rows = self._advance(action, live)
            if mask.any():
                rows = self._reset_some(mask, rows)
        return rows

    def _build_again(self, error: Exception) -> None:
        print(f"{self.name} is built again, because it raised: {error!r}", file=sys.stderr)
        self.cross(self.close)
        self.vector = self.cross(self._build)

    def _recorded(self, action: np.ndarray) -> Rows:
        """Steps like `_advance`, and records what `restore` needs."""
        log = self.log
        is_long = log.length >= 2 * self.anchor_interval
        if is_long and self._gives_states and not self._last.any():
            log.anchor_at(self.cross(self.vector.get_states))
        if log.length + 1 >= self.anchor_interval and self._last.any():
            return self._anchored(action)
        rows = self._advance(action)
        log.append(action)
        return rows

    def _anchored(self, action: np.ndarray) -> Rows:
        """Steps like `_recorded`, but seeds environments whose log is long where they are reset."""
        log = self.log
        mask = self._last & (log.steps + 1 - log.anchors >= self.anchor_interval)
        rows = self._advance(action, ~mask)
        log.append(action)
        if not mask.any():
            return rows
        log.anchor(mask)
        return self._reset_some(mask, rows)

    def _bounded(self, action: np.ndarray) -> Rows:
        """Steps like `_advance`, and truncates episodes after the limit of `unrecorded`."""
        if self._max_steps is None:
            return self._advance(action)
        rows = self._advance(action, ~self._is_overdue)
        if self._is_overdue.any():
            self.log.numbers[self._is_overdue] += 1
            rows = self._reset_some(self._is_overdue, rows)
        self._lengths = np.where(rows[0] == ts.StepType.FIRST, 0, self._lengths + 1)
        self._is_overdue = ~self._last & (self._lengths >= self._max_steps)
        self._last = self._last | self._is_overdue
        ended = np.flatnonzero(self._last).tolist()
        self.endings.extend((index, bool(self._is_overdue[index])) for index in ended)
        if not self._is_overdue.any():
            return rows
        self._add_own_returns(self._is_overdue)
        return np.where(self._is_overdue, np.int32(ts.StepType.LAST), rows[0]), *rows[1:]

    def _advance(self, action: np.ndarray, live: np.ndarray | None = None) -> Rows:
        """Steps the vector and returns its rows.

        Args:
          action: Actions [N, ...].
          live: bool [N], the environments to step; None for all. Environments that have not reached
            their anchor are in a state that their actions were not chosen for, and an environment
            that checks its actions would raise.
        """
        live = None if live is None or live.all() else live
        observation, reward, discount, last, own_returns = self.cross(
            self.vector.step, self._converted(action), live
        )
        self._returns_so_far = dict(own_returns)
        self._add_own_returns(last)
        # MID is 1. LAST is one more, where an episode ends; FIRST is one less, after such a row.
        step_type = self._mid + last - self._last
        self._last = last
        return step_type, reward, discount, *observation

    def _converted(self, action: np.ndarray) -> Any:
        try:
            return self._convert_actions(action)
        except ValueError as error:
            if self._rows is None or are_finite(self._rows[3:]):
                raise
            raise UserError(
                "an observation holds NaN, infinity or a number too large for float32, for which "
                f"the agent has no valid action ({error})"
            ) from error

    def _add_own_returns(self, ends: np.ndarray) -> None:
        for index in np.flatnonzero(ends).tolist() if self._returns_so_far else ():
            if index in self._returns_so_far:
                self.own_returns.append((index, self._returns_so_far[index]))
                self.own_return_sum += self._returns_so_far[index]

    def _reset_all(self) -> Rows:
        try:
            observation = self.cross(self.vector.reset, self._seeds())
        except Exception as error:
            if self._rows is None or isinstance(error, ProcessDied):
                raise
            # Some environments cannot be reset before their episode is over.
            self._build_again(error)
            observation = self.cross(self.vector.reset, self._seeds())
        if self._gives_states is None:
            self._gives_states = self.vector.description.offers_states and self._check_states()
        self._last, self._is_overdue = np.zeros((2, self._num_envs), np.bool_)
        self._lengths = np.zeros_like(self._lengths)
        reward, discount = np.zeros((2, self._num_envs), np.float32)
        return np.full_like(self._mid, ts.StepType.FIRST), reward, discount + 1, *observation

    def _reset_some(self, mask: np.ndarray, rows: Rows) -> Rows:
        """Resets the environments of `mask`, bool [N], and returns the updated `rows`."""
        observation = self.cross(self.vector.reset, self._seeds(), mask)
        self._last = self._last & ~mask
        step_type, reward, discount, *_ = rows
        return (
            np.where(mask, np.int32(ts.StepType.FIRST), step_type),
            np.where(mask, np.float32(0), reward),
            np.where(mask, np.float32(1), discount),
            *observation,
        )

    def _check_states(self) -> bool:
        """Returns True if `get_state` of the environments has the form that `saved_states` needs.

        Methods of this name may have another purpose.
        """
        try:
            self.cross(self.vector.get_states)
        except Exception as error:
            print(
                f"{self.name}: its get_state is not used to resume, because it has another form "
                f"than this program needs ({error})",
                file=sys.stderr,
            )
            return False
        return True

    def _seeds(self) -> list[int]:
        """Returns the seed of each environment's anchor."""
        first = self.resets - 1
        numbers = ([first, number] if number > 0 else [first] for number in self.log.numbers)
        keys = [
            randomness.stream_key(self._seed, "environment", index, *names)
            for index, names in enumerate(numbers)
        ]
        # gymnasium and the ALE accept only seeds below 2**31.
        return [key % 2**31 for key in keys]

    def _identity(self) -> dict[str, Any]:
        return {"name": self.name, "num_envs": self._num_envs}


def _sha256(rows: Rows) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.dtype} {row.shape}".encode() + np.ascontiguousarray(row).tobytes())
    return digest.hexdigest()
