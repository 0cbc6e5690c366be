"""Reinforcement learning with TF-Agents: train, resume and evaluate agents from gin files."""

from __future__ import annotations

import os
import warnings
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
      pipeline.errors.UserError: there is no such run or checkpoint, or it is damaged; or
        `tf.keras` is Keras 3 in this process already, and TF-Agents needs Keras 2.
    """
    # TensorFlow takes seconds to load, and `import pipeline` is also what the binaries begin with.
    from pipeline.saved_run import SavedRun
    from pipeline.tensorflow_import import LEGACY_KERAS, import_tensorflow

    run = SavedRun(os.fspath(root_dir), checkpoint)
    is_keras_chosen = LEGACY_KERAS in os.environ
    import_tensorflow()
    if not is_keras_chosen:
        warnings.warn(
            "From here on tf.keras is Keras 2 in this process, which TF-Agents needs; Keras 3 is "
            f"`import keras`. {LEGACY_KERAS}=1 in the environment chooses this without a warning.",
            stacklevel=2,
        )
    from pipeline import saved_policy

    return saved_policy.load_policy(run, allow_gin_imports)
