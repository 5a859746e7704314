"""Report the errors of a command-line program in one line, and set its exit status."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable

from model import end_with_reader
from model.errors import UserError
from train.files import describe_error
from train.monitor.signals import DO_NOT_RESTART, INTERRUPTED
from train.record.log import configure_logging


def command(main: Callable[..., int | None], system_error: int = 1) -> Callable[..., int]:
    """Decorate the main function of a command-line program so that it reports errors and returns an exit status.

    Log messages go to stderr. Only results are printed to stdout.

    Args:
        main: The function to decorate. It returns an exit status, or None for success.
        system_error: The exit status after a system error (OSError), or after an error that may be temporary.

    Returns:
        The decorated function. Its exit status is 2 after an error that the user can fix, and 130 after Ctrl-C.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        configure_logging(console="stderr")
        try:
            with end_with_reader():
                return main(argv) or 0
        except (UserError, ValueError, OSError) as error:
            print(f"error: {describe_error(error)}", file=sys.stderr)
            if os.environ.get("FP8_TRACEBACK") == "1":
                traceback.print_exc()
            is_users = isinstance(error, UserError | ValueError) and not getattr(error, "is_transient", False)
            return DO_NOT_RESTART if is_users else system_error
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return INTERRUPTED

    return run
