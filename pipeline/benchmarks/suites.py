"""Loads benchmark suites from short gin files: configs, environments, seeds and budgets.

The shipped suites are in `gin_configs/benchmarks`. `--suite` also accepts the path of another file.
"""

from __future__ import annotations

import fnmatch
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gin

from pipeline import configuration
from pipeline.configuration.statements import find_file, shipped_names, suggest
from pipeline.utils.constraints import PositiveInt, check_arguments
from pipeline.utils.errors import UserError

SCORES = ("evaluation", "training", "iteration")
_FOLDER = "benchmarks/"
_LONGEST_NAME = 200  # bytes; the name is also that of a folder


class Experiment(NamedTuple):
    """One algorithm on one environment, to be run with several seeds.

    Attributes:
      algorithm: Name of the algorithm in reports.
      environment: Name of the environment in reports. It has no other effect: the config or a
        binding selects the environment.
      config: A shipped config or the path of a gin file.
      num_env_steps: Training budget in environment steps.
      bindings: Gin statements that override those of the config.
    """

    algorithm: str
    environment: str
    config: str
    num_env_steps: int
    bindings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns `algorithm-environment`, which is also the name of the experiment's folder."""
        return name_of(self.algorithm, self.environment)


def name_of(algorithm: str, environment: str) -> str:
    """Returns the name of an experiment, which can also be the name of a folder."""
    return re.sub(r"[^\w.-]+", "_", f"{algorithm}-{environment}")


class Suite(NamedTuple):
    """Experiments whose scores belong in one report.

    Attributes:
      name: Name of the gin file, without its suffix.
      protocol: Description of how environments are made and scores are taken. If that depends on
        the algorithm, a mapping from algorithm to description.
      score: Which number is the score of a run, one of `SCORES` (see `records`), or a mapping from
        algorithm to it.
      num_seeds: Number of seeds. The seeds are 1 to num_seeds.
      budgets: Environment steps at which scores are tabulated in addition to the final one.
      bindings: Gin statements for every run. The bindings of an experiment override them.
      experiments: The experiments, each with a different name.
    """

    name: str
    protocol: str | Mapping[str, str]
    score: str | Mapping[str, str]
    num_seeds: int
    budgets: tuple[int, ...]
    bindings: tuple[str, ...]
    experiments: tuple[Experiment, ...]

    def protocol_of(self, experiment: Experiment) -> str:
        """Returns the description of an experiment's protocol."""
        return _of_algorithm(self.protocol, experiment)

    def score_of(self, experiment: Experiment) -> str:
        """Returns which number is the score of an experiment's runs, one of `SCORES`."""
        return _of_algorithm(self.score, experiment)


def _of_algorithm(values: str | Mapping[str, str], experiment: Experiment) -> str:
    return values if isinstance(values, str) else values[experiment.algorithm]


def load(name: str, allow_imports: bool = False) -> Suite:
    """Loads a suite from a gin file and leaves gin's global configuration unchanged.

    Args:
      name: Name of a shipped suite, such as `classic`, or the path of a gin file.
      allow_imports: True to let the file import modules from outside this package.

    Raises:
      UserError: If there is no suite of this name, if a value in it is invalid, or if it binds
        what is not used.
    """
    path = _find(name)
    with configuration.preserved():
        configuration.load([str(path)], allow_imports=allow_imports)
        built = suite(path.stem)
        if unused := configuration.unused(path):
            raise UserError(f"{unused} Statements for the runs belong in suite.bindings, as texts.")
        return built


def select_experiments(suite: Suite, patterns: Sequence[str]) -> Suite:
    """Returns the suite with only those experiments whose names match one of the patterns.

    Args:
      suite: The suite.
      patterns: Names of experiments, or patterns with the wildcards of a shell.

    Raises:
      UserError: If there is no pattern, or if no experiment matches one of them.
    """
    names = [experiment.name for experiment in suite.experiments]
    chosen: set[str] = set()
    for pattern in patterns or [""]:  # An empty flag names no experiment.
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise UserError(
                f"--experiments={pattern}: the suite {suite.name} has no such experiment."
                f"{suggest(pattern, names)} Its experiments are {', '.join(names)}."
            )
        chosen.update(matching)
    return suite._replace(experiments=tuple(e for e in suite.experiments if e.name in chosen))


def shipped() -> list[str]:
    """Returns the names of the shipped suites."""
    return [name.removeprefix(_FOLDER) for name in shipped_names() if name.startswith(_FOLDER)]


def _find(name: str) -> pathlib.Path:
    if name in shipped():
        return configuration.find_config(_FOLDER + name)
    try:
        return find_file(name, [pathlib.Path()])
    except UserError as error:
        raise UserError(
            f"no suite is named {name!r}.{suggest(name, shipped())} The shipped suites are "
            f"{', '.join(shipped())}. Use one of them, or the path of a gin file that binds "
            "suite.experiments."
        ) from error


@gin.configurable(denylist=["name"])
def suite(
    name: str,
    *,
    protocol: str | Mapping[str, str] = "",
    score: str | Mapping[str, str] = "evaluation",
    num_seeds: PositiveInt = 5,
    budgets: Sequence[PositiveInt] = (),  # environment steps
    bindings: Sequence[str] = (),
    experiments: Sequence[Sequence[Any]] = (),  # fields of Experiment; bindings may follow
) -> Suite:
    """Builds the suite that gin's bindings describe.

    Raises:
      UserError: If a value is invalid.
    """
    are_many = isinstance(experiments, list | tuple)
    _check(are_many, "experiments", experiments, "must be a tuple of experiments")
    built = tuple(_experiment(entry) for entry in experiments)
    _check_experiments(built)
    is_score = _covers(score, built) and all(_of_algorithm(score, e) in SCORES for e in built)
    _check(is_score, "score", score, f"must be {' or '.join(SCORES)}, or one for every algorithm")
    check_arguments(suite, locals())
    _check(are_texts(bindings), "bindings", bindings, "must be gin statements")
    expected = "must describe how scores are taken, for every algorithm"
    _check(bool(protocol) and _covers(protocol, built), "protocol", protocol, expected)
    return Suite(name, protocol, score, num_seeds, tuple(budgets), tuple(bindings), built)


def _covers(values: str | Mapping[str, str], experiments: Sequence[Experiment]) -> bool:
    if isinstance(values, Mapping):
        is_complete = {e.algorithm for e in experiments} <= values.keys()
        return is_complete and are_texts([*values.values()])
    return isinstance(values, str)


def _experiment(entry: Sequence[Any]) -> Experiment:
    is_right = isinstance(entry, list | tuple) and len(entry) >= 4
    is_right = is_right and are_texts((*entry[:3], *entry[4:]))
    expected = "must be (algorithm, environment, config, environment steps, *bindings)"
    _check(is_right, "experiments", entry, expected)
    algorithm, environment, config, num_env_steps, *bindings = entry
    is_count = type(num_env_steps) in (int, float) and num_env_steps >= 1
    is_count = is_count and num_env_steps % 1 == 0
    expected = "must have a whole number of environment steps, at least 1, in the fourth place"
    _check(is_count, "experiments", entry, expected)
    return Experiment(algorithm, environment, config, int(num_env_steps), tuple(bindings))


def _check_experiments(experiments: Sequence[Experiment]) -> None:
    names = [experiment.name for experiment in experiments]
    _check(bool(names), "experiments", (), "a suite needs at least one")
    long = [name for name in names if len(name.encode()) > _LONGEST_NAME]
    _check(not long, "experiments", long[:1], f"a name may have {_LONGEST_NAME} bytes at most")
    twice = [name for name in names if names.count(name) > 1]
    _check(not twice, "experiments", twice[:1], "this algorithm and environment occur twice")


def are_texts(values: Any) -> bool:
    """Returns True if `values` is a tuple or list of strings."""
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _check(is_right: bool, parameter: str, value: Any, need: str) -> None:
    if not is_right:
        raise UserError(f"suite.{parameter} = {value!r}: {need}.")
