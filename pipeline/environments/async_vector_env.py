"""gymnasium's AsyncVectorEnv, extended to step only some of its environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class SelectiveAsyncVectorEnv(gymnasium.vector.AsyncVectorEnv):
    """Steps all or some of its environments, each in a process of its own."""

    def step_some(
        self, live: np.ndarray, actions: Any
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the environments of `live`; the others stay as they are.

        Args:
          live: bool [N], the environments to step.
          actions: Actions of all N environments.

        Returns:
          The same values as `step`. The other environments have their last observations, rewards
          of 0 and flags of False. Infos are empty.

        Raises:
          Exception: If an environment raises; it is passed on.
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
