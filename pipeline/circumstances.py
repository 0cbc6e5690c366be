"""What may move bits beside the seed: recorded in every checkpoint, compared when it is resumed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import pprint
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from pipeline import configuration, data_files
from pipeline.errors import UserError
from pipeline.gin_statements import Binding, Source, scan

_FILE = "circumstances.json"
_PACKAGES = (
    *("tensorflow", "tf-keras", "tensorflow-probability", "tf-agents"),
    *("gymnasium", "ale-py", "numpy", "gin-config"),
)
_VECTOR_INSTRUCTIONS = re.compile(r"sse4\w*|avx\w*|fma|f16c|amx\w*")
# No bit of a run depends on these.
_HARMLESS = {"Patience.give_up_after", "Watchdog.timeout", "atari_environment.num_threads"}
# How long a run is changes nothing of what it has done, unless a schedule is spread over it.
_LENGTH = "train.num_env_steps"
_OF_WHOLE_RUN = "whole_run"
_MACRO = "gin.macro"


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **packages}


def machine() -> dict[str, Any]:
    """`cpu_model` and `cpu_count` of this machine; the model is None where Linux does not tell."""
    models = _cpu_info("model name")
    return {"cpu_model": next(models, None), "cpu_count": len(os.sched_getaffinity(0))}


class Exactness(NamedTuple):
    """What to do with a run that would not go on bit for bit."""

    allow_inexact: bool = False  # go on although circumstances differ
    require_exact: bool = False  # stop where the run cannot continue its episodes as they were

    def check(
        self,
        folder: pathlib.Path,
        differences: list[str],
        divergence: str,
        is_repeatable: bool = True,
    ) -> None:
        """Raises UserError if a run is not to go on.

        Args:
          folder: of the run.
          differences: of circumstances.
          divergence: why environments cannot continue their episodes, "" if they can.
          is_repeatable: whether the seed decides all that the run does.
        """
        if self.require_exact and not is_repeatable:
            raise UserError(
                "Threads of asynchronous actors cannot be resumed exactly. Bind "
                'asynchronous_runner.scheduler = "deterministic", or drop --require_exact_resume.'
            )
        if differences and not self.allow_inexact:
            lines = "\n  ".join(differences)
            raise UserError(
                f"{folder} cannot be resumed exactly here:\n  {lines}\nResume it as it was begun;"
                " or --allow_inexact_resume goes on all the same, and says so in run.json."
            )
        if divergence and self.require_exact:
            raise UserError(
                f"{divergence}. Without --require_exact_resume the run goes on with new episodes."
            )


DEFAULT_EXACTNESS = Exactness()


def configured_otherwise(operative_config: pathlib.Path) -> list[str]:
    """Values in force that a finished run's configuration has otherwise, a line each.

    How long the run is does not count.

    Raises:
      UserError: the file cannot be read.
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
        for name in there | here if here else ():  # of what is not imported nothing can be said
            pair = [_text(of[name]) if name in of else "nothing" for of in (there, here)]
            if pair[0] != pair[1] and f"{selector}.{name}" not in harmless:
                lines.append(f"{_name(scope, selector, name)}: {pair[0]} there, {pair[1]} here")
    return lines


def _name(scope: str, selector: str, parameter: str) -> str:
    return scope if selector == _MACRO else Binding(scope, selector, parameter, None, "").name


def _text(value: Any) -> str:
    """As gin writes it: sorted; a default that is a function or a class as a reference to it."""
    return f"@{value.__name__}" if callable(value) else pprint.pformat(value)


def _bindings(source: Source, harmless: Collection[str]) -> list[Binding]:
    """Those of an operative configuration that are not of `harmless` parameters."""
    return [
        statement
        for statement in scan(source, allow_imports=True)
        if isinstance(statement, Binding)
        and f"{statement.selector}.{statement.parameter}" not in harmless
    ]


class Circumstances:
    """A part of a checkpoint that is compared, not restored."""

    def __init__(self, settings: Mapping[str, Any], seed: int):
        """`settings`: of TensorFlow, see `configure_tensorflow`; `seed`: of the run."""
        self.settings = dict(settings)
        self._seed = seed
        self._saved: dict[str, str] | None = None

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes those of this process."""
        (folder / _FILE).write_text(json.dumps(self._now(), indent=1))

    def restore(self, folder: pathlib.Path) -> None:
        """Reads those of the process that saved.

        Raises:
          ValueError: the file holds something else.
        """
        saved = data_files.read_object(folder / _FILE)
        if not all(isinstance(value, str) for value in saved.values()):
            raise ValueError(f"{_FILE} does not hold circumstances")
        self._saved = saved

    def differences(self) -> list[str]:
        """From those restored, a line each; empty if nothing was restored.

        To be called once everything is built that the operative configuration lists.
        """
        if self._saved is None:
            return []
        now = self._now()
        pairs = [
            (name, self._saved.get(name, "nothing"), now.get(name, "nothing"))
            for name in sorted(now.keys() | self._saved.keys())
        ]
        return [
            f"{name}: {saved} in the checkpoint, {here} here"
            for name, saved, here in pairs
            if saved != here
        ]

    def _now(self) -> dict[str, str]:
        text = configuration.operative_config()
        harmless = _HARMLESS if _OF_WHOLE_RUN in text else {*_HARMLESS, _LENGTH}
        bindings = {b.name: repr(b.value) for b in _bindings(Source(text, None), harmless)}
        threads = {
            f"threads.{kind}": _threads(kind, count)
            for kind, count in self.settings["threads"].items()
        }
        return {
            "seed": str(self._seed),
            **{f"version of {name}": version for name, version in versions().items()},
            **threads,
            "execution (--eager, --exact_graph)": self.settings["execution"],
            "oneDNN": str(self.settings["onednn"]),
            "device": self.settings["device"],
            "processor's instructions": " ".join(_instructions()),
            **bindings,
        }


def _threads(kind: str, count: int) -> str:
    """How many TensorFlow makes; where it may choose (0), as its variable says, or one a core."""
    chosen = os.environ.get(f"TF_NUM_{kind.replace('_', '').upper()}_THREADS")
    return str(count or chosen or machine()["cpu_count"])


def _instructions() -> list[str]:
    flags = next(_cpu_info("flags"), "").split()
    return sorted({flag for flag in flags if _VECTOR_INSTRUCTIONS.fullmatch(flag)})


def _cpu_info(name: str) -> Iterator[str]:
    """What Linux says under this name, of each core."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return (line.partition(":")[2].strip() for line in lines if line.startswith(name))
