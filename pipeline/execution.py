"""How and where TensorFlow runs a `tf.function`: `--eager` and `--exact_graph`, host and GPU."""

from __future__ import annotations

import enum

import tensorflow as tf

#: The device of environments, replay buffers, counters and statistics.
HOST = "/CPU:0"


def accelerator() -> str:
    """Returns the device of networks and updates: the GPU in use, or `HOST` if there is none."""
    return "/GPU:0" if tf.config.get_visible_devices("GPU") else HOST


def configure_gpu(use_gpu: bool) -> str:
    """Makes the first GPU compute float32 in float32 and repeatably, and take memory as it needs.

    Call it before the first operation runs. Other GPUs are not used.

    Args:
      use_gpu: whether to use a GPU if there is one.

    Returns:
      What moves the bits of the device that computes: its name, and CUDA's versions.

    Raises:
      RuntimeError: TensorFlow has already run with other settings.
    """
    gpus = tf.config.list_physical_devices("GPU")[:1] if use_gpu else []
    if tf.config.get_visible_devices("GPU") != gpus:
        tf.config.set_visible_devices(gpus, "GPU")
    if not gpus:
        return "CPU"
    tf.config.experimental.set_memory_growth(gpus[0], True)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.experimental.enable_op_determinism()
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    build = tf.sysconfig.get_build_info()
    return f"{name}, CUDA {build['cuda_version']}, cuDNN {build['cudnn_version']}"


class Execution(enum.Enum):
    """Moves bits, and speed. `EAGER` and `EXACT_GRAPH` compute the same bits on the CPU."""

    GRAPH = "graph"
    EAGER = "eager"
    EXACT_GRAPH = "exact graph"

    @staticmethod
    def is_exact() -> bool:
        """Returns True if `EAGER` or `EXACT_GRAPH` is in force."""
        options = tf.config.optimizer.get_experimental_options()
        return tf.config.functions_run_eagerly() or options.get("disable_meta_optimizer", False)

    def configure(self) -> None:
        """Applies to every call of a `tf.function` from now on, whenever it was traced."""
        tf.config.run_functions_eagerly(self is Execution.EAGER)
        # The whole optimizer: without constant folding and arithmetic optimization alone, some
        # networks keep a difference, which remapping makes.
        options = {"disable_meta_optimizer": self is Execution.EXACT_GRAPH}
        tf.config.optimizer.set_experimental_options(options)
