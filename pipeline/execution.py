"""How TensorFlow runs what is written in a `tf.function`: `--eager` and `--exact_graph`."""

from __future__ import annotations

import enum

import tensorflow as tf


class Execution(enum.Enum):
    """Moves bits, and speed. `EAGER` and `EXACT_GRAPH` compute the same bits on the CPU."""

    GRAPH = "graph"
    EAGER = "eager"
    EXACT_GRAPH = "exact graph"

    def configure(self) -> None:
        """Applies to every call of a `tf.function` from now on, whenever it was traced."""
        tf.config.run_functions_eagerly(self is Execution.EAGER)
        # The whole optimizer: without constant folding and arithmetic optimization alone, some
        # networks keep a difference, which remapping makes.
        options = {"disable_meta_optimizer": self is Execution.EXACT_GRAPH}
        tf.config.optimizer.set_experimental_options(options)
