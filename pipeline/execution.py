"""How and where TensorFlow runs a `tf.function`: `--eager` and `--exact_graph`, host and GPU."""

from __future__ import annotations

import enum

import tensorflow as tf

#: The device of environments, replay buffers, counters and statistics.
HOST = "/CPU:0"


def accelerator() -> str:
    """Returns the device of networks and updates: the first GPU, or `HOST` where there is none."""
    return "/GPU:0" if tf.config.list_physical_devices("GPU") else HOST


def configure_gpus() -> list[str]:
    """Makes GPUs compute float32 in float32 and repeatably, and take memory as it is needed.

    Call it before the first operation runs. Without a GPU it does nothing.

    Returns:
      The GPUs' names.
    """
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.experimental.enable_op_determinism()
    details = (tf.config.experimental.get_device_details(gpu) for gpu in gpus)
    return [detail.get("device_name", "GPU") for detail in details]


class Execution(enum.Enum):
    """Moves bits, and speed. `EAGER` and `EXACT_GRAPH` compute the same bits on the CPU."""

    GRAPH = "graph"
    EAGER = "eager"
    EXACT_GRAPH = "exact graph"

    @staticmethod
    def exact_flag() -> str:
        """Returns the flag in force whose bits are promised, --eager or --exact_graph, or ""."""
        if tf.config.functions_run_eagerly():
            return "--eager"
        options = tf.config.optimizer.get_experimental_options()
        return "--exact_graph" if options.get("disable_meta_optimizer") else ""

    def configure(self) -> None:
        """Applies to every call of a `tf.function` from now on, whenever it was traced."""
        tf.config.run_functions_eagerly(self is Execution.EAGER)
        # The whole optimizer: without constant folding and arithmetic optimization alone, some
        # networks keep a difference, which remapping makes.
        options = {"disable_meta_optimizer": self is Execution.EXACT_GRAPH}
        tf.config.optimizer.set_experimental_options(options)
