"""Trust region policy optimisation (Schulman et al. 2015), with generalised advantages.

A rollout makes one step of the policy: along the natural gradient, as far as the bound on the mean
KL divergence allows, and back along that line until the surrogate has improved within the bound.
Then the value function, which has weights of its own, is fitted to the rollout's returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gin
import tensorflow as tf
import tensorflow_probability as tfp
from tf_agents.agents import tf_agent
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.actor_critic import ActorCritic
from pipeline.agents.agent import Agent, Gradients, first_rows, masked_mean, row_weights
from pipeline.agents.natural_gradient import (
    TrustRegion,
    conjugate_gradient,
    fisher_vector_product,
    flatten,
    frozen,
    unflatten,
)
from pipeline.agents.on_policy import OnPolicyAgent
from pipeline.agents.settings import check_settings
from pipeline.errors import UserError, check_whole
from pipeline.normalizers import RewardScaler
from pipeline.optimizers import Adam
from pipeline.randomness import permutations, stateless_seed, stream_key
from pipeline.schedules import Schedule, as_schedule


class StepOutcome(NamedTuple):
    """What became of the policy, float32 scalars.

    Attributes:
      surrogate: mean of ratio times advantage, less its value before the step.
      kl: mean divergence of the new policy from the old one.
      accepted: 1 if the policy has moved.
      fraction: of the longest step that the bound allowed.
    """

    surrogate: tf.Tensor
    kl: tf.Tensor
    accepted: tf.Tensor
    fraction: tf.Tensor


class TRPOAgent(OnPolicyAgent):
    """See `create_trpo_agent`.

    `gradients` and `apply` are those of the value function; the policy's step needs its rows from
    beginning to end, so `train` makes it.
    """

    needs_whole_rollouts = True
    loss_names = (
        "loss", "value_loss", "surrogate", "kl", "accepted", "step_fraction", "entropy",
    )  # fmt: skip

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: tensor_spec.BoundedTensorSpec,
        *,
        actor_critic: ActorCritic,
        seed: int,
        region: TrustRegion,
        value_epochs: int,
        value_minibatch_size: int,
        **kwargs,
    ):
        self._policy_variables = actor_critic.policy_variables
        self._region = region
        self._value_epochs = value_epochs
        self._value_minibatch_size = value_minibatch_size
        self._key = stream_key(seed, "trpo")
        super().__init__(time_step_spec, action_spec, actor_critic=actor_critic, **kwargs)

    def gradient_variables(self) -> list[tf.Variable]:
        return self._actor_critic.value_variables

    def _loss(self, experience: Trajectory, weights=None, **unused) -> tf_agent.LossInfo:
        """The squared error of the values of rows [B, 1]; boundary rows weigh nothing."""
        weights = row_weights(experience, weights)
        value = self._actor_critic.value(experience.observation[:, 0])
        target = experience.policy_info.value_target[:, 0]
        loss = masked_mean((target - value) ** 2, weights)
        return tf_agent.LossInfo(loss, {"value_loss": loss})

    def accumulate(self, num_batches: int) -> None:
        """Raises UserError unless it is 1: a step needs all of its rows from beginning to end."""
        if num_batches != 1:
            raise UserError(
                f"create_trpo_agent.accumulate_updates = {num_batches}: TRPO does not accumulate "
                "gradients; collect a longer rollout instead."
            )

    def learn_for(self, shared: Agent, send: Callable[[Gradients], None]) -> None:
        """Raises UserError: a step needs all of its rows, not their gradients."""
        raise UserError("TRPO does not learn from the gradients of asynchronous actors: use A2C.")

    def _train(self, experience: Trajectory, weights: tf.Tensor) -> tf_agent.LossInfo:
        """One step of the policy and the fit of the value function, on a whole rollout [B, 1]."""
        weights = row_weights(experience, weights)
        rows = first_rows(experience)
        step, entropy = self._step_policy(rows, weights)
        self.train_step_counter.assign_add(tf.cast(step.accepted, tf.int64))
        value_loss = self._fit_value(experience, weights)
        extra = {
            "loss": value_loss - step.surrogate,
            "value_loss": value_loss,
            "surrogate": step.surrogate,
            "kl": step.kl,
            "accepted": step.accepted,
            "step_fraction": step.fraction,
            "entropy": entropy,
        }
        return tf_agent.LossInfo(extra["loss"], extra)

    def _step_policy(self, rows: Trajectory, weights: tf.Tensor) -> tuple[StepOutcome, tf.Tensor]:
        """Algorithm 1 and appendix C of the paper; also the entropy before the step."""
        info = rows.policy_info

        def surrogate(policy: tfp.distributions.Distribution) -> tf.Tensor:
            ratio = tf.exp(policy.log_prob(rows.action) - info.log_probability)
            return masked_mean(ratio * info.advantage, weights)

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._policy_variables)
            policy = self._actor_critic.distribution(rows.observation)
            before = surrogate(policy)
        gradient = flatten(tape.gradient(before, self._policy_variables))
        old = frozen(policy)

        def evaluate() -> tuple[tf.Tensor, tf.Tensor]:
            new = self._actor_critic.distribution(rows.observation)
            return surrogate(new) - before, masked_mean(old.kl_divergence(new), weights)

        product = self._fisher_product(rows.observation, weights, old)
        direction = conjugate_gradient(product, gradient, self._region.cg_iterations)
        curvature = tf.tensordot(direction, product(direction), 1)
        longest = tf.sqrt(tf.math.divide_no_nan(2.0 * self._region.max_kl, curvature)) * direction
        return self._search(longest, evaluate), masked_mean(policy.entropy(), weights)

    def _fisher_product(
        self, observation: tf.Tensor, weights: tf.Tensor, old: tfp.distributions.Distribution
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Products with the Fisher matrix over the first rows, which come in random order."""
        num_rows = max(1, round(self._region.fisher_fraction * weights.shape[0]))
        observation, weights, old = observation[:num_rows], weights[:num_rows], old[:num_rows]

        def mean_kl() -> tf.Tensor:
            new = self._actor_critic.distribution(observation)
            return masked_mean(old.kl_divergence(new), weights)

        def product(vector: tf.Tensor) -> tf.Tensor:
            variables = self._policy_variables
            return fisher_vector_product(mean_kl, variables, vector, self._region.cg_damping)

        return product

    def _search(
        self, longest: tf.Tensor, evaluate: Callable[[], tuple[tf.Tensor, tf.Tensor]]
    ) -> StepOutcome:
        """Shortens the step until the surrogate improves and the KL is within the bound.

        Where no step does, the weights are what they were, bit for bit.
        """
        old = [tf.identity(variable) for variable in self._policy_variables]

        def move(fraction: tf.Tensor) -> None:
            steps = unflatten(fraction * longest, self._policy_variables)
            for variable, start, step in zip(self._policy_variables, old, steps, strict=True):
                variable.assign(start + step)

        def attempt(i, _):
            fraction = self._region.line_search_shrink ** tf.cast(i, tf.float32)
            move(fraction)
            improvement, kl = evaluate()
            accepted = tf.cast((improvement > 0.0) & (kl <= self._region.max_kl), tf.float32)
            return i + 1, StepOutcome(improvement, kl, accepted, fraction)

        def unfinished(i, outcome):
            return (i < self._region.line_search_steps) & (outcome.accepted == 0.0)

        zero = tf.constant(0.0)
        nothing = StepOutcome(zero, zero, zero, zero)
        state = (tf.constant(0), nothing)
        _, step = tf.while_loop(unfinished, attempt, state, parallel_iterations=1)

        def put_back() -> StepOutcome:
            for variable, start in zip(self._policy_variables, old, strict=True):
                variable.assign(start)
            return nothing

        return tf.cond(step.accepted > 0.0, lambda: step, put_back)

    def _fit_value(self, experience: Trajectory, weights: tf.Tensor) -> tf.Tensor:
        """Updates on shuffled minibatches; the mean of their losses.

        Rows left over at an epoch's end, too few for a minibatch, are not learnt from.
        """
        num_rows = weights.shape[0]
        size = min(self._value_minibatch_size, num_rows)
        num_batches = num_rows // size
        seed = stateless_seed(self._key, self.train_step_counter)
        order = permutations(self._value_epochs, num_rows, seed)[:, : num_batches * size]
        order = tf.reshape(order, [-1, size])

        def update(i, total):
            batch = tf.nest.map_structure(lambda x: tf.gather(x, order[i]), experience)
            gradients, loss_info = self.differentiate(batch, tf.gather(weights, order[i]))
            self.apply(gradients)
            return i + 1, total + loss_info.loss

        num_updates = self._value_epochs * num_batches
        _, total = tf.while_loop(
            lambda i, _: i < num_updates, update, (tf.constant(0), 0.0), parallel_iterations=1
        )
        return total / num_updates


@gin.configurable(denylist=["time_step_spec", "action_spec", "num_envs", "seed", "env_steps"])
def create_trpo_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    learning_rate: Schedule | float = 1e-3,  # of the value function, by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = Adam,
    value_epochs: int = 10,
    value_minibatch_size: int = 128,  # rows
    discount: float = 0.99,  # gamma
    gae_lambda: float = 0.95,
    normalize_returns: bool = False,  # scales rewards: see `normalizers.RewardScaler`
    gradient_clip_norm: float | None = None,  # of the value function; None: no limit
    accumulate_updates: int = 1,  # no other: a step needs its rows from beginning to end
) -> TRPOAgent:
    """TRPO for discrete and continuous actions; see `TrustRegion` and `actor_critic.ActorCritic`.

    Args:
      time_step_spec: unbatched, from the environment.
      action_spec: one discrete action in [0, n-1], or continuous actions.
      num_envs: environments collected from at once.
      seed: of the order in which the value function learns.
      env_steps: int64 counter of environment steps, which schedules read.

    Raises:
      UserError: policy and value share an encoder, or a value is out of its range.
    """
    check_settings("create_trpo_agent", locals())
    check_whole("create_trpo_agent.value_epochs", value_epochs)
    check_whole("create_trpo_agent.value_minibatch_size", value_minibatch_size)
    actor_critic = ActorCritic(time_step_spec.observation, action_spec)
    if actor_critic.value_encoder is actor_critic.encoder:
        raise UserError(
            "TRPO moves the policy's weights alone, so policy and value need an encoder each: bind "
            "ActorCritic.share_encoder = False."
        )
    rate_schedule = as_schedule(learning_rate)
    agent = TRPOAgent(
        time_step_spec,
        action_spec,
        actor_critic=actor_critic,
        optimizer=optimizer(learning_rate=lambda: rate_schedule(env_steps)),
        gradient_clip_norm=gradient_clip_norm,
        reward_scaler=RewardScaler(num_envs, discount) if normalize_returns else None,
        seed=seed,
        region=TrustRegion(),
        value_epochs=value_epochs,
        value_minibatch_size=value_minibatch_size,
        discount=discount,
        gae_lambda=gae_lambda,
        standardize_advantages=True,
    )
    agent.schedules = {"learning_rate": rate_schedule}
    agent.accumulate(accumulate_updates)
    return agent
