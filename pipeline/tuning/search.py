"""Searches over gin parameters, described by a short gin file, and their suggestions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import gin
import numpy as np

from pipeline import configuration
from pipeline.benchmarks.suites import Experiment, Suite
from pipeline.configuration.statements import find_file
from pipeline.utils.constraints import NonNegativeInt, PositiveInt, check_arguments
from pipeline.utils.errors import UserError

# A distribution is a tuple of its kind and its arguments.
_KINDS = {
    "uniform": '("uniform", low, high)',
    "log_uniform": '("log_uniform", low, high)',
    "int": '("int", low, high)',
    "log_int": '("log_int", low, high)',
    "choice": '("choice", value, value, ...)',
}
_STARTUP_TRIALS = 10  # trials that TPE draws at random first, Optuna's default


class Told(NamedTuple):
    """Trial as a sampler sees it.

    Attributes:
      parameters: Values of the search's parameters, by name.
      returns: Mean return at each rung that the trial has reached; None while it runs.
      is_complete: Whether the last of `returns` is that of the whole budget.
    """

    parameters: Mapping[str, Any]
    returns: Sequence[float] | None
    is_complete: bool


class Search(NamedTuple):
    """Search for the values of gin parameters that result in the highest return.

    A trial is one set of values. It is trained with every seed, and its value is the mean over the
    seeds of the return. `halving` describes how trials are compared before they are finished.

    Attributes:
      name: Name of the gin file, without its suffix.
      config: Shipped config or path of a gin file that every trial trains.
      num_env_steps: Budget of a run in environment steps.
      parameters: Distribution of each parameter, by the name that a binding would have.
      bindings: Gin statements for every run. Parameters override them.
      sampler: "tpe" (Bergstra et al. 2011, "Algorithms for hyper-parameter optimization"; as in
        Optuna, with the parameters taken together), "random" or "grid".
      num_seeds: Seeds of a trial, which are 1 to num_seeds.
      rungs: Environment steps at which trials are paused and compared; () trains all to the end.
      reduction: At a rung, one of this number of trials goes on.
      num_concurrent: A trial is chosen by the results of the trials up to this many numbers before
        it. So many can run at the same time, and `--workers` has no effect on the results.
      seed: Seed of the suggestions.
    """

    name: str
    config: str
    num_env_steps: int
    parameters: Mapping[str, tuple[Any, ...]]
    bindings: tuple[str, ...]
    sampler: str
    num_seeds: int
    rungs: tuple[int, ...]
    reduction: int
    num_concurrent: int
    seed: int

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns the environment steps of every rung and of the whole budget."""
        return (*self.rungs, self.num_env_steps)

    @property
    def grid(self) -> list[dict[str, Any]]:
        """Returns all combinations of the choices."""
        choices = [distribution[1:] for distribution in self.parameters.values()]
        return [
            dict(zip(self.parameters, values, strict=True))
            for values in itertools.product(*choices)
        ]

    def suite(self, trials: Mapping[int, Mapping[str, Any]]) -> Suite:
        """Returns the runs of trials, given by number and parameters, as a suite."""
        experiments = [
            Experiment(
                "trial",
                f"{number:03}",
                self.config,
                self.num_env_steps,
                tuple(f"{name} = {value!r}" for name, value in parameters.items()),
            )
            for number, parameters in trials.items()
        ]
        return Suite(
            name=self.name,
            protocol="",
            score="evaluation",
            num_seeds=self.num_seeds,
            budgets=(),
            bindings=self.bindings,
            experiments=tuple(experiments),
        )

    def suggest(self, number: int, told: Sequence[Told]) -> dict[str, Any]:
        """Returns the parameters of trial `number`, given all trials before it.

        The result depends on nothing but the arguments and the search. Real numbers are rounded to
        three significant digits.
        """
        if self.sampler == "grid":
            return self.grid[number]
        import optuna

        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        sampler: optuna.samplers.BaseSampler = (
            optuna.samplers.RandomSampler(seed=seed)
            if self.sampler == "random"
            else optuna.samplers.TPESampler(
                seed=seed, multivariate=True, n_startup_trials=_STARTUP_TRIALS
            )
        )
        study = self.study(told, sampler)
        suggested = study.ask(self._distributions()).params
        return {name: self._rounded(name, suggested[name]) for name in self.parameters}

    def study(self, told: Sequence[Told], sampler: Any = None) -> Any:
        """Returns an `optuna.Study` that has been told the trials."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in told:
            study.add_trial(self._frozen(trial))
        return study

    def _frozen(self, trial: Told) -> Any:
        from optuna.trial import TrialState, create_trial

        params, distributions = dict(trial.parameters), self._distributions()
        if trial.returns is None:
            return create_trial(
                state=TrialState.RUNNING, params=params, distributions=distributions
            )
        if trial.is_complete:
            return create_trial(
                state=TrialState.COMPLETE,
                value=trial.returns[-1],
                params=params,
                distributions=distributions,
            )
        # TPE ranks a trial without any value, because it failed, below all others.
        reached = dict(zip(self.ends, trial.returns, strict=False))
        return create_trial(
            state=TrialState.PRUNED,
            params=params,
            distributions=distributions,
            intermediate_values=reached,
        )

    def _distributions(self) -> dict[str, Any]:
        return {name: _optuna_distribution(*of) for name, of in self.parameters.items()}

    def _rounded(self, name: str, value: Any) -> Any:
        kind, *arguments = self.parameters[name]
        if kind not in ("uniform", "log_uniform"):
            return value
        low, high = arguments
        return min(max(float(f"{value:.3g}"), float(low)), float(high))


def _optuna_distribution(kind: str, *arguments: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if kind == "choice":
        return CategoricalDistribution(arguments)
    low, high = arguments
    numbers = IntDistribution if kind.endswith("int") else FloatDistribution
    return numbers(low, high, log=kind.startswith("log"))


def load(path: str, allow_imports: bool = False) -> Search:
    """Loads a search from a gin file and leaves gin's global configuration unchanged.

    Args:
      path: Path of the gin file.
      allow_imports: True to let the file import modules from outside this package.

    Raises:
      UserError: If there is no such file, or if a value in it is invalid.
    """
    import pathlib

    file = find_file(path, [pathlib.Path()])
    with configuration.preserved():
        configuration.load([str(file)], allow_imports=allow_imports)
        return search(file.stem)


@gin.configurable(denylist=["name"])
def search(
    name: str,
    *,
    config: str = "",
    num_env_steps: PositiveInt = 1,
    parameters: Mapping[str, Sequence[Any]] | None = None,
    bindings: Sequence[str] = (),
    sampler: Literal["tpe", "random", "grid"] = "tpe",
    num_seeds: PositiveInt = 1,
    rungs: Sequence[int] = (),
    reduction: PositiveInt = 3,
    num_concurrent: PositiveInt = 4,
    seed: NonNegativeInt = 1,
) -> Search:
    """Builds the search that gin's bindings describe.

    Args:
      name: Name of the search.
      config: See `Search`, as for all other arguments.
      num_env_steps: Budget of a run in environment steps.
      parameters: Dict from the name of a parameter to its distribution: ("uniform", low, high),
        ("log_uniform", low, high), ("int", low, high), ("log_int", low, high) or
        ("choice", value, ...).
      bindings: Gin statements for every run.
      sampler: "tpe", "random" or "grid".
      num_seeds: Seeds of a trial.
      rungs: Environment steps at which trials are compared.
      reduction: At a rung, one of this number of trials goes on.
      num_concurrent: Trials that may be chosen before the results of the first of them are known.
      seed: Seed of the suggestions.

    Raises:
      UserError: If a value is invalid.
    """
    check_arguments(search, locals())
    _check(isinstance(config, str) and bool(config), "config", config, "name what to train")
    _check(_are_texts(bindings), "bindings", bindings, "must be a tuple of gin statements")
    _check(bool(parameters), "parameters", parameters, "name at least one parameter")
    for parameter, distribution in dict(parameters or {}).items():
        need = f"{parameter!r} must have a distribution: {', '.join(_KINDS.values())}"
        _check(_is_distribution(distribution), "parameters", distribution, need)
        if sampler == "grid":
            need = f'with the sampler "grid", {parameter!r} must be a ("choice", value, ...)'
            _check(distribution[0] == "choice", "parameters", distribution, need)
    ends = (*rungs, num_env_steps)
    are_rising = all(type(x) is int for x in ends) and list(ends) == sorted({0, *ends} - {0})
    _check(are_rising, "rungs", rungs, "must be rising environment steps below num_env_steps")
    _check(reduction >= 2, "reduction", reduction, "must be at least 2")
    return Search(
        name=name,
        config=config,
        num_env_steps=num_env_steps,
        parameters={key: tuple(of) for key, of in dict(parameters or {}).items()},
        bindings=tuple(bindings),
        sampler=sampler,
        num_seeds=num_seeds,
        rungs=tuple(rungs),
        reduction=reduction,
        num_concurrent=num_concurrent,
        seed=seed,
    )


def _is_distribution(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value or value[0] not in _KINDS:
        return False
    kind, *arguments = value
    if kind == "choice":
        scalars = (bool, int, float, str, type(None))
        return bool(arguments) and all(isinstance(x, scalars) for x in arguments)
    are_numbers = all(type(x) in ((int,) if "int" in kind else (int, float)) for x in arguments)
    if len(arguments) != 2 or not are_numbers:
        return False
    low, high = arguments
    return low < high and (low > 0 or not kind.startswith("log"))


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _check(is_right: bool, parameter: str, value: Any, need: str) -> None:
    if not is_right:
        raise UserError(f"search.{parameter} = {value!r}: {need}.")
