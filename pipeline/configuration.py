"""Finding, loading and explaining gin files.

Imports neither TensorFlow nor anything that does, so that `--list_configs` and most mistakes are
answered at once; TensorFlow comes in when a gin file imports the module that it binds.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_config

from pipeline import gin_explain, gin_registry, gin_values
from pipeline.errors import UserError
from pipeline.gin_explain import explain_call_error
from pipeline.gin_statements import (
    COMMAND_LINE,
    Binding,
    Import,
    Macro,
    Reference,
    Source,
    find_file,
    last_switch,
    leaves,
    list_configs,
    scan,
    shipped_folder,
    suggest,
)

__all__ = [
    "apply",
    "defaults",
    "explain",
    "explain_call_error",
    "find_config",
    "ignored",
    "in_force",
    "list_configs",
    "load",
    "operative_config",
    "preserved",
    "read",
    "uses_onednn",
]

# Where each (scope, complete selector, parameter) of gin's global config was bound, in order.
_origins: dict[tuple[str, str, str], list[str]] = {}


def find_config(name: str) -> Path:
    """A path, or the name of a shipped config (`dqn_cartpole`, `agents/dqn`), `.gin` or not.

    Raises:
        UserError: there is no such file; names the nearest.
    """
    return find_file(name, [Path(), shipped_folder()])


def load(
    gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (), allow_imports: bool = False
) -> None:
    """Replaces gin's config by `gin_files` in order, then `gin_bindings`: `apply(read(...))`.

    Raises:
        UserError: any mistake in these.
    """
    apply(read(gin_files, gin_bindings, allow_imports))


def read(
    gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (), allow_imports: bool = False
) -> list[Import | Binding]:
    """The statements of `gin_files` with their includes, then of `gin_bindings`; executes none.

    Args:
        gin_files: paths or names of shipped configs.
        gin_bindings: gin statements, such as `train.num_env_steps = 50_000`.
        allow_imports: lets gin files import modules from outside this package.

    Raises:
        UserError: one that cannot be read, with its place.
    """
    sources = chain(
        (Source.read(find_config(name)) for name in gin_files),
        (Source(text.strip(), None) for text in gin_bindings),
    )
    return [statement for source in sources for statement in scan(source, allow_imports)]


def uses_onednn(statements: Iterable[Import | Binding]) -> bool:
    """The value of `configure_tensorflow.onednn`, which TensorFlow reads when it is imported."""
    return last_switch(statements, "configure_tensorflow.onednn", True)


def apply(statements: Sequence[Import | Binding]) -> None:
    """Replaces gin's config by `statements`: first the imports, then the bindings; the last wins.

    The config stays unlocked, so modules may be imported later.

    Raises:
        UserError: a name or a value is wrong; with its place and the nearest names.
    """
    bindings = [statement for statement in statements if isinstance(statement, Binding)]
    gin.clear_config()
    _origins.clear()
    for statement in statements:
        if isinstance(statement, Import):
            _import(statement)
    _check_macros(bindings)
    macros = {binding.name: binding.value for binding in bindings if not binding.parameter}
    for binding in bindings:
        _bind(binding, macros)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Leaves gin's global config as it was found, for a library inside a program that uses gin."""
    stores: list[Any] = [
        gin_config._CONFIG,
        gin_config._OPERATIVE_CONFIG,
        gin_config._SINGLETONS,
        gin_config._IMPORTS,
        _origins,
    ]
    before = [store.copy() for store in stores]
    was_locked = gin.config_is_locked()
    gin_config._set_config_is_locked(False)
    try:
        yield
    finally:
        for store, content in zip(stores, before, strict=True):
            store.clear()
            store.update(content)
        gin_config._set_config_is_locked(was_locked)


def defaults(selector: str) -> dict[str, Any]:
    """Of a configurable's signature; {} if the module that defines it has not been imported."""
    if not (configurable := gin_registry.registered(selector)):
        return {}
    parameters = inspect.signature(configurable.wrapped).parameters.values()
    without = (inspect.Parameter.empty, gin.REQUIRED)
    return {x.name: x.default for x in parameters if x.default not in without}


def in_force(scope: str, selector: str) -> dict[str, Any]:
    """What a configurable would be given now: its defaults, and over them what is bound."""
    if not gin_registry.registered(selector):
        return {}
    name = f"{scope}/{selector}".lstrip("/")
    return defaults(selector) | gin.get_bindings(name, resolve_references=False)


def operative_config() -> str:
    """Every value that the configurables called so far were given, as gin text for `load`."""
    return gin_explain.operative_config()


def explain() -> str:
    """`name.param = value  # file:line` or `# default (file:line)`, grouped by configurable.

    Covers the configurables called so far; bindings that none of them read are listed at the end.
    """
    return gin_explain.explain(_origins)


def ignored(is_complete: bool = True) -> str | None:
    """A message about bindings of the command line that nothing has read; None if there are none.

    Args:
        is_complete: whether all has been called that a run calls; what has not been called is
            otherwise passed over.
    """
    return gin_explain.ignored(_origins, is_complete)


def _import(statement: Import) -> None:
    try:
        importlib.import_module(statement.module)
    except ModuleNotFoundError as error:
        # A module that exists but lacks one of its own imports is no mistake in the gin file.
        if error.name is None or not f"{statement.module}.".startswith(f"{error.name}."):
            raise
        hint = suggest(statement.module, _package_modules())
        message = f"{statement.origin}: there is no module {statement.module!r}.{hint}"
        raise UserError(message) from None
    gin.parse_config(statement.text)


def _package_modules() -> list[str]:
    root = Path(__file__).parent
    files = (path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py"))
    return [".".join(path.parts) for path in files if path.name != "__init__"]


def _bind(binding: Binding, macros: Mapping[str, Any]) -> None:
    for leaf in leaves(binding.value):
        if isinstance(leaf, Reference):
            gin_registry.need_registered(leaf.name.rpartition("/")[2], binding.origin)
    selector = "gin.macro"
    if binding.parameter:
        configurable = gin_registry.need_registered(binding.selector, binding.origin)
        gin_registry.check_parameter(configurable, binding)
        binding = gin_values.checked(configurable, binding, macros)
        selector = configurable.selector
    try:
        gin.parse_config(f"{binding.name} = {binding.value!r}")
    except SyntaxError:
        message = f"{binding.origin}: {binding.value!r} has no spelling in gin."
        raise UserError(message) from None
    scope = binding.scope if binding.parameter else binding.name
    key = (scope, selector, binding.parameter or "value")
    _origins.setdefault(key, []).append(binding.origin)


def _check_macros(bindings: Iterable[Binding]) -> None:
    """Every macro used is defined, and every one defined on the command line is used."""
    defined = {binding.name: binding for binding in bindings if not binding.parameter}
    used: dict[str, str] = {}
    for binding in bindings:
        macros = (leaf for leaf in leaves(binding.value) if isinstance(leaf, Macro))
        used.update((macro.name, binding.origin) for macro in macros)
    for name, origin in used.items():
        if name not in defined and not gin_config._CONSTANTS.matching_selectors(name):
            hint = suggest(name, defined)
            raise UserError(f"{origin}: the macro %{name} is not defined.{hint}")
    for name, binding in defined.items():
        if binding.origin == COMMAND_LINE and name not in used:
            raise UserError(_unused_macro(name))


def _unused_macro(name: str) -> str:
    """`num_env_steps=5` is valid gin, but only defines a macro: surely a parameter was meant."""
    meant = gin_registry.hints(name)
    hint = f" Write {' or '.join(meant)}." if meant else ""
    return f"{COMMAND_LINE}: {name} names no configurable, and no %{name} is used.{hint}"
