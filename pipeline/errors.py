"""The exceptions that stand for what the user can mend."""

USER_ERROR_CODE = 2  # of a process that a UserError ends


class UserError(Exception):
    """Shown as its message alone, without a traceback; the process then exits with code 2.

    The message names what is wrong (the binding, file, space, game, ...) and what to do about it.
    """


class WriteError(UserError):
    """A file cannot be written now: the disk is full, not writable, ... Trying again may help."""
