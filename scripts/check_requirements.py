#!/usr/bin/env python3
"""Print the requirements that pip must install in this environment, one per line.

This script uses only the standard library, because it runs before any package is installed. Each line in a requirements
file has the form `name[extras]==version  # from X, optional: why`. The comment and each of its parts can be omitted.

- With --exact (for .venv), every installed package must have the pinned version.
- Without --exact (for the user's environment), version X and all later versions are accepted. Each accepted version
  that differs from the pinned version is reported on standard error.
- An optional package can be missing, unless --optional is passed. Without --exact, standard error reports a missing
  optional package.

With --keep, the script only checks whether an installed package would be replaced. In that case, it lists all packages
to install on standard error and exits with status 3. Otherwise, it prints nothing.
"""

import argparse
import contextlib
import os
import re
from importlib import metadata
from pathlib import Path

LINE = re.compile(
    r"^(?P<spec>(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>[^\s#]+))"
    r"\s*(#\s*(from (?P<floor>[\w.]+))?,?\s*(?P<optional>optional(: (?P<why>.*))?)?.*)?$"
)


def parse(text: str) -> list[re.Match]:
    """Parse the text of a requirements file and return one match of the regular expression LINE per requirement.

    The groups are spec (for pip), name, version, floor (lowest version known to work), optional (whether the package
    can be missing) and why (the feature that uses the package).

    Raises ValueError for a line that does not have the form `name==version`.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(("#", "-c ")):
            continue
        match = LINE.match(line.strip())
        if match is None:
            raise ValueError(
                f"line {number} is invalid: {line!r}. Use the form 'name==version  # from X, optional'."
            )
        found.append(match)
    return found


def numbers(version: str) -> list[int]:
    """Return the release segment of a version as a list of integers, for comparisons.

    For example, numbers("2.11.0+cu130") returns [2, 11, 0].
    """
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release.group().split(".")] if release else []


def installed_version(name: str) -> str | None:
    """Return the version of a package without a local part such as "+cpu", or None if the package is not installed."""
    try:
        return metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def to_install(
    requirements: list[re.Match], exact: bool, optional: bool = False
) -> tuple[list[re.Match], list[str]]:
    """Return the requirements that pip must install, and remarks on accepted versions and missing optional packages."""
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
            remarks.append(f"keeping the installed {name} {have} (tested version: {version})")
        else:
            wanted.append(requirement)
    return wanted, remarks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="requirements files")
    parser.add_argument(
        "--exact", action="store_true", help="require the pinned version of every installed package"
    )
    parser.add_argument("--optional", action="store_true", help="also install missing optional packages")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="check only whether an installed package would be replaced; the exit status is 3 if so",
    )
    arguments = parser.parse_args()
    wanted, remarks = [], []
    for file in arguments.files:
        found = to_install(parse(file.read_text(encoding="utf-8")), arguments.exact, arguments.optional)
        wanted += found[0]
        remarks += found[1]
    if arguments.keep:
        have = {requirement: installed_version(requirement["name"]) for requirement in wanted}
        if not any(have.values()):
            return 0
        remarks = [
            f"{r['name']}: installed: {v or 'none'}, required: {r['version']}" for r, v in have.items()
        ]
    else:
        for requirement in wanted:
            print(requirement["spec"])
    for remark in remarks:
        with contextlib.suppress(OSError):  # ignore errors if standard error is closed
            os.write(2, f"  {remark}\n".encode())
    return 3 if arguments.keep else 0


if __name__ == "__main__":
    raise SystemExit(main())
