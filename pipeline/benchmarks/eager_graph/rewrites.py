"""Finds the rewrites of TensorFlow's graph optimizer that change bits of the weights."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.benchmarks.eager_graph.differences import largest, same_bits
from pipeline.benchmarks.eager_graph.updates import Updates, Weights
from pipeline.utils.execution import Execution

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
    return {rewrite: _effect(rewrite, updates, eager, graph) for rewrite in REWRITES}


def _effect(rewrite: str, updates: Updates, eager: list[Weights], graph: list[Weights]) -> Effect:
    without = updates.run(Execution.GRAPH, [rewrite])
    alone = updates.run(Execution.GRAPH, [other for other in REWRITES if other != rewrite])
    changes_bits = not (same_bits(without, graph) and same_bits(alone, eager))
    return Effect(largest(without, eager), largest(alone, eager), changes_bits)


def responsible(found: dict[str, Effect]) -> list[str]:
    """Returns the names of the rewrites that change bits."""
    return [rewrite for rewrite, effect in found.items() if effect.changes_bits]
