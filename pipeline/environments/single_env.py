"""Runs one environment of a vector, and checks its results."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import RecordEpisodeStatistics

from pipeline.environments import saved_states, specs
from pipeline.environments.saved_states import State
from pipeline.environments.vectors import Arrays, Description, Vector, frames_per_second, store
from pipeline.utils.errors import UserError, without_gin
from pipeline.utils.shutdown import kept_handlers

_STEP = "gymnasium's step returns (observation, reward, terminated, truncated, info)"
_MAIN_THREAD = (
    '. Bind gymnasium_environment.vectorization_mode = "async", which runs the environment in the '
    "main thread of its own process."
)
_RESET = "gymnasium's reset takes seed=... and options=... and returns (observation, info)"


class SingleEnv:
    """Runs one environment, which the step after an episode's end resets.

    Infos are ignored. Everything else that the environment returns is checked and copied, so that
    the environment may change its arrays later.
    """

    def __init__(self, make: Callable[[], gymnasium.Env]):
        """Builds the environment with `make`.

        Raises:
          UserError: If its constructor calls sys.exit(), or it does not define its spaces.
        """
        try:
            self.env = make()
        except SystemExit as error:
            raise UserError("the constructor of the environment called sys.exit().") from error
        try:
            self._check_spaces()
            self._arrays = specs.arrays(self.env.observation_space)
        except BaseException:
            close_with_warning(self.env, "an environment")
            raise
        self._categories = [specs.categories(leaf.space) for leaf in self._arrays]
        # Most observations are a single array of numbers, which need no loop.
        is_plain = len(self._arrays) == 1 and not self._arrays[0].path and not self._categories[0]
        self._plain = self._arrays[0] if is_plain else None
        self._is_over = False
        layers = saved_states.layers(self.env)
        recorders = (x for x in layers if isinstance(x, RecordEpisodeStatistics))
        self._recorder = next(recorders, None)
        self._return_before = 0.0  # what the recorder held when the episode began

    def _check_spaces(self) -> None:
        for name in ("observation_space", "action_space"):
            try:
                space = getattr(self.env, name)
            except Exception as error:  # a property raises what it likes
                reason = f"{type(error).__name__}: {error}"
                raise self._fault(f"the environment's {name} raised {reason}") from error
            if not isinstance(space, gymnasium.Space):
                raise self._fault(f"{name} is {space!r:.80}, not a gymnasium.Space")

    @property
    def description(self) -> Description:
        """Returns the description of the environment for its vector."""
        # Not every constructor stores its render_mode. A wrapper's spec copies all arguments.
        spec = self.env.unwrapped.spec
        asked = spec.kwargs.get("render_mode") if spec else None
        return Description(
            self.env.observation_space,
            self.env.action_space,
            renders="rgb_array" in (self.env.render_mode, asked),
            render_fps=frames_per_second(self.env.metadata),
            # `_return_before` is not part of a state.
            offers_states=saved_states.are_offered(self.env) and not self._recorder,
            notes=self._notes(),
            source=self._source(),
        )

    def reset(self, seed: int, observation: Arrays) -> None:
        """Resets the environment.

        Args:
          seed: Seed of everything that the environment draws.
          observation: Arrays that the observation is copied to; see `specs.arrays`.

        Raises:
          UserError: If the environment does not have gymnasium's interface.
        """
        self._reset(observation, seed=seed)

    def step(self, action: Any, observation: Arrays) -> tuple[float, bool, bool, float | None]:
        """Steps the environment, or resets it if its episode is over.

        Args:
          action: Action of the environment's action space.
          observation: Arrays that the observation is copied to; see `specs.arrays`.

        Returns:
          The reward, whether the episode has terminated, whether it was truncated, and the return
          of the episode so far, if gymnasium's RecordEpisodeStatistics records it. A wrapper above
          the recorder may divide its episodes, for example at the loss of a life, or join them.

        Raises:
          UserError: If the environment does not have gymnasium's interface.
        """
        if self._is_over:
            self._reset(observation)
            return 0.0, False, False, None
        recorder = self._recorder
        ended, length = (recorder.episode_count, recorder.episode_lengths) if recorder else (0, 0)
        try:
            results = self._call("step", action)
        except ValueError as error:  # wrappers of gymnasium unpack the results too
            if _is_raised_by_gymnasium(error) and "to unpack (expected 5" in str(error):
                raise self._fault(f"step() does not return five values; {_STEP}") from error
            raise
        try:
            received, reward, terminated, truncated, _ = results
        except (TypeError, ValueError) as error:
            count = f"{len(results)} values" if isinstance(results, tuple) else repr(results)
            raise self._fault(f"step() returned {count:.80}; {_STEP}") from error
        self._store(received, observation)
        try:
            number = _number(reward)
        except (TypeError, ValueError) as error:
            raise self._fault(f"the reward {reward!r:.80} is not a number") from error
        is_terminated = self._flag("terminated", terminated)
        is_truncated = self._flag("truncated", truncated)
        self._is_over = is_terminated or is_truncated
        own_return = None
        if recorder:
            if recorder.episode_count > ended and recorder.episode_lengths <= length:
                # A wrapper above has reset the environment: the recorder has begun again at 0.
                self._return_before -= _number(recorder.return_queue[-1])
            # The infos have the return only if no wrapper above has ended the episode.
            own_return = _number(recorder.episode_returns) - self._return_before
        return number, is_terminated, is_truncated, own_return

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the environment.

        Raises:
          UserError: If it calls sys.exit(), which would end this program without an error.
        """
        try:
            return getattr(self.env, method)(*args, **kwargs)
        except SystemExit as error:
            raise self._fault(f"{method}() called sys.exit()") from error

    def _flag(self, name: str, value: Any) -> bool:
        """Returns a flag of `step` as a bool; numbers and arrays that are 0 or 1 are flags, too."""
        if isinstance(value, bool | np.bool_):
            return bool(value)
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf" or array.item() not in (0, 1):
            raise self._fault(
                f"step() returned {name} = {value!r:.80}, which is neither True nor False; {_STEP}"
            )
        return bool(array.item())

    def render(self) -> Any:
        """Returns the current frame, as the environment returned it."""
        return self._call("render")

    def get_state(self) -> State:
        """Returns the environment's state; see `saved_states`."""
        return saved_states.get(self.env)

    def set_state(self, state: State) -> None:
        """Restores the environment's state."""
        saved_states.set_state(self.env, state)

    def close(self) -> None:
        """Closes the environment."""
        self._call("close")

    def _notes(self) -> list[str]:
        """Returns notes about behaviour that may surprise users."""
        notes = specs.notes_of_omitted(self.env.observation_space)
        layers = saved_states.layers(self.env)
        names = [type(x).__name__ for x in layers if isinstance(x, gymnasium.RewardWrapper)]
        if self._recorder:
            return [*notes, "the logged returns are those that RecordEpisodeStatistics records"]
        return notes + [
            f"rewards pass through {name}: the logged returns are sums of what it returns. Apply "
            "gymnasium.wrappers:RecordEpisodeStatistics before it to log the environment's own"
            for name in names
        ]

    def _reset(self, observation: Arrays, **seed: Any) -> None:
        recorder = self._recorder
        if recorder:
            self._return_before = _number(recorder.episode_returns)
            start_before = recorder.episode_start_time
        try:
            with kept_handlers():  # Some simulators are started by a reset.
                results = self._call("reset", **seed)
        except (TypeError, ValueError) as error:
            # Wrappers of gymnasium pass options, too.
            refused = re.search("unexpected keyword argument '(seed|options)'", str(error))
            if seed and refused:
                raise self._fault(f"reset() does not accept {refused[1]}=...; {_RESET}") from error
            # They also take the result apart.
            cannot = re.search(r"to unpack \(expected 2|cannot unpack non-iterable", str(error))
            if cannot and _is_raised_by_gymnasium(error):
                raise self._fault(f"reset() returned no dictionary of info; {_RESET}") from error
            raise
        is_pair = isinstance(results, tuple) and len(results) == 2
        # A wrapper may have taken an observation of two numbers apart.
        if not is_pair or not isinstance(results[1], Mapping | None):
            raise self._fault(f"reset() returned no dictionary of info; {_RESET}")
        self._store(results[0], observation)
        self._is_over = False
        if recorder and recorder.episode_start_time != start_before:
            self._return_before = 0.0  # the recorder has begun another episode

    def _store(self, received: Any, observation: Arrays) -> None:
        if self._plain:
            self._store_array(self._plain, received, observation[0])
            return
        for leaf, values, array in zip(self._arrays, self._categories, observation, strict=True):
            try:
                part = leaf.of(received)
            except (KeyError, IndexError, TypeError) as error:
                raise self._fault(
                    f"{leaf.name} is missing from the observation {received!r:.100}"
                ) from error
            self._store_array(leaf, part, array)
            if not specs.are_in(values, array):
                raise self._fault(f"{leaf.name} is {part}, which is not in its space {leaf.space}")

    def _store_array(self, leaf: specs.Leaf, received: Any, array: np.ndarray) -> None:
        if fault := store(leaf, received, array):
            raise self._fault(fault)

    def _source(self) -> str:
        """Returns the classes of the environment and of wrappers that are not gymnasium's."""
        *wrappers, env = saved_states.layers(self.env)
        own = [x for x in wrappers if not type(x).__module__.startswith("gymnasium.")]
        return " or its wrapper ".join(_place(type(layer)) for layer in [env, *reversed(own)])

    def _fault(self, message: str) -> UserError:
        return UserError(f"{message}. Change the environment's class {self._source()}, or wrap it.")


def _number(value: Any) -> float:
    """Returns a number as a float; an array with one entry is a number, too.

    Raises:
      TypeError: If it is no number; also a ValueError.
    """
    if isinstance(value, str | bytes):
        raise TypeError("a text is not a number")
    return float(value.item() if isinstance(value, np.ndarray) else value)


def _place(layer: type) -> str:
    """Returns the name of a class and its file."""
    name = f"{layer.__module__}.{layer.__qualname__}"
    try:
        return f"{name} in {inspect.getsourcefile(layer)}"
    except (TypeError, OSError):  # a built-in class, or one without a file
        return name


def close_with_warning(environment: gymnasium.Env | SingleEnv | Vector, name: str) -> None:
    """Closes an environment, and prints a warning with its name if that fails."""
    try:
        environment.close()
    except Exception as error:  # the environment's author chose its type
        print(f"warning: {name} raised when closed: {error!r}", file=sys.stderr)


def shared_description(descriptions: Sequence[Description]) -> Description:
    """Returns the description of the environments of a vector.

    Raises:
      UserError: If the environments have different spaces.
    """
    for name in ("observation_space", "action_space"):
        first, *others = (getattr(description, name) for description in descriptions)
        for other in others:
            if not specs.look_the_same(first, other):
                raise UserError(
                    f"the environments of a vector have different spaces ({name}): {first} and "
                    f"{other}. Make them the same, or use one environment."
                )
    return descriptions[0]


def _is_raised_by_gymnasium(error: Exception) -> bool:
    folder = os.path.dirname(gymnasium.__file__)
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(folder + os.sep)


def describe(error: BaseException) -> str:
    """Describes an exception of an environment: its type, its message and its place.

    The place is the innermost frame outside of Python's standard library. It belongs to the
    innermost cause, because gymnasium rephrases some exceptions.
    """
    if isinstance(error, RemoteError):
        return str(error)
    innermost, seen = error, {id(error)}
    while (cause := innermost.__cause__) and cause.__traceback__ and id(cause) not in seen:
        seen.add(id(cause))  # `raise error from error` makes an error its own cause
        innermost = cause
    frames = traceback.extract_tb(innermost.__traceback__)
    frame = next((x for x in reversed(frames) if not is_pythons_own(x.filename)), frames[-1])
    message = without_gin(error)
    place = f"{frame.filename}:{frame.lineno}, in {frame.name}"
    advice = _MAIN_THREAD if "only works in main thread" in message else ""
    return f"{type(error).__name__}: {message} ({place}){advice}"


def is_pythons_own(filename: str) -> bool:
    """Returns True for files of Python's standard library, and for code without a file."""
    is_library = filename.startswith(sysconfig.get_path("stdlib"))
    return filename.startswith("<") or (is_library and "site-packages" not in filename)


class RemoteError(Exception):
    """Exception of an environment in another process; its message is that of `describe`."""
