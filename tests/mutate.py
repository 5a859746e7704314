#!/usr/bin/env python3
"""Check that the tests notice faults: apply each mutation of mutations.json to a copy, and run its tests there.

    python tests/mutate.py [NAME ...]       all mutations, or those named

A mutation is killed when one of its tests fails, which at the end must pass without it. Exit status 1: a mutation
survived, or its text is not in its file exactly once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = ".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", "runs"
MARKERS = "not gpu and not multi_gpu and not reliability and not downstream and not docs"
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}  # Python does not renew it after a change within a second
TESTS_FAILED = 1  # pytest's status; others mean that it could not run them


def failed_tests(folder: Path, tests: list[str], *options: str) -> list[str]:
    """Run `tests` and return the ids of those that fail. Raises RuntimeError: pytest cannot run them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKERS, *options, *tests],
        cwd=folder,
        env={"TORCH_EXTENSIONS_DIR": f"{sys.prefix}/torch_extensions", **os.environ, **NO_BYTECODE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()
    ids = [line.split(" - ")[0].partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, TESTS_FAILED) or bool(ids) != bool(done.returncode):
        raise RuntimeError(f"pytest ended with status {done.returncode}: {' / '.join(lines[-3:])}")
    return ids


def killers(folder: Path, mutation: dict) -> list[str]:
    """The first test that fails with a mutation in the copy `folder`, which is as before afterwards; [] if it survives.
    Raises RuntimeError: it cannot be applied, or pytest cannot run its tests."""
    file = folder / mutation["file"]
    original = file.read_text(encoding="utf-8") if file.is_file() else ""
    if (count := original.count(mutation["find"])) != 1:
        raise RuntimeError(f"its text is {count} times in {mutation['file']}")
    file.write_text(original.replace(mutation["find"], mutation["replace"]), encoding="utf-8")
    try:
        return failed_tests(folder, mutation["tests"], "-x")
    finally:
        file.write_text(original, encoding="utf-8")


def main(names: list[str]) -> int:
    mutations = json.loads((ROOT / "tests/mutations.json").read_text(encoding="utf-8"))
    if unknown := set(names) - {mutation["name"] for mutation in mutations}:
        print(f"no such mutation: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [mutation for mutation in mutations if not names or mutation["name"] in names]
    killed_by: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*EXCLUDED))
        for mutation in chosen:
            start = time.monotonic()
            try:
                found = killers(folder, mutation)
                result = f"killed by {found[0]}" if found else "survived"
                killed_by |= {mutation["name"]: found} if found else {}
            except RuntimeError as error:
                result = f"invalid: {error}"
            print(f"{mutation['name']:40} {time.monotonic() - start:6.1f} s  {result}", flush=True)
        tests = sorted({test for found in killed_by.values() for test in found})
        broken = set(failed_tests(folder, tests)) if tests else set()
    for test in sorted(broken):
        print(f"fails without a mutation, too, and kills none: {test}")
    killed = [name for name, found in killed_by.items() if broken.isdisjoint(found)]
    print(f"{len(killed)} of {len(chosen)} mutations killed")
    return 0 if len(killed) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
