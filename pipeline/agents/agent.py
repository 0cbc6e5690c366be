"""Defines the base class of agents: the interface between the train loop and TF-Agents' agents.

The train loop calls, in this order and inside one graph:

    rows, final_time_step = collect with agent.collect_policy
    agent.observe(rows)
    experience.begin(prepare)     -> agent.prepare(rows, final_time_step)
    for each update:              -> agent.train(batch, weights) = apply(gradients(batch, weights))
    experience.end(agent.finish)  -> agent.finish(rows)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import gin
import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.accumulator import Accumulator
from pipeline.ops.batches import clip_by_global_norm, row_weights
from pipeline.ops.normalizers import ObservationNormalizer
from pipeline.ops.returns import valid_mask
from pipeline.ops.schedules import Schedule
from pipeline.utils.errors import UserError
from pipeline.utils.execution import Execution

Gradients = Any  # a nest of tensors, None where a variable has no gradient

agent_factory = functools.partial(
    gin.configurable, denylist=["time_step_spec", "action_spec", "num_envs", "seed", "env_steps"]
)
"""Decorator that lets gin configure a function that creates an agent.

The run passes these arguments, which gin cannot bind:
  time_step_spec: Unbatched spec of the environment's time steps.
  action_spec: Unbatched spec of its actions: one or several integers, or floats.
  num_envs: Number of environments that collect at once.
  seed: Seed of what the agent draws in updates. The driver seeds the collect policy.
  env_steps: int64 counter of environment steps, which schedules read.
"""


class Agent(tf_agent.TFAgent):
    """Computes `gradients` in `train`, and passes them to `apply`.

    Counters, clipping and target updates belong to `apply`. Gradients can therefore be summed over
    several batches, or come from another agent, before they are applied.
    """

    #: Names of the scalars in `LossInfo.extra` to log.
    loss_names: tuple[str, ...] = ()
    #: Networks whose weights are trained, and the normaliser; `weights_sha256` hashes them.
    trained: Mapping[str, tf.Module]
    #: Schedules whose values are logged together with the losses.
    schedules: Mapping[str, Schedule] = {}
    #: Normalises observations, if the agent does so; `observe` updates its statistics.
    normalizer: ObservationNormalizer | None = None
    #: Sums the gradients of several batches. If None, every batch makes an update.
    accumulator: Accumulator | None = None
    #: True if the loss is the mean over rows, False if it is their sum.
    takes_mean: bool = True
    #: True if each batch has to be the whole rollout that an iteration collects.
    needs_whole_rollouts: bool = False
    #: True if a rollout may have been collected with older weights.
    learns_off_policy: bool = False
    _compiled_gradients: Callable[..., tuple[Gradients, tf_agent.LossInfo]] | None = None
    # The default `apply` uses these two.
    _optimizer: tf.keras.optimizers.legacy.Optimizer
    _gradient_clip_norm: float | None

    def __init__(self, *args: Any, **kwargs: Any):
        """Initializes TF-Agents' agent with a counter of its own, which `apply` increases."""
        counter = tf.Variable(0, dtype=tf.int64, name="updates")
        super().__init__(*args, train_step_counter=counter, **kwargs)

    def gradients(
        self, experience: Trajectory, weights: tf.Tensor
    ) -> tuple[Gradients, tf_agent.LossInfo]:
        """Computes the gradients of the loss of a batch [B, T] with row weights [B].

        It changes no variable. The default implementation suits agents with one loss: it
        differentiates `_loss` with respect to all trained variables.
        """
        variables = self.gradient_variables()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss_info = self._loss(experience, weights=weights)
            self._check_loss(loss_info)
        gradients = tape.gradient(loss_info.loss, variables)
        loss_info.extra["gradient_norm"] = tf.linalg.global_norm(gradients)
        return gradients, loss_info

    def _check_loss(self, loss_info: tf_agent.LossInfo) -> None:
        """Checks what `_loss` returns.

        Raises:
          UserError: If the loss, or an entry of `loss_names`, is not one number.
        """
        name = type(self).__name__
        if not isinstance(loss_info, tf_agent.LossInfo) or not isinstance(loss_info.extra, dict):
            raise UserError(f"{name}._loss must return tf_agent.LossInfo(loss, dict of extras).")
        logged = {key: x for key, x in loss_info.extra.items() if key in self.loss_names}
        for key, number in {**logged, "loss": loss_info.loss}.items():
            if (shape := tf.convert_to_tensor(number).shape).rank:
                raise UserError(
                    f"{name}._loss returns {key!r} of shape {shape} instead of one number: use "
                    "masked_mean(..., weights)."
                )

    def differentiate(
        self, experience: Trajectory, weights: tf.Tensor
    ) -> tuple[Gradients, tf_agent.LossInfo]:
        """Calls `gradients`, compiled by XLA after `compile` unless the execution is exact."""
        compiled = self._compiled_gradients if Execution.current() is Execution.GRAPH else None
        return (compiled or self.gradients)(experience, weights)

    def gradient_variables(self) -> Any:
        """Returns the trained variables, in the same nest as the result of `gradients`."""
        return [v for network in self.trained.values() for v in network.trainable_variables]

    def apply(self, gradients: Gradients) -> None:
        """Makes one update: clips and applies `gradients`, and increments the update counter.

        The default implementation suits agents with one `_optimizer` and one `_gradient_clip_norm`.
        Agents whose target network is updated after a number of updates extend it.
        """
        gradients = clip_by_global_norm(gradients, self._gradient_clip_norm)
        self._optimizer.apply_gradients(zip(gradients, self.gradient_variables(), strict=True))
        self.train_step_counter.assign_add(1)

    def _train(self, experience: Trajectory, weights: tf.Tensor) -> tf_agent.LossInfo:
        return self.learn(experience, weights, self.apply)

    def learn(
        self, experience: Trajectory, weights: tf.Tensor, apply: Callable[[Gradients], None]
    ) -> tf_agent.LossInfo:
        """Computes the gradients of a batch [B, T] with row weights [B] and passes them to `apply`.

        If gradients are accumulated, `apply` is called once for several batches. `train` passes
        `self.apply`; an asynchronous actor passes a function that updates the shared weights.
        """
        gradients, loss_info = self.differentiate(experience, weights)
        if self.accumulator is None:
            apply(gradients)
        else:
            num_rows = tf.reduce_sum(row_weights(experience, weights))
            self.accumulator.add(gradients, num_rows, apply)
        return loss_info

    def share_target(self, shared: Agent) -> None:
        """Uses the target network of `shared`, another agent of this class, instead of its own.

        The default implementation suits agents without a target network.
        """

    def compile(self) -> None:
        """Makes `differentiate` compile `gradients` with XLA."""
        compiled = tf.function(self.gradients, jit_compile=True, autograph=False)
        # tf.Module would track the tf.function itself.
        self._compiled_gradients = lambda *args: compiled(*args)

    def accumulate(self, num_batches: int) -> None:
        """Makes each update use the accumulated gradients of `num_batches` batches."""
        if num_batches != 1:
            self.accumulator = Accumulator(
                self.gradient_variables(), num_batches, of_means=self.takes_mean
            )

    def observe(self, rows: Trajectory) -> None:
        """Updates the normaliser, if there is one, with collected rows [T, N]."""
        if self.normalizer is not None:
            self.normalizer.update(rows.observation, valid_mask(rows.step_type))

    def normalizers(self) -> dict[str, tf.Module]:
        """Returns the normaliser by its name in `trained`, or an empty dict if there is none."""
        return {} if self.normalizer is None else {"normalizer": self.normalizer}

    def prepare(self, rows: Trajectory, final_time_step: TimeStep) -> Trajectory:
        """Converts a collected rollout [T, N] to training rows; by default returns it unchanged."""
        del final_time_step
        return rows

    def finish(self, rows: Trajectory) -> None:
        """Processes the rollout after its last update, for instance to update normalisers."""
