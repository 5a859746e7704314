"""Make untrusted text safe to print to a terminal."""

from __future__ import annotations

import re

# C0 except newline and tab, DEL, C1, line and paragraph separators, and characters that change the writing direction.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Escape control characters in `text` (for example as `\\x1b`), because a terminal would interpret them."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
