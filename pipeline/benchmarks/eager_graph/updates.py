"""Repeats the same updates eagerly and as graphs, and measures how far the weights are apart."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.trajectories import Trajectory

from pipeline.checkpointing.saveables import Variables
from pipeline.environments.training_environment import named_failures
from pipeline.training.components import Components
from pipeline.training.intervals import check_store, initialize_replay_buffer
from pipeline.training.iteration import Iterations
from pipeline.utils.execution import Execution

#: The trained variables after an update, by name.
Weights: TypeAlias = dict[str, np.ndarray]

# The rewrites that tf.config.optimizer.set_experimental_options can switch and that are on by
# default. A rewrite that is off by default cannot cause a difference.
REWRITES = (
    "constant_folding",
    "arithmetic_optimization",
    "remapping",
    "layout_optimizer",
    "shape_optimization",
    "common_subgraph_elimination",
    "dependency_optimization",
    "loop_optimization",
    "function_optimization",
    "implementation_selector",
)


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
    experience.check_rows()
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


class Difference(NamedTuple):
    """Largest elementwise difference of two arrays.

    Attributes:
      absolute: Largest absolute difference, in the unit of the arrays.
      relative: Largest difference relative to the larger magnitude of the two elements, at most 2.
    """

    absolute: float
    relative: float


def difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Computes the difference of two arrays of the same shape, which may be empty.

    It is 0 only if all elements are equal.
    """
    gap = np.abs(first.astype(np.float64) - second.astype(np.float64))
    magnitude = np.maximum(np.abs(first), np.abs(second)).astype(np.float64)
    relative = np.divide(gap, magnitude, out=np.zeros_like(gap), where=magnitude > 0)
    return Difference(float(np.max(gap, initial=0.0)), float(np.max(relative, initial=0.0)))


def differences(first: list[Weights], second: list[Weights]) -> dict[str, list[Difference]]:
    """Returns the differences of each variable, one after each update."""
    return {
        name: [difference(a[name], b[name]) for a, b in zip(first, second, strict=True)]
        for name in first[0]
    }


def largest(first: list[Weights], second: list[Weights]) -> float:
    """Returns the largest absolute difference over all variables and updates."""
    of_each = differences(first, second).values()
    return max(apart.absolute for variable in of_each for apart in variable)


def same_bits(first: Iterable[Weights], second: Iterable[Weights]) -> bool:
    """Returns True if all variables are equal to the last bit after every update."""
    pairs = zip(first, second, strict=True)
    return all(a[name].tobytes() == b[name].tobytes() for a, b in pairs for name in a)


class Effect(NamedTuple):
    """Effect of one rewrite on the weights.

    Attributes:
      without: Largest absolute difference from eager execution with all rewrites but this one.
      alone: Largest absolute difference from eager execution with this rewrite only.
      changes_bits: True if the graph with this rewrite only differs from eager execution, or if
        the graph without it differs from the graph with all rewrites.
    """

    without: float
    alone: float
    changes_bits: bool


def effects(updates: Updates, eager: list[Weights], graph: list[Weights]) -> dict[str, Effect]:
    """Measures the effect of each rewrite, by switching off the rewrite and then all others.

    Args:
      updates: The updates to run.
      eager: Weights after each update, run eagerly.
      graph: Weights after each update, run as a graph with all rewrites.
    """
    found = {}
    for rewrite in REWRITES:
        without = updates.run(Execution.GRAPH, [rewrite])
        alone = updates.run(Execution.GRAPH, [other for other in REWRITES if other != rewrite])
        changes_bits = not (same_bits(without, graph) and same_bits(alone, eager))
        found[rewrite] = Effect(largest(without, eager), largest(alone, eager), changes_bits)
    return found
