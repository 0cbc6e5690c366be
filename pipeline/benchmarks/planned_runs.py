"""The runs that a suite asks for, with their folders, commands and settings."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline import configuration
from pipeline.benchmarks.suites import Experiment, Suite
from pipeline.configuration.statements import Binding
from pipeline.utils.errors import UserError

_BUDGET = "train.num_env_steps"
_ALLOW_IMPORTS = "--allow_gin_imports"


class Run(NamedTuple):
    """One training, in as many processes as it takes to finish it.

    Attributes:
      suite: The suite of the run.
      experiment: The experiment of the suite.
      seed: Seed of the run.
      folder: Folder of the run, `<output_dir>/<suite>/<experiment>/seed-<n>`.
      bindings: Gin statements that override those of the config, in order.
      settings: What config and bindings together bind, without the defaults of the code: values as
        text, by name. Equal for runs that differ only in the seed.
      flags: Flags of `pipeline.train`, beside those that say which run it is.
    """

    suite: Suite
    experiment: Experiment
    seed: int
    folder: pathlib.Path
    bindings: tuple[str, ...]
    settings: Mapping[str, str]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the run, for people."""
        return f"{self.experiment.name} seed {self.seed}"

    @property
    def num_env_steps(self) -> int:
        """The budget in environment steps, of the suite or of a binding."""
        return int(self.settings[_BUDGET])

    @property
    def log(self) -> pathlib.Path:
        """The file with the output of the processes, outside of the folder of the run."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def arguments(self) -> list[str]:
        """The flags for `pipeline.train`."""
        return [
            f"--root_dir={self.folder}",
            f"--gin_file={self.experiment.config}",
            *(f"--gin_bindings={binding}" for binding in self.bindings),
            f"--seed={self.seed}",
            *self.flags,
        ]


def plan(
    suite: Suite,
    output_dir: pathlib.Path,
    gin_bindings: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> list[Run]:
    """Returns all runs of a suite, the first seed of every experiment before any second seed.

    Args:
      suite: The suite.
      output_dir: Folder of the benchmark.
      gin_bindings: Statements for every run, after those of the suite.
      flags: Flags of every run.

    Raises:
      UserError: If a config is missing, or if it or a binding cannot be read.
    """
    first_seeds = [_first_run(suite, e, output_dir, gin_bindings, flags) for e in suite.experiments]
    return [
        run._replace(seed=seed, folder=run.folder.with_name(f"seed-{seed}"))
        for seed in range(1, suite.num_seeds + 1)
        for run in first_seeds
    ]


def _first_run(
    suite: Suite,
    experiment: Experiment,
    output_dir: pathlib.Path,
    gin_bindings: Sequence[str],
    flags: Sequence[str],
) -> Run:
    folder = output_dir / suite.name / experiment.name / "seed-1"
    budget = f"{_BUDGET} = {experiment.num_env_steps}"
    bindings = (budget, *suite.bindings, *experiment.bindings, *gin_bindings)
    settings = _settings(experiment.config, bindings, _ALLOW_IMPORTS in flags)
    return Run(suite, experiment, 1, folder, bindings, settings, tuple(flags))


def _settings(config: str, bindings: Sequence[str], allow_imports: bool) -> dict[str, str]:
    statements = configuration.read([config], bindings, allow_imports)
    values = {s.short_name: s.value for s in statements if isinstance(s, Binding)}
    foreign = [name for name in values if name.startswith("suite.")]
    if foreign:
        raise UserError(
            f"{foreign[0]} cannot be bound here: --gin_bindings are for the runs. Copy the suite's "
            "gin file, change it there, and give its path as --suite."
        )
    values[_BUDGET] = _whole_number(values[_BUDGET])
    return {name: repr(value) for name, value in values.items()}


def _whole_number(value: Any) -> int:
    """Returns the budget, which gin may write as 2e4, as an int."""
    if type(value) not in (int, float) or value < 1 or value % 1 != 0:
        raise UserError(f"{_BUDGET} = {value!r}: a benchmark needs a whole number, at least 1.")
    return int(value)
