"""Runs a trained agent outside of the pipeline, with NumPy observations and actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from pipeline.environments import specs
from pipeline.environments.saved_spaces import from_json
from pipeline.ops.normalizers import RunningMoments
from pipeline.ops.randomness import stateless_seed, stream_key
from pipeline.runs.saved_run import SavedRun
from pipeline.training.components import build_agent, count_of_env_steps
from pipeline.training.train_loop import bound
from pipeline.utils.errors import UserError

_NO_SEED = np.zeros(2, np.int32)


class SavedPolicy:
    """Applies a policy with its weights to one observation or a batch of them.

    Attributes:
      observation_spec: Spec of one observation, a nest for Dict and Tuple spaces.
      observation_space: Gymnasium's observation space, which the agent was trained on.
      action_space: Gymnasium's action space, which contains each action that `predict` returns.
      env_steps: Environment steps after which the weights were saved.
      agent: The agent, with its networks and policies.
      warnings: Messages about newer checkpoints that are damaged.
    """

    def __init__(self, restored: RestoredAgent, computes_float64: bool = True):
        """Traces the policy of an agent.

        Args:
          restored: The agent, whose normalizers are changed.
          computes_float64: False if normalizers must compute in float32 alone, as for LiteRT.
        """
        for module in restored.agent.submodules:
            if isinstance(module, RunningMoments):
                module.is_precise = computes_float64
        self.agent = restored.agent
        self.observation_spec: Any = self.agent.time_step_spec.observation
        self.observation_space = restored.observation_space
        self.action_space = restored.action_space
        self.env_steps = restored.checkpoint.env_steps
        self.warnings = restored.checkpoint.warnings
        self._to_space = specs.action_converter(self.action_space)
        self._act = self._graph(self.agent.policy)
        self._act_stochastically = self._graph(self.agent.collect_policy)

    def predict(self, observation: Any, seed: int | None = None) -> np.ndarray | np.generic:
        """Returns the action for an observation, or the actions for a batch of them.

        Args:
          observation: One observation, or a batch of them with a leading axis. For Dict and Tuple
            spaces, every array has that axis. It must come from the space that the agent was
            trained on, wrappers included. Any dtype is allowed that converts to the space's dtype
            without a change of kind: integers convert to floats, but floats do not convert to
            integers. If the space's dtype is an integer, the values must fit into it.
          seed: None returns the greedy action, whatever `Evaluator.greedy` says. A number samples
            from the collect policy instead, exploration included. The same number samples the same
            actions, so pass a different number at each step.

        Returns:
          One action, or a batch of them. `env.step` accepts each without conversion. Discrete
          actions are int64 and start where their space starts. Continuous actions are clipped to
          their space.

        Raises:
          ValueError: If a shape or a dtype does not fit the observation spec, or a part is missing.
        """
        batch, is_batch = self._batch(observation)
        if seed is None:
            actions = self._act(batch, _NO_SEED)
        else:
            key = stream_key(seed, "saved_policy")
            actions = self._act_stochastically(batch, stateless_seed(key, tf.constant(0)))
        actions = self._to_space(actions.numpy())
        return actions if is_batch else actions[0]

    def greedy_actions(self, observation: Any) -> tf.Tensor:
        """Returns the greedy actions [B, ...] of the action space, in a graph.

        Args:
          observation: Nest of tensors [B, ...], as in `observation_spec`.
        """
        actions = self._act(observation, tf.constant(_NO_SEED))
        return specs.actions_in_space(actions, self.action_space)

    def _graph(self, policy: tf_policy.TFPolicy) -> Callable[..., tf.Tensor]:
        """Returns a function of a batch and a seed, traced once for all batch sizes.

        It is traced at once, because layers and schedules may read gin's configuration.
        """
        batch = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self.observation_spec
        )
        signature = [batch, tf.TensorSpec([2], tf.int32)]

        @tf.function(input_signature=signature, autograph=False)
        def act(observation, seed):
            return _actions(policy, observation, seed)

        act.get_concrete_function()
        return act

    def _batch(self, observation: Any) -> tuple[Any, bool]:
        """Returns the observation as a batch, and True if it was a batch before."""
        tensors, batch_shapes = [], set()
        for leaf, spec in zip(
            specs.arrays(self.observation_space),
            tf.nest.flatten(self.observation_spec),
            strict=True,
        ):
            try:
                array = np.asarray(leaf.of(observation))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{leaf.name} is missing, or is no array. Pass an observation of "
                    f"{self.observation_space}, as env.step returns it and without the info of "
                    "env.reset."
                ) from error
            array = _converted(array, spec, leaf)
            batch_shape = array.shape[: array.ndim - spec.shape.rank]
            batch_shapes.add(batch_shape)
            tensors.append(tf.constant(array if batch_shape else array[np.newaxis]))
        if len(batch_shapes) > 1:
            raise ValueError(
                "the arrays of the observation have different batch sizes. Pass arrays with the "
                "same leading dimension, or all without one."
            )
        return tf.nest.pack_sequence_as(self.observation_spec, tensors), batch_shapes != {()}


def _actions(policy: tf_policy.TFPolicy, observation: Any, seed: tf.Tensor) -> tf.Tensor:
    sizes = tf.shape(tf.nest.flatten(observation)[0])[:1]
    time_step = ts.TimeStep(
        tf.fill(sizes, ts.StepType.FIRST), tf.zeros(sizes), tf.ones(sizes), observation
    )
    step = policy.action(time_step, policy.get_initial_state(sizes[0]), seed)
    return clip_action(step.action, policy.action_spec)


def _converted(array: np.ndarray, spec: tf.TensorSpec, leaf: specs.Leaf) -> np.ndarray:
    """Converts an array, or a batch of them, to the dtype of its spec, and checks it.

    Raises:
      ValueError: If the shape or the dtype does not fit, or a category is not in the space.
    """
    shape, name = tuple(spec.shape), leaf.name
    if array.shape not in (shape, array.shape[:1] + shape):
        sizes = "".join(f", {n}" for n in shape)
        raise ValueError(
            f"{name} has shape {array.shape}. Pass shape {shape}, or (batch size{sizes}) for a "
            "batch."
        )
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    if array.dtype.kind in "uib" and dtype.kind in "uib":
        if not np.array_equal(array.astype(dtype), array):
            raise ValueError(
                f"{name} holds integers from {array.min()} to {array.max()}, which do not fit into "
                f"{dtype.name}."
            )
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name} has dtype {array.dtype}; the agent takes {spec.dtype.name}.")
    if not specs.are_in(specs.categories(leaf.space), array):
        raise ValueError(f"{name} holds a value that is not in its space {leaf.space}.")
    with np.errstate(over="ignore"):  # what overflows is refused below
        array = array.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} holds NaN, infinity, or a number too large for {dtype.name}.")
    return array


class RestoredAgent(NamedTuple):
    """Agent with its weights, and the spaces that it was trained on."""

    agent: Agent
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    checkpoint: Restored


def restore_agent(run: SavedRun) -> RestoredAgent:
    """Builds the agent from gin's config and the run's spaces, and restores it.

    Apply the config of the run (`run.read_config`) before.

    Args:
      run: Run that the checkpoint belongs to.

    Raises:
      UserError: If the checkpoint or run.json is damaged, or the config does not fit.
    """
    create_agent = bound("create_agent")
    origin = run.origin
    try:
        observation_space = from_json(origin["observation_space"])
        action_space = from_json(origin["action_space"])
    except ValueError as error:
        raise UserError(
            f"{run.path / 'run.json'} is damaged ({error}). Restore the file, or train again."
        ) from error
    name = str(run.path)
    time_step_spec = ts.time_step_spec(specs.observation_spec(observation_space, name))
    action_spec = specs.action_spec(action_space, name)
    env_steps = count_of_env_steps()
    agent = build_agent(
        time_step_spec, action_spec, run.num_envs, run.seed, create_agent, env_steps
    )
    checkpoint = run.restore(agent=Variables(agent=agent), networks=Variables(**agent.trained))
    env_steps.assign(checkpoint.env_steps)  # Schedules, such as that of epsilon, read it.
    return RestoredAgent(agent, observation_space, action_space, checkpoint)


def load_policy(
    run: SavedRun,
    allow_gin_imports: bool,
    gin_bindings: Sequence[str] = (),
    computes_float64: bool = True,
) -> SavedPolicy:
    """Loads the policy of a run and leaves gin's config unchanged. See `pipeline.load_policy`.

    Args:
      run: The run.
      allow_gin_imports: Whether its configuration may import other packages.
      gin_bindings: Bindings that override its configuration.
      computes_float64: See `SavedPolicy`.
    """
    with configuration.preserved():
        configuration.apply(run.read_config([*gin_bindings], allow_gin_imports))
        return SavedPolicy(restore_agent(run), computes_float64)
