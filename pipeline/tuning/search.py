"""Searches over gin parameters, described by a short gin file, and their suggestions."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import gin
import numpy as np

from pipeline import configuration
from pipeline.benchmarks.suites import Experiment, Suite, are_texts
from pipeline.configuration.statements import Binding, find_file
from pipeline.utils.constraints import NonNegativeInt, PositiveInt, Range, check_arguments
from pipeline.utils.errors import UserError

# A distribution is a tuple of its kind and its arguments.
_FORMS = (
    '("uniform", low, high), ("log_uniform", low, high), ("int", low, high), ("log_int", low, '
    'high) or ("choice", value, value, ...)'
)
# The search itself decides about these.
_NO_PARAMETERS = ("train.num_env_steps", "train.eval_interval", "train.num_final_episodes")
_LARGEST = 1e300  # Optuna needs the difference of the bounds, too.
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
      parameters: Distribution of each parameter, by the name that a binding would have:
        ("uniform", low, high), ("log_uniform", low, high), ("int", low, high),
        ("log_int", low, high) or ("choice", value, ...).
      bindings: Gin statements for every run. Parameters override them.
      sampler: "tpe" (Bergstra et al. 2011, "Algorithms for hyper-parameter optimization"; as in
        Optuna, with the parameters taken together), "random" or "grid".
      num_seeds: Seeds of a trial, which are 1 to num_seeds.
      rungs: Environment steps at which trials are paused and compared; () trains all to the end.
      reduction: 1 of every `reduction` trials continues after a rung.
      num_concurrent: Number of trials that can be in progress at the same time. The parameters of
        trial n depend on the results of trials 0 to n - num_concurrent.
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

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Search:
        """Creates a search from its fields, which may hold lists instead of tuples."""
        tuples: dict[str, Any] = {name: tuple(fields[name]) for name in ("bindings", "rungs")}
        tuples["parameters"] = {name: tuple(of) for name, of in fields["parameters"].items()}
        return cls(**{**fields, **tuples})

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns the environment steps of every rung and of the whole budget."""
        return (*self.rungs, self.num_env_steps)

    @property
    def grid_size(self) -> int:
        """Returns the number of combinations of the choices."""
        return math.prod(len(distribution) - 1 for distribution in self.parameters.values())

    def _grid_point(self, number: int) -> dict[str, Any]:
        """Returns a combination of the choices. The last parameter changes fastest."""
        points = itertools.product(*(choices for _, *choices in self.parameters.values()))
        return dict(zip(self.parameters, next(itertools.islice(points, number, None)), strict=True))

    def suite(self, number: int, parameters: Mapping[str, Any]) -> Suite:
        """Returns the runs of trial `number` as a suite."""
        bindings = tuple(f"{name} = {value!r}" for name, value in parameters.items())
        trial = Experiment("trial", f"{number:03}", self.config, self.num_env_steps, bindings)
        return Suite(self.name, "", "evaluation", self.num_seeds, (), self.bindings, (trial,))

    def suggest(self, number: int, told: Sequence[Told]) -> dict[str, Any]:
        """Returns the parameters of trial `number`, given all trials before it.

        The result depends on nothing but the arguments and the search. Real numbers are rounded to
        three digits or, if that is finer, to a power of ten between a hundredth and a thousandth of
        their range.
        """
        if self.sampler == "grid":
            return self._grid_point(number)
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

        if trial.returns is None:
            outcome: dict[str, Any] = {"state": TrialState.RUNNING}
        elif trial.is_complete:
            outcome = {"state": TrialState.COMPLETE, "value": trial.returns[-1]}
        else:  # TPE ranks a trial without any value, because it failed, below all others.
            reached = dict(zip(self.ends, trial.returns, strict=False))
            outcome = {"state": TrialState.PRUNED, "intermediate_values": reached}
        params, distributions = dict(trial.parameters), self._distributions()
        return create_trial(params=params, distributions=distributions, **outcome)

    def _distributions(self) -> dict[str, Any]:
        return {name: _optuna_distribution(*of) for name, of in self.parameters.items()}

    def _rounded(self, name: str, value: Any) -> Any:
        kind, *arguments = self.parameters[name]
        if kind not in ("uniform", "log_uniform"):
            return value
        low, high = map(float, arguments)
        finest = min(abs(value), high - low) if value else high - low
        return min(max(round(value, 2 - math.floor(math.log10(finest))), low), high)


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
      UserError: If there is no such file, if a value in it is invalid, or if it binds what is not
        used.
    """
    try:
        file = find_file(path, [pathlib.Path()])
    except UserError as error:  # It suggests shipped configs, and none of them is a search.
        raise UserError(
            f"there is no search {path!r}. Pass the path of a gin file that binds "
            "search.parameters."
        ) from error
    with configuration.preserved():
        configuration.load([str(file)], allow_imports=allow_imports)
        built = search(file.stem)
        if unused := configuration.unused(file):
            raise UserError(f"{unused} Statements for the runs belong in search.bindings.")
        return built


@gin.configurable(denylist=["name"])
def search(
    name: str,
    *,
    config: str = "",
    num_env_steps: NonNegativeInt = 0,
    parameters: Mapping[str, Sequence[Any]] | None = None,
    bindings: Sequence[str] = (),
    sampler: Literal["tpe", "random", "grid"] = "tpe",
    num_seeds: PositiveInt = 1,
    rungs: Sequence[PositiveInt] = (),
    reduction: Annotated[int, Range(2)] = 3,
    num_concurrent: PositiveInt = 4,
    seed: NonNegativeInt = 1,
) -> Search:
    """Builds the search that gin's bindings describe; see `Search` for the parameters.

    Raises:
      UserError: If a value is invalid.
    """
    check_arguments(search, locals())
    _check_runs(config, num_env_steps, bindings)
    _check_parameters(parameters, sampler)
    if [*rungs, num_env_steps] != sorted({*rungs, num_env_steps}):
        raise UserError(
            f"search.rungs = {rungs!r} must be in increasing order, and all less than "
            f"search.num_env_steps = {num_env_steps:_}."
        )
    return Search.of(locals())


def _check_runs(config: Any, num_env_steps: int, bindings: Any) -> None:
    """Checks what every run trains.

    Raises:
      UserError: If a value is missing or invalid.
    """
    if not config or not isinstance(config, str):
        raise UserError(
            "search.config is not set. Set it to a shipped config or to the path of a gin file, "
            'for example search.config = "ppo_cartpole".'
        )
    if not num_env_steps:
        raise UserError(
            "search.num_env_steps is not set. Set it to the environment steps of a run, for "
            "example search.num_env_steps = 100_000."
        )
    if not are_texts(bindings):
        raise UserError(
            f"search.bindings = {bindings!r} must be a tuple of strings, for example "
            '("train.eval_interval = 5_000",). A tuple with one string needs a comma.'
        )


def _check_parameters(parameters: Any, sampler: str) -> None:
    """Checks the names and the distributions of a search.

    Raises:
      UserError: If one is invalid.
    """
    if not isinstance(parameters, Mapping) or not parameters:
        raise UserError(
            f"search.parameters = {parameters!r} must be a dict with at least one parameter and "
            'its distribution, for example {"Rollout.num_epochs": ("int", 1, 20)}.'
        )
    for name, distribution in parameters.items():
        if not isinstance(name, str) or "." not in name:
            raise UserError(
                f"search.parameters: {name!r} is not the name of a parameter, such as "
                '"create_ppo_agent.gae_lambda". To search over a macro, name a parameter that it '
                "is bound to."
            )
        if short_name(name) in _NO_PARAMETERS:
            raise UserError(
                f"search.parameters: {name} cannot be searched over, because trials are compared "
                "by it. Set search.num_env_steps, or use search.bindings."
            )
        wrong = _wrong_with(distribution)
        if sampler == "grid" and not wrong and distribution[0] != "choice":
            wrong = 'search.sampler = "grid" needs ("choice", value, ...)'
        if wrong:
            raise UserError(f"search.parameters: {name!r}: {distribution!r}: {wrong}.")


def short_name(parameter: str) -> str:
    """Returns the name of a parameter without the module path that gin allows before it."""
    scope, _, name = parameter.rpartition("/")
    selector, _, name = name.rpartition(".")
    return Binding(scope, selector, name, None, "").short_name


def _wrong_with(distribution: Any) -> str:
    """Returns what is wrong with a distribution, or "" if nothing is."""
    is_tuple = isinstance(distribution, list | tuple) and bool(distribution)
    kind = distribution[0] if is_tuple else None
    if kind == "choice":
        scalars = (bool, int, float, str, type(None))
        are_scalars = all(isinstance(x, scalars) for x in distribution[1:])
        is_right = len(distribution) > 1 and are_scalars
        return "" if is_right else "choices must be numbers, strings, True, False or None"
    if kind not in ("uniform", "log_uniform", "int", "log_int"):
        return f"a distribution is one of {_FORMS}"
    kinds = (int,) if kind.endswith("int") else (int, float)
    if len(distribution) != 3 or not all(type(x) in kinds for x in distribution[1:]):
        numbers = "whole numbers" if kind.endswith("int") else "numbers"
        return f"{kind} needs two {numbers}, low and high"
    _, low, high = distribution
    if not -_LARGEST < low < high < _LARGEST:  # A comparison with NaN is false.
        return f"low must be less than high, and both between {-_LARGEST:g} and {_LARGEST:g}"
    return f"low must be greater than 0 for {kind}" if kind[:3] == "log" and low <= 0 else ""
