"""Errors that the user can fix: one family of exceptions with stable codes."""

from __future__ import annotations


class UserError(Exception):
    """An error the user can fix.

    Programs print the message without a traceback and exit with status 2: the same command would fail again. If
    `may_pass` is true, as for a fault of a file system, the status is 1, which is worth a restart.

    Args:
        message: what is wrong with its value, what is allowed, what to do.
        code: identifies the error for programs and tests, in lower case with underscores. It does not change when the
            message is reworded. Default: the code of the class.
        key: the configuration key, command line option or path that the error is about.
    """

    code = "user_error"
    may_pass = False

    def __init__(self, message: str = "", *, code: str | None = None, key: str | None = None):
        super().__init__(message)
        self.code = code or type(self).code
        self.key = key
