"""Graph calls of training, each sized so that the host gets its turn often enough."""

from __future__ import annotations

import time

import tensorflow as tf

from pipeline.iteration import Chunk, LoopState, Runner
from pipeline.stopwatch import Stopwatch

SECONDS_PER_CALL = 0.5  # the progress line and Ctrl-C wait for a call's end


class Chunks:
    """Calls chunks of iterations, as many in a call as take about half a second."""

    def __init__(self, runner: Runner, stopwatch: Stopwatch):
        self._collect_steps = runner.collect_steps
        self._stopwatch = stopwatch
        self._built: Chunk | None = None
        self._iterations_per_call = 1

    def is_built(self, chunk: Chunk) -> bool:
        """Whether it is the one last built."""
        return chunk == self._built

    def build(self, chunk: Chunk, state: LoopState) -> None:
        """Traces the graph; what fits into a call of it is not yet known."""
        no_iterations = tf.zeros([], tf.int64)
        chunk(state, no_iterations, no_iterations)
        self._built = chunk
        self._iterations_per_call = 1

    def run(self, chunk: Chunk, state: LoopState, until: int) -> LoopState:
        """The state after one call, which ends at `until` environment steps if it gets so far."""
        before = _total(state.carry.vector_steps)
        started = time.perf_counter()
        state = chunk(
            state,
            tf.constant(self._iterations_per_call, tf.int64),
            tf.constant(until, tf.int64),
        )
        vector_steps = _total(state.carry.vector_steps)
        seconds = time.perf_counter() - started
        self._stopwatch.add(seconds)
        iterations = (vector_steps - before) // self._collect_steps
        fitting = int(iterations * SECONDS_PER_CALL / seconds)
        self._iterations_per_call = max(1, min(fitting, 4 * self._iterations_per_call))
        return state


def _total(vector_steps: tf.Tensor) -> int:
    return int(tf.reduce_sum(vector_steps))
