"""Trains with a second logical CPU as the GPU: `python two_devices.py CONFIG BINDING...`.

Operations without a requested device run there, as on a GPU, also in threads, and only
deterministic ones may run. Prints, as JSON, what ran where: the devices of each type of operation,
the tensors that were sent from one device to the other, and the devices of the indices with which
threads read the rows for a checkpoint.
"""

import concurrent.futures
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from pipeline.utils.tensorflow_import import import_tensorflow

HOST, ACCELERATOR = "CPU:0", "CPU:1"


def main(config: str, *bindings: str) -> dict[str, Any]:
    import tensorflow as tf

    from pipeline import configuration
    from pipeline.replay import columns
    from pipeline.utils import execution

    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, devices)
    execution.accelerator = lambda: f"/{ACCELERATOR}"
    tf.config.experimental.enable_op_determinism()
    concurrent.futures.ThreadPoolExecutor = ThreadsOnAccelerator  # type: ignore[misc, assignment]
    from pipeline.training.train_loop import build_bound

    configuration.load([config], bindings)
    with tf.device(f"/{ACCELERATOR}"):
        parts = build_bound(seed=1)
        state = parts.runner.initial_state()
        forever = tf.constant(1_000_000, tf.int64)
        if parts.experience.keeps_rows:
            state = parts.runner.collect_randomly(state, tf.constant(20, tf.int64), forever)
        nodes = list(
            nodes_run(lambda: parts.runner.train(state, tf.constant(2, tf.int64), forever))
        )
        indices: set[str] = set()
        columns.gather = noting_indices(columns.gather, indices)
        with tempfile.TemporaryDirectory() as folder:
            parts.experience.save(pathlib.Path(folder))
    parts.close()
    return {"devices": devices_of(nodes), "sent": sent(nodes), "indices": sorted(indices)}


class ThreadsOnAccelerator(concurrent.futures.ThreadPoolExecutor):
    """Runs operations without a requested device on the accelerator, also in threads."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = ""):
        import tensorflow as tf

        device = tf.device(f"/{ACCELERATOR}")
        super().__init__(max_workers, thread_name_prefix, device.__enter__)


def noting_indices(gather, devices: set[str]):
    def noted(variable, indices):
        devices.add(name_of(indices.device))
        return gather(variable, indices)

    return noted


def nodes_run(call) -> Iterable[Any]:
    """Yields the nodes of all graphs of a call, each with the device on which it ran."""
    from tensorflow.python.eager import context

    context.context().enable_graph_collection()
    try:
        call()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    for graphs in metadata.function_graphs:
        for partition in graphs.partition_graphs:
            yield from partition.node


def name_of(device: str) -> str:
    return device.rpartition("device:")[2]


def devices_of(nodes: Iterable[Any]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for node in nodes:
        found.setdefault(node.op, set()).add(name_of(node.device))
    return {kind: sorted(devices) for kind, devices in found.items()}


def sent(nodes: Iterable[Any]) -> list[list[str]]:
    """Returns the source, dtype and name of each tensor."""
    import tensorflow as tf

    return sorted(
        [
            name_of(node.attr["send_device"].s.decode()),
            tf.as_dtype(node.attr["T"].type).name,
            node.attr["tensor_name"].s.decode(),
        ]
        for node in nodes
        if node.op in ("_Send", "_HostSend")
        and node.attr["send_device"].s != node.attr["recv_device"].s
    )


if __name__ == "__main__":
    import_tensorflow(onednn=False)
    print(json.dumps(main(*sys.argv[1:])))
