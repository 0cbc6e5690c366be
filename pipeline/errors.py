"""The one exception that stands for a mistake the user can mend."""


class UserError(Exception):
    """Shown as its message alone, without a traceback; the process then exits with code 2.

    The message names what is wrong (the binding, file, space, game, ...) and what to do about it.
    """
