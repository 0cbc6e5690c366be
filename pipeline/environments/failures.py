"""Reports failures outside the program in words: environments that raise, disks that are full."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from pipeline.environments import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.utils.errors import UserError, WriteError


@contextlib.contextmanager
def named_failures(
    environment: TrainingEnvironment, cause: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Turns what `environment` raises, eagerly or in a graph, into a UserError that names it.

    Args:
      environment: Environment whose exceptions are turned.
      cause: Returns a reason outside the environment, which is added to the message, or "".

    Raises:
      UserError: If the environment raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = environment.failure_message()
        if not message:
            raise
        raise UserError(message + cause()) from error


def untold(
    errors: Sequence[Exception], environments: Sequence[VectorEnvironment]
) -> Sequence[Exception]:
    """Returns those of `errors` that `named_failures` may not report.

    The caller raises the first of `errors`. If environments raised, `named_failures` reports their
    exceptions instead of it. Which of `errors` these exceptions caused is not known, because a
    graph has changed them. All of `errors` are then returned, unless environments explain them all.

    Args:
      errors: Errors that occurred together.
      environments: Environments that may have caused them.
    """
    explained = sum(environment.error is not None for environment in environments)
    if explained >= len(errors):
        return []
    return errors if explained else errors[1:]


@contextlib.contextmanager
def named_write_errors(folder: pathlib.Path) -> Iterator[None]:
    """Turns errors in writing files of `folder` into a WriteError that names the folder.

    Raises:
      WriteError: If a file cannot be written.
    """
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise WriteError(f"cannot write to {folder}: {error}") from error


def resume_hint(latest: Callable[[], pathlib.Path | None]) -> str:
    """Returns a sentence about the `latest` checkpoint, or "" if that cannot be read now.

    The sentence is added to a worse error, which an error in reading must not hide.
    """
    try:
        newest = latest()
    except WriteError:
        return ""
    return f"The checkpoint {newest} is intact." if newest else "There is no checkpoint yet."


@contextlib.contextmanager
def hinting(hint: Callable[[], str]) -> Iterator[None]:
    """Adds the hint, if there is one, to every UserError as a line of its own."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{error}\n{hint()}".rstrip("\n")) from error
