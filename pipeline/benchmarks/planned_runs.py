"""Plans the runs of a suite, with their folders, commands and settings."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline import configuration
from pipeline.benchmarks.published_scores import is_same_environment, published
from pipeline.benchmarks.suites import Experiment, Suite
from pipeline.configuration.statements import Binding, Import, shipped_folder
from pipeline.utils.errors import UserError, hinting

_BUDGET = "train.num_env_steps"
_ALLOW_IMPORTS = "--allow_gin_imports"
# Parameters that name the environment, by the factory of `train.create_environment`.
_NAMES = {
    "atari_environment": "game",
    "deepmind_atari_environment": "game",
    "gymnasium_environment": "name",
}
_ARGUMENTS = "gymnasium_environment.kwargs"


class Run(NamedTuple):
    """Planned training run, which may take several processes to finish.

    Attributes:
      suite: The suite that the run belongs to.
      experiment: The experiment that the run belongs to.
      seed: Seed of the run.
      folder: Folder of the run, `<output_dir>/<suite>/<experiment>/seed-<n>`.
      bindings: Gin statements that override those of the config, in order.
      settings: Values that the config and the bindings bind, as text, by name. Defaults of the code
        are not included. They are equal for runs that differ only in the seed.
      flags: Flags of `pipeline.train`, in addition to those that identify the run.
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
        """Returns the name of the run for messages."""
        return f"{self.experiment.name} seed {self.seed}"

    @property
    def config(self) -> str:
        """Returns the gin file as a process with another working directory names it."""
        path = configuration.find_config(self.experiment.config)
        is_shipped = path.is_relative_to(shipped_folder())
        return self.experiment.config if is_shipped else str(path.absolute())

    @property
    def num_env_steps(self) -> int:
        """Returns the budget in environment steps, from the suite or a binding."""
        return int(self.settings[_BUDGET])

    @property
    def log(self) -> pathlib.Path:
        """Returns the log of the processes' output, which is outside of the run's folder."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def arguments(self) -> list[str]:
        """Returns the flags for `pipeline.train`."""
        return [
            f"--root_dir={self.folder}",
            f"--gin_file={self.config}",
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
    """Returns all runs of a suite, with the first seed of every experiment before any second seed.

    Args:
      suite: The suite to plan.
      output_dir: Folder of the benchmark.
      gin_bindings: Statements for every run, after those of the suite.
      flags: Flags of every run, in addition to those that identify the run.

    Raises:
      UserError: If a config is missing, if it or a binding cannot be read, or if an experiment
        trains another environment than the one whose published scores it is compared with.
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
    with hinting(lambda: f"It is a binding of the suite or search, or of {experiment.name} in it."):
        configuration.read((), (*suite.bindings, *experiment.bindings), allow_imports=True)
    given = (*suite.bindings, *experiment.bindings, *gin_bindings)
    bindings = (budget, *(line for binding in given for line in expanded(binding)))
    settings = _settings(experiment.config, bindings, _ALLOW_IMPORTS in flags)
    _check_environment(suite, experiment, settings)
    return Run(suite, experiment, 1, folder, bindings, settings, tuple(flags))


def expanded(binding: str) -> list[str]:
    """Returns a binding, or all statements of the files that it includes.

    A process in another working directory, or on another machine, may not find these files.
    """
    if not re.search(r"^\s*include\b", binding, re.MULTILINE):
        return [binding]
    statements = configuration.read((), [binding], allow_imports=True)
    return [x.text if isinstance(x, Import) else f"{x.name} = {x.value!r}" for x in statements]


def _settings(config: str, bindings: Sequence[str], allow_imports: bool) -> dict[str, str]:
    statements = configuration.read([config], bindings, allow_imports)
    values = {s.short_name: s.value for s in statements if isinstance(s, Binding)}
    foreign = [name for name in values if name.startswith("suite.")]
    if foreign:
        raise UserError(
            f"{foreign[0]} is not a parameter of the runs: bind it in a gin file of your own, and "
            "pass its path as --suite."
        )
    values[_BUDGET] = _whole_number(values[_BUDGET])
    return {name: repr(value) for name, value in values.items()}


def bound(settings: Mapping[str, str], name: str, default: str = "") -> str:
    """Returns the text of a value among a run's settings, also if it is bound to macros."""
    value = settings.get(name, default)
    for _ in settings:  # macros may be values of macros
        value = settings.get(value.removeprefix("%"), value)
    return value


def _check_environment(suite: Suite, experiment: Experiment, settings: Mapping[str, str]) -> None:
    """Checks that an experiment trains in the environment whose scores it is compared with.

    Raises:
      UserError: If it binds another environment.
    """
    factory = bound(settings, "train.create_environment").removeprefix("@").rpartition(".")[2]
    trained = bound(settings, f"{factory}.{_NAMES.get(factory, '')}").strip("'\"")
    name, protocol = experiment.environment, suite.protocol_of(experiment)
    # With arguments, an environment may have the name of another, such as LunarLanderContinuous.
    if not trained or _ARGUMENTS in settings or is_same_environment(trained, name):
        return
    if any(score.protocol == protocol for score in published(name)):
        raise UserError(
            f"{experiment.name} would train {trained}. Bind its environment in suite.experiments, "
            "or give the experiment another name, because it would be compared with scores that "
            f"are published for {name}."
        )


def _whole_number(value: Any) -> int:
    """Returns the budget, which gin may write as 2e4, as an int."""
    if type(value) not in (int, float) or value < 1 or value % 1 != 0:
        raise UserError(f"{_BUDGET} = {value!r}: a benchmark needs a whole number of at least 1.")
    return int(value)
