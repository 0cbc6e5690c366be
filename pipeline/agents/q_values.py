"""Q-values of discrete actions: their network, the losses of their errors, and what is common."""

from __future__ import annotations

import gin
import tensorflow as tf
from tf_agents.specs import tensor_spec

from pipeline.errors import UserError
from pipeline.networks import HeadedNetwork, QHead, create_encoder, num_actions


@gin.configurable
def huber_loss(td_error: tf.Tensor, threshold: float = 1.0) -> tf.Tensor:
    """Quadratic up to `threshold`, linear beyond: DQN's clipped error (Mnih et al. 2015)."""
    size = tf.abs(td_error)
    quadratic = tf.minimum(size, threshold)
    return 0.5 * quadratic**2 + threshold * (size - quadratic)


@gin.configurable
def squared_loss(td_error: tf.Tensor) -> tf.Tensor:
    """Half the squared error, so that its gradient is the error."""
    return 0.5 * td_error**2


def select_action(q_values: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
    """Q-values [B] of the actions [B] taken, out of [B, actions]."""
    return tf.reduce_sum(q_values * tf.one_hot(actions, q_values.shape[-1]), -1)


def create_q_network(observation_spec, action_spec, name: str) -> HeadedNetwork:
    """[B, *observation] -> Q-values [B, actions], on the encoder that fits the observation."""
    head = QHead(num_actions(action_spec))
    return HeadedNetwork(observation_spec, create_encoder(observation_spec), head, name)


def need_discrete_actions(action_spec: tensor_spec.BoundedTensorSpec, algorithm: str) -> None:
    """Raises UserError if the actions are continuous; `algorithm` is named in it."""
    if not tensor_spec.is_discrete(action_spec):
        raise UserError(
            f"{algorithm} needs discrete actions, but the environment's are continuous "
            f"({action_spec.dtype.name}, shape {tuple(action_spec.shape)}). "
            "Use agents/ppo, agents/a2c, agents/trpo or agents/sac."
        )
