"""Defines the actor-critic network and policy of the on-policy agents."""

from __future__ import annotations

from typing import NamedTuple

import gin
import tensorflow as tf
import tensorflow_probability as tfp
from tf_agents.policies import tf_policy
from tf_agents.specs import tensor_spec
from tf_agents.trajectories.policy_step import PolicyStep
from tf_agents.typing import types

from pipeline.networks.encoders import create_encoder
from pipeline.networks.heads import CategoricalHead, GaussianHead, ValueHead
from pipeline.networks.initializers import Initializer, Orthogonal
from pipeline.ops.normalizers import create_normalizer
from pipeline.ops.observations import action_mask, has_pixels


@gin.configurable(denylist=["observation_spec", "action_spec"])
class ActorCritic(tf.Module):
    """Holds policy and value heads, by default with one encoder for images and two for vectors."""

    def __init__(
        self,
        observation_spec: types.NestedTensorSpec,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        share_encoder: bool | None = None,
        policy_initializer: Initializer = Orthogonal,
        value_initializer: Initializer = Orthogonal,
        normalize_observations: bool = False,
    ):
        """Initializes the networks and creates their variables.

        Args:
          observation_spec: Unbatched spec of the observations.
          action_spec: Spec of one or several discrete actions, each in [0, n-1], or of continuous
            actions.
          share_encoder: Whether policy and value share one encoder. If None, they share it for
            images only.
          policy_initializer: Initialiser of the policy head's kernel.
          value_initializer: Initialiser of the value head's kernel.
          normalize_observations: Whether to normalise observations by running mean and variance.
        """
        super().__init__(name="actor_critic")
        has_images = any(map(has_pixels, tf.nest.flatten(observation_spec)))
        share = has_images if share_encoder is None else share_encoder
        self.normalizer = create_normalizer(observation_spec, normalize_observations)
        self.encoder = create_encoder(observation_spec, self.normalizer)
        self.value_encoder = (
            self.encoder if share else create_encoder(observation_spec, self.normalizer)
        )
        head = CategoricalHead if tensor_spec.is_discrete(action_spec) else GaussianHead
        self.policy_head = head(action_spec, policy_initializer)
        self.value_head = ValueHead(value_initializer)
        self(tensor_spec.zero_spec_nest(observation_spec, outer_dims=[1]))

    def __call__(self, observation: types.NestedTensor):
        """Returns the action distribution and the values [B] of observations [B, ...]."""
        features = self.encoder(observation)
        shared = self.value_encoder is self.encoder
        value_features = features if shared else self.value_encoder(observation)
        distribution = self.policy_head(features, action_mask(observation))
        return distribution, self.value_head(value_features)

    @property
    def policy_variables(self) -> list[tf.Variable]:
        """Returns the trainable weights that the action distribution depends on."""
        return [*self.encoder.trainable_variables, *self.policy_head.trainable_variables]

    @property
    def value_variables(self) -> list[tf.Variable]:
        """Returns the trainable weights that the values depend on."""
        return [*self.value_encoder.trainable_variables, *self.value_head.trainable_variables]

    def distribution(self, observation: types.NestedTensor) -> tfp.distributions.Distribution:
        """Returns only the action distribution of observations [B, ...]."""
        return self.policy_head(self.encoder(observation), action_mask(observation))

    def value(self, observation: types.NestedTensor) -> tf.Tensor:
        """Returns only the values [B] of observations [B, ...]."""
        return self.value_head(self.value_encoder(observation))


class OnPolicyInfo(NamedTuple):
    """Policy info of on-policy rows, all float32.

    Attributes:
      log_probability: Log-probability of the action under the collect policy.
      value: Value of the observation when it was collected.
      advantage: Advantage of the action; only in training rows.
      value_target: Target of the value function; only in training rows.
    """

    log_probability: tf.Tensor
    value: tf.Tensor
    advantage: tf.Tensor | tuple = ()
    value_target: tf.Tensor | tuple = ()


class ActorCriticPolicy(tf_policy.TFPolicy):
    """Samples actions from an actor-critic.

    With `collect`, its info holds the log-probability of each action and the value of the
    observation.
    """

    def __init__(self, time_step_spec, action_spec, actor_critic: ActorCritic, collect: bool):
        scalar = tf.TensorSpec((), tf.float32)
        super().__init__(
            time_step_spec,
            action_spec,
            info_spec=OnPolicyInfo(scalar, scalar) if collect else (),
            clip=False,
        )
        self._actor_critic = actor_critic
        self._collect = collect

    def _variables(self):
        return self._actor_critic.variables

    def _distribution(self, time_step, policy_state):
        distribution = self._actor_critic.distribution(time_step.observation)
        return PolicyStep(distribution, policy_state, ())

    def _action(self, time_step, policy_state, seed):
        distribution, value = self._actor_critic(time_step.observation)
        action = distribution.sample(seed=seed)
        info = OnPolicyInfo(distribution.log_prob(action), value) if self._collect else ()
        return PolicyStep(action, policy_state, info)
