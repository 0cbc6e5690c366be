"""Defines policies whose random draws are pure functions of the seed that they are given.

TF-Agents' policies sample with stateful random ops, whose state a checkpoint cannot hold. Here
`action(time_step, policy_state, seed)` takes a [2] integer tensor as the seed and samples
statelessly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tf_agents.policies import tf_policy
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import policy_step

from pipeline.ops.masks import uniform_action
from pipeline.ops.observations import action_mask


class _DerivedPolicy(tf_policy.TFPolicy):
    """Serves as the base class of policies that use the distribution of another policy.

    Actions are not clipped (see `clip_action`).
    """

    def __init__(self, policy: tf_policy.TFPolicy):
        super().__init__(
            policy.time_step_spec,
            policy.action_spec,
            policy.policy_state_spec,
            policy.info_spec,
            clip=False,
        )
        self._wrapped = policy

    def _variables(self):
        return self._wrapped.variables()

    def _distribution(self, time_step, policy_state):
        return self._wrapped.distribution(time_step, policy_state)


class SampledPolicy(_DerivedPolicy):
    """Samples actions from the distribution of another policy."""

    def _action(self, time_step, policy_state, seed):
        step = self._distribution(time_step, policy_state)
        return step._replace(action=step.action.sample(seed=seed))


class GreedyPolicy(_DerivedPolicy):
    """Takes the mode of another policy's distribution. It needs no seed."""

    def _action(self, time_step, policy_state, seed):
        del seed
        step = self._distribution(time_step, policy_state)
        return step._replace(action=step.action.mode())


class EpsilonGreedyPolicy(_DerivedPolicy):
    """Takes the greedy action, or with probability epsilon a uniformly random one.

    Args:
      policy: Policy over one discrete action in [0, n-1].
      epsilon: Function that returns the probability of a random action, a float32 scalar. It is
        called whenever actions are chosen.
    """

    def __init__(self, policy: tf_policy.TFPolicy, epsilon: Callable[[], tf.Tensor]):
        super().__init__(policy)
        self._epsilon = epsilon

    def _action(self, time_step, policy_state, seed):
        step = self._distribution(time_step, policy_state)
        greedy_action = step.action.mode()
        # The first draw decides whether to explore, the second chooses the random action.
        draws = tf.random.stateless_uniform([2, tf.shape(greedy_action)[0]], seed)
        mask = action_mask(time_step.observation)
        if mask is None:
            num_actions = int(self.action_spec.maximum) + 1
            random_action = tf.floor(draws[1] * num_actions)
        else:
            random_action = uniform_action(draws[1], mask)
        random_action = tf.cast(random_action, greedy_action.dtype)
        explore = draws[0] < self._epsilon()
        return step._replace(action=tf.where(explore, random_action, greedy_action))


class RandomPolicy(tf_policy.TFPolicy):
    """Samples actions uniformly within their bounds.

    If observations have an action mask, only allowed actions are sampled.

    If the distance between any of the bounds is infinite, actions are instead drawn from a normal
    distribution around the action that is nearest to 0, with a standard deviation of 1, and clipped
    to the bounds. The distance of finite bounds is also infinite if their dtype cannot represent
    it.
    """

    def __init__(self, time_step_spec, action_spec, info_spec=()):
        super().__init__(time_step_spec, action_spec, info_spec=info_spec, clip=False)

    def _variables(self):
        return []

    def _action(self, time_step, policy_state, seed):
        spec = self.action_spec
        batch_size = tf.shape(time_step.step_type)[0]
        shape = tf.concat([[batch_size], spec.shape], 0)
        mask = action_mask(time_step.observation)
        if mask is not None:
            draws = tf.random.stateless_uniform(shape, seed)
            action = tf.cast(uniform_action(draws, mask), spec.dtype)
        elif tensor_spec.is_discrete(spec) and spec.shape.rank:
            draws = tf.random.stateless_uniform(shape, seed)
            action = tf.cast(tf.floor(draws * (spec.maximum + 1)), spec.dtype)
        elif tensor_spec.is_discrete(spec):
            action = tf.random.stateless_uniform(
                shape, seed, int(spec.minimum), int(spec.maximum) + 1, spec.dtype
            )
        elif _have_finite_distance(spec):
            uniform = tf.random.stateless_uniform(shape, seed, dtype=spec.dtype)
            action = spec.minimum + uniform * (spec.maximum - spec.minimum)
        else:
            nearest = np.clip(0, spec.minimum, spec.maximum)
            normal = tf.random.stateless_normal(shape, seed, dtype=spec.dtype)
            action = clip_action(nearest + normal, spec)
        info = tensor_spec.zero_spec_nest(self.info_spec, outer_dims=[batch_size])
        return policy_step.PolicyStep(action, policy_state, info)


def _have_finite_distance(spec: tensor_spec.BoundedTensorSpec) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(spec.maximum - spec.minimum).all())


def clip_action(action: tf.Tensor, spec: tensor_spec.BoundedTensorSpec) -> tf.Tensor:
    """Returns the nearest action that the environment allows.

    Gaussian policies exceed the bounds: the environment receives the clipped action, and the
    learner sees the one that the policy chose. Discrete actions are returned unchanged.
    """
    if tensor_spec.is_discrete(spec):
        return action
    return tf.clip_by_value(action, spec.minimum, spec.maximum)
