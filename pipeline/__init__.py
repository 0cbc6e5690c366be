"""Reinforcement learning with TF-Agents: train, resume and evaluate agents from gin files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.saved_policy import SavedPolicy

__all__ = ["load_policy"]


def load_policy(
    root_dir: str | os.PathLike[str],
    checkpoint: str | int = "latest",
    *,
    allow_gin_imports: bool = False,
) -> SavedPolicy:
    """Loads the agent that a run has trained, to be used anywhere.

        import gymnasium, pipeline
        policy = pipeline.load_policy("runs/dqn_cartpole")
        env = gymnasium.make("CartPole-v1")
        observation, over = env.reset(seed=1)[0], False
        while not over:
            observation, reward, over, truncated, _ = env.step(policy.predict(observation))
            over = over or truncated

    Args:
      root_dir: the run's folder; nothing is written to it.
      checkpoint: "latest" (the newest that is intact), "best" (by evaluation while it trained), or
        the number of environment steps of one.
      allow_gin_imports: as the flag that the run was trained with, if it was.

    Returns:
      A policy with `predict(observation, seed=None)`: greedy without a seed, drawn with one. It
      knows observations as the agent saw them: apply the wrappers of the run's configuration to
      your environment, if there are any. Gin's global config is left as it was.

    Raises:
      pipeline.errors.UserError: there is no such run or checkpoint, or it is damaged.
    """
    # TensorFlow takes seconds to load, and `import pipeline` is also what the binaries begin with.
    from pipeline import cli
    from pipeline.saved_run import SavedRun

    run = SavedRun(os.fspath(root_dir), checkpoint)
    cli.before_tensorflow()
    from pipeline import saved_policy

    return saved_policy.load_policy(run, allow_gin_imports)
