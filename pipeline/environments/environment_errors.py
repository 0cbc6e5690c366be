"""Reports failures of environments by messages that a user can understand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from pipeline.environments import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
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


def unreported(
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
