#!/usr/bin/env python3
"""Print what of a requirements file pip must install in this environment, one specification a line.

Standard library only, since it runs before anything is installed. A line of the file reads
`name[extras]==version  # from X, optional: why`, the comment and its parts being optional themselves:

- with --exact (our own virtual environment) every installed package must have its pinned version;
- without (an environment somebody else made) a version not below `from` is accepted, and standard error names it;
- an `optional` package may be missing, which standard error names without --exact; with --optional it may not.

With --keep nothing is printed unless an installed package would be replaced: then standard error lists all that would
be installed, and the exit status is 3.
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
    """The groups of LINE for each requirement of a file's text: `spec` as pip reads it, name, version, floor (the
    lowest version known to work), optional (it may be missing), why (what then needs it). ValueError names a line that
    is not `name==version`."""
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
    """The release part of a version for comparing: "2.11.0+cu130" -> [2, 11, 0]."""
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release.group().split(".")] if release else []


def installed_version(name: str) -> str | None:
    """Version of an installed distribution without its local part ("+cpu"), None if there is none."""
    try:
        return metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def to_install(
    requirements: list[re.Match], exact: bool, optional: bool = False
) -> tuple[list[re.Match], list[str]]:
    """(requirements that pip must install, remarks about what stays as it is)."""
    wanted, remarks = [], []
    for requirement in requirements:
        name, version, floor = requirement.group("name", "version", "floor")
        have = installed_version(name)
        if have == version:
            continue
        if have is None and requirement["optional"] and not optional:
            needed = f", for {requirement['why']}" if requirement["why"] else ""
            if not exact:
                remarks.append(f"{name} is not installed (optional{needed}; tested with {version})")
        elif not exact and have is not None and floor is not None and numbers(have) >= numbers(floor):
            remarks.append(f"{name} {have} stays (tested with {version})")
        else:
            wanted.append(requirement)
    return wanted, remarks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="requirements files")
    parser.add_argument("--exact", action="store_true", help="only the pinned versions will do")
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
        with contextlib.suppress(OSError):  # a console that is gone
            os.write(2, f"  {remark}\n".encode())
    return 3 if arguments.keep else 0


if __name__ == "__main__":
    raise SystemExit(main())
