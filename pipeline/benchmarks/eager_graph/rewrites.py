"""Which rewrites of TensorFlow's graph optimizer change bits."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.benchmarks.eager_graph.differences import largest, same_bits
from pipeline.benchmarks.eager_graph.updates import Updates, Weights
from pipeline.utils.execution import Execution

# The options of tf.config.optimizer.set_experimental_options that stand for a rewrite and are on by
# default; those that are off cannot be what makes the default differ.
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
    """What one rewrite does.

    Attributes:
      without: largest absolute difference from eager with all rewrites but this one.
      alone: the same with this one only.
      changes_bits: whether alone it leaves other bits than eager, or without it the graph has
        other bits than with all.
    """

    without: float
    alone: float
    changes_bits: bool


def effects(updates: Updates, eager: list[Weights], graph: list[Weights]) -> dict[str, Effect]:
    """Switches each rewrite off, and then all others.

    Args:
      updates: to run.
      eager: their weights run eagerly.
      graph: and as a graph with all rewrites.
    """
    return {rewrite: _effect(rewrite, updates, eager, graph) for rewrite in REWRITES}


def _effect(rewrite: str, updates: Updates, eager: list[Weights], graph: list[Weights]) -> Effect:
    without = updates.run(Execution.GRAPH, [rewrite])
    alone = updates.run(Execution.GRAPH, [other for other in REWRITES if other != rewrite])
    changes_bits = not (same_bits(without, graph) and same_bits(alone, eager))
    return Effect(largest(without, eager), largest(alone, eager), changes_bits)


def responsible(found: dict[str, Effect]) -> list[str]:
    """The rewrites that change bits."""
    return [rewrite for rewrite, effect in found.items() if effect.changes_bits]
