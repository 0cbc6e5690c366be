"""Loads gin files and bindings into gin's global configuration."""

from __future__ import annotations

import contextlib
import graphlib
import importlib
import inspect
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_config

from pipeline.configuration import explanation, registry, values
from pipeline.configuration.statements import (
    COMMAND_LINE,
    Binding,
    Import,
    Macro,
    Reference,
    Source,
    find_file,
    leaves,
    scan,
    shipped_folder,
    suggest,
)
from pipeline.utils.errors import UserError

_applied: list[Import | Binding] = []
_preserving = threading.RLock()


def find_config(name: str) -> Path:
    """Returns the path of a gin file.

    Args:
      name: Path, or name of a shipped config (`dqn_cartpole`, `agents/dqn`), with or without
        `.gin`.

    Raises:
      UserError: If there is no such file. The message suggests the nearest names.
    """
    return find_file(name, [Path(), shipped_folder()])


def load(
    gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (), allow_imports: bool = False
) -> None:
    """Replaces gin's config by `gin_files` in order, then `gin_bindings`.

    This is `apply(read(...))`.

    Raises:
      UserError: If there is any mistake in them.
    """
    apply(read(gin_files, gin_bindings, allow_imports))


def read(
    gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (), allow_imports: bool = False
) -> list[Import | Binding]:
    """Returns the statements of `gin_files` with their includes, then those of `gin_bindings`.

    No statement is executed.

    Args:
      gin_files: Paths, or names of shipped configs.
      gin_bindings: Gin statements, such as `train.num_env_steps = 50_000`.
      allow_imports: Whether gin files may import modules from outside this package.

    Raises:
      UserError: If a statement cannot be read. The message names its place.
    """
    sources = chain(
        (Source.read(find_config(name)) for name in gin_files),
        (Source(text.strip(), None) for text in gin_bindings),
    )
    return [statement for source in sources for statement in scan(source, allow_imports)]


def uses_onednn(statements: Iterable[Import | Binding]) -> bool:
    """Returns `configure_tensorflow.onednn`, which TensorFlow reads when it is imported.

    The value is that of the last binding, before anything that the bindings may need is imported.

    Raises:
      UserError: If it is neither True nor False.
    """
    name = "configure_tensorflow.onednn"
    last = [x for x in statements if isinstance(x, Binding) and x.short_name == name][-1:]
    for binding in last:
        if not isinstance(binding.value, bool):
            raise UserError(
                f"{binding.origin}: {name} = {binding.value!r}: must be a literal True or "
                "False, because it is read before anything else."
            )
    return last[0].value if last else True


def apply(statements: Sequence[Import | Binding]) -> None:
    """Replaces gin's config by `statements`: first the imports, then the bindings.

    The last binding of a parameter wins. The config stays unlocked, so modules may be imported
    later.

    Raises:
      UserError: If a name or a value is wrong. The message names its place and, for a name, the
        nearest ones.
    """
    bindings = [statement for statement in statements if isinstance(statement, Binding)]
    gin.clear_config()
    explanation.origins.clear()
    explanation.without_effect.clear()
    _applied[:] = statements
    for statement in statements:
        if isinstance(statement, Import):
            _import(statement)
    _check_macros(bindings)
    macros = {binding.name: binding.value for binding in bindings if not binding.parameter}
    for binding in bindings:
        _bind(binding, macros)
    _check_repeated(bindings)


def applied() -> list[Import | Binding]:
    """Returns the statements that were applied last, which another process can apply, too."""
    return list(_applied)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores gin's global config on exit, for a library inside a program that uses gin.

    Threads wait for each other, because there is only one config.
    """
    stores: list[Any] = [
        gin_config._CONFIG,
        gin_config._OPERATIVE_CONFIG,
        gin_config._SINGLETONS,
        gin_config._IMPORTS,
        explanation.origins,
        explanation.without_effect,
    ]
    with _preserving:
        before, applied_before = [store.copy() for store in stores], list(_applied)
        was_locked = gin.config_is_locked()
        gin_config._set_config_is_locked(False)
        try:
            yield
        finally:
            for store, content in zip(stores, before, strict=True):
                store.clear()
                store.update(content)
            _applied[:] = applied_before
            gin_config._set_config_is_locked(was_locked)


def defaults(selector: str) -> dict[str, Any]:
    """Returns the defaults in a configurable's signature, without REQUIRED ones.

    Returns {} if the module that defines the configurable has not been imported.
    """
    if not (configurable := registry.registered(selector)):
        return {}
    parameters = registry.signature(configurable).values()
    without = (inspect.Parameter.empty, gin.REQUIRED)
    return {x.name: x.default for x in parameters if x.default not in without}


def in_force(scope: str, selector: str) -> dict[str, Any]:
    """Returns the values that a configurable would receive if it were called now.

    These are its defaults, overridden by its bindings.
    """
    if not registry.registered(selector):
        return {}
    name = f"{scope}/{selector}".lstrip("/")
    return defaults(selector) | gin.get_bindings(name, resolve_references=False)


def warn_of_ignored(say: Callable[[str], None] = print) -> None:
    """Says which bindings of the command line were not used by what has been called so far."""
    if message := explanation.ignored():
        say(f"warning: {message}")


def _import(statement: Import) -> None:
    try:
        importlib.import_module(statement.module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{statement.module}.".startswith(f"{missing}."):
            raise UserError(
                f"{statement.origin}: there is no module {statement.module!r}. Correct its name, "
                "or add its folder to PYTHONPATH."
            ) from None
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{statement.origin}: import {statement.module} raised {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno})"
        ) from error
    gin.parse_config(statement.text)


def _bind(binding: Binding, macros: Mapping[str, Any]) -> None:
    for leaf in leaves(binding.value):
        if isinstance(leaf, Reference):
            registry.need_registered(leaf.name.rpartition("/")[2], binding.origin)
    selector = "gin.macro"
    if binding.parameter:
        configurable = registry.need_registered(binding.selector, binding.origin)
        registry.check_parameter(configurable, binding, macros)
        binding = values.checked(configurable, binding, macros)
        selector = configurable.selector
    try:
        gin.parse_config(f"{binding.name} = {binding.value!r}")
    except SyntaxError:
        raise UserError(
            f"{binding.origin}: {binding.value!r} cannot be written in gin; use finite numbers."
        ) from None
    except ValueError as error:  # such as a method that is named without its class
        raise UserError(f"{binding.origin}: {str(error).splitlines()[0]}") from None
    scope = binding.scope if binding.parameter else binding.name
    key = (scope, selector, binding.parameter or "value")
    explanation.origins.setdefault(key, []).append(binding.origin)


def _check_repeated(bindings: Iterable[Binding]) -> None:
    """Checks that no binding leaves the value that it overrides in force in another scope.

    An `operative_config.gin` has the same value without a scope and in the scope evaluation. If
    only one of them were overridden, the evaluation would not be that of the trained environment.

    Raises:
      UserError: If a file binds both to the same value, and only the former is overridden.
    """
    in_force: dict[tuple[str, str, str], Binding] = {}
    overridden: dict[tuple[str, str], Binding] = {}
    for binding in bindings:
        configurable = registry.registered(binding.selector) if binding.parameter else None
        if configurable is None:
            continue
        parameter = configurable.selector, binding.parameter
        before = in_force.get((*parameter, binding.scope))
        if before and not binding.scope and before.file != binding.file:
            overridden[parameter] = before
        in_force[*parameter, binding.scope] = binding
    for (selector, name, scope), inner in in_force.items():
        outer = overridden.get((selector, name))
        if not scope or not outer or inner.file != outer.file or inner.value != outer.value:
            continue
        now = in_force[selector, name, ""]
        if now.value != outer.value:
            raise UserError(
                f"{now.origin}: {now.name} = {now.value!r} would leave {inner.name} = "
                f"{inner.value!r} ({inner.origin}) in force. Bind {inner.name}, too."
            )


def _check_macros(bindings: Iterable[Binding]) -> None:
    """Checks that used macros are defined, and that macros of the command line are used.

    Raises:
      UserError: If one of these checks fails.
    """
    defined = {binding.name: binding for binding in bindings if not binding.parameter}
    used: dict[str, str] = {}
    for binding in bindings:
        macros = (leaf for leaf in leaves(binding.value) if isinstance(leaf, Macro))
        used.update((macro.name, binding.origin) for macro in macros)
    for name, origin in used.items():
        if name not in defined and not gin_config._CONSTANTS.matching_selectors(name):
            hint = suggest(name, defined)
            raise UserError(f"{origin}: the macro %{name} is not defined.{hint}")
    _check_circles(defined)
    for name, binding in defined.items():
        if binding.origin == COMMAND_LINE and name not in used:
            raise UserError(_unused_macro(name))


def _check_circles(defined: Mapping[str, Binding]) -> None:
    """Checks that no macro uses itself, directly or indirectly.

    Raises:
      UserError: If one does.
    """
    used = {
        name: [x.name for x in leaves(binding.value) if isinstance(x, Macro) and x.name in defined]
        for name, binding in defined.items()
    }
    try:
        graphlib.TopologicalSorter(used).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        macros = " -> ".join(f"%{name}" for name in circle)
        raise UserError(
            f"{defined[circle[0]].origin}: the macros are circular: {macros}."
        ) from None


def _unused_macro(name: str) -> str:
    """Returns the message for a macro that the command line defines and nothing uses.

    `num_env_steps=5` is valid gin, but it only defines a macro. The user must have meant a
    parameter.
    """
    meant = registry.hints(name)
    hint = f" Write {' or '.join(meant)}." if meant else ""
    return f"{COMMAND_LINE}: {name} only defines a macro, and nothing uses %{name}.{hint}"
