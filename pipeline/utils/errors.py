"""Exceptions for errors that the user can fix."""

USER_ERROR_CODE = 2  # Exit code of a process that ends with a UserError.


class UserError(Exception):
    """Error that the user can fix.

    It is shown as its message alone, without a traceback, and the process exits with code 2. The
    message names what is wrong (the binding, file, space, game, ...) and how to fix it.
    """


class WriteError(UserError):
    """Error for a file that cannot be written now, for example because the disk is full.

    A later attempt may succeed.
    """
