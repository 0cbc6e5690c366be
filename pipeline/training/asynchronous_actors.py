"""Defines asynchronous actors, and the parts of a checkpoint that hold their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.trajectories import Trajectory

from pipeline.acting.collect_driver import Carry, CollectDriver
from pipeline.acting.episode_statistics import (
    EpisodeStatistics,
    initial_statistics,
    merge_statistics,
)
from pipeline.agents.agent import Agent, Gradients
from pipeline.checkpointing.checkpoints import Parts
from pipeline.checkpointing.saveables import Variables
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.ops.batches import ordered_sum
from pipeline.replay import Experience
from pipeline.training.iteration import Iterations, LoopState, clear_losses
from pipeline.training.nan_checks import FROM_ENVIRONMENT

_STALENESS_BINS = 64  # the last bin counts all larger values


class Actor(Iterations):
    """Runs iterations with a copy of the shared weights, and updates the shared weights."""

    def __init__(
        self,
        shared: Agent,
        agent: Agent,
        experience: Experience,
        driver: CollectDriver,
        env_steps: tf.Variable,
        lock: tf.CriticalSection | None,
    ):
        super().__init__(agent, experience, driver, env_steps)
        self._shared = shared
        self._lock = lock
        self._updates_when_copied = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.staleness = tf.Variable(tf.zeros([_STALENESS_BINS], tf.int64), trainable=False)
        accumulator = {"accumulator": agent.accumulator} if agent.accumulator else {}
        # Everything that is not shared, except the copy of the weights, which is made anew before
        # each rollout.
        variables = Variables(staleness=self.staleness, **accumulator)
        self.parts = Parts({"experience": experience, "variables": variables})
        agent.share_target(shared)

    def _train_iteration(self, state: LoopState) -> LoopState:
        copied = self._exclusively(self._copy)
        # Without this dependency, TensorFlow may delay the copy until the rollout has begun.
        with tf.control_dependencies([copied]):
            carry = tf.nest.map_structure(tf.identity, state.carry)
        return super()._train_iteration(state._replace(carry=carry))

    def _copy(self) -> tf.Tensor:
        updates = self._updates_when_copied.assign(self._shared.train_step_counter)
        # Counted first, so that an update in between counts as one that the copy missed.
        with tf.control_dependencies([updates]):
            copies = _copy_weights(self._shared, self.agent)
        with tf.control_dependencies(copies):
            return tf.identity(updates)

    def _learn(self, batch: Trajectory, weights: tf.Tensor) -> tf_agent.LossInfo:
        return self.agent.learn(batch, weights, self._send)

    def _send(self, gradients: Gradients) -> None:
        self._exclusively(lambda: self._apply(gradients))

    def _apply(self, gradients: Gradients) -> tf.Tensor:
        with tf.control_dependencies([g for g in tf.nest.flatten(gradients) if g is not None]):
            by_others = self._shared.train_step_counter - self._updates_when_copied
        index = tf.minimum(by_others, _STALENESS_BINS - 1)
        self.staleness.assign_add(tf.one_hot(index, _STALENESS_BINS, dtype=tf.int64))
        self._shared.apply(gradients)
        return by_others if self._lock is None else _when_written(self._shared, by_others)

    def _exclusively(self, act: Callable[[], tf.Tensor]) -> tf.Tensor:
        return act() if self._lock is None else self._lock.execute(act)


def _copy_weights(source: Agent, target: Agent) -> list[tf.Operation]:
    weights, copies = (tf.nest.flatten(x.gradient_variables()) for x in (source, target))
    pairs = zip(weights, copies, strict=True)
    return [copy.assign(weight, read_value=False) for weight, copy in pairs]


def _when_written(agent: Agent, value: tf.Tensor) -> tf.Tensor:
    """Returns `value` once all weights are written, so that a lock is held until then."""
    weights = tf.nest.flatten(agent.gradient_variables())
    with tf.control_dependencies([x.read_value() for x in (*weights, agent.train_step_counter)]):
        return tf.identity(value)


class ActorEnvironments(Parts):
    """Holds the environments of all actors; implements `TrainingEnvironment`."""

    noun = "actors"

    def __init__(self, environments: Sequence[VectorEnvironment]):
        super().__init__({str(n): x for n, x in enumerate(environments)})
        self._environments = environments
        self.batch_size = len(environments)
        self.observation_space = environments[0].observation_space
        self.action_space = environments[0].action_space

    @property
    def seconds(self) -> float:
        """Returns the time that all environments have spent in steps and resets, in seconds."""
        return sum(environment.seconds for environment in self._environments)

    @property
    def divergence(self) -> str:
        """Returns why the last `restore` could not continue some episodes, or "" if it did."""
        return next((x.divergence for x in self._environments if x.divergence), "")

    def failure_message(self) -> str:
        """Returns what environments raised, one line for each, or "" if none raised."""
        messages = [environment.failure_message() for environment in self._environments]
        return "\n".join(filter(None, messages))


class ActorExperience(Parts):
    """Holds all actors' rollouts and accumulated gradients; the host loop saves and checks them."""

    noun = "actors"

    def __init__(self, actors: Sequence[Actor]):
        super().__init__({str(n): x.parts for n, x in enumerate(actors)})
        self._stores = [actor.experience for actor in actors]

    keeps_rows = False

    def check_rows(self) -> None:
        """Does nothing, because rows are trained on as they were collected."""

    def check_ready(self) -> None:
        """Does nothing, because each iteration collects all rows that it trains on."""

    def bad_columns(self) -> list[str]:
        """Describes the columns with NaN or infinity of one actor, or returns [] if there are none.

        If several actors have such columns, one whose environment returned NaN or infinity is
        preferred, because that may have caused the others.
        """
        bad = [columns for store in self._stores if (columns := store.bad_columns())]
        return max(bad, key=lambda columns: columns[0].startswith(FROM_ENVIRONMENT), default=[])


def split_state(state: LoopState) -> list[LoopState]:
    """Splits the joint state into the states of the actors, whose counts begin at 0."""
    carry = state.carry._replace(statistics=initial_statistics(1))
    counts = clear_losses(state._replace(carry=carry, collect_seconds=tf.zeros([], tf.float64)))
    joint = _own(state.carry)

    def of_actor(number: int, vector_steps: tf.Tensor) -> LoopState:
        own = tf.nest.map_structure(lambda x: x[number : number + 1], joint)
        return _with_own(counts, own, vector_steps)

    return [of_actor(n, steps) for n, steps in enumerate(tf.unstack(state.carry.vector_steps))]


def with_counts(state: LoopState, counts: LoopState) -> LoopState:
    """Returns the state of one actor with the counts of `counts`."""
    return _with_own(counts, _own(state.carry), state.carry.vector_steps)


def join_states(states: Sequence[LoopState], counts: LoopState) -> LoopState:
    """Joins the states of all actors into one, with the counts of `counts`."""
    carries = [state.carry for state in states]
    joint = tf.nest.map_structure(lambda *x: tf.concat(x, axis=0), *map(_own, carries))
    return _with_own(counts, joint, tf.stack([carry.vector_steps for carry in carries]))


def _own(carry: Carry) -> Any:
    """Returns the tensors of a carry that have a row for each actor, [K, ...]."""
    statistics = carry.statistics
    unfinished = statistics.episode_return, statistics.episode_length
    return carry.time_step, carry.policy_state, *unfinished


def _with_own(counts: LoopState, own: Any, vector_steps: tf.Tensor) -> LoopState:
    """Returns a state with the tensors that `_own` returns, and the counts of `counts`."""
    time_step, policy_state, episode_return, episode_length = own
    statistics = counts.carry.statistics._replace(
        episode_return=episode_return, episode_length=episode_length
    )
    return counts._replace(carry=Carry(time_step, policy_state, vector_steps, statistics))


def sum_states(states: Sequence[LoopState], before: EpisodeStatistics) -> LoopState:
    """Joins the states of actors that have run at the same time, and adds up their counts.

    Args:
      states: States of the actors. The counts of the first state begin at those of `before`, with
        an empty window of episodes. The counts of the other states begin at 0.
      before: Statistics of all actors together before they ran.
    """
    statistics = merge_statistics([state.carry.statistics for state in states], before)
    counts = LoopState(
        states[0].carry._replace(statistics=statistics),
        {name: ordered_sum([x.loss_sums[name] for x in states]) for name in states[0].loss_sums},
        ordered_sum([state.loss_count for state in states]),
        ordered_sum([state.collect_seconds for state in states]),
    )
    return join_states(states, counts)
