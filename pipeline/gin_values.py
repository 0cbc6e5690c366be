"""Whether a bound value is of the kind that the parameter's annotation asks for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gin import config as gin_config

from pipeline.errors import UserError
from pipeline.gin_registry import registered
from pipeline.gin_statements import Binding, Macro, Reference


class _Kind(NamedTuple):
    """The types of a kind's values, its name in a message, and the kind of the values' items."""

    types: tuple[type, ...]
    wanted: str
    items: str = ""


_NONE = type(None)
_NUMBER = "a number"
_WHOLE_NUMBER = "a whole number"
_CALLED = "the name of what is called: write @name"
# By how a kind reads in a signature, as text or as a type. What is called has no literal; of a
# Callable that is all that is read, not what stands in its brackets.
_KINDS = {
    "float": _Kind((int, float), _NUMBER),
    "int | float": _Kind((int, float), _NUMBER),
    "Schedule | float": _Kind((int, float), _NUMBER),
    "float | None": _Kind((int, float, _NONE), _NUMBER),
    "int": _Kind((int,), _WHOLE_NUMBER),
    "int | None": _Kind((int, _NONE), _WHOLE_NUMBER),
    "bool": _Kind((bool,), "True or False"),
    "bool | None": _Kind((bool, _NONE), "True, False or None"),
    "str": _Kind((str,), "text in quotes"),
    "str | None": _Kind((str, _NONE), "text in quotes, or None"),
    "dict[str, Any] | None": _Kind((dict, _NONE), "a dictionary, or None"),
    "Sequence[int]": _Kind((tuple, list), "a tuple of whole numbers, as in (64,)", "int"),
    "Sequence[float]": _Kind((tuple, list), "a tuple of numbers, as in (0.1, 0.5)", "float"),
    "tuple[float, float] | None": _Kind(
        (tuple, list, _NONE), "a pair of numbers, as in (-1.0, 1.0), or None", "float"
    ),
    "Sequence[tuple[int, int, int]]": _Kind(
        (tuple, list), "a tuple of (channels, kernel, stride)", "tuple[int, int, int]"
    ),
    "tuple[int, int, int]": _Kind((tuple, list), "three whole numbers, as in (32, 8, 4)", "int"),
    "Callable": _Kind((), _CALLED),
    "Initializer": _Kind((), _CALLED),
}


def checked(
    configurable: gin_config.Configurable, binding: Binding, macros: Mapping[str, Any]
) -> Binding:
    """The binding; a float such as 2e4 has become the int that an int parameter needs.

    Args:
        configurable: that has the binding's parameter.
        binding: whose references all name a configurable.
        macros: the values of all, by name.

    Raises:
        UserError: the value is of another kind, or that of a macro is.
    """
    value, name = binding.value, _kind(configurable, binding.parameter)
    if name not in _KINDS:
        return binding
    if not _fits(value, name, macros):
        must = f"must be {_KINDS[name].wanted}"
        if isinstance(value, Reference):
            must = f"drop the parentheses: write @{value.name}"
        raise UserError(f"{binding.origin}: {binding.name} = {value!r}: {must}.")
    return binding._replace(value=_with_ints(value, name))


def _fits(value: Any, name: str, macros: Mapping[str, Any]) -> bool:
    if isinstance(value, Reference):
        return _KINDS[name].wanted != _CALLED or not value.evaluate or _gives_callable(value, name)
    if isinstance(value, Macro):
        others = {macro: x for macro, x in macros.items() if macro != value.name}
        return value.name not in macros or _fits(macros[value.name], name, others)
    types, _, items = _KINDS[name]
    if isinstance(value, tuple | list) and items and type(value) in types:
        return all(_fits(item, items, macros) for item in value)
    return type(value) in types or _stands_for_int(value, name)


def _gives_callable(reference: Reference, name: str) -> bool:
    """Whether what @name() returns may itself be called; true of what nobody has annotated."""
    configurable = registered(reference.name.rpartition("/")[2])
    target = configurable.wrapped if configurable else None
    if inspect.isclass(target):
        # An initializer can be called too, but to draw; wanted is what makes one.
        has_call = any("__call__" in vars(base) for base in target.__mro__)
        return has_call and name != "Initializer"
    returned = _text(getattr(target, "__annotations__", {}).get("return", ""))
    return _outline(returned) in ("", "Any", "Callable", "Initializer", "Schedule")


def _with_ints(value: Any, name: str) -> Any:
    items = _KINDS[name].items
    if isinstance(value, tuple | list) and items:
        return type(value)(_with_ints(item, items) for item in value)
    return int(value) if _stands_for_int(value, name) else value


def _stands_for_int(value: Any, name: str) -> bool:
    types = _KINDS[name].types
    return isinstance(value, float) and value.is_integer() and int in types and float not in types


def _kind(configurable: gin_config.Configurable, name: str) -> str:
    parameter = inspect.signature(configurable.wrapped).parameters.get(name)
    text = _text(parameter.annotation) if parameter else ""
    return "Callable" if _outline(text) == "Callable" else text


def _text(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _outline(text: str) -> str:
    """Without what stands in brackets."""
    while (shorter := re.sub(r"\[[^][]*\]", "", text)) != text:
        text = shorter
    return text
