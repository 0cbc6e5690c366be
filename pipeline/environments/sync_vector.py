"""Steps the environments of a vector one after the other in the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from pipeline.environments.saved_states import State
from pipeline.environments.single_env import SingleEnv, close_with_warning, shared_description
from pipeline.environments.vectors import Arrays, Outcome, gather, new_observations


class SyncVector:
    """Steps its environments one after the other; rows are independent of each other."""

    thread = 0

    def __init__(self, makes: Sequence[Callable[[], gymnasium.Env]]):
        """Builds the environments, and closes them again if one raises."""
        self.envs: list[SingleEnv] = []
        try:
            for make in makes:
                self.envs.append(SingleEnv(make))
            self.description = shared_description([env.description for env in self.envs])
        except BaseException:
            close_with_warning(self, "an environment")
            raise
        self.num_envs = len(self.envs)
        self._observation = new_observations(self.description.observation_space, self.num_envs)

    def reset(self, seeds: Sequence[int], mask: np.ndarray | None = None) -> Arrays:
        """Resets environments; see `Vector.reset`."""
        self._observation = [array.copy() for array in self._observation]
        for index in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            row = [array[index, ...] for array in self._observation]
            self.envs[index].reset(seeds[index], row)
        return self._observation

    def step(self, actions: np.ndarray, live: np.ndarray | None = None) -> Outcome:
        """Steps environments; see `Vector.step`."""
        new = np.empty_like if live is None else np.copy
        observation = self._observation = [new(array) for array in self._observation]
        indices = range(self.num_envs) if live is None else np.flatnonzero(live).tolist()
        results = [  # not a generator, in which a StopIteration would become another error
            (i, self.envs[i].step(actions[i], [array[i, ...] for array in observation]))
            for i in indices
        ]
        return gather(observation, self.num_envs, results)

    def render(self) -> Any:
        """Returns the first environment's current frame."""
        return self.envs[0].render()

    def get_states(self) -> list[State]:
        """Returns the state of every environment."""
        return [env.get_state() for env in self.envs]

    def set_states(self, states: Sequence[State]) -> None:
        """Restores the state of every environment."""
        for env, state in zip(self.envs, states, strict=True):
            env.set_state(state)

    def close(self) -> None:
        """Closes all environments, also if one raises."""
        errors = []
        while self.envs:
            try:
                self.envs.pop().close()
            except Exception as error:  # the environment's author chose its type
                errors.append(error)
        if errors:
            raise errors[0]
