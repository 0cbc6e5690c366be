"""Creates any gymnasium environment by its id."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import gin
import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from pipeline.environments.async_vector_env import SelectiveAsyncVectorEnv
from pipeline.environments.sync_vector_env import LeanSyncVectorEnv
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.utils.constraints import PositiveInt, check, check_arguments
from pipeline.utils.errors import UserError

# A callable, "module:attribute", or ("module:attribute", {keyword: value}).
Wrapper = Callable[[gymnasium.Env], gymnasium.Env] | str | tuple[str, dict[str, Any]]


@gin.configurable(denylist=["seed", "render"])
def gymnasium_environment(
    seed: int,
    *,
    name: str = "",
    num_envs: PositiveInt = 1,
    kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    max_episode_steps: int | None = None,
    vectorization_mode: Literal["sync", "async"] = "sync",
    render: bool = False,
) -> VectorEnvironment:
    """Creates a vector of environments with Box observations and Discrete or Box actions.

    gymnasium's native vector environments are not used: CartPole's, for example, has a single
    random stream for all its rows.

    Args:
      seed: Seed of everything that the environments draw.
      name: A registered id, or `module:EnvId` if importing `module` registers the id.
      num_envs: Number of environments that are stepped together.
      kwargs: Keyword arguments of the environment's constructor.
      wrappers: Wrappers to apply to each environment, in this order. Each is a callable,
        `"module:Class"`, or `("module:Class", {keyword: value})`.
      max_episode_steps: Environment steps after which an episode is truncated; None for the
        registered limit, -1 for no limit.
      vectorization_mode: `"sync"` steps them in this process, `"async"` each in its own.
      render: Whether `render()` can be used; there is then only one environment.

    Raises:
      UserError: If there is no such environment, something that it needs is not installed, it does
        not accept `kwargs`, its spaces are not supported, or it or a wrapper raises while it is
        built.
    """
    num_envs = 1 if render else num_envs
    check_arguments(gymnasium_environment, locals())
    _check_name(name)
    if max_episode_steps is not None and max_episode_steps != -1:
        check("gymnasium_environment.max_episode_steps", max_episode_steps, PositiveInt)
    _check_wrappers(wrappers)
    make_kwargs = {"disable_env_checker": True} | (kwargs or {})
    if max_episode_steps is not None:
        make_kwargs["max_episode_steps"] = max_episode_steps
    if render:
        make_kwargs["render_mode"] = "rgb_array"
    # The ALE registers its ids only when it is imported.
    full_name = f"ale_py:{name}" if name.startswith("ALE/") else name
    callables = [(_wrapper_name(w), _wrapper(w)) for w in wrappers]
    make = functools.partial(_make, full_name, make_kwargs, callables)
    build = functools.partial(_build, name, make, num_envs, vectorization_mode)
    vector_env = build()
    try:
        return VectorEnvironment(vector_env, name=name, seed=seed, rebuild=build)
    except UserError:
        vector_env.close()
        raise


def _check_name(name: str) -> None:
    if not name:
        raise UserError(
            "gymnasium_environment.name is not bound: name the environment, for example"
            " --gin_bindings=\"gymnasium_environment.name='CartPole-v1'\"."
        )
    if name.count(":") > 1:
        raise UserError(
            f"gymnasium_environment.name = {name!r} has more than one ':'. Write 'EnvId' or"
            " 'module:EnvId'."
        )


def _check_wrappers(wrappers: Sequence[Wrapper]) -> None:
    def is_wrapper(wrapper: object) -> bool:
        if isinstance(wrapper, tuple | list):
            return [type(value) for value in wrapper] == [str, dict]
        return isinstance(wrapper, str) or callable(wrapper)

    if isinstance(wrappers, tuple | list) and all(map(is_wrapper, wrappers)):
        return
    raise UserError(
        f"gymnasium_environment.wrappers = {wrappers!r}: must be a tuple of 'module:Class', "
        "('module:Class', {'argument': value}) or @configurable, for example "
        "('gymnasium.wrappers:FlattenObservation',)."
    )


def _build(
    name: str, make: Callable[[], gymnasium.Env], num_envs: int, vectorization_mode: str
) -> VectorEnv:
    makes, mode = [make] * num_envs, AutoresetMode.NEXT_STEP
    with _worded_errors(name):
        if vectorization_mode == "sync":
            return LeanSyncVectorEnv(makes, autoreset_mode=mode)
        # A forked process knows the gin bindings of wrappers and ids that were registered by hand;
        # a spawned one would know neither.
        return SelectiveAsyncVectorEnv(makes, context="fork", autoreset_mode=mode)


def _make(
    name: str,
    kwargs: dict[str, Any],
    wrappers: Sequence[tuple[str, Callable[[gymnasium.Env], gymnasium.Env]]],
) -> gymnasium.Env:
    env = gymnasium.make(name, **kwargs)
    for wrapper_name, wrapper in wrappers:
        try:
            env = wrapper(env)
        except UserError:
            raise
        except Exception as error:
            message = f"gymnasium_environment.wrappers: {wrapper_name} {_raised(error)}"
            raise UserError(message) from error
    return env


def _wrapper_name(wrapper: Wrapper) -> str:
    if isinstance(wrapper, str | tuple):
        return repr(wrapper)
    return getattr(wrapper, "__name__", repr(wrapper))


def _raised(error: Exception) -> str:
    """Describes the exception and where its innermost cause was raised.

    The place is that of the cause because gymnasium rephrases some exceptions.
    """
    innermost: BaseException = error
    while innermost.__cause__ and innermost.__cause__.__traceback__:
        innermost = innermost.__cause__
    frame = traceback.extract_tb(innermost.__traceback__)[-1]
    message = str(error).split("\n  In call to configurable ")[0]  # gin appends the rest
    place = f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return f"raised {type(error).__name__}: {message} ({place})"


def _wrapper(wrapper: Wrapper) -> Callable[[gymnasium.Env], gymnasium.Env]:
    if callable(wrapper):
        return wrapper
    path, kwargs = (wrapper, {}) if isinstance(wrapper, str) else wrapper
    module, _, attribute = path.partition(":")
    try:
        return functools.partial(getattr(importlib.import_module(module), attribute), **kwargs)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"gymnasium_environment.wrappers: {path!r} cannot be loaded: {error}. Write"
            " 'module:Class', for example 'gymnasium.wrappers:FlattenObservation'."
        ) from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"gymnasium_environment.wrappers: {path!r} {_raised(error)}") from error


@contextlib.contextmanager
def _worded_errors(name: str) -> Iterator[None]:
    binding = f"gymnasium_environment.name = {name!r}"
    try:
        yield
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise UserError(f"{binding}: {error}{_nearest(name)}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(f"{binding} needs a package that is not installed: {error}") from error
    except ModuleNotFoundError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        raise UserError(
            f"{binding} needs the module {cause.name!r}, which is not installed. Install the"
            " package that provides it, or put its folder on PYTHONPATH."
        ) from error
    except gymnasium.error.Error as error:
        raise UserError(f"{binding}: {error}") from error
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            message = f"{binding} does not accept one of its arguments: {error}"
        else:
            message = f"{binding} {_raised(error)}"
        raise UserError(message) from error


def _nearest(name: str) -> str:
    """Returns the registered ids nearest to `name` as the end of a message, or "" if none is."""
    module, _, env_id = name.rpartition(":")
    by_lower_case = {key.lower(): key for key in gymnasium.registry}
    near = difflib.get_close_matches(env_id.lower(), by_lower_case)
    prefix = f"{module}:" if module else ""
    ids = ", ".join(prefix + by_lower_case[key] for key in near)
    return f" Nearest registered ids: {ids}." if ids else ""
