"""Helpers that declare configuration keys, and argparse types for command lines.

`option` creates a pydantic field that describes a configuration key. train/config generates messages, --help, the JSON
schema and the resume rules from these fields. `between`, `unicode`, `given_path` and `json_file` are argparse types.
`folder_problem` and `file_problem` check whether a result can be written before a command starts its work.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

# The pydantic configuration of every section: no unknown keys, no conversion of types.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# The resume rule of a key: whether a run that resumes from a checkpoint may have another value.
RESUME = {
    "free": "may change when a run resumes",  # has no effect on a step's result
    "allowed": "may change when a run resumes with allow_changes_on_resume",
    "structural": "cannot change when a run resumes",
}

NOT_GIVEN = "empty value, perhaps from a shell variable that is not set; pass a path, such as . for the current folder"


def option(
    help: str,
    default: Any = ...,
    *,
    resume: str = "allowed",
    why: str = "",
    example: Any = None,
    before: Any = None,
    **limits: Any,
) -> Any:
    """Create a pydantic field for a configuration key. A key without a default is required.

    Args:
        help: description of the key, with its unit.
        resume: the resume rule, a key of RESUME.
        why: for a structural key, the reason why its value cannot change when a run resumes.
        example: an example for error messages, for a key that expects an object or a list.
        before: the value that versions without the key used, if it differs from the default.
        limits: pydantic's limits, such as gt, ge, lt, le and min_length.
    """
    assert resume in RESUME and bool(why) == (resume == "structural")
    examples = None if example is None else [example]
    extra: Any = {"resume": resume} | ({"why": why} if why else {})
    extra |= {} if before is None else {"before": before}
    return Field(default, description=help, examples=examples, json_schema_extra=extra, **limits)


def between(low: float, high: float = math.inf, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return an argparse type for numbers of type `kind` from `low` to `high`."""

    def number(text: str) -> float:
        if not low <= (value := kind(text)) <= high:
            allowed = f"{low} to {high}" if high < math.inf else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{text} is out of range; use {allowed}")
        return value

    return number


def unicode(text: str) -> str:
    """Argparse type for text that is valid UTF-8. Command-line arguments may contain other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid UTF-8; pass text in UTF-8") from error
    return text


def given_path(text: str) -> Path:
    """Argparse type for a path.

    An empty path is rejected, because Path("") is the current folder. The usual cause of an empty path is an unset
    shell variable.
    """
    if not text:
        raise argparse.ArgumentTypeError(NOT_GIVEN)
    return Path(text)


def json_file(text: str) -> Path:
    """Argparse type for the path of a .json file that can be written."""
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text}: the file name must end in .json")
    if problem := file_problem(Path(text)):
        raise argparse.ArgumentTypeError(f"{text} {problem}")
    return Path(text)


def file_problem(path: Path) -> str:
    """Return why the user cannot write the file `path`, or "" if the file can be written.

    The folder of the file does not have to exist yet.
    """
    return "is a folder; pass the path of a file" if path.is_dir() else folder_problem(path.parent)


def folder_problem(folder: Path) -> str:
    """Return why the user cannot create `folder` or write into it, or "" if the folder is writable."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():  # also true for a broken link
        return f"cannot be written: {place} is not a folder; choose another path"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"cannot be written: no permission to write to {place}; choose another folder"
    return ""
