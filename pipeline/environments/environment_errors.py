"""Reports failures of environments by messages that a user can understand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pipeline.environments import TrainingEnvironment
from pipeline.utils.errors import UserError


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
