"""Configures how and where TensorFlow runs a `tf.function`: eagerly or as a graph, CPU or GPU."""

from __future__ import annotations

import enum
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config

T = TypeVar("T")

#: Device of environments, replay buffers, counters and statistics.
HOST = "/CPU:0"

# The second file is that of Windows' subsystem for Linux.
NVIDIA_DRIVER = [pathlib.Path("/dev/nvidiactl"), pathlib.Path("/usr/lib/wsl/lib/libcuda.so.1")]
_UNUSED_GPU = (
    "warning: TensorFlow cannot use the GPU of this machine, so networks and updates run on the "
    "CPU. `make install GPU=1` installs CUDA; with TF_CPP_MIN_LOG_LEVEL=0, TensorFlow prints what "
    "is missing. With configure_tensorflow.use_gpu = False, this warning disappears."
)


def accelerator() -> str:
    """Returns the device of networks and updates: the GPU in use, or `HOST` if there is none."""
    return "/GPU:0" if tf.config.get_visible_devices("GPU") else HOST


def configure_gpu(use_gpu: bool) -> None:
    """Configures the first GPU for full float32 precision, determinism and memory growth.

    Call it before the first operation runs. Other GPUs are not used.

    Args:
      use_gpu: Whether to use a GPU if there is one.

    Raises:
      RuntimeError: If TensorFlow has already run with other settings.
    """
    gpus = tf.config.list_physical_devices("GPU")[:1] if use_gpu else []
    if tf.config.get_visible_devices("GPU") != gpus:
        tf.config.set_visible_devices(gpus, "GPU")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if gpus:
        tf.config.experimental.set_memory_growth(gpus[0], True)
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.experimental.enable_op_determinism()
    elif use_gpu and not is_hidden and any(path.exists() for path in NVIDIA_DRIVER):
        print(_UNUSED_GPU, file=sys.stderr, flush=True)


def device_name() -> str:
    """Returns properties of the compute device that affect the exact bits of results.

    These are the name of the GPU and the versions of CUDA and cuDNN for which TensorFlow was built,
    or "CPU".
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "CPU"
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    build = tf.sysconfig.get_build_info()
    return f"{name}, CUDA {build['cuda_version']}, cuDNN {build['cudnn_version']}"


def on_device(device: str, function: Callable[..., T]) -> Callable[..., T]:
    """Returns `function` with its operations on `device`, except where it requests another one."""

    def placed(*args: Any) -> T:
        with tf.device(device):
            return function(*args)

    return placed


def int64(number: int) -> tf.Tensor:
    """Converts a number to a scalar, int64 [].

    TensorFlow keeps each Python number that it converts until the process ends, but no NumPy
    number. Use this function wherever the numbers are ever new.
    """
    return tf.constant(np.int64(number))


def timestamp() -> tf.Tensor:
    """Returns the time in seconds, float64 [], also where `tf.timestamp` raises an error.

    TensorFlow has no deterministic operation for the time. Where only deterministic ones may run,
    as on a GPU (see `configure_gpu`), Python reads the clock.
    """
    if not config.is_op_determinism_enabled():
        return tf.timestamp()
    # Run eagerly, `numpy_function` would make a float32 tensor of a Python float.
    return tf.ensure_shape(tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64), [])


class Execution(enum.Enum):
    """Defines the modes in which TensorFlow runs a `tf.function`.

    The mode affects the exact bits of results, and the speed. `EAGER` and `EXACT_GRAPH` compute
    the same bits on the CPU.
    """

    GRAPH = "graph"
    EAGER = "eager"
    EXACT_GRAPH = "exact graph"

    @classmethod
    def current(cls) -> Execution:
        """Returns the mode that is in force."""
        if tf.config.functions_run_eagerly():
            return cls.EAGER
        options = tf.config.optimizer.get_experimental_options()
        return cls.EXACT_GRAPH if options.get("disable_meta_optimizer") else cls.GRAPH

    def configure(self) -> None:
        """Applies this mode to every later call of a `tf.function`, whenever it was traced."""
        tf.config.run_functions_eagerly(self is Execution.EAGER)
        # Disable the whole optimizer: if only constant folding and arithmetic optimization are
        # disabled, remapping still changes the bits of some networks.
        options = {"disable_meta_optimizer": self is Execution.EXACT_GRAPH}
        tf.config.optimizer.set_experimental_options(options)
