"""What a suite is: configs, environments, seeds and budgets, in a gin file of a few lines.

Shipped ones are in `gin_configs/benchmarks`; `--suite` takes the path of any other.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gin

from pipeline import configuration
from pipeline.configuration.statements import find_file, shipped_names, suggest
from pipeline.utils.errors import UserError

SCORES = ("evaluation", "training", "iteration")
_FOLDER = "benchmarks/"


class Experiment(NamedTuple):
    """One algorithm on one environment, to be run with several seeds.

    Attributes:
        algorithm: as reports name it.
        environment: as reports name it; the config, or a binding, is what chooses it.
        config: a shipped config or the path of a gin file.
        num_env_steps: the budget, in environment steps.
        bindings: gin statements, which override those of the config.
    """

    algorithm: str
    environment: str
    config: str
    num_env_steps: int
    bindings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`algorithm-environment`, which is also the name of a folder."""
        return name_of(self.algorithm, self.environment)


def name_of(algorithm: str, environment: str) -> str:
    """The name of an experiment."""
    return re.sub(r"[^\w.-]+", "_", f"{algorithm}-{environment}")


class Suite(NamedTuple):
    """Experiments whose scores belong into one report.

    Attributes:
        name: of its gin file.
        protocol: how environments are made and scores taken, in words; where that depends on the
            algorithm, words for each.
        score: "evaluation": the mean return of the final weights' evaluation; "training": the mean
            return of the last 100 training episodes when the budget ends; "iteration": of those
            that ended in its last 250,000 environment steps, as Dopamine reports. Or for each
            algorithm one of them.
        num_seeds: seeds are 1 to num_seeds.
        budgets: environment steps at which scores are tabled beside the final one.
        bindings: gin statements for every run; those of an experiment override them.
        experiments: of different names.
    """

    name: str
    protocol: str | Mapping[str, str]
    score: str | Mapping[str, str]
    num_seeds: int
    budgets: tuple[int, ...]
    bindings: tuple[str, ...]
    experiments: tuple[Experiment, ...]

    def protocol_of(self, experiment: Experiment) -> str:
        """The protocol in words."""
        return _of_algorithm(self.protocol, experiment)

    def score_of(self, experiment: Experiment) -> str:
        """Which number counts, one of `SCORES`."""
        return _of_algorithm(self.score, experiment)


def _of_algorithm(values: str | Mapping[str, str], experiment: Experiment) -> str:
    return values if isinstance(values, str) else values[experiment.algorithm]


def load(name: str, allow_imports: bool = False) -> Suite:
    """The suite of a shipped gin file or of one's own; gin's global config stays as it is.

    Args:
        name: `classic`, or the path of a gin file.
        allow_imports: lets it import modules from outside this package.

    Raises:
        UserError: there is none of this name, or it makes no sense.
    """
    path = _find(name)
    with configuration.preserved():
        configuration.load([str(path)], allow_imports=allow_imports)
        return suite(path.stem)


def shipped() -> list[str]:
    """Names of the shipped suites."""
    names = (name.removeprefix(_FOLDER) for name in shipped_names() if name.startswith(_FOLDER))
    return [name for name in names if "/" not in name]


def _find(name: str) -> pathlib.Path:
    if name in shipped():
        return configuration.find_config(_FOLDER + name)
    try:
        return find_file(name, [pathlib.Path()])
    except UserError as error:
        raise UserError(
            f"no suite is named {name!r}.{suggest(name, shipped())} There are "
            f"{', '.join(shipped())}; or give the path of a gin file that binds suite.experiments."
        ) from error


@gin.configurable(denylist=["name"])
def suite(
    name: str,
    *,
    protocol: str | Mapping[str, str] = "",
    score: str | Mapping[str, str] = "evaluation",
    num_seeds: int = 5,
    budgets: Sequence[int] = (),  # environment steps
    bindings: Sequence[str] = (),
    experiments: Sequence[Sequence[Any]] = (),  # fields of Experiment; bindings may follow
) -> Suite:
    """The suite that gin describes.

    Raises:
        UserError: a value makes no sense.
    """
    are_many = isinstance(experiments, list | tuple)
    _check(are_many, "experiments", experiments, "must be a tuple of experiments")
    built = tuple(_experiment(entry) for entry in experiments)
    _check_experiments(built)
    is_score = _covers(score, built) and all(_of_algorithm(score, e) in SCORES for e in built)
    _check(is_score, "score", score, f"must be {' or '.join(SCORES)}, or so for every algorithm")
    _check(_is_count(num_seeds), "num_seeds", num_seeds, "must be a whole number, at least 1")
    are_counts = isinstance(budgets, list | tuple) and all(map(_is_count, budgets))
    _check(are_counts, "budgets", budgets, "must be a tuple of environment steps")
    _check(_are_texts(bindings), "bindings", bindings, "must be gin statements")
    expected = "must say how scores are taken, for every algorithm"
    _check(bool(protocol) and _covers(protocol, built), "protocol", protocol, expected)
    return Suite(name, protocol, score, num_seeds, tuple(budgets), tuple(bindings), built)


def _covers(values: str | Mapping[str, str], experiments: Sequence[Experiment]) -> bool:
    if isinstance(values, Mapping):
        return {e.algorithm for e in experiments} <= values.keys()
    return isinstance(values, str)


def _experiment(entry: Sequence[Any]) -> Experiment:
    is_right = isinstance(entry, list | tuple) and len(entry) >= 4 and _is_count(entry[3])
    is_right = is_right and _are_texts((*entry[:3], *entry[4:]))
    expected = "must be (algorithm, environment, config, environment steps, *bindings)"
    _check(is_right, "experiments", entry, expected)
    algorithm, environment, config, num_env_steps, *bindings = entry
    return Experiment(algorithm, environment, config, num_env_steps, tuple(bindings))


def _check_experiments(experiments: Sequence[Experiment]) -> None:
    names = [experiment.name for experiment in experiments]
    _check(bool(names), "experiments", (), "a suite needs at least one")
    twice = [name for name in names if names.count(name) > 1]
    _check(not twice, "experiments", twice[:1], "one algorithm is on one environment twice")


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _check(is_right: bool, parameter: str, value: Any, need: str) -> None:
    if not is_right:
        raise UserError(f"suite.{parameter} = {value!r}: {need}.")
