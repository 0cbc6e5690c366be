"""Where the time of a run goes."""

from __future__ import annotations

from pipeline.environments import TrainingEnvironment
from pipeline.iteration import LoopState


class Stopwatch:
    """Where the time goes, since the last log."""

    def __init__(self, environment: TrainingEnvironment, at_once: int):
        """`at_once`: iterations that run at the same time; their seconds are shared among them."""
        self._environment = environment
        self._at_once = at_once
        self._seconds = self._environment_seconds = self._collect_seconds = 0.0
        self._env_steps = 0

    def restart(self, state: LoopState) -> None:
        """Begins a new interval."""
        self._seconds = 0.0
        self._environment_seconds = self._environment.seconds
        self._collect_seconds = float(state.collect_seconds)
        self._env_steps = int(state.carry.statistics.env_steps)

    def add(self, seconds: float) -> None:
        """Counts one graph call."""
        self._seconds += seconds

    def env_steps_per_second(self, state: LoopState) -> float:
        """Environment steps per second inside graph calls: evaluation and logs do not count."""
        steps = int(state.carry.statistics.env_steps) - self._env_steps
        return steps / self._seconds if self._seconds else 0.0

    def shares(self, state: LoopState) -> dict[str, float]:
        """Shares of that time: in the environment, in the rest of collecting, in updates."""
        if not self._seconds:
            return {}
        seconds = self._seconds * self._at_once
        environment = (self._environment.seconds - self._environment_seconds) / seconds
        collect = (float(state.collect_seconds) - self._collect_seconds) / seconds
        return {
            "environment_share": environment,
            "policy_share": max(collect - environment, 0.0),
            "update_share": max(1.0 - collect, 0.0),
        }
