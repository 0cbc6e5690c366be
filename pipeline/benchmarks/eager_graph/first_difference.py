"""Finds the first operation of an update whose outputs differ between graph and eager execution."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipeline.benchmarks.eager_graph.differences import Difference, difference, same_bits
from pipeline.benchmarks.eager_graph.operations import OperationGraph, Outputs, graph_as_run
from pipeline.benchmarks.eager_graph.updates import Updates, Weights, running
from pipeline.utils.execution import Execution

_PACKAGE = pathlib.Path(__file__).parents[2]
_MAX_DEPTH = 2  # of nested formulas
_MAX_ROUNDING = 1e-4  # fraction of the largest magnitude, in float32, with sums and cancellation


class Parting(NamedTuple):
    """First operation whose outputs differ between the two graphs.

    All operations that it depends on and that both graphs have are equal to the last bit. So a
    rewrite made the difference in this operation, or in the operations that replaced its inputs.

    Attributes:
      update: Number of the update, from 1.
      name: Name of the operation. It begins with the name of its layer if it belongs to one.
      difference: Difference of the outputs.
      written: The operation and its inputs as the program has them.
      rewritten: The same operation and its inputs after the graph optimizer.
      source: "file:line, in function" of the program; empty if unknown.
      variables: Names of the variables that the operation reads.
    """

    update: int
    name: str
    difference: Difference
    written: str
    rewritten: str
    source: str
    variables: list[str]


def first_parting(updates: Updates, eager: list[Weights], graph: list[Weights]) -> Parting | None:
    """Repeats the first update after which the weights differ, and compares its operations.

    The graph as the program wrote it stands for eager execution, because an exact graph has the
    same bits.

    Args:
      updates: The updates to run.
      eager: Weights after each update, run eagerly.
      graph: Weights after each update, run as a graph.

    Returns:
      The first operation that differs. None if no weights differ, or if no operation that is in
      both graphs differs.
    """
    apart = [not same_bits([a], [b]) for a, b in zip(eager, graph, strict=True)]
    if not any(apart):
        return None
    number = apart.index(True)
    traced = updates.apply.get_concrete_function(updates.batches[0])
    written, rewritten = (
        OperationGraph(graph_as_run(updates, execution), traced.captured_inputs)
        for execution in (Execution.EXACT_GRAPH, Execution.GRAPH)
    )
    expected, seen = (_outputs(updates, number, graph) for graph in (written, rewritten))
    name = _first_difference(expected, seen, written.before_variables())
    if not name:
        return None
    return Parting(
        number + 1,
        name,
        _largest(expected[name], seen[name]),
        _formula(name, written, rewritten),
        _formula(name, rewritten, written),
        _source(traced.graph, name),
        _variables(traced.graph, name),
    )


def _outputs(updates: Updates, number: int, graph: OperationGraph) -> Outputs:
    """Returns the outputs of the operations of the update that follows `number` others."""
    updates.restore()
    with running(Execution.EXACT_GRAPH):
        for batch in updates.batches[:number]:
            updates.apply(batch)
    outputs = graph.outputs(updates.batches[number])
    updates.restore()
    return outputs


def _first_difference(expected: Outputs, seen: Outputs, relevant: set[str]) -> str:
    """Returns the name of the first of the `relevant` operations that differs; "" if none does."""
    parted = (name for name in expected if name in relevant and name in seen)
    return next((name for name in parted if _is_rounded(expected[name], seen[name])), "")


def _is_rounded(expected: list[np.ndarray], seen: list[np.ndarray]) -> bool:
    """Returns True if the outputs of two operations with one name differ, but only by rounding.

    A rewrite that reorders operations may give the name of one operation to another. The outputs
    then differ by more than rounding, or in their shapes.
    """
    alike = [(a.shape, a.dtype) for a in expected] == [(b.shape, b.dtype) for b in seen]
    if not alike or all(a.tobytes() == b.tobytes() for a, b in zip(expected, seen, strict=True)):
        return False
    magnitude = max(float(np.max(np.abs(a), initial=0)) for a in expected)
    return _largest(expected, seen).absolute <= _MAX_ROUNDING * magnitude


def _largest(expected: list[np.ndarray], seen: list[np.ndarray]) -> Difference:
    return max(difference(a, b) for a, b in zip(expected, seen, strict=True))


def _formula(name: str, graph: OperationGraph, other: OperationGraph, depth: int = 0) -> str:
    """Returns `Op(input, ...)`.

    Inputs that the other graph lacks or computes differently are formulas of the same kind.
    """
    node = graph.nodes[name]
    if node.op == "Const":
        value = tf.make_ndarray(node.attr["value"].tensor)
        return f"{value.item():g}" if value.size == 1 else f"constant {list(value.shape)}"
    if depth and (depth > _MAX_DEPTH or _inputs(graph, name) == _inputs(other, name)):
        return name
    inputs = _inputs(graph, name)[1:]
    parts = [_formula(text.partition(":")[0], graph, other, depth + 1) for text in inputs]
    fused = ", ".join(text.decode() for text in node.attr["fused_ops"].list.s)
    return f"{node.op}{f'[{fused}]' if fused else ''}({', '.join(parts)})"


def _inputs(graph: OperationGraph, name: str) -> list[str]:
    """Returns the type and the inputs of an operation; empty if there is none of this name."""
    node = graph.nodes.get(name)
    return [node.op, *(text for text in node.input if text[0] != "^")] if node else []


def _source(graph: tf.Graph, name: str) -> str:
    """Returns the innermost line of this package that created the operation; "" if unknown."""
    try:
        frames = graph.get_operation_by_name(name).traceback
    except KeyError:  # the operation comes from the body of a function
        return ""
    inner = [frame for frame in frames if _PACKAGE in pathlib.Path(frame.filename).parents]
    if not inner:
        return ""
    path = pathlib.Path(inner[-1].filename).relative_to(_PACKAGE.parent)
    return f"{path}:{inner[-1].lineno}, in {inner[-1].name}"


def _variables(graph: tf.Graph, name: str) -> list[str]:
    """Returns the variables whose values are inputs of the operation, directly or via Identity."""
    try:
        inputs = [tensor.op for tensor in graph.get_operation_by_name(name).inputs]
    except KeyError:
        return []
    while any(op.type == "Identity" for op in inputs):
        inputs = [op.inputs[0].op if op.type == "Identity" else op for op in inputs]
    handles = {id(op.inputs[0]) for op in inputs if op.type == "ReadVariableOp"}
    by_handle = {id(inner): outer for outer, inner in graph.captures}
    read = {id(by_handle[handle]) for handle in handles if handle in by_handle}
    return [v.name.removesuffix(":0") for v in graph.variables if id(v.handle) in read]
