"""Defines types for parameters with a limited range, and checks calls against them.

def create_agent(*, discount: Probability = 0.99, n_step: PositiveInt = 1):
    check_arguments(create_agent, locals())
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pipeline.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
    """Range of the numbers from `low` to `high`.

    It excludes `low` itself if `is_open` is True, and `high` itself if `is_open_above` is True.
    """

    low: float
    high: float = math.inf
    is_open: bool = False
    is_open_above: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = self.low < value if self.is_open else self.low <= value
        return is_above and (value < self.high if self.is_open_above else value <= self.high)

    def __str__(self) -> str:
        low = f" above {self.low}" if self.is_open else f", at least {self.low}"
        high = f", below {self.high}" if self.is_open_above else f", at most {self.high}"
        return low + (high if self.high < math.inf else "")


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, is_open=True)]
NonNegative = Annotated[float, Range(0)]
AtLeastOne = Annotated[float, Range(1)]
Fraction = Annotated[float, Range(0, 1, is_open=True)]
Probability = Annotated[float, Range(0, 1)]
DecayRate = Annotated[float, Range(0, 1, is_open_above=True)]

_LARGEST = 2**63 - 1
#: Name of the attribute with both ends of a linear schedule.
ENDS = "ends"


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Checks the arguments of a call against the ranges in the annotations of its parameters.

    Parameters without a range are not checked. Both ends of a `linear_schedule` are checked. An end
    may equal a bound that the range excludes, for example a learning rate of 0.

    Args:
      function: Function that is called.
      arguments: Values by name. Names that are not parameters of the function are ignored.

    Raises:
      UserError: If an argument is out of its range. The message names the parameter and the range.
    """
    target = inspect.unwrap(function)
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name in arguments:
            annotation = resolved(target, parameter.annotation)
            full_name = f"{target.__name__}.{parameter.name}"
            check(full_name, arguments[parameter.name], annotation)


def check(name: str, value: object, annotation: Any) -> None:
    """Checks the value of the parameter `name` against its annotation.

    Raises:
      UserError: If the value is out of the range of the annotation.
    """
    members = union_members(annotation)
    if value is None and types.NoneType in members:
        return
    if callable(value) and any(is_callable(member) for member in members):
        for end in getattr(value, ENDS, ()):
            _check_end(f"{name} (an end of its schedule)", end, members)
        return
    for member in members:
        if get_origin(member) is Literal:
            none = [None] if types.NoneType in members else []
            _check_choice(name, value, [*get_args(member), *none])
        if get_origin(member) is Annotated:
            number, *constraints = get_args(member)
            for allowed in (x for x in constraints if isinstance(x, Range)):
                _check_number(name, value, number, allowed)
        if get_origin(member) is Sequence and isinstance(value, list | tuple):
            for place, item in enumerate(value):
                check(f"{name}[{place}]", item, get_args(member)[0])


def _check_number(name: str, value: Any, number: type, allowed: Range) -> None:
    is_number = type(value) is int or (number is float and type(value) is float)
    if not is_number or value not in allowed:
        kind = "a number" if number is float else "a whole number"
        raise UserError(f"{name} = {value!r}: must be {kind}{allowed}.")
    if number is int and value > _LARGEST:
        raise UserError(f"{name} = {value!r}: must be at most {_LARGEST}, a number of 64 bits.")


def _check_end(name: str, value: float, members: tuple[Any, ...]) -> None:
    for member in (x for x in members if get_origin(x) is Annotated):
        for allowed in (x for x in get_args(member) if isinstance(x, Range)):
            _check_number(name, value, float, dataclasses.replace(allowed, is_open=False))


def _check_choice(name: str, value: object, choices: list[object]) -> None:
    if value not in choices:
        *others, last = ("None" if choice is None else f'"{choice}"' for choice in choices)
        raise UserError(f"{name} = {value!r}: must be {', '.join(others)} or {last}.")


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or a tuple of the annotation alone."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def is_callable(annotation: Any) -> bool:
    """Returns True for `Callable`, with or without its arguments."""
    return annotation is Callable or get_origin(annotation) is get_origin(Callable[[], Any])


def resolved(target: Any, annotation: Any) -> Any:
    """Evaluates an annotation of `target` that is a string.

    Returns None if it cannot be evaluated: it may use names that its module has only while types
    are checked, or be no type at all.
    """
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[target.__module__]))
    except Exception:
        return None
