"""Defines the iteration that all agents share, and graph functions that run chunks of iterations.

An iteration consists of `collect` and then `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from tf_agents.agents import tf_agent
from tf_agents.policies import tf_policy
from tf_agents.trajectories import Trajectory

from pipeline.acting.collect_driver import Carry, CollectDriver, initial_carry, interrupt_episodes
from pipeline.acting.policies import RandomPolicy
from pipeline.agents.agent import Agent
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.watchdog import Watched
from pipeline.ops.batches import ordered_sum
from pipeline.replay import Experience
from pipeline.utils.errors import UserError
from pipeline.utils.execution import HOST, accelerator, on_device, timestamp


class LoopState(NamedTuple):
    """State that one iteration passes to the next, except for variables.

    It is part of a checkpoint.

    Attributes:
      carry: Carry of the collect driver.
      loss_sums: Sums of the losses over the batches since the last log, float64 [] by name.
      loss_count: Number of those batches, int64 [].
      collect_seconds: Wall time spent collecting, float64 []; for display only.
    """

    carry: Carry
    loss_sums: dict[str, tf.Tensor]
    loss_count: tf.Tensor
    collect_seconds: tf.Tensor


def first_state(carry: Carry, agent: Agent) -> LoopState:
    """Returns the state of a run of `agent` that begins with `carry`."""
    loss_sums = dict.fromkeys(agent.loss_names)
    return clear_losses(LoopState(carry, loss_sums, None, tf.zeros([], tf.float64)))


def clear_losses(state: LoopState) -> LoopState:
    """Returns `state` with its losses cleared, as after a log."""
    zeros = {name: tf.zeros([], tf.float64) for name in state.loss_sums}
    return state._replace(loss_sums=zeros, loss_count=tf.zeros([], tf.int64))


#: Runs iterations from a state, and returns the state after them: at most `max_iterations` (int64
#: []; 0 only traces the graph), and until the run has taken `until` environment steps (int64 []).
Chunk = Callable[[LoopState, tf.Tensor, tf.Tensor], LoopState]


class Runner(Protocol):
    """Interface of the objects that run iterations for the host loop.

    `Iterations` implements it for one agent and its environments.

    Attributes:
      train: Runs iterations.
      collect_randomly: Runs iterations that collect with a random policy and make no updates.
      collect_steps: Vector steps of an iteration.
      at_once: Number of iterations that run at the same time.
      is_repeatable: True if the results depend only on the seed.
      description: Entries of result.json that describe the runner.
    """

    train: Chunk
    collect_randomly: Chunk
    collect_steps: int
    at_once: int
    is_repeatable: bool
    description: Mapping[str, Any]

    @property
    def environments(self) -> Sequence[VectorEnvironment]:
        """Returns the environments that are in this process."""

    @property
    def watched(self) -> Sequence[Watched]:
        """Returns the objects that may hang: the environments, or the waits for collectors."""

    def initial_state(self) -> LoopState:
        """Resets the environments and returns the state before the first iteration."""

    def begin_new_episodes(self, state: LoopState) -> LoopState:
        """Truncates the unfinished episodes; the next step starts new ones. Runs eagerly."""

    def measurements(self) -> dict[str, Any]:
        """Returns further entries of metrics.jsonl: numbers, or lists of counts (histograms)."""

    def close(self) -> None:
        """Closes the environments and ends all threads."""


class Updates:
    """Makes the updates of an iteration from the rows that have been collected."""

    def __init__(self, agent: Agent, experience: Experience):
        """Initializes the object.

        Args:
          agent: Agent to train.
          experience: Store that holds the collected rows.
        """
        self.agent = agent
        self.experience = experience

    def update(self, state: LoopState) -> LoopState:
        """Makes the updates from the collected rows, the second half of an iteration."""
        self.begin_updates(state)
        if self.experience.num_batches == 1:
            loss_sums = self._update_once(state.loss_sums)
        else:
            _, loss_sums = tf.while_loop(
                lambda update, _: update < self.experience.num_batches,
                lambda update, sums: (update + 1, self._update_once(sums)),
                (tf.constant(0), state.loss_sums),
                parallel_iterations=1,
            )
        self.end_updates()
        count = state.loss_count + self.experience.num_batches
        return state._replace(loss_sums=loss_sums, loss_count=count)

    def observe(self, rows: Trajectory) -> None:
        """Passes collected rows to `agent.observe`."""
        on_device(accelerator(), self.agent.observe)(rows)

    def begin_updates(self, state: LoopState) -> None:
        """Prepares the collected rows for the agent. Call it before `experience.next_batch`."""
        final_time_step = state.carry.time_step
        self.experience.begin(
            on_device(accelerator(), lambda rows: self.agent.prepare(rows, final_time_step))
        )

    def end_updates(self) -> None:
        """Passes the collected rows to `agent.finish`. Call it after the last batch."""
        self.experience.end(on_device(accelerator(), self.agent.finish))

    def _learn(self, batch: Trajectory, weights: tf.Tensor) -> tf_agent.LossInfo:
        return self.agent.train(batch, weights)

    def _update_once(self, loss_sums: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        batch, weights, _ = self.experience.next_batch()
        losses = on_device(accelerator(), self._learn)(batch, weights).extra
        if missing := sorted(loss_sums.keys() - losses.keys()):
            raise UserError(
                f"{type(self.agent).__name__}.train returns no {', '.join(missing)}, which "
                "loss_names lists."
            )
        return {
            name: total + tf.cast(losses[name], tf.float64) for name, total in loss_sums.items()
        }


class Iterations(Updates):
    """Runs chunks of iterations of one agent. Each chunk is one call of a `tf.function`.

    A chunk ends after `max_iterations`, at the first iteration that reaches `until` environment
    steps, or at the first iteration with a loss that is not finite. Nothing else affects where it
    ends. Each `tf.function` is traced once.
    """

    at_once = 1
    is_repeatable = True
    description: Mapping[str, Any] = {}

    def __init__(
        self,
        agent: Agent,
        experience: Experience,
        driver: CollectDriver,
        env_steps: tf.Variable,
    ):
        """Initializes the runner.

        Args:
          agent: Collects and is trained.
          experience: Stores what is collected.
          driver: Steps the environments.
          env_steps: Counts the environment steps of the run, int64 []; every iteration adds its
            own at its end.
        """
        super().__init__(agent, experience)
        self.environments: Sequence[VectorEnvironment] = (driver.environment,)
        self.watched: Sequence[Watched] = (driver.environment.episodes,)
        self._driver = driver
        self.collect_steps = experience.collect_steps
        self._env_steps = env_steps
        policy = agent.collect_policy
        random = RandomPolicy(policy.time_step_spec, policy.action_spec, policy.info_spec)
        self.train = self._chunk(self._train_iteration)
        self.collect_randomly = self._chunk(lambda state: self.collect(state, random))

    def initial_state(self) -> LoopState:
        """Resets the environments and returns the state before the first iteration."""
        carry = initial_carry(self._driver.environment, self.agent.collect_policy)
        return first_state(carry, self.agent)

    def begin_new_episodes(self, state: LoopState) -> LoopState:
        """Truncates the unfinished episodes; see `Runner.begin_new_episodes`."""
        self._driver.environment.episodes.abandon()
        self.experience.truncate()
        return state._replace(carry=interrupt_episodes(state.carry))

    def measurements(self) -> dict[str, Any]:
        """Returns an empty dict, because there are no further entries."""
        return {}

    def close(self) -> None:
        """Closes the environments."""
        self._driver.environment.close()

    def _chunk(
        self, iteration: Callable[[LoopState], LoopState]
    ) -> tf.types.experimental.PolymorphicFunction:
        """Returns a graph that repeats an iteration."""

        def chunk(state: LoopState, max_iterations: tf.Tensor, until: tf.Tensor) -> LoopState:
            def unfinished(count, state):
                finite = tf.math.is_finite(ordered_sum(list(state.loss_sums.values())))
                return (count < max_iterations) & (self._env_steps < until) & finite

            def body(count, state):
                before = state.carry.statistics.env_steps
                state = iteration(state)
                # Not earlier, because schedules read the count before this iteration's own steps.
                self._env_steps.assign_add(state.carry.statistics.env_steps - before)
                return count + 1, state

            with tf.device(HOST):
                # A loop would keep variables on a GPU if they were made there.
                state, max_iterations, until = tf.nest.map_structure(
                    tf.identity, (state, max_iterations, until)
                )
                count = tf.zeros([], tf.int64)
                _, state = tf.while_loop(unfinished, body, (count, state), parallel_iterations=1)
            return state

        return tf.function(chunk, autograph=False)

    def _train_iteration(self, state: LoopState) -> LoopState:
        return self.update(self.collect(state, self.agent.collect_policy))

    def collect(self, state: LoopState, policy: tf_policy.TFPolicy) -> LoopState:
        """Collects `collect_steps` vector steps with `policy`, the first half of an iteration."""
        started = timestamp()
        with tf.control_dependencies([started]):
            carry, rows = self._driver.run(policy, state.carry, self.collect_steps)
        with tf.control_dependencies([carry.time_step.step_type]):
            seconds = timestamp() - started
        with tf.control_dependencies([seconds]):
            # The updates need the rows: they would otherwise begin before the clock is read.
            rows = tf.nest.map_structure(tf.identity, rows)
        self.experience.add(tf.range(rows.step_type.shape[1]), rows)
        self.observe(rows)
        return state._replace(carry=carry, collect_seconds=state.collect_seconds + seconds)
