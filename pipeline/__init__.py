"""Trains, resumes and evaluates reinforcement learning agents, on TF-Agents, from gin files."""

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
    """Loads a trained agent as a policy for use in any program.

    Example:
        import gymnasium, pipeline
        policy = pipeline.load_policy("runs/dqn_cartpole")
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=1)
        terminated = truncated = False
        while not (terminated or truncated):
            observation, reward, terminated, truncated, _ = env.step(policy.predict(observation))

    Args:
      root_dir: Folder of the run, or "pretrained:NAME" for a policy that comes with the package.
        Nothing is written to the folder.
      checkpoint: "latest" for the newest intact checkpoint, "best" for the best one by evaluation
        during training, or the number of environment steps of a checkpoint.
      allow_gin_imports: True if the run was trained with `--allow_gin_imports`.

    Returns:
      A policy with `predict(observation, seed=None)`: greedy without a seed, sampled with one. It
      expects observations as the agent saw them: if the run's configuration has wrappers, apply
      them to your environment. Gin's global config is left unchanged.

    Raises:
      pipeline.utils.errors.UserError: If there is no such run or checkpoint, if it is damaged, or
        if `tf.keras` is already Keras 3 in this process, because TF-Agents needs Keras 2.
    """
    # TensorFlow takes seconds to load, and all binaries begin with `import pipeline` too.
    from pipeline.runs.saved_run import SavedRun
    from pipeline.utils.tensorflow_import import LEGACY_KERAS, import_tensorflow

    run = SavedRun(os.fspath(root_dir), checkpoint)
    is_keras_chosen = LEGACY_KERAS in os.environ
    import_tensorflow()
    if not is_keras_chosen:
        warnings.warn(
            "From here on tf.keras is Keras 2 in this process, because TF-Agents needs it. Use "
            f"`import keras` for Keras 3. Set the environment variable {LEGACY_KERAS}=1 to avoid "
            "this warning.",
            stacklevel=2,
        )
    from pipeline import saved_policy

    policy = saved_policy.load_policy(run, allow_gin_imports)
    for warning in policy.warnings:
        warnings.warn(warning, stacklevel=2)
    return policy
