"""Makes training's graph calls: chooses the number of iterations per call, and times the calls."""

from __future__ import annotations

import time

import tensorflow as tf

from pipeline.environments import TrainingEnvironment
from pipeline.training.iteration import Chunk, LoopState, Runner
from pipeline.utils.execution import int64

#: Names of the shares of time in the records of metrics.jsonl.
SHARES = ("environment_share", "policy_share", "update_share")
SECONDS_PER_CALL = 0.5  # the progress line and Ctrl-C wait for a call's end


class GraphCalls:
    """Calls chunks of iterations, as many per call as take about half a second, and times them.

    Speeds and shares cover the calls since the last `restart_timing`; time that the host spends
    between calls, as in evaluations, does not count.
    """

    def __init__(self, runner: Runner, environment: TrainingEnvironment):
        """Initializes the object, without making a call.

        Args:
          runner: Runs the iterations.
          environment: The environments that the iterations step.
        """
        self._runner = runner
        self._environment = environment
        self._traced: Chunk | None = None
        self._iterations_per_call = 1
        self._seconds = self._environment_seconds = self._collect_seconds = 0.0
        self._env_steps = 0

    def is_traced(self, chunk: Chunk) -> bool:
        """Returns True if `chunk` is the one that was traced last."""
        return chunk == self._traced

    def trace(self, chunk: Chunk, state: LoopState) -> None:
        """Traces the graph of `chunk`, and resets the number of iterations per call to 1."""
        no_iterations = tf.zeros([], tf.int64)
        chunk(state, no_iterations, no_iterations)
        self._traced = chunk
        self._iterations_per_call = 1

    def run(self, chunk: Chunk, state: LoopState, until: int) -> LoopState:
        """Makes one call, which ends early if the run reaches `until` environment steps.

        Returns:
          The state after the call.
        """
        before = _total(state.carry.vector_steps)
        environment_seconds = self._environment.seconds
        started = time.perf_counter()
        state = chunk(state, int64(self._iterations_per_call), int64(until))
        vector_steps = _total(state.carry.vector_steps)
        seconds = time.perf_counter() - started
        self._seconds += seconds
        self._environment_seconds += self._environment.seconds - environment_seconds
        iterations = (vector_steps - before) // self._runner.collect_steps
        fitting = int(iterations * SECONDS_PER_CALL / seconds)
        self._iterations_per_call = max(1, min(fitting, 4 * self._iterations_per_call))
        return state

    def restart_timing(self, state: LoopState) -> None:
        """Begins a new interval of timing at `state`."""
        self._seconds = self._environment_seconds = 0.0
        self._collect_seconds = float(state.collect_seconds)
        self._env_steps = int(state.carry.statistics.env_steps)

    def env_steps_per_second(self, state: LoopState) -> float:
        """Returns the environment steps per second of the calls up to `state`."""
        steps = int(state.carry.statistics.env_steps) - self._env_steps
        return steps / self._seconds if self._seconds else 0.0

    def shares(self, state: LoopState) -> dict[str, float]:
        """Returns the shares of time for the environments, the rest of collecting, and the updates.

        If several iterations run at the same time, the sums of their times are divided by their
        number. If environments step during updates, only the time for which updates wait counts.
        """
        if not self._seconds:
            return {}
        seconds = self._seconds * self._runner.at_once
        # Graphs read the machine's clock, which may be set back.
        collect = max((float(state.collect_seconds) - self._collect_seconds) / seconds, 0.0)
        collect = min(collect, 1.0)
        environment = min(self._environment_seconds / seconds, collect)
        return dict(zip(SHARES, (environment, collect - environment, 1.0 - collect), strict=True))


def _total(vector_steps: tf.Tensor) -> int:
    return int(tf.reduce_sum(vector_steps))
