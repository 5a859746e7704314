"""Errors that the user can fix: one family of exceptions with stable codes."""

from __future__ import annotations


class UserError(Exception):
    """An error the user can fix.

    Programs print the message without a traceback and exit with status 2, because the same command would fail again. If
    `is_transient` is true, for example for a file system error, they exit with status 1, and a restart may help.

    Args:
        message: what is wrong, with the value; what is allowed; what to do.
        code: identifies the error for programs and tests, in lower case with underscores. It does not change when the
            message is reworded. Default: the code of the class.
        key: the configuration key, command line option or path that the error is about.
    """

    code = "user_error"
    is_transient = False

    def __init__(self, message: str = "", *, code: str | None = None, key: str | None = None):
        super().__init__(message)
        self.code = code or type(self).code
        self.key = key
