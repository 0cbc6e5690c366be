"""The exceptions that stand for what the user can mend."""

import math
from collections.abc import Iterable, Sequence

USER_ERROR_CODE = 2  # of a process that a UserError ends


class UserError(Exception):
    """Shown as its message alone, without a traceback; the process then exits with code 2.

    The message names what is wrong (the binding, file, space, game, ...) and what to do about it.
    """


class WriteError(UserError):
    """A file cannot be written now: the disk is full, not writable, ... Trying again may help."""


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises UserError unless the parameter `name` is a whole number, at least `least`."""
    if type(value) is not int or value < least:
        raise UserError(f"{name} = {value!r}: must be a whole number, at least {least}.")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raises UserError unless the parameter `name` is one of `choices`, two or more."""
    if value not in choices:
        *others, last = ("None" if choice is None else f'"{choice}"' for choice in choices)
        raise UserError(f"{name} = {value!r}: must be {', '.join(others)} or {last}.")


def check_wholes(name: str, values: Iterable[object]) -> None:
    """Raises UserError unless each of the parameter's values is a whole number, at least 1."""
    for place, value in enumerate(values):
        check_whole(f"{name}[{place}]", value)


def check_number(name: str, value: object, above: float, at_most: float = math.inf) -> None:
    """Raises UserError unless the parameter `name` is a number in (above, at_most]."""
    if type(value) not in (int, float) or not above < value <= at_most:  # type: ignore[operator]
        limit = f", at most {at_most}" if at_most < math.inf else ""
        raise UserError(f"{name} = {value!r}: must be a number above {above}{limit}.")


def check_within(name: str, value: object, least: float, at_most: float = math.inf) -> None:
    """Raises UserError unless the parameter `name` is a number in [least, at_most]."""
    if type(value) not in (int, float) or not least <= value <= at_most:  # type: ignore[operator]
        limit = f", at most {at_most}" if at_most < math.inf else ""
        raise UserError(f"{name} = {value!r}: must be a number, at least {least}{limit}.")
