"""Trains with a second logical CPU as the accelerator: `python two_devices.py CONFIG BINDING...`.

Prints, as JSON, which devices the graph of training asks for, and what of images crosses from one
to another.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from pipeline.tensorflow_import import import_tensorflow

IMAGE = [84, 84]


def main(config: str, *bindings: str) -> dict[str, Any]:
    import tensorflow as tf

    from pipeline import configuration, execution

    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, devices)
    execution.accelerator = lambda: "/CPU:1"
    from pipeline.train_loop import build_bound

    configuration.load([config], bindings)
    parts = build_bound(seed=1)
    state = parts.runner.initial_state()
    forever = tf.constant(1_000_000, tf.int64)
    if parts.experience.keeps_rows:
        state = parts.runner.collect_randomly(state, tf.constant(10, tf.int64), forever)
    train: Any = parts.runner.train
    graph = train.get_concrete_function(state, forever, forever).graph
    train(state, tf.constant(2, tf.int64), forever)
    parts.close()
    return {
        "devices": devices_of(graph),
        "crossings": crossings(graph),
        "weights": sorted({name_of(x.device) for x in parts.agent.variables}),
    }


def operations(graph: Any) -> Iterator[Any]:
    """All of a graph, those of loops and branches included."""
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from operations(function.graph)


def name_of(device: str) -> str:
    """`CPU:1` of `/job:localhost/.../device:CPU:1`; "" where TensorFlow chooses."""
    return device.rpartition("device:")[2]


def devices_of(graph: Any) -> dict[str, list[str]]:
    """Devices by the type of operation."""
    found: dict[str, set[str]] = {}
    for op in operations(graph):
        found.setdefault(op.type, set()).add(name_of(op.device))
    return {kind: sorted(devices) for kind, devices in found.items()}


def crossings(graph: Any) -> list[list[str]]:
    """Of each tensor of images that one device makes and another takes: from, to, dtype."""
    found = {
        (tensor.ref(), name_of(tensor.op.device), name_of(op.device), tensor.dtype.name)
        for op in operations(graph)
        for tensor in op.inputs
        if tensor.shape.rank is not None and tensor.shape[-2:] == IMAGE
    }
    return sorted([*places, dtype] for _, *places, dtype in found if len(set(places)) == 2)


if __name__ == "__main__":
    import_tensorflow(onednn=False)
    print(json.dumps(main(*sys.argv[1:])))
