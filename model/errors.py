"""Base class for errors that the user can fix, with stable error codes."""

from __future__ import annotations


class UserError(Exception):
    """Base class for errors that the user can fix.

    Commands print the message without a traceback and exit with status 2, because the same command would fail again. If
    `is_transient` is true (for example, for a file system error), commands exit with status 1, because a restart may
    help.

    Args:
        message: what is wrong, with the value; what is allowed; what to do.
        code: stable identifier of the error for scripts and tests, in lower case with underscores. Defaults to the code
            of the class.
        key: the affected configuration key, command-line option or path.
    """

    code = "user_error"
    is_transient = False

    def __init__(self, message: str = "", *, code: str | None = None, key: str | None = None):
        super().__init__(message)
        self.code = code or type(self).code
        self.key = key
