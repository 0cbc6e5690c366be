"""Imports TensorFlow and TF-Agents in the way that TF-Agents 0.19 needs on a current TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator

from pipeline.errors import UserError

LEGACY_KERAS = "TF_USE_LEGACY_KERAS"  # TensorFlow's switch: "1" makes tf.keras Keras 2 (tf-keras)
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# What TensorFlow's libraries print while they load, before they read TF_CPP_MIN_LOG_LEVEL.
_START_UP_LINES = r"^(WARNING: All log messages before absl::InitializeLog|[IWE]0000 )"

KERAS_3_MESSAGE = (
    "TF-Agents needs Keras 2, and tf.keras is Keras 3 in this process. Set the environment "
    f"variable {LEGACY_KERAS}=1 before TensorFlow is imported; for Keras 3 models of your own, "
    "use `import keras` instead of tf.keras."
)
NO_TF_AGENTS_MESSAGE = (
    "TF-Agents is not installed. Its outdated requirements keep it out of this package's, so it "
    "takes a command of its own: pip install --no-deps tf-agents==0.19.0"
)


def import_tensorflow(onednn: bool | None = None) -> None:
    """Imports TensorFlow, with Keras 2 as `tf.keras`, and all of TF-Agents.

    Call it before importing any module of this package that uses TensorFlow. Variables that the
    user has set in the environment win. Once it has succeeded, another call does nothing.

    Args:
      onednn: whether TensorFlow uses oneDNN's kernels. None leaves the choice to TensorFlow, which
        makes it by the kind of processor.

    Raises:
      UserError: `tf.keras` is Keras 3, because the program imported TensorFlow before or the
        environment asks for it; or TF-Agents is not installed.
    """
    if importlib.util.find_spec("tf_agents") is None:
        raise UserError(NO_TF_AGENTS_MESSAGE)
    if "tensorflow" not in sys.modules:
        os.environ.setdefault(LEGACY_KERAS, "1")
        if onednn is not None:
            os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", str(int(onednn)))
        with _without_start_up_lines():
            import tensorflow  # noqa: F401
    import tensorflow as tf
    import tf_keras

    if tf.keras.Model is not tf_keras.Model:
        raise UserError(KERAS_3_MESSAGE)
    if "tf_agents" not in sys.modules:
        _import_tf_agents()


def _import_tf_agents() -> None:
    """Imports TF-Agents, of which every subpackage comes along, without its gym.

    TF-Agents imports the legacy gym in one unguarded place and needs nothing of it here. The empty
    module stands in only meanwhile, so that no other library takes it for the real one.
    """
    with contextlib.ExitStack() as stack:
        if "gym" not in sys.modules:
            sys.modules["gym"] = types.ModuleType("gym")
            stack.callback(sys.modules.pop, "gym")
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", SyntaxWarning)  # Python compares literals by `is` there
        from tf_agents.networks import categorical_projection_network

    # It calls int() on an array of one number, which NumPy 2.4 refuses.
    categorical_projection_network.int = lambda array: int(array.item())


@contextlib.contextmanager
def _without_start_up_lines() -> Iterator[None]:
    """Keeps TensorFlow's start-up lines from standard error; everything else passes."""
    with contextlib.ExitStack() as stack:
        wants_lines = os.environ.setdefault(_LOG_LEVEL, "3") != "3"
        with contextlib.suppress(OSError):  # there is no standard error, or no grep
            if not wants_lines:
                _filter_standard_error(stack)
        yield


def _filter_standard_error(stack: contextlib.ExitStack) -> None:
    """Sends file descriptor 2 through grep until `stack` unwinds.

    A process of its own filters, so that what a crash of the import prints is not lost.
    """
    standard_error = os.dup(2)
    stack.callback(os.close, standard_error)
    command = ["grep", "--text", "--line-buffered", "-vE", _START_UP_LINES]
    grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=standard_error)
    assert grep.stdin is not None
    os.dup2(grep.stdin.fileno(), 2)
    grep.stdin.close()

    def wait() -> None:
        # A process that another thread has started meanwhile goes on writing through it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            grep.wait(timeout=1)

    stack.callback(wait)
    stack.callback(os.dup2, standard_error, 2)
