"""Reports failures of environments and of disks by messages that a user can understand."""

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
    """Converts exceptions of `environment`, raised eagerly or in a graph, to a UserError.

    The message names the environment.

    Args:
      environment: Environment whose exceptions are converted.
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
    """Returns the `errors` that `named_failures` may not report.

    The caller raises the first error. If environments raised, `named_failures` reports their
    exceptions instead of that error. It is then not known which errors these exceptions caused,
    because a graph has changed the errors. All errors are therefore returned, unless at least as
    many environments raised as there are errors. If no environment raised, all errors except the
    first are returned.

    Args:
      errors: Errors that occurred together.
      environments: Environments that may have caused them.
    """
    explained = sum(environment.episodes.error is not None for environment in environments)
    if explained >= len(errors):
        return []
    return errors if explained else errors[1:]


@contextlib.contextmanager
def named_write_errors(folder: pathlib.Path) -> Iterator[None]:
    """Converts errors in writing files of `folder` to a WriteError that names the folder.

    Raises:
      WriteError: If a file cannot be written.
    """
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise WriteError(f"cannot write to {folder}: {error}") from error


def resume_hint(latest: Callable[[], pathlib.Path | None]) -> str:
    """Returns a sentence about the `latest` checkpoint, or "" if that cannot be read now.

    The sentence is added to the message of another error. An error while reading the checkpoint
    must not hide that error.
    """
    try:
        newest = latest()
    except WriteError:
        return ""
    return f"The checkpoint {newest} is intact." if newest else "There is no checkpoint yet."


@contextlib.contextmanager
def hinting(hint: Callable[[], str]) -> Iterator[None]:
    """Adds the hint, if it is not empty, to every UserError as a separate line."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{error}\n{hint()}".rstrip("\n")) from error
