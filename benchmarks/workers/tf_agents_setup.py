"""Creates the environments, networks and agents of TF-Agents' examples for `tf_agents_worker`."""

from __future__ import annotations

import functools
from typing import Any

import ale_py
import gymnasium
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
import workloads
from tf_agents.agents.ddpg.critic_network import CriticNetwork
from tf_agents.agents.dqn.dqn_agent import DqnAgent
from tf_agents.agents.ppo.ppo_clip_agent import PPOClipAgent
from tf_agents.agents.sac.sac_agent import SacAgent
from tf_agents.agents.sac.tanh_normal_projection_network import TanhNormalProjectionNetwork
from tf_agents.agents.tf_agent import TFAgent
from tf_agents.environments.batched_py_environment import BatchedPyEnvironment
from tf_agents.environments.py_environment import PyEnvironment
from tf_agents.environments.tf_py_environment import TFPyEnvironment
from tf_agents.keras_layers.inner_reshape import InnerReshape
from tf_agents.networks.actor_distribution_network import ActorDistributionNetwork
from tf_agents.networks.sequential import Sequential
from tf_agents.networks.value_network import ValueNetwork
from tf_agents.specs import BoundedArraySpec
from tf_agents.trajectories import time_step as ts
from tf_agents.utils import common

gymnasium.register_envs(ale_py)

_FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_FEATURES = 512


def set_threads(workload: workloads.Workload) -> dict[str, int]:
    """Sets the same numbers of TensorFlow's threads as this pipeline, and returns them.

    For networks that read vectors, fewer threads are faster by a tenth or less.
    """
    tf.config.threading.set_inter_op_parallelism_threads(workload.threads["inter_op"])
    tf.config.threading.set_intra_op_parallelism_threads(workload.threads["intra_op"])
    return workload.threads


class GymnasiumEnvironment(PyEnvironment):
    """Gymnasium environment, wrapped as `GymWrapper` wraps environments of legacy gym."""

    def __init__(self, env: gymnasium.Env, seed: int) -> None:
        super().__init__(handle_auto_reset=True)
        self._env = env
        self._seed: int | None = seed

    def observation_spec(self) -> BoundedArraySpec:
        return _spec(self._env.observation_space)

    def action_spec(self) -> BoundedArraySpec:
        return _spec(self._env.action_space)

    def _reset(self) -> ts.TimeStep:
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return ts.restart(observation)

    def _step(self, action: np.ndarray) -> ts.TimeStep:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        if terminated:
            return ts.termination(observation, reward)
        return (ts.truncation if truncated else ts.transition)(observation, reward)


def _spec(space: gymnasium.Space) -> BoundedArraySpec:
    if isinstance(space, gymnasium.spaces.Discrete):
        return BoundedArraySpec((), np.int64, 0, np.subtract(space.n, 1))
    assert isinstance(space, gymnasium.spaces.Box)
    return BoundedArraySpec(space.shape, space.dtype, space.low, space.high)


def make_env(workload: workloads.Workload, num_envs: int) -> TFPyEnvironment:
    """Creates `num_envs` environments in one process, which are stepped one after another.

    On two cores, this was faster than a thread or a process for each.
    """
    envs = [
        GymnasiumEnvironment(_gymnasium_env(workload), workloads.SEED + i) for i in range(num_envs)
    ]
    return TFPyEnvironment(BatchedPyEnvironment(envs, multithreading=False))


def _gymnasium_env(workload: workloads.Workload) -> gymnasium.Env:
    if not workload.is_atari:
        return gymnasium.make(workload.environment, disable_env_checker=True)
    env = gymnasium.make(
        workload.environment,
        frameskip=1,
        repeat_action_probability=0.0 if workload.openai_protocol else 0.25,
    )
    env = gymnasium.wrappers.AtariPreprocessing(
        env,
        noop_max=30 if workload.openai_protocol else 0,
        terminal_on_life_loss=workload.openai_protocol,
    )
    env = gymnasium.wrappers.ClipReward(env, -1, 1)
    return _channels_last(gymnasium.wrappers.FrameStackObservation(env, workloads.FRAME_STACK))


def _channels_last(env: gymnasium.Env) -> gymnasium.Env:
    """Moves frames to [height, width, frames], because convolutions on the CPU need it."""
    space = gymnasium.spaces.Box(0, 255, (84, 84, workloads.FRAME_STACK), np.uint8)
    return gymnasium.wrappers.TransformObservation(
        env, lambda frames: np.moveaxis(frames, 0, -1), space
    )


def create_agent(workload: workloads.Workload, env: TFPyEnvironment, step: tf.Variable) -> TFAgent:
    """Creates the agent of a workload.

    Args:
      workload: The workload.
      env: Environment of the agent.
      step: Variable that counts the updates of the agent, int64 [].
    """
    create = {"dqn": _dqn, "ppo": _ppo, "sac": _sac}[workload.algorithm]
    agent = create(workload, env, train_step_counter=step)
    agent.initialize()
    return agent


def _adam(workload: workloads.Workload) -> Any:
    return tf.compat.v1.train.AdamOptimizer(
        workload.learning_rate, epsilon=workload.optimizer_epsilon
    )


def _dense(units: int, activation: str | None = "relu") -> tf.keras.layers.Dense:
    initializer = tf.keras.initializers.VarianceScaling(scale=2.0)
    return tf.keras.layers.Dense(units, activation, kernel_initializer=initializer)


def _nature_cnn() -> list[tf.keras.layers.Layer]:
    """Returns the layers of examples/dqn/mnih15, which here can also read [B, T, ...]."""
    conv = functools.partial(
        tf.keras.layers.Conv2D,
        activation="relu",
        kernel_initializer=tf.keras.initializers.VarianceScaling(scale=2.0),
    )
    return [
        tf.keras.layers.Lambda(lambda pixels: pixels / 255),
        *(conv(*filters) for filters in _FILTERS),
        InnerReshape([7, 7, 64], [7 * 7 * 64]),
        _dense(_FEATURES),
    ]


def _dqn(workload: workloads.Workload, env: TFPyEnvironment, **common_arguments: Any) -> DqnAgent:
    num_actions = env.action_spec().maximum + 1
    hidden = _nature_cnn() if workload.is_atari else [_dense(units) for units in workload.units]
    return DqnAgent(
        env.time_step_spec(),
        env.action_spec(),
        q_network=Sequential([*hidden, _dense(num_actions, None)]),
        optimizer=_adam(workload),
        epsilon_greedy=workloads.EPSILON,
        target_update_period=workload.target_update_period,
        td_errors_loss_fn=common.element_wise_huber_loss,
        gamma=workloads.DISCOUNT,
        gradient_clipping=workload.gradient_clip_norm,
        **common_arguments,
    )


def _ppo(
    workload: workloads.Workload, env: TFPyEnvironment, **common_arguments: Any
) -> PPOClipAgent:
    actor, value = (_image_networks if workload.is_atari else _vector_networks)(workload, env)
    return PPOClipAgent(
        env.time_step_spec(),
        env.action_spec(),
        optimizer=_adam(workload),
        actor_net=actor,
        value_net=value,
        importance_ratio_clipping=workload.clip_ratio,
        lambda_value=workload.gae_lambda,
        discount_factor=workloads.DISCOUNT,
        entropy_regularization=workload.entropy_coefficient,
        value_pred_loss_coef=workload.value_coefficient,
        gradient_clipping=workload.gradient_clip_norm,
        num_epochs=1,
        use_gae=True,
        use_td_lambda_return=True,
        normalize_rewards=False,
        normalize_observations=False,
        compute_value_and_advantage_in_train=False,
        update_normalizers_in_train=False,
        **common_arguments,
    )


def _vector_networks(workload: workloads.Workload, env: TFPyEnvironment) -> tuple[Any, Any]:
    shared = {"fc_layer_params": workload.units, "activation_fn": tf.keras.activations.tanh}
    return (
        ActorDistributionNetwork(env.observation_spec(), env.action_spec(), **shared),
        ValueNetwork(env.observation_spec(), **shared),
    )


def _image_networks(workload: workloads.Workload, env: TFPyEnvironment) -> tuple[Any, Any]:
    """Returns a policy and a value network that share the layers below their heads."""
    encoder = _nature_cnn()
    spec = env.action_spec()

    def distribution(logits: tf.Tensor) -> tfp.distributions.Distribution:
        return tfp.distributions.Categorical(logits, dtype=spec.dtype)

    policy_head = [_dense(spec.maximum + 1, None), tf.keras.layers.Lambda(distribution)]
    value_head = [_dense(1, None), InnerReshape([1], [])]
    return Sequential([*encoder, *policy_head]), Sequential([*encoder, *value_head])


def _sac(workload: workloads.Workload, env: TFPyEnvironment, **common_arguments: Any) -> SacAgent:
    observation_spec, action_spec = env.observation_spec(), env.action_spec()
    return SacAgent(
        env.time_step_spec(),
        action_spec,
        actor_network=ActorDistributionNetwork(
            observation_spec,
            action_spec,
            fc_layer_params=workload.units,
            continuous_projection_net=TanhNormalProjectionNetwork,
        ),
        critic_network=CriticNetwork(
            (observation_spec, action_spec), joint_fc_layer_params=workload.units
        ),
        actor_optimizer=_adam(workload),
        critic_optimizer=_adam(workload),
        alpha_optimizer=_adam(workload),
        target_update_tau=workloads.TARGET_UPDATE_TAU,
        td_errors_loss_fn=tf.math.squared_difference,
        gamma=workloads.DISCOUNT,
        initial_log_alpha=float(np.log(workload.initial_alpha)),
        target_entropy=-float(np.prod(action_spec.shape)),
        **common_arguments,
    )
