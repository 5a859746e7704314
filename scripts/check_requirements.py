#!/usr/bin/env python3
"""Print the requirements that pip must install in this environment, one per line.

Uses only the standard library, because it runs before any package is installed. A line of a requirements file is
`name[extras]==version  # from X, optional: why`. The comment and each of its parts can be omitted.

- With --exact (for .venv), every installed package must have its pinned version.
- Without --exact (for the user's environment), any version from `from` on is accepted and reported on standard error.
- An `optional` package may be missing, unless --optional is given. Without --exact, standard error reports it.

With --keep, nothing is printed unless an installed package would be replaced. In that case, standard error lists all
packages that would be installed, and the exit status is 3.
"""

import argparse
import contextlib
import os
import re
import sys
from importlib import metadata
from pathlib import Path

LINE = re.compile(
    r"^(?P<spec>(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>[^\s#]+))"
    r"\s*(#\s*(from (?P<floor>[\w.]+))?,?\s*(?P<optional>optional(: (?P<why>.*))?)?.*)?$"
)


def parse(text: str) -> list[re.Match]:
    """Parse the text of a requirements file into matches of LINE.

    Groups: spec (for pip), name, version, floor (the lowest version known to work), optional (the package may be
    missing) and why (the feature that needs it).

    Raises ValueError for a line that is not `name==version`.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(("#", "-c ")):
            continue
        match = LINE.match(line.strip())
        if match is None:
            raise ValueError(f"line {number} is not 'name==version  # from X, optional': {line!r}")
        found.append(match)
    return found


def numbers(version: str) -> list[int]:
    """Return the release part of a version for comparison: "2.11.0+cu130" -> [2, 11, 0]."""
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release.group().split(".")] if release else []


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution without its local part ("+cpu"), or None."""
    try:
        return metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def to_install(
    requirements: list[re.Match], exact: bool, optional: bool = False
) -> tuple[list[re.Match], list[str]]:
    """Return the requirements that pip must install, and remarks about accepted or missing packages."""
    wanted, remarks = [], []
    for requirement in requirements:
        name, version, floor = requirement.group("name", "version", "floor")
        have = installed_version(name)
        if have == version:
            continue
        if have is None and requirement["optional"] and not optional:
            needed = f", for {requirement['why']}" if requirement["why"] else ""
            if not exact:
                remarks.append(f"{name} is not installed (optional{needed}; tested version: {version})")
        elif not exact and have is not None and floor is not None and numbers(have) >= numbers(floor):
            remarks.append(f"{name} {have} is kept (tested version: {version})")
        else:
            wanted.append(requirement)
    return wanted, remarks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="requirements files")
    parser.add_argument("--exact", action="store_true", help="accept only the pinned versions")
    parser.add_argument("--optional", action="store_true", help="also install missing optional packages")
    parser.add_argument("--keep", action="store_true", help="fail if an installed package would be replaced")
    arguments = parser.parse_args()
    wanted, remarks = [], []
    for file in arguments.files:
        try:
            found = to_install(parse(file.read_text(encoding="utf-8")), arguments.exact, arguments.optional)
        except (OSError, ValueError) as error:
            print(f"{file}: {error}", file=sys.stderr)
            return 1
        wanted += found[0]
        remarks += found[1]
    if arguments.keep:
        have = {requirement: installed_version(requirement["name"]) for requirement in wanted}
        if not any(have.values()):
            return 0
        remarks = [f"{r['name']}: installed {v or 'none'}, needed {r['version']}" for r, v in have.items()]
    else:
        for requirement in wanted:
            print(requirement["spec"])
    for remark in remarks:
        with contextlib.suppress(OSError):  # continue if the console is gone
            os.write(2, f"  {remark}\n".encode())
    return 3 if arguments.keep else 0


if __name__ == "__main__":
    raise SystemExit(main())
