"""Repeats the same updates, from the same weights and on the same batches, in different ways."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.trajectories import Trajectory

from pipeline.checkpointing.saveables import Variables
from pipeline.environments.environment_errors import named_failures
from pipeline.training.components import Components
from pipeline.training.intervals import check_store, initialize_replay_buffer
from pipeline.training.iteration import Iterations
from pipeline.utils.execution import Execution

#: The trained variables after an update, by name.
Weights: TypeAlias = dict[str, np.ndarray]


class _Batch(NamedTuple):
    """Inputs of one update, or of a part of it if gradients are accumulated.

    Attributes:
      experience: Trajectories [B, T, ...].
      weights: Weights of the trajectories, float32 [B].
      env_steps: Environment steps at the time of the update, which schedules read, int64 [].
    """

    experience: Trajectory
    weights: tf.Tensor
    env_steps: tf.Tensor


class Updates:
    """Runs the first updates of an agent, on data collected by its initial policy.

    All batches are collected with the initial weights, so that the batch of an update does not
    depend on the updates before it.
    """

    def __init__(self, components: Components, num_updates: int):
        """Collects the batches, after a warm-up if there is one.

        Args:
          components: Newly built components, which this changes.
          num_updates: Number of updates, at least 1. An update that accumulates gradients has
            several batches.

        Raises:
          UserError: If an environment fails, or if the warm-up does not fit the experience.
        """
        accumulator = components.agent.accumulator
        self._num_batches = accumulator.num_batches if accumulator else 1  # of an update
        with named_failures(components.environment):
            self.batches = _collect_batches(components, num_updates * self._num_batches)
        self._agent = components.agent
        self._env_steps = components.env_steps
        self._variables = Variables(agent=components.agent)
        self._initial = tempfile.TemporaryDirectory()
        self._variables.save(pathlib.Path(self._initial.name))
        self.apply = tf.function(self._apply, autograph=False)

    def _apply(self, batch: _Batch) -> tf_agent.LossInfo:
        # Return what the train loop reads, because the graph optimizer removes unread outputs.
        self._env_steps.assign(batch.env_steps)
        return self._agent.train(batch.experience, batch.weights)

    def restore(self) -> None:
        """Restores the state before the first update."""
        self._variables.restore(pathlib.Path(self._initial.name))

    def weights(self) -> Weights:
        """Returns a copy of the trained variables as they are now."""
        return {
            _full_name(network, variable): variable.numpy()
            for network, module in self._agent.trained.items()
            for variable in module.trainable_variables
        }

    def run(self, execution: Execution, without: Sequence[str] = ()) -> list[Weights]:
        """Makes all updates from the initial state and returns the weights after each of them.

        Args:
          execution: How the updates are run.
          without: Rewrites that are switched off; see `running`.
        """
        history = []
        self.restore()
        with running(execution, without):
            for number, batch in enumerate(self.batches, 1):
                self.apply(batch)
                if number % self._num_batches == 0:
                    history.append(self.weights())
        self.restore()
        return history

    def per_second(self, execution: Execution, seconds: float) -> float:
        """Measures updates per second over at least `seconds`, one call per batch.

        Tracing is not timed.
        """
        self.restore()
        with running(execution):
            self.apply(self.batches[0])
            count, started = 0, time.perf_counter()
            while (spent := time.perf_counter() - started) < seconds:
                self.apply(self.batches[count % len(self.batches)])
                count += 1
        self.restore()
        return count / self._num_batches / spent


@contextlib.contextmanager
def running(execution: Execution, without: Sequence[str] = ()) -> Iterator[None]:
    """Sets how TensorFlow runs inside of a context, and restores graphs with all rewrites after it.

    Args:
      execution: How TensorFlow runs inside of the context.
      without: Options of `tf.config.optimizer.set_experimental_options`, on by default, that are
        off inside of the context.
    """
    execution.configure()
    tf.config.optimizer.set_experimental_options(dict.fromkeys(without, False))
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(dict.fromkeys(without, True))
        Execution.GRAPH.configure()


def _collect_batches(components: Components, num_updates: int) -> list[_Batch]:
    runner, experience = components.runner, components.experience
    assert isinstance(runner, Iterations)
    warm_up = initialize_replay_buffer()
    check_store(warm_up, experience)
    state = runner.initial_state()
    if warm_up:
        steps = tf.constant(warm_up, tf.int64)
        state = runner.collect_randomly(state, steps, steps)
    experience.check_ready()
    batches: list[_Batch] = []
    while len(batches) < num_updates:
        components.env_steps.assign(state.carry.statistics.env_steps)
        state = runner.collect(state, components.agent.collect_policy)
        runner.begin_updates(state)
        for _ in range(experience.num_batches):
            rows, weights, _ = experience.next_batch()
            batches.append(_Batch(rows, weights, state.carry.statistics.env_steps))
        runner.end_updates()
    return batches[:num_updates]


def _full_name(network: str, variable: tf.Variable) -> str:
    """Returns the name of a variable with the name of its network as its prefix."""
    name = variable.name.removesuffix(":0")
    return name if name.startswith(f"{network}/") else f"{network}/{name}"
