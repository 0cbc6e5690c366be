"""Failures that are not the program's, in words: environments that raise, disks that are full."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from pipeline.environments import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.errors import UserError, WriteError


@contextlib.contextmanager
def named_failures(
    environment: TrainingEnvironment, cause: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """What `environment` raises, eagerly or in a graph, becomes a UserError that names it.

    What `cause` then says is added: a reason that lies elsewhere.
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
    """Those of `errors`, of which the first is raised, that `named_failures` may not tell.

    Where the environments explain some, it tells these; which of the errors they are is not known,
    for a graph has changed them.
    """
    explained = sum(environment.error is not None for environment in environments)
    if explained >= len(errors):
        return []
    return errors if explained else errors[1:]


@contextlib.contextmanager
def named_write_errors(folder: pathlib.Path) -> Iterator[None]:
    """What keeps files of `folder` from being written becomes a WriteError that names it."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise WriteError(f"cannot write to {folder}: {error}") from error


def resume_hint(latest: Callable[[], pathlib.Path | None]) -> str:
    """Tells of the `latest` checkpoint; nothing where that cannot be read now.

    What it is added to is worse, and must not be hidden by it.
    """
    try:
        newest = latest()
    except WriteError:
        return ""
    return f"The checkpoint {newest} is intact." if newest else "There is no checkpoint yet."


@contextlib.contextmanager
def hinting(hint: Callable[[], str]) -> Iterator[None]:
    """Adds a line to every UserError, if there is a hint."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{error}\n{hint()}".rstrip("\n")) from error
