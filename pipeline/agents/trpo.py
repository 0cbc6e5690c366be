"""Implements trust region policy optimisation (Schulman et al. 2015) with generalised advantages.

Each rollout makes one step of the policy along the natural gradient. The step is first as long as
the bound on the mean KL divergence allows, and a line search then shortens it until the surrogate
improves within the bound. After that the value function, which has weights of its own, is fitted to
the returns of the rollout.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
import tensorflow_probability as tfp
from tf_agents.agents import tf_agent
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.agent import agent_factory
from pipeline.agents.on_policy import OnPolicyAgent
from pipeline.networks.actor_critic import ActorCritic
from pipeline.ops.batches import first_rows, masked_mean, row_weights
from pipeline.ops.natural_gradient import (
    StepOutcome,
    TrustRegion,
    conjugate_gradient,
    fisher_vector_product,
    flatten,
    line_search,
)
from pipeline.ops.normalizers import RewardScaler
from pipeline.ops.optimizers import Adam
from pipeline.ops.randomness import permutations, stateless_seed, stream_key
from pipeline.ops.schedules import Schedule, as_schedule
from pipeline.utils.constraints import (
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
)
from pipeline.utils.errors import UserError


class TRPOAgent(OnPolicyAgent):
    """Implements the TRPO agent; see `create_trpo_agent`.

    `gradients` and `apply` belong to the value function. The policy step needs the whole rollout
    from beginning to end, so `train` makes it.
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
        self.policy_variables = actor_critic.policy_variables
        self._region = region
        self._value_epochs = value_epochs
        self._value_minibatch_size = value_minibatch_size
        self._key = stream_key(seed, "trpo")
        super().__init__(time_step_spec, action_spec, actor_critic=actor_critic, **kwargs)

    def gradient_variables(self) -> list[tf.Variable]:
        return self.actor_critic.value_variables

    def _loss(self, experience: Trajectory, weights=None, **unused) -> tf_agent.LossInfo:
        """Computes the mean squared error of the values of rows [B, 1].

        Boundary rows have weight 0.
        """
        weights = row_weights(experience, weights)
        value = self.actor_critic.value(first_rows(experience).observation)
        target = experience.policy_info.value_target[:, 0]
        loss = masked_mean((target - value) ** 2, weights)
        return tf_agent.LossInfo(loss, {"value_loss": loss})

    def accumulate(self, num_batches: int) -> None:
        """Checks that `num_batches` is 1, because a step needs the whole rollout at once.

        Raises:
          UserError: If `num_batches` is not 1.
        """
        if num_batches != 1:
            raise UserError(
                f"create_trpo_agent.accumulate_updates = {num_batches}: TRPO does not accumulate "
                "gradients. Bind it to 1 and collect a longer rollout instead."
            )

    def _train(self, experience: Trajectory, weights: tf.Tensor) -> tf_agent.LossInfo:
        """Makes one policy step and fits the value function, on a whole rollout [B, 1]."""
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
        """Makes one policy step (section 6 and appendix C of the paper).

        Returns:
          The outcome of the step, and the mean entropy before the step.
        """
        info = rows.policy_info

        def surrogate(policy: tfp.distributions.Distribution) -> tf.Tensor:
            ratio = tf.exp(policy.log_prob(rows.action) - info.log_probability)
            return masked_mean(ratio * info.advantage, weights)

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.policy_variables)
            policy = self.actor_critic.distribution(rows.observation)
            before = surrogate(policy)
        gradient = flatten(tape.gradient(before, self.policy_variables))

        def evaluate() -> tuple[tf.Tensor, tf.Tensor]:
            new = self.actor_critic.distribution(rows.observation)
            return surrogate(new) - before, masked_mean(policy.kl_divergence(new), weights)

        product = self._fisher_product(rows.observation, weights, policy)
        direction = conjugate_gradient(product, gradient, self._region.cg_iterations)
        curvature = tf.tensordot(direction, product(direction), 1)
        longest = tf.sqrt(tf.math.divide_no_nan(2.0 * self._region.max_kl, curvature)) * direction
        step = line_search(self._region, self.policy_variables, longest, evaluate)
        return step, masked_mean(policy.entropy(), weights)

    def _fisher_product(
        self, observation: tf.Tensor, weights: tf.Tensor, old: tfp.distributions.Distribution
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns a function that multiplies a vector by the Fisher matrix.

        The matrix is estimated from the first rows, which are a random sample because the rows come
        in random order.
        """
        num_rows = max(1, round(self._region.fisher_fraction * weights.shape[0]))
        observation = tf.nest.map_structure(lambda x: x[:num_rows], observation)
        weights, old = weights[:num_rows], old[:num_rows]

        def mean_kl() -> tf.Tensor:
            new = self.actor_critic.distribution(observation)
            return masked_mean(old.kl_divergence(new), weights)

        def product(vector: tf.Tensor) -> tf.Tensor:
            variables = self.policy_variables
            return fisher_vector_product(mean_kl, variables, vector, self._region.cg_damping)

        return product

    def _fit_value(self, experience: Trajectory, weights: tf.Tensor) -> tf.Tensor:
        """Updates the value function on shuffled minibatches, and returns the mean of their losses.

        Rows left over at the end of an epoch, too few for a minibatch, are not used.
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


@agent_factory
def create_trpo_agent(
    time_step_spec: TimeStep,
    action_spec: tensor_spec.BoundedTensorSpec,
    *,
    num_envs: int,
    seed: int,
    env_steps: tf.Variable,
    learning_rate: Schedule | NonNegative = 1e-3,  # of the values, by environment steps
    optimizer: Callable[..., tf.keras.optimizers.legacy.Optimizer] = Adam,  # optimizer class
    value_epochs: PositiveInt = 10,  # passes over a rollout that fit the value function
    value_minibatch_size: PositiveInt = 128,  # rows; at most those of the rollout are used
    discount: Probability = 0.99,  # gamma
    gae_lambda: Probability = 0.95,  # lambda
    normalize_returns: bool = False,  # scale rewards with `RewardScaler`
    gradient_clip_norm: Positive | None = None,  # of the value function; None: no limit
    accumulate_updates: PositiveInt = 1,  # must be 1, because a step needs the whole rollout
    agent_class: Callable[..., TRPOAgent] | None = None,  # a subclass; None: TRPOAgent
) -> TRPOAgent:
    """Creates a TRPO agent for discrete or continuous actions.

    Its parts are configured by `TrustRegion` and `actor_critic.ActorCritic`.

    The first five arguments are those of `agent.agent_factory`.

    Raises:
      UserError: If policy and value share an encoder, or a value is out of its range.
    """
    check_arguments(create_trpo_agent, locals())
    actor_critic = ActorCritic(time_step_spec.observation, action_spec)
    if actor_critic.value_encoder is actor_critic.encoder:
        raise UserError(
            "TRPO updates the weights of the policy separately, so policy and value need separate "
            "encoders. Bind ActorCritic.share_encoder = False."
        )
    rate_schedule = as_schedule(learning_rate)
    agent = (agent_class or TRPOAgent)(
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
