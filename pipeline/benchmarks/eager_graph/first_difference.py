"""The first operation at which an update's graph parts from the same operations run eagerly."""

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
_MAX_DEPTH = 2  # of formulas in one another
_MAX_ROUNDING = 1e-4  # of the largest magnitude, in float32; sums and cancellation included


class Parting(NamedTuple):
    """An operation whose outputs differ while all that it depends on and that both graphs have is
    equal to the last bit: a rewrite made the difference here, or in what took its inputs' place.

    Attributes:
      update: in which it is, from 1.
      name: of the operation, which begins with its layer where there is one.
      difference: of its outputs.
      written: the operation and its inputs as the program has them.
      rewritten: what the optimizer made of that.
      source: "file:line, in function" of the program; empty if nothing is known.
      variables: those that it reads.
    """

    update: int
    name: str
    difference: Difference
    written: str
    rewritten: str
    source: str
    variables: list[str]


def first_parting(updates: Updates, eager: list[Weights], graph: list[Weights]) -> Parting | None:
    """Makes the first update after which weights differ once more, operation by operation.

    What is written stands for eager, whose bits an exact graph has.

    Args:
      updates: to run.
      eager: their weights run eagerly.
      graph: and as a graph.

    Returns:
      The first operation that parts; None if no weights do, or no operation that both graphs have.
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
    """Of the update that follows `number` others."""
    updates.restore()
    with running(Execution.EXACT_GRAPH):
        for batch in updates.batches[:number]:
            updates.apply(batch)
    outputs = graph.outputs(updates.batches[number])
    updates.restore()
    return outputs


def _first_difference(expected: Outputs, seen: Outputs, relevant: set[str]) -> str:
    """The first operation of the `relevant` that parts; "" if none does."""
    parted = (name for name in expected if name in relevant and name in seen)
    return next((name for name in parted if _is_rounded(expected[name], seen[name])), "")


def _is_rounded(expected: list[np.ndarray], seen: list[np.ndarray]) -> bool:
    """Whether two operations of one name give the same but for rounding, and do not give equals.

    Where a rewrite changes the order of operations, it may give the name of one to another: its
    outputs then differ by more, or in their shape.
    """
    alike = [(a.shape, a.dtype) for a in expected] == [(b.shape, b.dtype) for b in seen]
    if not alike or all(a.tobytes() == b.tobytes() for a, b in zip(expected, seen, strict=True)):
        return False
    magnitude = max(float(np.max(np.abs(a), initial=0)) for a in expected)
    return _largest(expected, seen).absolute <= _MAX_ROUNDING * magnitude


def _largest(expected: list[np.ndarray], seen: list[np.ndarray]) -> Difference:
    return max(difference(a, b) for a, b in zip(expected, seen, strict=True))


def _formula(name: str, graph: OperationGraph, other: OperationGraph, depth: int = 0) -> str:
    """`Op(input, ...)`; inputs that the other graph lacks or computes otherwise likewise."""
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
    """The operation's type and what it takes in; empty if there is none of this name."""
    node = graph.nodes.get(name)
    return [node.op, *(text for text in node.input if text[0] != "^")] if node else []


def _source(graph: tf.Graph, name: str) -> str:
    """The innermost line of this package, or of a user's own agent, that made the operation."""
    try:
        frames = graph.get_operation_by_name(name).traceback
    except KeyError:  # it comes from the body of a function
        return ""
    inner = [frame for frame in frames if _PACKAGE in pathlib.Path(frame.filename).parents]
    if not inner:
        return ""
    path = pathlib.Path(inner[-1].filename).relative_to(_PACKAGE.parent)
    return f"{path}:{inner[-1].lineno}, in {inner[-1].name}"


def _variables(graph: tf.Graph, name: str) -> list[str]:
    """Variables whose value the operation takes in, directly or through an Identity."""
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
