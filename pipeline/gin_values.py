"""Whether a bound value is of the kind that the parameter's annotation asks for."""

from __future__ import annotations

import inspect
from typing import Any

from gin import config as gin_config

from pipeline.errors import UserError
from pipeline.gin_statements import Binding, Macro, Reference

# How kinds read in a signature, as text or as types.
_NUMBERS = {"float", "float | None", "int | float", "Schedule | float"}
_WHOLE_NUMBERS = {"int", "int | None", "None | int", "Optional[int]", "typing.Optional[int]"}
_OTHERS: dict[str, tuple[Any, str]] = {
    "bool": (bool, "True or False"),
    "str": (str, "text in quotes"),
    "str | None": ((str, type(None)), "text in quotes, or None"),
    "dict[str, Any] | None": ((dict, type(None)), "a dictionary, or None"),
    "Sequence[int]": ((tuple, list), "a tuple of whole numbers, as in (64,)"),
}


def checked(configurable: gin_config.Configurable, binding: Binding) -> Binding:
    """The binding; a float such as 2e4 has become the int that an int parameter needs.

    Raises:
        UserError: the value is of another kind.
    """
    value = binding.value
    parameter = inspect.signature(configurable.wrapped).parameters.get(binding.parameter)
    annotation = parameter.annotation if parameter else ""
    kind = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if isinstance(value, Reference | Macro):
        return binding
    if kind in _OTHERS:
        types, wanted = _OTHERS[kind]
        if isinstance(value, types):
            return binding
    elif kind in _NUMBERS | _WHOLE_NUMBERS:
        is_whole, may_be_none = kind in _WHOLE_NUMBERS, "None" in kind or "Optional" in kind
        if is_whole and isinstance(value, float) and value.is_integer():
            return binding._replace(value=int(value))
        if type(value) in ((int,) if is_whole else (int, float)) or value is None and may_be_none:
            return binding
        wanted = "a whole number" if is_whole else "a number"
    else:
        return binding
    raise UserError(f"{binding.origin}: {binding.name} = {value!r}: must be {wanted}.")
