"""How long a run is, and what is done when."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.errors import UserError, check_whole


class Plan(NamedTuple):
    """All in environment steps, but for the numbers of episodes."""

    num_env_steps: int
    log_interval: int
    eval_interval: int
    checkpoint_interval: int
    num_eval_episodes: int
    num_final_episodes: int

    def check(self) -> None:
        """Raises UserError for a number that is too small, or none: a macro may stand for any."""
        for name, value in self._asdict().items():
            check_whole(f"train.{name}", value, 0 if name.endswith("_interval") else 1)

    def check_warm_up(self, num_env_steps: int) -> None:
        """Raises UserError if after so many environment steps of warm-up none are left to train."""
        check_whole("initialize_replay_buffer.num_env_steps", num_env_steps, 0)
        if num_env_steps >= self.num_env_steps:
            raise UserError(
                f"train.num_env_steps = {self.num_env_steps:_} includes the warm-up, and "
                f"initialize_replay_buffer.num_env_steps = {num_env_steps:_} leaves nothing to "
                "train: raise the former or lower the latter."
            )

    def next_stop(self, env_steps: int) -> int:
        """Where a chunk must end that begins at `env_steps`: a multiple of an interval, the end."""
        intervals = (self.log_interval, self.eval_interval, self.checkpoint_interval)
        stops = [(env_steps // i + 1) * i for i in intervals if i]
        return min([self.num_env_steps, *stops])
