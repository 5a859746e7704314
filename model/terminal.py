"""Format text for a terminal: escape control characters, and align the columns of tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

# C0 except newline and tab, DEL, C1, line and paragraph separators, and characters that change the writing direction.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Escape control characters in `text` (for example as `\\x1b`), because a terminal would interpret them."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def format_table(rows: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Format rows of text as a table.

    sides: for each column, "<" to align it on the left, or ">" to align it on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return "\n".join("  ".join(map(format, row, formats)).rstrip() for row in rows)
