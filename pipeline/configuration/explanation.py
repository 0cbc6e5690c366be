"""Explains where every value of a run comes from, and shortens gin's run-time errors to one line.

gin 0.5.0 does not record where values are bound; `pipeline.configuration` does so while loading.
"""

from __future__ import annotations

import inspect
import pprint
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config as gin_config

from pipeline.configuration.registry import TF_AGENTS
from pipeline.configuration.statements import (
    COMMAND_LINE,
    Binding,
    Reference,
    Source,
    find_file,
    scan,
    shipped_folder,
    shipped_names,
    suggest,
)
from pipeline.utils.errors import UserError, without_gin

#: Places that bound each (scope, complete selector, parameter) of gin's global config, in order.
#: The last is in force. `pipeline.configuration.apply` fills it.
origins: dict[tuple[str, str, str], list[str]] = {}

#: Why parameters have no effect in the run that was built, by "function.parameter". What builds the
#: run notes them, because gin takes a parameter that a function has received for used.
without_effect: dict[str, str] = {}

# Prefixes of the selectors that are called while a run is built: those of this package, and those
# of Keras' optimizers and initializers, which this package registers.
_OURS = ("pipeline.", "tf_keras.")

_GIN_CALL = "gin_wrapper"  # the function that gin calls around each configurable
# A call without all of its arguments, in the words of Python and then of gin.
_LACKS = re.compile(
    r"missing \d+ required [\w-]+ arguments?: (?P<parameters>.*)\n"
    r"(?:  (?!In call).*\n)*  In call to configurable '(?P<name>\w+)'"
)
_TRAIN = "pipeline.training.train_loop.train"
_MACRO = "gin.macro"
_CONSTANT = "gin.constant"
_MAX_ALIGNED = 60  # Columns. A longer binding does not shift the comments of all others.


class _Row(NamedTuple):
    text: str
    comment: str


def explain() -> str:
    """Returns all values with their places, grouped by configurable, then the unused bindings.

    A line is `name.param = value  # file:line` or `name.param = value  # default (file:line)`.
    It covers the configurables called so far, so build the run first.
    """
    groups: list[list[_Row]] = []
    for (scope, selector), values in sorted(_operative().items(), key=_order):
        if selector == _CONSTANT or not values:
            continue
        groups.append(
            [
                _Row(f"{_target(scope, selector, name)} = {value!r}", _place(scope, selector, name))
                for name, value in sorted(values.items())
            ]
        )
    unread = [_Row(_target(*key), origins[key][-1]) for key in _unread()]
    text = "\n\n".join(_aligned(groups))
    if unread:
        text += "\n\n# Bound, but not used in this run:\n" + "\n".join(_aligned([unread]))
    return text.lstrip("\n")


def ignored() -> str | None:
    """Returns a message about the unused bindings of the command line, or None if there are none.

    Everything in this package that uses bindings must have been called. The message names the
    nearest bindings that are used. It leaves out configurables of other packages that have not been
    called, because they may be called later, and parameters of `train` that are bound to a
    configurable that has been called, because other programs read the factories of a run without
    calling `train`.
    """
    called = {selector for _, selector in _operative()}
    unread = [
        _target(scope, selector, name)
        for scope, selector, name in _unread()
        if origins[scope, selector, name][-1] == COMMAND_LINE
        and (selector in called or selector.startswith(_OURS) or selector == _MACRO)
        and not (selector == _TRAIN and _referent(scope, selector, name) in called)
    ]
    return f"{COMMAND_LINE}: {' '.join(map(_not_used, unread))}" if unread else None


def warnings() -> list[str]:
    """Returns a message for each binding that has no effect in this run, and perhaps in none.

    Files bind parameters for other runs as well. Of files that are not shipped, these count: macros
    that no binding uses, and bindings in a scope in which a function that this run has called was
    not called.
    """
    bound = {_target(*x) for x in origins if x[0] or origins[x][-1] == COMMAND_LINE}
    told = sorted(bound & without_effect.keys())
    messages = [f"{target} has no effect, because {without_effect[target]}." for target in told]
    called = {selector for _, selector in _operative()}
    used = {x.config_key for x in gin_config.iterate_references(gin_config._CONFIG)}
    for scope, selector, name in _unread():
        target, place = _target(scope, selector, name), origins[scope, selector, name][-1]
        could_be_read = (scope, selector) in used or selector not in (*called, _MACRO)
        is_own = place != COMMAND_LINE and not place.startswith(f"{shipped_folder().name}/")
        if scope and is_own and not could_be_read and target not in without_effect:
            messages.append(f"{place}: {_not_used(target)}")
    return messages


def unused(file: Path) -> str | None:
    """Returns the place and name of a parameter that a file binds in vain, or None.

    Nothing called so far has used such a binding. Macros do not count.
    """
    label = Source.read(file).label
    for key in _unread():
        if key[1] != _MACRO and origins[key][-1].rpartition(":")[0] == label:
            return f"{origins[key][-1]}: {_not_used(_target(*key))}"
    return None


def _not_used(target: str) -> str:
    """Returns a sentence about an unused binding that names the nearest bindings that are used."""
    known = [_target(*key, name) for key, values in _operative().items() for name in values]
    return f"{target} is not used here.{suggest(target, known)}"


def _referent(scope: str, selector: str, name: str) -> str | None:
    """Returns the selector of the configurable that a parameter is bound to, or None."""
    value = gin_config._CONFIG.get((scope, selector), {}).get(name)
    is_reference = isinstance(value, gin_config.ConfigurableReference)
    return value.configurable.selector if is_reference else None


def operative_config() -> str:
    """Returns every value that the configurables called so far have received, as gin text.

    Values that are bound to configurables of other packages are included, because an environment
    may read them later, or in another process. `pipeline.configuration.load` can read this text.
    TF-Agents' own configurables, which it refuses, are left out.
    """
    values = _operative()
    missing = [key for key in gin_config._CONFIG if not key[1].startswith((*_OURS, "gin."))]
    while missing:
        key = missing.pop()
        bound = gin_config._CONFIG.get(key, {})
        values[key] = bound | values.get(key, {})
        references = gin_config.iterate_references({key: bound})
        missing += [x.config_key for x in references if x.config_key not in values]
    return gin_config._config_str(
        {key: {name: _in_order(x) for name, x in bound.items()} for key, bound in values.items()}
    )


class _InOrder(dict):
    """Dictionary that gin writes in its own order, because an environment may depend on it.

    gin sorts other dictionaries.
    """

    def __repr__(self) -> str:
        return pprint.pformat(dict(self), sort_dicts=False)


def _in_order(value: Any) -> Any:
    """Returns the value with each outer dictionary as an `_InOrder`."""
    if type(value) in (list, tuple):
        return type(value)(map(_in_order, value))
    return _InOrder(value) if type(value) is dict else value


def _operative() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns a copy of gin's operative values by (scope, complete selector).

    TF-Agents' own configurables are left out.
    """
    with gin_config._OPERATIVE_CONFIG_LOCK:
        items = gin_config._OPERATIVE_CONFIG.items()
        return {key: dict(values) for key, values in items if not key[1].startswith(TF_AGENTS)}


def _unread() -> list[tuple[str, str, str]]:
    read = {
        _binding_key(scope, selector, name)
        for (scope, selector), values in _operative().items()
        for name in values
    }
    return [key for key in origins if key not in read]


def _order(item: tuple[tuple[str, str], Any]) -> tuple[bool, bool, str, str]:
    """Returns a sort key: macros first, then this package's configurables, scopes side by side."""
    scope, selector = item[0]
    return selector != _MACRO, not selector.startswith("pipeline."), _short(selector), scope


def _place(scope: str, selector: str, name: str) -> str:
    """Returns where the value of a parameter inside `scope` comes from."""
    key = _binding_key(scope, selector, name)
    if key in origins:
        return _history(origins[key])
    return (
        "gin.bind_parameter, in an imported module" if key else f"default ({_definition(selector)})"
    )


def _binding_key(scope: str, selector: str, name: str) -> tuple[str, str, str] | None:
    """Returns the key of the binding that gin uses inside `scope`, or None if there is none.

    gin uses the binding in the innermost enclosing scope.
    """
    parts = scope.split("/") if scope else []
    for depth in range(len(parts), -1, -1):
        outer = "/".join(parts[:depth])
        if name in gin_config._CONFIG.get((outer, selector), {}):
            return outer, selector, name
    return None


def _history(places: Sequence[str]) -> str:
    overridden = f" (overrides {', '.join(reversed(places[:-1]))})" if len(places) > 1 else ""
    return places[-1] + overridden


def _short(selector: str) -> str:
    return gin_config._REGISTRY.minimal_selector(selector)


def _target(scope: str, selector: str, name: str) -> str:
    if selector == _MACRO:
        return scope
    return f"{scope}/{_short(selector)}.{name}" if scope else f"{_short(selector)}.{name}"


def _definition(selector: str) -> str:
    """Returns the place of the function or constructor whose default is used.

    For example `pipeline/agents/dqn.py:42`.
    """
    target = gin_config._REGISTRY[selector].wrapped
    if inspect.isclass(target):
        target = gin_config._find_class_construction_fn(target)
    code = getattr(inspect.unwrap(target), "__code__", None)
    if code is None:  # Written in C.
        return selector
    path = Path(code.co_filename)
    depth = target.__module__.count(".") + 1 + (path.name == "__init__.py")
    return f"{'/'.join(path.parts[-depth:])}:{code.co_firstlineno}"


def _aligned(groups: Sequence[Sequence[_Row]]) -> list[str]:
    widths = [len(row.text) for group in groups for row in group]
    width = max((w for w in widths if w <= _MAX_ALIGNED), default=0)
    return ["\n".join(f"{row.text:<{width}}  # {row.comment}" for row in group) for group in groups]


def explain_call_error(error: BaseException) -> str | None:
    """Returns a short message for a user's error that passed through gin, or None for other errors.

    gin appends "In call to configurable ..." to an exception for each call that it passes. The
    message of a `UserError` is returned without this text. For a missing REQUIRED parameter, the
    message names the flag that binds it, or the shipped files that bind it to a function. If a call
    lacks an argument, as that of `@f()` where `@f` is meant, the message names the parameter. If
    references call each other in a circle, it names what they call.
    """
    message = without_gin(error)
    if isinstance(error, UserError):
        return message
    if isinstance(error, RecursionError):
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        counts = Counter(x.f_locals["selector"] for x in frames if x.f_code.co_name == _GIN_CALL)
        repeated = (x for x, count in counts.items() if count > 1 and x != "gin.macro")
        if names := sorted(map(gin_config._REGISTRY.minimal_selector, repeated)):
            return (
                f"the call of {' and '.join(names)} needs its own result, because a parameter is "
                "bound to a reference (@...) that calls it again. Correct that binding."
            )
    if lacks := _LACKS.search(str(error)):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.name == _GIN_CALL:  # The call failed, not something inside the function.
            name, parameters = lacks["name"], lacks["parameters"]
            return (
                f"{name} was called without {parameters}. Bind this parameter, or write @{name} "
                f"instead of @{name}() if it is to be called later."
            )
    missing = re.fullmatch(
        r"Required bindings for `(.+)` not provided in config: \[(.*)\]", message.strip()
    )
    if missing is None:
        return None
    names = [f"{missing[1]}.{name.strip(chr(39))}" for name in missing[2].split(", ")]
    if text := next(filter(None, map(missing_file_message, names)), None):
        return text
    flags = " ".join(f'{COMMAND_LINE}="{name}={_example(name)}"' for name in names)
    have = "have no values" if len(names) > 1 else "has no value"
    return f"{' and '.join(names)} {have}: add {flags}"


def missing_file_message(parameter: str) -> str | None:
    """Returns a message that a parameter of `train` is not bound, with the shipped parts that do.

    It is None if no shipped part binds the parameter to a function. The function alone would be
    wrong advice, because it needs other bindings of its file.
    """
    if not parameter.startswith("train."):
        return None
    values = _shipped_values(parameter)
    files = dict.fromkeys(name for name, x in values if "/" in name and isinstance(x, Reference))
    if not files:
        return None
    return f"{parameter} is not bound. Add a --gin_file that binds it: {', '.join(files)}."


def _example(parameter: str) -> str:
    """Returns the value that a shipped config binds to this parameter, or "..." if none does."""
    return next((repr(value) for _, value in _shipped_values(parameter)), "...")


def _shipped_values(parameter: str) -> Iterator[tuple[str, Any]]:
    """Yields the name of each shipped config that binds the parameter, and the value."""
    for name in shipped_names():
        for statement in scan(Source.read(find_file(name, [shipped_folder()]))):
            if isinstance(statement, Binding) and statement.name == parameter:
                yield name, statement.value
