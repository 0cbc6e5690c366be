"""The iteration that all agents share, as one graph function over a chunk of iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from tf_agents.policies import tf_policy

from pipeline.agents.agent import Agent
from pipeline.collect import Carry, CollectDriver, initial_carry
from pipeline.execution import HOST, accelerator
from pipeline.experience import Experience
from pipeline.policies import RandomPolicy


class LoopState(NamedTuple):
    """All that one iteration hands to the next outside of variables; part of a checkpoint.

    Attributes:
      carry: of the collect driver.
      loss_sums: float32 scalars by name, summed over the batches since the last log.
      loss_count: float32 scalar, the number of those batches.
      collect_seconds: float64 scalar, wall time spent collecting; for display only.
    """

    carry: Carry
    loss_sums: dict[str, tf.Tensor]
    loss_count: tf.Tensor
    collect_seconds: tf.Tensor


def clear_losses(state: LoopState) -> LoopState:
    """The state after a log."""
    zeros = {name: tf.zeros([], tf.float32) for name in state.loss_sums}
    return state._replace(loss_sums=zeros, loss_count=tf.zeros([], tf.float32))


class Halted(Exception):
    """Parts of a run failed, and all else came to rest.

    Attributes:
      errors: that they failed with.
      state: of the train loop, from which a checkpoint can be made.
    """

    def __init__(self, errors: list[Exception], state: LoopState):
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors
        self.state = state


class Chunk(Protocol):
    """Some iterations in one call."""

    def __call__(
        self, state: LoopState, max_iterations: tf.Tensor, until: tf.Tensor, /
    ) -> LoopState:
        """Goes on from `state` for at most `max_iterations`, int64 [], or until the run has taken
        `until` environment steps, int64 []. A call of no iterations builds the graph."""


class Runner(Protocol):
    """Runs iterations for the host; `Iterations` does so for one agent and its environments.

    Attributes:
      train: a chunk of iterations.
      collect_randomly: as `train`, with a random policy and no updates.
      collect_steps: vector steps that an iteration takes.
      at_once: iterations that run at the same time.
      is_repeatable: whether the seed decides all that it does.
      drivers: those that it collects with.
      description: what result.json says of it.
    """

    train: Chunk
    collect_randomly: Chunk
    collect_steps: int
    at_once: int
    is_repeatable: bool
    drivers: Sequence[CollectDriver]
    description: Mapping[str, Any]

    def initial_state(self) -> LoopState:
        """The state before the first iteration; resets the environments."""

    def measurements(self) -> dict[str, Any]:
        """What a record of metrics.jsonl says of it beside losses: numbers, or counts in a list."""

    def close(self) -> None:
        """Closes the environments, and ends all threads."""


class Iterations:
    """Runs chunks of iterations, each chunk one call of a `tf.function` traced once.

    A chunk ends after `max_iterations`, at the first iteration that reaches `until` environment
    steps, or at the first with a loss that is not finite: nothing else moves its end.
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
        """`env_steps`: int64, counts those of the run; iterations add theirs at their ends."""
        self.drivers: Sequence[CollectDriver] = (driver,)
        self._driver = driver
        self.collect_steps = experience.collect_steps
        self.agent = agent
        self.experience = experience
        self._env_steps = env_steps
        policy = agent.collect_policy
        self._random_policy = RandomPolicy(
            policy.time_step_spec, policy.action_spec, policy.info_spec
        )
        self.train = tf.function(self._train_chunk, autograph=False)
        self.collect_randomly = tf.function(self._random_chunk, autograph=False)

    def initial_state(self) -> LoopState:
        """The state before the first iteration; resets the environments."""
        carry = initial_carry(self._driver.environment, self.agent.collect_policy)
        loss_sums = dict.fromkeys(self.agent.loss_names)
        return clear_losses(LoopState(carry, loss_sums, None, tf.zeros([], tf.float64)))

    def measurements(self) -> dict[str, Any]:
        """Nothing beside the losses."""
        return {}

    def close(self) -> None:
        """Closes the environments."""
        self._driver.environment.close()

    def _train_chunk(
        self, state: LoopState, max_iterations: tf.Tensor, until: tf.Tensor
    ) -> LoopState:
        """Iterations of collecting and updating; `max_iterations` int64 and `until` int64."""
        return self._repeat(self._train_iteration, state, max_iterations, until)

    def _random_chunk(
        self, state: LoopState, max_iterations: tf.Tensor, until: tf.Tensor
    ) -> LoopState:
        """As `train`, with a random policy and no updates."""
        return self._repeat(self._random_iteration, state, max_iterations, until)

    def _repeat(self, iteration, state, max_iterations, until) -> LoopState:
        def unfinished(count, state):
            finite = tf.math.is_finite(tf.add_n(list(state.loss_sums.values())))
            return (count < max_iterations) & (self._env_steps < until) & finite

        def body(count, state):
            before = state.carry.statistics.env_steps
            state = iteration(state)
            # Not earlier: schedules read the count before this iteration's own steps.
            self._env_steps.assign_add(state.carry.statistics.env_steps - before)
            return count + 1, state

        with tf.device(HOST):
            # A loop keeps its variables where they come from: on a GPU, if they were made there.
            state, max_iterations, until = tf.nest.map_structure(
                tf.identity, (state, max_iterations, until)
            )
            count = tf.zeros([], tf.int64)
            _, state = tf.while_loop(unfinished, body, (count, state), parallel_iterations=1)
        return state

    def _random_iteration(self, state: LoopState) -> LoopState:
        return self._collect(self._random_policy, state)

    def _train_iteration(self, state: LoopState) -> LoopState:
        state = self._collect(self.agent.collect_policy, state)
        final_time_step = state.carry.time_step
        self.experience.begin(_accelerated(lambda rows: self.agent.prepare(rows, final_time_step)))
        state = self._update(state)
        self.experience.end(_accelerated(self.agent.finish))
        return state

    def _collect(self, policy: tf_policy.TFPolicy, state: LoopState) -> LoopState:
        started = tf.timestamp()
        with tf.control_dependencies([started]):
            carry, rows = self._driver.run(policy, state.carry, self.experience.collect_steps)
        with tf.control_dependencies([carry.time_step.observation]):
            seconds = tf.timestamp() - started
        self.experience.add(tf.range(rows.step_type.shape[1]), rows)
        return state._replace(carry=carry, collect_seconds=state.collect_seconds + seconds)

    def _update(self, state: LoopState) -> LoopState:
        if self.experience.num_batches == 1:
            loss_sums = self._update_once(state.loss_sums)
        else:
            _, loss_sums = tf.while_loop(
                lambda update, _: update < self.experience.num_batches,
                lambda update, sums: (update + 1, self._update_once(sums)),
                (tf.constant(0), state.loss_sums),
                parallel_iterations=1,
            )
        count = state.loss_count + float(self.experience.num_batches)
        return state._replace(loss_sums=loss_sums, loss_count=count)

    def _update_once(self, loss_sums: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        batch, weights, keys = self.experience.next_batch()
        loss_info = _accelerated(self.agent.train)(batch, weights)
        self.experience.feedback(keys, loss_info)
        return {name: total + loss_info.extra[name] for name, total in loss_sums.items()}


def _accelerated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with its operations on the accelerator."""

    def on_accelerator(*args: Any) -> Any:
        with tf.device(accelerator()):
            return function(*args)

    return on_accelerator
