"""Defines the exceptions for errors that the user can fix."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

USER_ERROR_CODE = 2  # Exit code of a process that ends with a UserError.
RETRY_CODE = 75  # EX_TEMPFAIL of sysexits.h: exit code after a RetryableError.
# How the lines begin that gin appends to the message of an exception.
_OF_GIN = (
    "  In call to configurable ",
    "  No values supplied by Gin ",
    "  Gin had values bound for",
    "  Caller supplied values for",
)


class UserError(Exception):
    """Error that the user can fix.

    It is shown as its message alone, without a traceback, and the process exits with `exit_code`.
    The message names what is wrong (the binding, file, space, game, ...) and how to fix it.
    """

    exit_code = USER_ERROR_CODE


class RetryableError(UserError):
    """Error whose cause is outside of the run, such as another process or another machine.

    Nothing is wrong with the run: the same command may succeed later or elsewhere. The process
    exits with code 75.
    """

    exit_code = RETRY_CODE


class WriteError(RetryableError):
    """Error for a file that cannot be written now, for example because the disk is full."""


class DeniedError(WriteError):
    """Error for a file that this user may not write, which waiting alone does not change."""

    exit_code = USER_ERROR_CODE


@contextlib.contextmanager
def hinting(hint: Callable[[], str]) -> Iterator[None]:
    """Adds the hint, if it is not empty, to every UserError as a separate line."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{error}\n{hint()}".rstrip("\n")) from error


def last_line(error: Exception | str) -> str:
    """Returns the last line of an error, which names the cause if the error holds a traceback.

    The lines that gin appends for each call that an exception passes are left out.
    """
    lines = [line for line in str(error).strip().split("\n") if not line.startswith(_OF_GIN)]
    line = lines[-1] if lines else ""
    return line or (type(error).__name__ if isinstance(error, Exception) else "")


def without_gin(error: BaseException) -> str:
    """Returns the message of an exception without what gin appends."""
    lines = str(error).split("\n")
    return "\n".join(itertools.takewhile(lambda line: not line.startswith(_OF_GIN), lines))
