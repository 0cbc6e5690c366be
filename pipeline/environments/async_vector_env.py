"""gymnasium's AsyncVectorEnv, which can also step some of its environments alone."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class SelectiveAsyncVectorEnv(gymnasium.vector.AsyncVectorEnv):
    """Steps its environments each in a process of its own, all of them or some."""

    def step_some(
        self, live: np.ndarray, actions: Any
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As `step`, of the environments of `live`, bool [N]; the others stay as they are.

        Their observations are those that they gave last, their rewards 0, their flags False. Infos
        are empty.

        Raises what an environment raises.
        """
        rewards = np.zeros(self.num_envs, np.float64)
        terminations = np.zeros(self.num_envs, np.bool_)
        truncations = np.zeros(self.num_envs, np.bool_)
        successes = [True] * self.num_envs
        indices = np.flatnonzero(live)
        for index in indices:
            self.parent_pipes[index].send(("step", actions[index]))
        for index in indices:
            answer, successes[index] = self.parent_pipes[index].recv()
            if successes[index]:  # the observation comes through shared memory
                _, rewards[index], terminations[index], truncations[index], _ = answer
        self._raise_if_errors(successes)
        observations: Any = self.observations
        return observations.copy(), rewards, terminations, truncations, {}
