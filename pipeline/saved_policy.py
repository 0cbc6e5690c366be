"""Runs a trained agent outside of the pipeline, with NumPy observations and actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gymnasium
import numpy as np
import tensorflow as tf
from tf_agents.policies import tf_policy
from tf_agents.trajectories import time_step as ts

from pipeline import configuration
from pipeline.acting.policies import clip_action
from pipeline.agents.agent import Agent
from pipeline.checkpointing.checkpoints import Restored
from pipeline.checkpointing.saveables import Variables
from pipeline.environments.specs import action_converter
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.ops.randomness import stateless_seed, stream_key
from pipeline.runs.saved_run import SavedRun
from pipeline.training.components import build_agent, build_evaluation_environment
from pipeline.training.train_loop import bound

_NO_SEED = np.zeros(2, np.int32)


class SavedPolicy:
    """Policy with its weights, for one observation or a batch of them.

    Attributes:
      observation_spec: Spec of one observation.
      action_space: Gymnasium's action space, which contains each action that `predict` returns.
      env_steps: Environment steps after which the weights were saved.
    """

    def __init__(
        self,
        policy: tf_policy.TFPolicy,
        stochastic_policy: tf_policy.TFPolicy,
        action_space: gymnasium.Space,
        env_steps: int,
    ):
        self.observation_spec: tf.TensorSpec = policy.time_step_spec.observation
        self.action_space = action_space
        self.env_steps = env_steps
        self._to_space = action_converter(action_space)
        self._act = self._graph(policy)
        self._act_stochastically = self._graph(stochastic_policy)

    def predict(self, observation: np.ndarray, seed: int | None = None) -> np.ndarray | np.generic:
        """Returns the action for an observation, or the actions for a batch of them.

        Args:
          observation: One observation, or a batch of them on a leading axis. It must come from the
            space that the agent was trained on, wrappers included. Any dtype is allowed that
            converts to the space's dtype without a change of kind: integers convert to floats, but
            floats do not convert to integers.
          seed: None returns the greedy action, whatever `Evaluator.greedy` says. A number samples
            from the collect policy instead, exploration included. The same number samples the same
            actions, so pass a different number at each step.

        Returns:
          One action, or a batch of them. `env.step` accepts each without conversion. Discrete
          actions are int64 and start where their space starts. Continuous actions are clipped to
          their space.

        Raises:
          ValueError: If the shape or the dtype does not fit the observation spec.
        """
        observation = np.asarray(observation)
        self._check(observation)
        is_batch = observation.ndim > self.observation_spec.shape.rank
        batch = observation if is_batch else observation[np.newaxis]
        tensor = tf.constant(batch.astype(self.observation_spec.dtype.as_numpy_dtype))
        if seed is None:
            actions = self._act(tensor, _NO_SEED)
        else:
            key = stream_key(seed, "saved_policy")
            actions = self._act_stochastically(tensor, stateless_seed(key, tf.constant(0)))
        actions = self._to_space(actions.numpy())
        return actions if is_batch else actions[0]

    def _graph(self, policy: tf_policy.TFPolicy) -> Callable[..., tf.Tensor]:
        """Returns a function of a batch and a seed, traced once for all batch sizes."""
        spec = self.observation_spec
        signature = [
            tf.TensorSpec([None, *spec.shape], spec.dtype),
            tf.TensorSpec([2], tf.int32),
        ]

        @tf.function(input_signature=signature, autograph=False)
        def act(observation, seed):
            sizes = tf.shape(observation)[:1]
            time_step = ts.TimeStep(
                tf.fill(sizes, ts.StepType.FIRST), tf.zeros(sizes), tf.ones(sizes), observation
            )
            step = policy.action(time_step, policy.get_initial_state(sizes[0]), seed)
            return clip_action(step.action, policy.action_spec)

        return act

    def _check(self, observation: np.ndarray) -> None:
        spec = self.observation_spec
        shape, dtype = tuple(spec.shape), spec.dtype.as_numpy_dtype
        if observation.shape not in (shape, observation.shape[:1] + shape):
            sizes = "".join(f", {n}" for n in shape)
            raise ValueError(
                f"the observation has shape {observation.shape}; the agent takes {shape}, or a"
                f" batch (any{sizes})."
            )
        if not np.can_cast(observation.dtype, dtype, "same_kind"):
            raise ValueError(
                f"the observation has dtype {observation.dtype}; the agent takes {spec.dtype.name}."
            )


class RestoredAgent(NamedTuple):
    """Agent with its weights, and the evaluation environment that it was built for."""

    agent: Agent
    environment: VectorEnvironment
    create_environment: Callable[..., VectorEnvironment]
    checkpoint: Restored


def restore_agent(run: SavedRun, seed: int) -> RestoredAgent:
    """Builds the environment and the agent from gin's config, and restores the agent.

    Apply the config of the run (`run.read_config`) before.

    Args:
      run: Run that the checkpoint belongs to.
      seed: Seed of the environment.

    Raises:
      UserError: If the checkpoint is damaged, or the config does not fit it.
    """
    create_environment, create_agent = bound("create_environment"), bound("create_agent")
    environment = build_evaluation_environment(seed, create_environment)
    env_steps = tf.Variable(0, dtype=tf.int64, name="env_steps")
    try:
        agent = build_agent(environment, run.num_envs, run.seed, create_agent, env_steps)
        checkpoint = run.restore(Variables(agent=agent))
    except Exception:
        environment.close()
        raise
    env_steps.assign(checkpoint.env_steps)  # Schedules, such as that of epsilon, read it.
    return RestoredAgent(agent, environment, create_environment, checkpoint)


def load_policy(run: SavedRun, allow_gin_imports: bool) -> SavedPolicy:
    """Loads the policy of a run and leaves gin's config unchanged. See `pipeline.load_policy`."""
    with configuration.preserved():
        configuration.apply(run.read_config([], allow_gin_imports))
        restored = restore_agent(run, run.seed)
    restored.environment.close()
    return SavedPolicy(
        restored.agent.policy,
        restored.agent.collect_policy,
        restored.environment.action_space,
        restored.checkpoint.env_steps,
    )
