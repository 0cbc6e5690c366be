"""Records what can change a run's exact results, and compares it when the run is resumed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import pprint
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pipeline import configuration
from pipeline.configuration.statements import Binding, Macro, Source, leaves, scan
from pipeline.utils import files
from pipeline.utils.errors import RetryableError, UserError
from pipeline.utils.processor import tensorflow_threads, vector_instructions

_FILE = "circumstances.json"
_PACKAGES = (
    *("tensorflow", "tf-keras", "tensorflow-probability", "tf-agents"),
    *("gymnasium", "ale-py", "numpy", "gin-config"),
)
# Packages with which environments compute, where they are installed.
_OF_ENVIRONMENTS = ("box2d", "mujoco", "opencv-python", "opencv-python-headless")
# Environment variables that choose the kernels, except those about what kernels print.
_OF_KERNELS = re.compile(
    r"(?!.*(VERBOSE|DUMP|LOG_PATH))"
    r"((ONEDNN|DNNL|NVIDIA_TF32|TF_(XLA|CONV2D|CUBLAS|CUDNN|CUFFT|FP16|MATMUL|SET_ONEDNN))_.*"
    r"|TF_AUTO_MIXED_PRECISION_.*|TF_DETERMINISTIC_OPS|XLA_FLAGS|CUBLAS_WORKSPACE_CONFIG"
    r"|TF_ENABLE_(FFT_TILING_FORWARD|MAXPOOL_NANPROP|ONEDNN_SPMM|WINOGRAD_NONFUSED|ZENDNN_OPTS)"
    r"|TF_USE_(CUBLASLT|CUDNN_.*|DEEP_CONV2D|DEFAULT_CONV_ALGO|DETERMINISTIC_.*))"
)
# These parameters do not affect a run's results, or only by what is compared in their place.
_HARMLESS = {
    "Patience.give_up_after",
    "Watchdog.timeout",
    "atari_environment.num_threads",
    "configure_tensorflow.inter_op",
    "configure_tensorflow.intra_op",
    "configure_tensorflow.onednn",
    "configure_tensorflow.use_gpu",
    "distributed_runner.ray_address",
    "distributed_runner.timeout",
    "gymnasium_environment.own_thread",
    "train.checkpoint_interval",
    "train.log_interval",
}
# These parameters of evaluations do not affect what a run learns.
_OF_EVALUATION = {"Evaluator.max_episode_steps", "train.num_final_episodes"}
# The length of a run does not affect the steps taken so far, unless a schedule spans the whole run.
_LENGTH = "train.num_env_steps"
_OF_WHOLE_RUN = "whole_run"
_MACRO = "gin.macro"
_VERSION = "version of "
_INSTRUCTIONS = "processor's instructions"
_VARIABLES = "environment variables"
# What depends on the machine, rather than on the command.
_OF_TRAITS = (_VERSION, _INSTRUCTIONS, _VARIABLES)
_OF_MACHINE = (*_OF_TRAITS, "threads.", "device", "oneDNN")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect the computation."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    for name in _OF_ENVIRONMENTS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {"python": platform.python_version(), **packages}


def traits() -> dict[str, str]:
    """Returns what changes the exact results of a run from machine to machine, except threads."""
    return {
        **{f"{_VERSION}{name}": version for name, version in versions().items()},
        f"{_VERSION}C library": " ".join(platform.libc_ver()),  # it has exp, log, sin and the like
        _INSTRUCTIONS: " ".join(vector_instructions()),
        _VARIABLES: " ".join(
            f"{k}={v}" for k, v in sorted(os.environ.items()) if _OF_KERNELS.fullmatch(k)
        ),
    }


def threads(chosen: Mapping[str, int]) -> dict[str, str]:
    """Returns the numbers of threads that TensorFlow creates, given those that were chosen."""
    return {f"threads.{k}": str(tensorflow_threads(k, count)) for k, count in chosen.items()}


def saved_traits(checkpoint: pathlib.Path) -> dict[str, str]:
    """Returns the `traits` of the machine that wrote a checkpoint; {} if they are not known."""
    try:
        saved = files.read_object(checkpoint / "circumstances" / _FILE)
    except (ValueError, OSError):
        return {}  # A resume examines the checkpoint, and reports what is damaged.
    return {k: str(v) for k, v in saved.items() if k.startswith(_OF_TRAITS)}


class Exactness(NamedTuple):
    """Policy for resuming a run that might not continue bit for bit."""

    allow_inexact: bool = False  # Resume even if circumstances differ.
    require_exact: bool = False  # Refuse a run that cannot continue its episodes exactly.

    def check_runner(self, is_repeatable: bool) -> None:
        """Checks that the results of the run depend only on the seed, if that is required.

        Args:
          is_repeatable: Whether they do; see `iteration.Runner`.

        Raises:
          UserError: If that is required and the results also depend on something else.
        """
        if self.require_exact and not is_repeatable:
            raise UserError(
                "The order of actors in threads, and of messages that are taken as they arrive, "
                "cannot be resumed exactly. Bind asynchronous_runner.scheduler = "
                '"deterministic", or distributed_runner.order = "turns", or drop '
                "--require_exact_resume."
            )

    def check_episodes(self, divergence: str) -> None:
        """Checks that environments can continue their episodes, if that is required.

        Args:
          divergence: Reason why they cannot, or "" if they can.

        Raises:
          UserError: If that is required and there is such a reason.
        """
        if self.require_exact and divergence:
            raise UserError(
                f"{divergence}. To continue with new episodes, drop --require_exact_resume."
            )


DEFAULT_EXACTNESS = Exactness()


def configured_otherwise(operative_config: pathlib.Path) -> list[str]:
    """Returns the values that differ from another run's configuration, one line each.

    The length of the run is not compared.

    Raises:
      UserError: If the file cannot be read.
    """
    harmless = {*_HARMLESS, _LENGTH}
    written: dict[tuple[str, str], dict[str, Any]] = {}
    for binding in _bindings(Source.read(operative_config), harmless):
        parameter = binding.parameter or "value"
        key = (binding.scope, binding.selector) if binding.parameter else (binding.name, _MACRO)
        written.setdefault(key, {})[parameter] = binding.value
    lines = []
    for (scope, selector), values in written.items():
        here = configuration.in_force(scope, selector)
        there = configuration.defaults(selector) | values
        for name in there | here if here else ():  # What is not imported cannot be compared.
            pair = [_text(of[name]) if name in of else "nothing" for of in (there, here)]
            if pair[0] != pair[1] and f"{selector}.{name}" not in harmless:
                lines.append(f"{_name(scope, selector, name)}: {pair[0]} there, {pair[1]} here")
    return lines


def _name(scope: str, selector: str, parameter: str) -> str:
    return scope if selector == _MACRO else Binding(scope, selector, parameter, None, "").name


def _text(value: Any) -> str:
    """Formats a value, with functions and classes as references."""
    return f"@{value.__name__}" if callable(value) else pprint.pformat(value, sort_dicts=False)


def _bindings(source: Source, harmless: Collection[str]) -> list[Binding]:
    """Returns an operative configuration's bindings, except those of `harmless` parameters.

    Macros that only such parameters use are left out, too.
    """
    found = [x for x in scan(source, allow_imports=True) if isinstance(x, Binding)]
    kept = [x for x in found if f"{x.selector}.{x.parameter}" not in harmless]
    used, before = _macros(x for x in kept if x.parameter), set[str]()
    while used != before:  # A macro can stand for another one.
        before, used = used, used | _macros(x for x in found if x.name in used)
    return [x for x in kept if x.parameter or x.name in used]


def _macros(bindings: Iterable[Binding]) -> set[str]:
    return {leaf.name for x in bindings for leaf in leaves(x.value) if isinstance(leaf, Macro)}


def check_seed(folder: pathlib.Path, saved: Any, seed: int) -> None:
    """Checks that a run is resumed with the seed with which it began.

    Raises:
      UserError: If it is not; no flag allows that.
    """
    if str(saved) != str(seed):
        raise UserError(
            f"{folder} was begun with --seed={saved}, not {seed}. Resume with that seed, or choose "
            "another --root_dir."
        )


class Circumstances:
    """Holds everything besides variables that affects a run's exact results, as a checkpoint part.

    It is compared instead of restored. Make it the first part of a checkpoint, so that a run that
    cannot be resumed exactly is refused before anything is restored.

    Attributes:
      settings: Settings of TensorFlow, see `configure_tensorflow`.
      seed: Seed of the run.
      exactness: What to do if the circumstances differ.
      differences: Differences from the restored circumstances, one line each.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        seed: int,
        folder: pathlib.Path,
        exactness: Exactness = DEFAULT_EXACTNESS,
    ):
        """Initializes the part; `folder` names the run in messages.

        Call it after everything that the operative configuration lists has been built. What changes
        later does not count: values that an environment reads, or the processors of the process,
        because TensorFlow keeps its threads.
        """
        self.settings = dict(settings)
        self.seed = seed
        self.exactness = exactness
        self.differences: list[str] = []
        self._folder = folder
        self._now = self._circumstances()

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes the circumstances of this process."""
        (folder / _FILE).write_text(json.dumps(self._now, indent=1))

    def restore(self, folder: pathlib.Path) -> None:
        """Compares the saved circumstances with those of this process.

        Raises:
          UserError: If they differ, and `exactness` does not allow that; a RetryableError if
            another machine might continue the run.
          ValueError: If the file contains something else.
        """
        saved = files.read_object(folder / _FILE, "seed")
        if not all(isinstance(value, str) for value in saved.values()):
            raise ValueError(f"{_FILE} is damaged: all its values must be strings")
        now = self._now
        self.differences = [
            f"{name}: {saved.get(name, 'nothing')} in the checkpoint, "
            f"{now.get(name, 'nothing')} here"
            for name in sorted(now.keys() | saved.keys())
            if saved.get(name) != now.get(name) and not self._is_harmless(name, saved)
        ]
        check_seed(self._folder, saved["seed"], self.seed)
        if self.differences and not self.exactness.allow_inexact:
            lines = "\n  ".join(self.differences)
            are_of_machine = all(line.startswith(_OF_MACHINE) for line in self.differences)
            raise (RetryableError if are_of_machine else UserError)(
                f"{self._folder} cannot be resumed exactly here:\n  {lines}\nResume it as it was "
                "started, pass --allow_inexact_resume to resume it anyway and record this in "
                "run.json, or begin a new run with its agent: "
                f"--warm_start={shlex.quote(str(self._folder))}."
            )

    def _is_harmless(self, name: str, saved: Mapping[str, str]) -> bool:
        """Returns True if a difference in a name does not affect the results.

        A package was not installed, or an earlier revision of this package lacked the name, or
        saved it although it is harmless.
        """
        if name not in self._now:
            is_macro = name.isidentifier()
            return is_macro or name.rpartition("/")[2] in _HARMLESS | _OF_EVALUATION
        if name in saved:
            return False
        if name.startswith(_OF_TRAITS):
            return True
        selector, _, parameter = name.rpartition("/")[2].rpartition(".")
        defaults = configuration.defaults(selector)
        return parameter in defaults and repr(defaults[parameter]) == self._now[name]

    def _circumstances(self) -> dict[str, str]:
        text = configuration.operative_config()
        harmless = _HARMLESS | _OF_EVALUATION
        if _OF_WHOLE_RUN not in text:
            harmless.add(_LENGTH)
        bindings = {b.name: repr(b.value) for b in _bindings(Source(text, None), harmless)}
        return {
            "seed": str(self.seed),
            **traits(),
            **threads(self.settings["threads"]),
            "execution (--eager, --exact_graph)": self.settings["execution"],
            **({"--warm_start": x} if (x := self.settings.get("warm_start")) else {}),
            "oneDNN": str(self.settings["onednn"]),
            "device": self.settings["device"],
            **bindings,
        }
