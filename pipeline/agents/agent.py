"""What every agent has in common: the seam between the train loop and TF-Agents' agents.

The loop calls, in this order and inside one graph:

    rows, final_time_step = collect with agent.collect_policy
    experience.begin(prepare)     -> agent.prepare(rows, final_time_step)
    for each update:              -> agent.train(batch, weights) = apply(gradients(batch, weights))
    experience.end(agent.finish)  -> agent.finish(rows)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.trajectories import TimeStep, Trajectory

from pipeline.agents.accumulator import Accumulator
from pipeline.execution import Execution
from pipeline.returns import valid_mask
from pipeline.schedules import Schedule

Gradients = Any  # a nest of tensors, None where a variable has no gradient


class Agent(tf_agent.TFAgent):
    """A TFAgent whose `train` is the composition of `gradients` and `apply`.

    Counters, clipping and target updates live in `apply`, so that gradients can be summed over
    several batches, or come from elsewhere, before they are applied.
    """

    #: Names of the scalars in `LossInfo.extra` that are worth logging.
    loss_names: tuple[str, ...] = ()
    #: Networks whose weights are trained: what `weights_sha256` digests.
    trained: Mapping[str, tf.Module]
    #: Values that depend on counters, to be logged beside the losses.
    schedules: Mapping[str, Schedule] = {}
    #: Sums the gradients of several batches; None: every batch makes an update.
    accumulator: Accumulator | None = None
    #: Whether the loss is a mean over rows, or their sum.
    takes_mean: bool = True
    #: Whether a batch has to be all that an iteration collects.
    needs_whole_rollouts: bool = False
    _send: Callable[[Gradients], None] | None = None
    _compiled_gradients: Callable[..., tuple[Gradients, tf_agent.LossInfo]] | None = None
    # What the default `apply` needs.
    _optimizer: tf.keras.optimizers.legacy.Optimizer
    _gradient_clip_norm: float | None

    def gradients(
        self, experience: Trajectory, weights: tf.Tensor
    ) -> tuple[Gradients, tf_agent.LossInfo]:
        """Gradients of the loss on a batch [B, T] with row weights [B]; changes no variable.

        This default differentiates `_loss` by all trained variables, for agents with one loss.
        """
        variables = self.gradient_variables()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss_info = self._loss(experience, weights=weights)
        gradients = tape.gradient(loss_info.loss, variables)
        loss_info.extra["gradient_norm"] = tf.linalg.global_norm(gradients)
        return gradients, loss_info

    def differentiate(
        self, experience: Trajectory, weights: tf.Tensor
    ) -> tuple[Gradients, tf_agent.LossInfo]:
        """`gradients`, compiled by XLA after `compile` unless exact bits are asked for."""
        compiled = None if Execution.is_exact() else self._compiled_gradients
        return (compiled or self.gradients)(experience, weights)

    def gradient_variables(self) -> Any:
        """The trained variables, in the nest in which `gradients` gives their gradients."""
        return [v for network in self.trained.values() for v in network.trainable_variables]

    def apply(self, gradients: Gradients) -> None:
        """One update: clips and applies `gradients`, counts, and moves target networks.

        This default is for agents with one `_optimizer` and `_gradient_clip_norm`. A target network
        that follows environment steps moves before the first gradients of an update instead.
        """
        gradients = clip_by_global_norm(gradients, self._gradient_clip_norm)
        self._optimizer.apply_gradients(zip(gradients, self.gradient_variables(), strict=True))
        self.train_step_counter.assign_add(1)

    def _train(self, experience: Trajectory, weights: tf.Tensor) -> tf_agent.LossInfo:
        gradients, loss_info = self.differentiate(experience, weights)
        apply = self._send or self.apply
        if self.accumulator is None:
            apply(gradients)
        else:
            num_rows = tf.reduce_sum(row_weights(experience, weights))
            self.accumulator.add(gradients, num_rows, apply)
        return loss_info

    def learn_for(self, shared: Agent, send: Callable[[Gradients], None]) -> None:
        """Makes this the agent of an actor, with which others train the weights of `shared`.

        A subclass that has more to share, such as a target network, takes it from `shared`.

        Args:
          shared: created like this one.
          send: called in the graph with this agent's gradients; has `shared` apply them.

        Raises:
          UserError: the agent cannot learn in this way.
        """
        del shared
        self._send = send

    def copy_weights(self, shared: Agent) -> None:
        """Assigns the trained weights of `shared`, in the graph."""
        own, others = (tf.nest.flatten(agent.gradient_variables()) for agent in (self, shared))
        for variable, other in zip(own, others, strict=True):
            variable.assign(other, read_value=False)

    def _between_updates(self, act: Callable[[], tf.Operation]) -> None:
        """Calls `act` in the graph, unless gradients that have been summed wait for an update."""
        if self.accumulator is None:
            act()
        else:
            tf.cond(tf.equal(self.accumulator.summed, 0), act, tf.no_op)

    def compile(self) -> None:
        """From now on XLA compiles what `differentiate` calls."""
        compiled = tf.function(self.gradients, jit_compile=True, autograph=False)
        self._compiled_gradients = lambda *args: compiled(*args)  # a tf.Module tracks functions

    def accumulate(self, num_batches: int) -> None:
        """From now on the gradients of `num_batches` batches make one update."""
        if num_batches != 1:
            self.accumulator = Accumulator(
                self.gradient_variables(), num_batches, of_means=self.takes_mean
            )

    def prepare(self, rows: Trajectory, final_time_step: TimeStep) -> Trajectory:
        """Turns a collected rollout [T, N] into training rows; off-policy agents keep it as is."""
        del final_time_step
        return rows

    def finish(self, rows: Trajectory) -> None:
        """Called with the rollout after its last update, for instance to update normalisers."""


def masked_mean(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Mean of `values` [B] under `weights` [B]; 0 where all weights are 0."""
    return tf.math.divide_no_nan(tf.reduce_sum(values * weights), tf.reduce_sum(weights))


def row_weights(experience: Trajectory, weights: tf.Tensor | None) -> tf.Tensor:
    """Weights [B] of sequences [B, T]: 0 where the first row is a boundary row."""
    valid = valid_mask(experience.step_type[:, 0])
    return valid if weights is None else valid * weights


def first_rows(experience: Trajectory) -> Trajectory:
    """The rows [B, ...] of sequences [B, 1, ...]."""
    return tf.nest.map_structure(lambda t: tf.squeeze(t, 1), experience)


def standardize(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Values [B] to mean 0 and variance 1 over the rows whose weight is not 0."""
    centred = values - masked_mean(values, weights)
    return centred * tf.math.rsqrt(masked_mean(centred**2, weights) + 1e-8)


def clip_by_global_norm(gradients: list, norm: float | None) -> list:
    """Scales `gradients` together so that their global norm is at most `norm` (None: as it is)."""
    return gradients if norm is None else tf.clip_by_global_norm(gradients, norm)[0]
