"""Runs a graph as TensorFlow optimized it and returns the outputs of each operation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.eager import context

from pipeline.benchmarks.eager_graph.updates import Batch, Updates, running
from pipeline.utils.execution import Execution

#: The outputs of each operation, by its name.
Outputs: TypeAlias = dict[str, list[np.ndarray]]

_INTERFACE = ("_Arg", "_Retval")
_CHANGES = re.compile(r"Resource(Apply|Scatter)|Assign\w*VariableOp")  # operations on variables


def graph_as_run(updates: Updates, execution: Execution) -> GraphDef:
    """Returns an update's graph after the graph optimizer's last pass, from a call's run metadata.

    If a call runs several graphs, this is the one with the most nodes.
    """
    updates.restore()
    with running(execution):
        context.context().enable_graph_collection()
        try:
            updates.new_function()(updates.batches[0])
            metadata = context.context().export_run_metadata()
        finally:
            context.context().disable_graph_collection()
    updates.restore()
    graphs = (graphs.post_optimization_graph for graphs in metadata.function_graphs)
    return max(graphs, key=lambda graph: len(graph.node))


class OperationGraph:
    """Graph of an update that returns the outputs of every operation.

    Attributes:
      nodes: Nodes of the graph, by name.
    """

    def __init__(self, graph: GraphDef, captured: list[tf.Tensor]):
        """Initializes the graph.

        Args:
          graph: A graph from `graph_as_run`.
          captured: Handles of the variables, in the order in which the traced function captured
            them.
        """
        self.nodes: dict[str, NodeDef] = {node.name: node for node in graph.node}
        self._graph = graph
        self._captured = captured
        self._run: tf.types.experimental.ConcreteFunction | None = None

    def before_variables(self) -> set[str]:
        """Returns the names of all operations on which the new value of some variable depends."""
        waiting = [name for name, node in self.nodes.items() if _CHANGES.match(node.op)]
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                inputs = self.nodes[name].input
                waiting += [text.partition(":")[0] for text in inputs if text[0] != "^"]
        return found

    def outputs(self, batch: Batch) -> Outputs:
        """Makes the update and returns the outputs in an order in which the operations can run.

        Operations in branches of conditions and in bodies of loops are left out, because they do
        not run exactly once.
        """
        arguments = [*tf.nest.flatten(batch), *self._captured]
        if self._run is None:
            signature = [tf.TensorSpec(x.shape, x.dtype) for x in arguments]
            self._run = tf.compat.v1.wrap_function(self._import, signature)
        with running(Execution.EXACT_GRAPH):
            flat = self._run(*arguments)
        outputs: Outputs = {}
        for name, value in zip(self._names, flat, strict=True):
            outputs.setdefault(name, []).append(value.numpy())
        return outputs

    def _import(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        inner = GraphDef(versions=self._graph.versions, library=self._graph.library)
        inner.node.extend(node for node in self._graph.node if node.op not in _INTERFACE)
        for node in inner.node:
            # Colocation refers to nodes of the traced graph, which are not in this one.
            node.attr.pop("_class", None)
        read = {text.partition(":")[0] for node in inner.node for text in node.input}
        inputs = {
            f"{node.name}:0": arguments[node.attr["index"].i]
            for node in self._graph.node
            if node.op == "_Arg" and node.name in read
        }
        tf.graph_util.import_graph_def(inner, input_map=inputs, name="")
        operations = arguments[0].graph.get_operations()
        tensors = [
            tensor
            for operation in _unconditional(operations)
            for tensor in operation.outputs
            if operation.name in self.nodes and tensor.dtype not in (tf.resource, tf.variant)
        ]
        self._names = [tensor.op.name for tensor in tensors]
        return tensors


def _unconditional(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns the operations that are outside of branches and loops.

    Args:
      operations: Operations in an order in which they can run.
    """
    inside: set[str] = set()
    for operation in operations:
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        is_loop = any(other.type in ("Enter", "NextIteration") for other in before)
        ends = operation.type == "Exit" or operation.type == "Merge" and not is_loop
        begins = operation.type in ("Switch", "Enter")
        if begins or not ends and any(other.name in inside for other in before):
            inside.add(operation.name)
    return [operation for operation in operations if operation.name not in inside]
