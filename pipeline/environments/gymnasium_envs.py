"""Creates any gymnasium environment by its id."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import gin
import gymnasium

from pipeline.configuration.statements import suggest
from pipeline.environments.process_vector import ProcessVector
from pipeline.environments.single_env import SingleEnv, close_with_warning, describe
from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.thread_vector import ThreadVector
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.vectors import Vector, refuse_statistics
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
    own_thread: bool | None = None,
    render: bool = False,
) -> VectorEnvironment:
    """Creates a vector of environments.

    gymnasium's vector environments are not used: CartPole's native one, for example, has a single
    random stream for all its rows, and those in processes do not check what environments return.

    Args:
      seed: Seed of everything that the environments draw.
      name: A registered id, or `module:EnvId` if importing `module` registers the id.
      num_envs: Number of environments that are stepped together.
      kwargs: Keyword arguments of the environment's constructor.
      wrappers: Wrappers to apply to each environment, in this order. Each is a callable,
        `"module:Class"`, or `("module:Class", {keyword: value})`.
      max_episode_steps: Steps of the environment without `wrappers` after which an episode is
        truncated; None for the registered limit, -1 for no limit.
      vectorization_mode: `"sync"` steps them in this process, one after the other; `"async"` steps
        each in a process of its own.
      own_thread: Whether `"sync"` environments are built, reset, stepped, rendered and closed in
        one thread of their own. If False, TensorFlow's threads step them, which change from call
        to call. This saves 0.1 ms a vector step, but does not suit environments that use databases,
        OpenGL or event loops. None is False for gymnasium's own environments without wrappers and
        rendering, and True for all others.
      render: Whether `render()` can be used; there is then only one environment.

    Raises:
      UserError: If there is no such environment, something that it needs is not installed, it does
        not accept `kwargs`, its spaces are not supported, or it or a wrapper raises while it is
        built.
    """
    num_envs = 1 if render else num_envs
    check_arguments(gymnasium_environment, locals())
    make = maker(name, kwargs, wrappers, max_episode_steps, render)
    if own_thread is None:
        own_thread = render or bool(wrappers) or not _is_gymnasiums_own(name)
    build = functools.partial(_build, name, [make] * num_envs, vectorization_mode, own_thread)
    return VectorEnvironment(build, name=name, seed=seed)


def maker(
    name: str,
    kwargs: dict[str, Any] | None,
    wrappers: Sequence[Wrapper],
    max_episode_steps: int | None,
    render: bool,
) -> Callable[[], gymnasium.Env]:
    """Returns a function that builds one environment; see `gymnasium_environment`.

    Raises:
      UserError: If an argument is not valid, or a wrapper cannot be loaded.
    """
    _check_name(name)
    if max_episode_steps is not None and max_episode_steps != -1:
        check("gymnasium_environment.max_episode_steps", max_episode_steps, PositiveInt)
    _check_wrappers(wrappers)
    make_kwargs = {"disable_env_checker": True} | (kwargs or {})
    if max_episode_steps is not None:
        make_kwargs["max_episode_steps"] = max_episode_steps
    if make_kwargs.get("render_mode") == "human":
        raise UserError(
            'gymnasium_environment.kwargs: render_mode = "human" opens windows, which training '
            "does not need. Drop it; pipeline.evaluate --video=FILE.mp4 records an episode."
        )
    if render:
        make_kwargs["render_mode"] = "rgb_array"
    callables = [(_wrapper_name(w), _wrapper(w)) for w in wrappers]
    return functools.partial(_make, name, make_kwargs, callables, gin.current_scope())


def _build(
    name: str,
    makes: Sequence[Callable[[], gymnasium.Env]],
    vectorization_mode: str,
    own_thread: bool,
) -> Vector:
    if vectorization_mode == "async":
        # Built here too, so that gin of this process knows what wrappers read.
        close_with_warning(SingleEnv(makes[0]), name)
        return ProcessVector(makes)
    return ThreadVector(lambda: SyncVector(makes)) if own_thread else SyncVector(makes)


def _is_gymnasiums_own(name: str) -> bool:
    """Returns True if gymnasium itself has the environment, so that it suits any thread."""
    spec = gymnasium.registry.get(name)
    return spec is not None and str(spec.entry_point).startswith("gymnasium.envs.")


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


def _make(
    name: str,
    kwargs: dict[str, Any],
    wrappers: Sequence[tuple[str, Callable[[gymnasium.Env], gymnasium.Env]]],
    scope: list[str],
) -> gymnasium.Env:
    """Builds an environment in gin's scope of the caller of `gymnasium_environment`.

    The scope belongs to the thread, and environments may be built in another one, also later.
    """
    # The ALE registers its ids only when it is imported.
    full_name = f"ale_py:{name}" if name.startswith("ALE/") else name
    with _worded_errors(name), gin.config_scope(scope):
        env = gymnasium.make(full_name, **_copied(kwargs))
        try:
            for wrapper_name, wrapper in wrappers:
                env = _wrapped(env, wrapper_name, wrapper)
            refuse_statistics(env)
        except BaseException:
            close_with_warning(env, name)
            raise
        return env


def _wrapped(
    env: gymnasium.Env, name: str, wrapper: Callable[[gymnasium.Env], gymnasium.Env]
) -> gymnasium.Env:
    try:
        wrapped = wrapper(env)
    except UserError:
        raise
    except Exception as error:
        message = f"gymnasium_environment.wrappers: {name} raised {describe(error)}"
        raise UserError(message) from error
    if not isinstance(wrapped, gymnasium.Env):
        raise UserError(
            f"gymnasium_environment.wrappers: {name} returned {wrapped!r:.80}, but it must return "
            "the wrapped environment."
        )
    return wrapped


def _wrapper_name(wrapper: Wrapper) -> str:
    if isinstance(wrapper, str | tuple):
        return repr(wrapper)
    return getattr(wrapper, "__name__", repr(wrapper))


def _wrapper(wrapper: Wrapper) -> Callable[[gymnasium.Env], gymnasium.Env]:
    if callable(wrapper):
        return wrapper
    path, kwargs = (wrapper, {}) if isinstance(wrapper, str) else wrapper
    module, _, attribute = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"gymnasium_environment.wrappers: {path!r} cannot be loaded: {error}. Write"
            " 'module:Class', for example 'gymnasium.wrappers:FlattenObservation'."
        ) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"gymnasium_environment.wrappers: {path!r} raised {describe(error)}"
        ) from error
    return lambda env: loaded(env, **_copied(kwargs))


def _copied(value: Any) -> Any:
    """Copies gin's dicts, lists, tuples and sets, so that no two environments share one."""
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    return kind(map(_copied, value)) if kind in (list, tuple, set) else value


@contextlib.contextmanager
def _worded_errors(name: str) -> Iterator[None]:
    binding = f"gymnasium_environment.name = {name!r}"
    try:
        yield
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        module, _, id_ = name.rpartition(":")
        if hasattr(sys.modules.get(module), id_):
            hint = f" {id_} is an object of {module}, but no id: register it there with gymnasium."
            hint += f"register('{id_}-v0', entry_point={name!r}), and bind '{module}:{id_}-v0'."
        else:
            hint = suggest(id_, gymnasium.registry)
        raise UserError(f"{binding}: {error}{hint}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(f"{binding} needs a package that is not installed: {error}") from error
    except ModuleNotFoundError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        # An exception that has passed through gin has its text but not its name.
        module = cause.name or str(cause).partition("'")[2].partition("'")[0]
        raise UserError(
            f"{binding} needs the module {module!r}, which is not installed. Install the"
            " package that provides it, or put its folder on PYTHONPATH."
        ) from error
    except gymnasium.error.Error as error:
        raise UserError(f"{binding}: {error}") from error
    except UserError:
        raise
    except Exception as error:
        if "ExceptionProxy" in str(error) and isinstance(error.__context__, Exception):
            error = error.__context__  # gymnasium cannot copy the exceptions that gin raises
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            message = f"{binding} does not accept one of its arguments: {error}"
        else:
            message = f"{binding} raised {describe(error)}"
        raise UserError(message) from error
