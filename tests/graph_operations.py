"""Operations of TensorFlow's graphs, and those among them that draw random numbers."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

STATELESS_DRAWS = {
    "StatelessMultinomial",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformV2",
}


def operations(graph: tf.Graph) -> set[str]:
    """Returns the types of all operations, including those in loops, branches and calls."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    return {node.op for node in nodes}


def draws_from_state(operation: str) -> bool:
    """Returns whether an operation draws random numbers from a state inside the process."""
    if (
        operation.startswith(("Stateful", "Rng", "NonDeterministic"))
        and "Partitioned" not in operation
    ):
        return True
    definition = op_def_registry.get(operation)
    attributes = {a.name for a in definition.attr} if definition else set()
    return bool(definition and definition.is_stateful and "seed2" in attributes)


def stateful_draws(graph: tf.Graph) -> set[str]:
    return set(filter(draws_from_state, operations(graph)))


def stateless_draws(graph: tf.Graph) -> set[str]:
    return operations(graph) & STATELESS_DRAWS
