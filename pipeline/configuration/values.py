"""Checks that bound values have the types that the annotations of their parameters ask for."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from gin import config as gin_config

from pipeline.configuration.registry import registered, signature
from pipeline.configuration.statements import Binding, Macro, Reference, value_of
from pipeline.utils.constraints import is_callable, resolved, union_members
from pipeline.utils.errors import UserError


class _Kind(NamedTuple):
    """Requirements on the value of a parameter.

    Attributes:
      types: Types that the value may have.
      wanted: Name of these types in a message.
      items: Requirements on the items if the value is a sequence.
      is_called: True if the value is a function or a class that will be called.
      may_be_called: True if it may be one.
      result: The type of the result of the call, if that is known to be a class.
    """

    types: tuple[type, ...]
    wanted: str
    items: _Kind | None = None
    is_called: bool = False
    may_be_called: bool = False
    result: type | None = None


_NUMBER = _Kind((int, float), "a number")
_WHOLE_NUMBER = _Kind((int,), "a whole number")
_KINDS: dict[Any, _Kind] = {
    float: _NUMBER,
    int: _WHOLE_NUMBER,
    bool: _Kind((bool,), "True or False"),
    str: _Kind((str,), "text in quotes"),
    Sequence[int]: _Kind((tuple, list), "a tuple of whole numbers, as in (64,)", _WHOLE_NUMBER),
    Sequence[float]: _Kind((tuple, list), "a tuple of numbers, as in (0.1, 0.5)", _NUMBER),
    tuple[float, float]: _Kind((tuple, list), "a pair of numbers, as in (-1.0, 1.0)", _NUMBER),
    tuple[int, int, int]: _Kind(
        (tuple, list), "three whole numbers, as in (32, 8, 4)", _WHOLE_NUMBER
    ),
    dict[str, Any]: _Kind((dict,), "a dictionary"),
}
_KINDS[Sequence[tuple[int, int, int]]] = _Kind(
    (tuple, list), "a tuple of (channels, kernel, stride)", _KINDS[tuple[int, int, int]]
)


def checked(
    configurable: gin_config.Configurable, binding: Binding, macros: Mapping[str, Any]
) -> Binding:
    """Returns the binding after a check of its value.

    A float such as 2e4 is converted to an int if the parameter needs an int.

    Args:
      configurable: Configurable that has the binding's parameter.
      binding: Binding whose references all name a configurable.
      macros: Values of all macros by name.

    Raises:
      UserError: If the value, or the value of a macro in it, has the wrong type.
    """
    value, kind = binding.value, _kind_of(configurable, binding.parameter)
    if kind is None:
        return binding
    if not _fits(value, kind, macros):
        must, used = f"must be {kind.wanted}", value_of(value, macros)
        if isinstance(used, float) and _stands_for_int(used, kind):
            must = f"{must}, and the macro is {used}: write {int(used)}"
        if isinstance(value, Reference) and value.evaluate and kind.is_called:
            must = f"drop the parentheses: write @{value.name}"
        elif isinstance(value, Reference) and kind.result:
            must = f"must return an object of the class {kind.result.__name__}"
        raise UserError(f"{binding.origin}: {binding.name} = {value!r}: {must}.")
    return binding._replace(value=_with_ints(value, kind))


def _fits(value: Any, kind: _Kind, macros: Mapping[str, Any], in_macro: bool = False) -> bool:
    in_macro = in_macro or isinstance(value, Macro)  # whose value is not converted to an int
    value = value_of(value, macros)
    if isinstance(value, Reference):
        if kind.is_called:
            return _gives_callable(value, kind) if value.evaluate else _makes(value, kind)
        return kind.may_be_called or (value.evaluate and not _gives_only_callables(value))
    if isinstance(value, Macro):  # a constant of gin
        return True
    if isinstance(value, tuple | list) and kind.items and type(value) in kind.types:
        return all(_fits(item, kind.items, macros, in_macro) for item in value)
    return type(value) in kind.types or (not in_macro and _stands_for_int(value, kind))


def _target(reference: Reference) -> Any:
    """Returns the function or class that a reference names; None if it is not registered."""
    configurable = registered(reference.name.rpartition("/")[2])
    return configurable.wrapped if configurable else None


def _returned(function: Any) -> Any:
    """Returns the annotation of a function's result; `Any` if there is none."""
    return resolved(function, getattr(function, "__annotations__", {}).get("return", Any))


def _makes(reference: Reference, kind: _Kind) -> bool:
    """Returns True if `name()` may return what is needed, as far as its annotation says."""
    target = _target(reference)
    made = target if inspect.isclass(target) else _returned(target)
    return any(_may_be(member, kind.result) for member in union_members(made))


def _may_be(made: Any, wanted: type | None) -> bool:
    made = get_origin(made) or made
    if wanted is None or made is Any or not inspect.isclass(made):
        return True
    try:
        return issubclass(made, wanted)
    except TypeError:  # for a protocol
        return True


def _gives_callable(reference: Reference, kind: _Kind) -> bool:
    """Returns True if the result of `@name()` may itself be called, or has no annotation."""
    target = _target(reference)
    if inspect.isclass(target):
        if kind.result and issubclass(target, kind.result):
            return False  # an instance, where the class that makes it is needed
        return any("__call__" in vars(base) for base in target.__mro__)
    members = union_members(_returned(target))
    return any(member in (Any, None) or is_callable(member) for member in members)


def _gives_only_callables(reference: Reference) -> bool:
    """Returns True if the result of `@name()` can only be a function, such as a schedule."""
    target = _target(reference)
    return not inspect.isclass(target) and all(map(is_callable, union_members(_returned(target))))


def _with_ints(value: Any, kind: _Kind) -> Any:
    if isinstance(value, tuple | list) and kind.items:
        return type(value)(_with_ints(item, kind.items) for item in value)
    return int(value) if _stands_for_int(value, kind) else value


def _stands_for_int(value: Any, kind: _Kind) -> bool:
    is_whole = isinstance(value, float) and value.is_integer()
    return is_whole and int in kind.types and float not in kind.types


def _kind_of(configurable: gin_config.Configurable, name: str) -> _Kind | None:
    """Returns the kind of a parameter; None if its annotation allows anything."""
    target = configurable.wrapped
    parameter = signature(configurable).get(name)
    annotation = resolved(target, parameter.annotation) if parameter else None
    return None if annotation is None else _kind(annotation)


def _kind(annotation: Any) -> _Kind | None:
    members = [_plain(member) for member in union_members(annotation)]
    if not all(isinstance(member, Hashable) for member in members):
        return None  # no type
    named = {member for member in members if member in _KINDS}
    if float in named:
        named.discard(int)
    others = (x for x in members if x not in _KINDS and x is not NoneType)
    if len(named) > 1 or not all(map(is_callable, others)):
        return None
    if named:
        kind = _KINDS[named.pop()]._replace(may_be_called=any(map(is_callable, members)))
    elif any(map(is_callable, members)):
        results = [get_args(member)[1:] for member in members if is_callable(member)]
        result = results[0][0] if results[0] and inspect.isclass(results[0][0]) else None
        wanted = "a configurable reference, for example @Adam"
        kind = _Kind((), wanted, is_called=True, result=result)
    else:
        return None
    if NoneType not in members:
        return kind
    return kind._replace(types=(*kind.types, NoneType), wanted=f"{kind.wanted}, or None")


def _plain(annotation: Any) -> Any:
    """Returns an annotation without ranges; `str` for a `Literal` of texts."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        is_text = all(isinstance(value, str) for value in get_args(annotation))
        return str if is_text else annotation
    is_nested_union = len(union_members(annotation)) > 1
    if get_origin(annotation) is not None and not is_callable(annotation) and not is_nested_union:
        arguments = tuple(_plain(argument) for argument in get_args(annotation))
        return annotation.__origin__[arguments] if arguments else annotation
    return annotation
