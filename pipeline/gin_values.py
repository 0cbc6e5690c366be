"""Whether a bound value is of the kind that the parameter's annotation asks for."""

from __future__ import annotations

import inspect

from gin import config as gin_config

from pipeline.errors import UserError
from pipeline.gin_statements import Binding, Macro, Reference

_NONE = type(None)
_NUMBER = "a number"
_WHOLE_NUMBER = "a whole number"
# By how a kind reads in a signature, as text or as a type: the types of its values, and its name.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "float": ((int, float), _NUMBER),
    "int | float": ((int, float), _NUMBER),
    "Schedule | float": ((int, float), _NUMBER),
    "float | None": ((int, float, _NONE), _NUMBER),
    "int": ((int,), _WHOLE_NUMBER),
    "int | None": ((int, _NONE), _WHOLE_NUMBER),
    "bool": ((bool,), "True or False"),
    "str": ((str,), "text in quotes"),
    "str | None": ((str, _NONE), "text in quotes, or None"),
    "dict[str, Any] | None": ((dict, _NONE), "a dictionary, or None"),
    "Sequence[int]": ((tuple, list), "a tuple of whole numbers, as in (64,)"),
}


def checked(configurable: gin_config.Configurable, binding: Binding) -> Binding:
    """The binding; a float such as 2e4 has become the int that an int parameter needs.

    Raises:
        UserError: the value is of another kind.
    """
    value, kind = binding.value, _kind(configurable, binding.parameter)
    if kind not in _KINDS or isinstance(value, Reference | Macro):
        return binding
    types, wanted = _KINDS[kind]
    if type(value) in types:
        return binding
    if int in types and isinstance(value, float) and value.is_integer():
        return binding._replace(value=int(value))
    raise UserError(f"{binding.origin}: {binding.name} = {value!r}: must be {wanted}.")


def _kind(configurable: gin_config.Configurable, name: str) -> str:
    parameter = inspect.signature(configurable.wrapped).parameters.get(name)
    annotation = parameter.annotation if parameter else ""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
