"""Defines the Q-network, losses and checks that the Q-learning agents share."""

from __future__ import annotations

from collections.abc import Callable

import gin
import numpy as np
import tensorflow as tf
from tf_agents.specs import tensor_spec

from pipeline.networks.encoders import QNetwork, create_encoder
from pipeline.networks.heads import QHead
from pipeline.ops.normalizers import ObservationNormalizer
from pipeline.utils.constraints import Positive, check_arguments
from pipeline.utils.errors import UserError


@gin.configurable(denylist=["td_error"])
def huber_loss(
    td_error: tf.Tensor,
    threshold: Positive = 1.0,  # size of the error from which the loss is linear
) -> tf.Tensor:
    """Computes the Huber loss, which is quadratic up to `threshold` and linear beyond.

    Its gradient is the clipped error of DQN (Mnih et al. 2015).

    Raises:
      UserError: If `threshold` is out of its range.
    """
    check_arguments(huber_loss, locals())
    size = tf.abs(td_error)
    quadratic = tf.minimum(size, threshold)
    return 0.5 * quadratic**2 + threshold * (size - quadratic)


@gin.configurable(denylist=["td_error"])
def squared_loss(td_error: tf.Tensor) -> tf.Tensor:
    """Computes half of the squared error, so that the gradient is the error."""
    return 0.5 * td_error**2


def check_td_loss(td_loss: Callable[[tf.Tensor], tf.Tensor], parameter: str) -> None:
    """Checks that a loss maps temporal-difference errors [B] to losses [B].

    Args:
      td_loss: The loss. It is called, and gin then counts its bindings as operative.
      parameter: Name of the parameter that takes the loss, for the error message.

    Raises:
      UserError: If it takes other arguments, or returns anything else.
    """
    try:
        fault = _fault_of(td_loss)
    except Exception as error:  # whatever the user's function raises
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise  # gin raised it because a parameter of the loss is not bound
        fault = str(error).partition("\n")[0]
    if fault:
        raise UserError(
            f"{parameter} = @{getattr(td_loss, '__name__', td_loss)}: must be a function of the "
            "temporal-difference errors, float32 [B], that returns one loss for each, float32 [B], "
            f"in TensorFlow's operations ({fault})."
        )


def _fault_of(td_loss: Callable[[tf.Tensor], tf.Tensor]) -> str:
    """Returns what is wrong with a loss, or "" if nothing is."""
    errors = tf.constant([0.5, -2.0, 3.0])
    spec = tf.TensorSpec([None], tf.float32)
    graph = tf.function(lambda errors: td_loss(errors), [spec], autograph=False)
    with tf.GradientTape() as tape:
        tape.watch(errors)
        losses = graph(errors)
    if not (tf.is_tensor(losses) and losses.shape == [3] and losses.dtype == tf.float32):
        return f"for errors of shape [3] it returned {losses!r}"
    if not np.allclose(losses, tf.concat([graph(error[tf.newaxis]) for error in errors], 0)):
        return "a loss depends on other errors than its own"
    gradient = tape.gradient(losses, errors)
    return "" if gradient is not None and np.isfinite(gradient).all() else "it has no gradient"


def select_action(q_values: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
    """Selects the Q-values [B] of `actions` [B] from `q_values` [B, actions]."""
    return tf.reduce_sum(q_values * tf.one_hot(actions, q_values.shape[-1]), -1)


def create_q_network(
    observation_spec, action_spec, normalizer: ObservationNormalizer | None, name: str
) -> QNetwork:
    """Creates the Q-network for an observation spec: [B, *observation] -> Q-values [B, actions]."""
    head = QHead(int(action_spec.maximum) + 1)
    encoder = create_encoder(observation_spec, normalizer)
    return QNetwork(observation_spec, encoder, head, name)


def need_discrete_actions(action_spec: tensor_spec.BoundedTensorSpec, algorithm: str) -> None:
    """Checks that the action is one discrete number.

    Args:
      action_spec: Spec of the actions.
      algorithm: Name of the algorithm, for the error message.

    Raises:
      UserError: If the action is continuous or has more than one element.
    """
    if tensor_spec.is_discrete(action_spec) and action_spec.shape.rank:
        raise UserError(
            f"{algorithm} needs a single discrete action, but the environment's action has the "
            f"shape {tuple(action_spec.shape)} (MultiDiscrete, MultiBinary or a Box of integers). "
            "Use agents/ppo, agents/a2c or agents/trpo."
        )
    if not tensor_spec.is_discrete(action_spec):
        raise UserError(
            f"{algorithm} needs discrete actions, but the environment's are continuous "
            f"({action_spec.dtype.name}, shape {tuple(action_spec.shape)}). "
            "Use agents/ppo, agents/a2c, agents/trpo or agents/sac."
        )
