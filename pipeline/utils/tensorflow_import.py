"""Imports TensorFlow and TF-Agents in the way that TF-Agents 0.19 needs on a current TensorFlow."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

from pipeline.utils.errors import UserError

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"  # TensorFlow's switch: "0" makes it use its own kernels
LEGACY_KERAS = "TF_USE_LEGACY_KERAS"  # TensorFlow's switch: "1" makes tf.keras Keras 2 (tf-keras)
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Lines that TensorFlow's libraries print while loading, before they read TF_CPP_MIN_LOG_LEVEL.
_START_UP_LINES = r"^(WARNING: All log messages before absl::InitializeLog|[IWE]0000 )"

_importing = threading.Lock()

KERAS_3_MESSAGE = (
    "TF-Agents needs Keras 2, and tf.keras is Keras 3 in this process. Set the environment "
    f"variable {LEGACY_KERAS}=1 before TensorFlow is imported; for Keras 3 models of your own, "
    "use `import keras` instead of tf.keras."
)
NO_DOCSTRINGS_MESSAGE = (
    "TensorFlow cannot be imported by a Python that drops docstrings: start it without -OO, and "
    "unset PYTHONOPTIMIZE."
)
NO_TF_AGENTS_MESSAGE = (
    "TF-Agents is not installed. This package cannot require it, because TF-Agents' own "
    "requirements are outdated. Install it with: pip install --no-deps tf-agents==0.19.0"
)


def import_tensorflow(onednn: bool | None = None, freeze: bool = False) -> None:
    """Imports TensorFlow, with Keras 2 as `tf.keras`, and all of TF-Agents.

    From then on, gradients are summed in a fixed order.

    Call it before importing any module of this package that uses TensorFlow. Environment variables
    that the user has set take precedence. After a successful call, further calls change nothing.
    Threads wait for each other.

    Args:
      onednn: Whether TensorFlow uses oneDNN's kernels. None leaves the choice to TensorFlow, which
        depends on the kind of processor.
      freeze: Whether later garbage collections skip all that the process holds after the import.
        Visiting TensorFlow's modules again and again would take a quarter of the time of a short
        training. A library must not freeze what belongs to its caller.

    Raises:
      UserError: If `tf.keras` is Keras 3, because the program imported TensorFlow before or the
        environment asks for it, if TF-Agents is not installed, or if Python drops docstrings.
    """
    with _importing:
        if sys.flags.optimize >= 2:
            raise UserError(NO_DOCSTRINGS_MESSAGE)
        if importlib.util.find_spec("tf_agents") is None:
            raise UserError(NO_TF_AGENTS_MESSAGE)
        _load_cusolver()
        if "tensorflow" not in sys.modules:
            if os.environ.setdefault(LEGACY_KERAS, "1") not in ("1", "true", "True"):
                raise UserError(KERAS_3_MESSAGE)
            if onednn is not None:
                os.environ.setdefault(ONEDNN, str(int(onednn)))
            with _without_start_up_lines(), _without_garbage_collection():
                import tensorflow  # noqa: F401
        import tensorflow as tf
        import tf_keras

        if tf.keras.Model is not tf_keras.Model:
            raise UserError(KERAS_3_MESSAGE)
        if "tf_agents" not in sys.modules:
            _fix_order_of_gradient_sums()
            with _without_garbage_collection():
                _import_tf_agents()
                if freeze:
                    gc.freeze()


def _load_cusolver() -> None:
    """Loads NVIDIA's cuSOLVER if its Python package is installed.

    TensorFlow 2.21 finds all libraries of CUDA in their packages but this one, and does without a
    GPU if one is missing. It finds a library that the process has loaded.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or []:
        library = pathlib.Path(folder, "cusolver", "lib", "libcusolver.so.11")
        if library.exists():
            with contextlib.suppress(OSError):  # TensorFlow tries again, and names what is missing.
                ctypes.CDLL(str(library))


def _fix_order_of_gradient_sums() -> None:
    """Makes sums of three or more gradients of one tensor the same in every run.

    TensorFlow adds them with AddN, which starts at the first input whose memory it can reuse. Which
    one that is depends on the timing of other operations, and so do the last bits of the sum.
    """
    import tensorflow as tf
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop

    def aggregate(gradients: list[Any]) -> Any:
        are_tensors = all(isinstance(x, tf.Tensor) for x in gradients)
        # Those of a TensorArray are lists (tf.variant), which only AddN can add.
        if len(gradients) > 2 and are_tensors and gradients[0].dtype.is_floating:
            return tf.reduce_sum(tf.stack(gradients), 0)
        return backprop._aggregate_grads(gradients)

    vspace = backprop._default_vspace._replace(aggregate_fn=aggregate)
    pywrap_tfe.TFE_Py_RegisterVSpace(vspace)


def _import_tf_agents() -> None:
    """Imports TF-Agents with all its subpackages, without the legacy gym.

    TF-Agents imports gym in one unguarded place but does not need it here. An empty module replaces
    gym only during the import, so that no other library takes it for the real one.
    """
    with contextlib.ExitStack() as stack:
        if "gym" not in sys.modules:
            sys.modules["gym"] = types.ModuleType("gym")
            stack.callback(sys.modules.pop, "gym")
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", SyntaxWarning)  # TF-Agents compares literals by `is`.
        from tf_agents.networks import categorical_projection_network

    # This module calls int() on an array with one number, which NumPy 2.4 does not allow.
    categorical_projection_network.int = lambda array: int(array.item())


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector, which takes a tenth of the time of a long import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _without_start_up_lines() -> Iterator[None]:
    """Keeps TensorFlow's start-up lines off standard error, and lets everything else pass."""
    with contextlib.ExitStack() as stack:
        wants_lines = os.environ.setdefault(_LOG_LEVEL, "3") != "3"
        with contextlib.suppress(OSError):  # Standard error or grep may be missing.
            if not wants_lines:
                _filter_standard_error(stack)
        yield


def _filter_standard_error(stack: contextlib.ExitStack) -> None:
    """Sends file descriptor 2 through grep until `stack` unwinds.

    A separate process filters, so that the output of a crash during the import is not lost.
    """
    standard_error = os.dup(2)
    stack.callback(os.close, standard_error)
    command = ["grep", "--text", "--line-buffered", "-vE", _START_UP_LINES]
    grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=standard_error)
    assert grep.stdin is not None
    os.dup2(grep.stdin.fileno(), 2)
    grep.stdin.close()

    def wait() -> None:
        # grep runs on if a process that another thread started meanwhile still writes through it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            grep.wait(timeout=1)

    stack.callback(wait)
    stack.callback(os.dup2, standard_error, 2)
