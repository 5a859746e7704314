"""Turn the errors of a command into one line and an exit status."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable

from model.errors import UserError
from train.files import reason
from train.monitor.signals import DO_NOT_RESTART, INTERRUPTED
from train.record.log import configure_logging


def command(main: Callable[..., int | None], system_error: int = 1) -> Callable[..., int]:
    """Decorate the main function of a command.

    Log messages go to stderr, so that stdout has only results.

    Args:
        main: returns an exit status, or None for 0.
        system_error: exit status after an OSError.

    Returns: `main`, which then returns 2 after an error that the user can fix, and 130 after Ctrl-C.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        configure_logging(console="stderr")
        try:
            return main(argv) or 0
        except (UserError, ValueError, OSError) as error:
            print(f"error: {reason(error)}", file=sys.stderr)
            if os.environ.get("FP8_TRACEBACK") == "1":
                traceback.print_exc()
            is_users = isinstance(error, UserError | ValueError) and not getattr(error, "is_transient", False)
            return DO_NOT_RESTART if is_users else system_error
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return INTERRUPTED

    return run
