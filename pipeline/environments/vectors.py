"""Defines the interface of vectors of environments, and adapts gymnasium's."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode

from pipeline.environments import saved_states, specs
from pipeline.environments.saved_states import State
from pipeline.utils.errors import UserError

_DEFAULT_FPS = 30.0


Arrays = Sequence[np.ndarray]


class Description(NamedTuple):
    """Describes the environments of a vector, which all have the same spaces.

    Attributes:
      observation_space: Observation space of one environment.
      action_space: Action space of one environment.
      renders: True if `Vector.render` can be used.
      render_fps: Frame rate at which a video with one frame per step plays at natural speed.
      offers_states: True if `Vector.get_states` and `Vector.set_states` can be used.
      notes: Sentences that a user should read before training.
      source: Class of the environments and its file, and those of wrappers that are not
        gymnasium's; "" if they are not known.
    """

    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    renders: bool
    render_fps: float
    offers_states: bool
    notes: Sequence[str]
    source: str = ""


class Outcome(NamedTuple):
    """Results of a vector step.

    Attributes:
      observation: Arrays [N, ...] of the observations; see `specs.arrays`.
      reward: float32 [N]; 0 where the step has reset an environment.
      discount: float32 [N]; 0 where nothing that follows counts: the episode has terminated, or, in
        some environments, a life was lost.
      is_last: bool [N]; True where an episode has ended.
      own_returns: Number of the environment and return of its episode so far, for environments
        that were stepped and record their returns themselves.
    """

    observation: Arrays
    reward: np.ndarray
    discount: np.ndarray
    is_last: np.ndarray
    own_returns: Sequence[tuple[int, float]] = ()


def gather(observation: Arrays, num_envs: int, results: Iterable[tuple[int, Any]]) -> Outcome:
    """Gathers what `SingleEnv.step` has returned, given with the number of each environment."""
    reward = np.zeros(num_envs, np.float32)
    terminated, truncated = np.zeros((2, num_envs), np.bool_)
    own_returns = []
    for index, result in results:
        reward[index], terminated[index], truncated[index], own_return = result
        if own_return is not None:
            own_returns.append((index, own_return))
    discount = np.subtract(1, terminated, dtype=np.float32)
    return Outcome(observation, reward, discount, terminated | truncated, own_returns)


def store(leaf: specs.Leaf, received: Any, array: np.ndarray) -> str:
    """Copies what an environment has returned into an array of its space.

    Args:
      leaf: Part of the observation.
      received: Its value, which may be a list or have another dtype.
      array: The array to write to, with the dtype of the space.

    Returns:
      Why the value does not fit, or "" if it does.
    """
    try:
        given = np.asarray(received)
    except ValueError:  # Its parts have different shapes.
        return f"{leaf.name} is {received!r:.80}, not an array; its space is {leaf.space}"
    if given.shape != array.shape:
        return (
            f"{leaf.name} has the shape {given.shape} instead of {array.shape}; its space is "
            f"{leaf.space}"
        )
    if given.dtype == array.dtype or (array.dtype.kind == "f" and given.dtype.kind in "uibf"):
        array[...] = given  # as float64 is rounded to float32
        return ""
    # In other spaces, numbers and truth values are stored if they stay the same.
    is_number = given.dtype.kind in "uibf"
    if is_number:
        with np.errstate(over="ignore", invalid="ignore"):
            array[...] = given.astype(array.dtype)
    if not is_number or not np.array_equal(array, given):
        return (
            f"{leaf.name} has the dtype {given.dtype}, whose values cannot be stored in its space "
            f"{leaf.space} without a change"
        )
    return ""


class Vector(Protocol):
    """N environments that are reset and stepped together.

    The step after an episode's end ignores its action and resets the environment instead, as in
    gymnasium's autoreset mode NEXT_STEP. Returned arrays are never written again.
    """

    num_envs: int
    description: Description
    thread: int  # identifier of the thread that runs the environments; 0: the thread that calls

    def reset(self, seeds: Sequence[int], mask: np.ndarray | None = None) -> Arrays:
        """Resets environments, each with its own seed.

        Args:
          seeds: Seeds of all N environments.
          mask: bool [N], the environments to reset; None for all.

        Returns:
          Arrays [N, ...] of the observations of all N environments; see `specs.arrays`.
        """

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Outcome:
        """Steps environments.

        Args:
          actions: Actions [N, ...] of the action space.
          live: bool [N], the environments to step; None for all. A vector may step all of them
            anyway. What it returns for the others has no meaning.
        """

    def render(self) -> Any:
        """Returns the first environment's current frame, as the environment returned it."""

    def get_states(self) -> list[State]:
        """Returns the state of every environment; see `saved_states`."""

    def set_states(self, states: Sequence[State]) -> None:
        """Restores the state of every environment. All of them must have been reset before."""

    def close(self) -> None:
        """Frees what the environments hold: processes, threads, windows."""


def frames_per_second(metadata: Any) -> float:
    """Returns the `render_fps` of an environment's metadata, or 30 if that is not a rate."""
    fps = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    rate = float(fps) if isinstance(fps, numbers.Real) else 0.0
    return rate if 0.0 < rate < math.inf else _DEFAULT_FPS


def new_observations(space: gymnasium.Space, num_envs: int) -> Arrays:
    """Creates the arrays [num_envs, ...] for observations of a space.

    TensorFlow reads the bytes of every array in the order of the machine.
    """
    return [
        np.empty(
            (num_envs, *(leaf.space.shape or ())), np.dtype(leaf.space.dtype).newbyteorder("=")
        )
        for leaf in specs.arrays(space)
    ]


def refuse_statistics(env: gymnasium.Env | gymnasium.vector.VectorEnv) -> None:
    """Refuses gymnasium's wrappers that normalise by running statistics.

    Their statistics are not part of a checkpoint, and evaluation would begin with other ones.

    Raises:
      UserError: If there is such a wrapper. The message names the parameter that replaces it.
    """
    observations = "normalize_observations = True of the agent or of its ActorCritic"
    rewards = (
        "normalize_returns = True of an agent that has it, or scale the rewards with a wrapper "
        "such as TransformReward of gymnasium.wrappers or gymnasium.wrappers.vector"
    )
    replacements: dict[type, str] = {
        wrappers.NormalizeObservation: observations,
        wrappers.vector.NormalizeObservation: observations,
        wrappers.NormalizeReward: rewards,
        wrappers.vector.NormalizeReward: rewards,
    }
    for layer in saved_states.layers(env):
        for kind, replacement in replacements.items():
            if isinstance(layer, kind):
                raise UserError(
                    f"gymnasium's wrapper {type(layer).__name__} has statistics that no checkpoint "
                    "holds, and that evaluation would not share. Remove it, and bind "
                    f"{replacement}."
                )


class GymnasiumVector:
    """Adapts a gymnasium vector environment with autoreset mode NEXT_STEP.

    Its `reset` must take a list with a seed for each environment, and `options["reset_mask"]` with
    the environments to reset, as `SyncVectorEnv.reset` does, and return the observations of the
    others unchanged.
    """

    thread = 0
    copies_observations = True  # not needed if the vector environment always returns new arrays

    def __init__(self, vector_env: gymnasium.vector.VectorEnv):
        """Initializes the vector and takes ownership of `vector_env`.

        Raises:
          UserError: If the autoreset mode is not supported, or if a wrapper normalises.
        """
        for env in (vector_env, *getattr(vector_env.unwrapped, "envs", ())):
            refuse_statistics(env)
        mode = vector_env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(
                f"the vector environment's autoreset mode is {mode}. Use AutoresetMode.NEXT_STEP, "
                "the only mode that maps onto TF-Agents' time steps."
            )
        # Any, because gymnasium's vector environments take different kinds of seeds.
        self.vector_env: Any = vector_env
        self.num_envs = vector_env.num_envs
        self._arrays = specs.arrays(vector_env.single_observation_space)
        self._categories = [specs.categories(leaf.space) for leaf in self._arrays]
        self._like = new_observations(vector_env.single_observation_space, self.num_envs)
        self._received: Arrays = self._like
        self.description = Description(
            vector_env.single_observation_space,
            vector_env.single_action_space,
            renders=vector_env.render_mode == "rgb_array",
            render_fps=frames_per_second(vector_env.metadata),
            offers_states=False,  # gymnasium's vector environments pass no states on
            notes=specs.notes_of_omitted(vector_env.single_observation_space),
        )

    def reset(self, seeds: Sequence[int], mask: np.ndarray | None = None) -> Arrays:
        """Resets environments; see `Vector.reset`."""
        options = None if mask is None else {"reset_mask": mask}
        observation, info = self.vector_env.reset(seed=self._seeds(seeds, mask), options=options)
        self._on_reset(info, mask)
        before, after = self._received, self._checked(observation)
        if mask is not None:
            self._check_others(before, after, ~mask)
        return after

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Outcome:
        """Steps all environments; see `Vector.step`."""
        observation, reward, terminated, truncated, info = self.vector_env.step(actions)
        terminated = self._row("terminated", terminated, np.bool_)
        is_last = terminated | self._row("truncated", truncated, np.bool_)
        discount = self._discount(terminated, is_last, info)
        reward = self._row("reward", reward, np.float32)
        return Outcome(self._checked(observation), reward, discount, is_last)

    def render(self) -> Any:
        """Returns the first environment's current frame."""
        return self.vector_env.render()[0]

    def get_states(self) -> list[State]:
        """Raises NotImplementedError."""
        raise NotImplementedError

    def set_states(self, states: Sequence[State]) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the vector environment."""
        self.vector_env.close()

    def _row(self, name: str, given: Any, dtype: type) -> np.ndarray:
        """Returns a result of `step` with one entry for each environment, as a new array.

        Raises:
          UserError: If it has another shape, or holds anything but numbers or truth values.
        """
        array = np.asarray(given)
        if array.shape == (self.num_envs,) and array.dtype.kind in "buif":
            row: np.ndarray = array.astype(dtype)
            if dtype is not np.bool_ or np.array_equal(row, array):
                return row
        raise UserError(
            f"step() returned {name} with the shape {array.shape} and the dtype {array.dtype} "
            f"instead of {(self.num_envs,)} and {dtype.__name__}. {self._change}"
        )

    def _checked(self, observation: Any) -> Arrays:
        """Returns the arrays of an observation, copied or converted to their dtypes if necessary.

        Raises:
          UserError: If an array has another shape, or numbers that are not in the space.
        """
        received = [leaf.of(observation) for leaf in self._arrays]
        for place, (given, like) in enumerate(zip(received, self._like, strict=True)):
            is_new = isinstance(given, np.ndarray) and not self.copies_observations
            if is_new and (given.shape, given.dtype) == (like.shape, like.dtype):
                continue
            received[place] = np.empty_like(like)
            if fault := store(self._arrays[place], given, received[place]):
                raise UserError(f"{fault}. {self._change}")
        for leaf, values, array in zip(self._arrays, self._categories, received, strict=True):
            if not specs.are_in(values, array):
                raise UserError(
                    f"{leaf.name} holds a value that is not in its space {leaf.space}. "
                    f"{self._change}"
                )
        self._received = received
        return received

    @property
    def _change(self) -> str:
        names = [type(layer).__qualname__ for layer in saved_states.layers(self.vector_env)]
        return f"Change the vector environment {' of '.join(names)}."

    def _check_others(self, before: Arrays, after: Arrays, others: np.ndarray) -> None:
        """Checks that a reset has not changed the observations of the other environments.

        If they were reset, too, their next rows would continue an episode that has ended.

        Raises:
          UserError: If it has changed one.
        """
        for old, new in zip(before, after, strict=True):
            if not np.array_equal(old[others], new[others], equal_nan=new.dtype.kind == "f"):
                raise UserError(
                    "reset has changed observations of environments that are False in "
                    f'options["reset_mask"]. It must return these unchanged. {self._change}'
                )

    def _seeds(self, seeds: Sequence[int], mask: np.ndarray | None) -> Any:
        """Returns the seeds in the form that the vector environment's `reset` takes."""
        return list(seeds)

    def _on_reset(self, info: dict[str, Any], mask: np.ndarray | None) -> None:
        """Handles the infos of a reset of the environments in `mask`, or of all if it is None."""

    def _discount(
        self, terminated: np.ndarray, is_last: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        """Computes the discounts, float32 [N], of a step."""
        return np.subtract(1, terminated, dtype=np.float32)
