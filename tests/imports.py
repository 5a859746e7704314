"""The import graph of the sources, for tests/test_layout.py and tests/test_docs.py.

A "room" is a node of the graph: a folder of sources, or a single file directly in train/.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ("model", "train", "fp8_inference_demo", "test_fp8")


@cache
def sources() -> list[Path]:
    """Return every source file, relative to the repository."""
    return sorted(p.relative_to(ROOT) for top in TOP for p in (ROOT / top).rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the room of a file: train/data/stream.py -> train/data, but train/trainer.py -> train/trainer.py."""
    parent = path.parent.as_posix()
    return path.as_posix() if parent == "train" and path.name != "__init__.py" else parent


@cache
def imported_modules(path: Path) -> set[str]:
    """Return the dotted names that a file imports, also inside functions and by importlib.import_module("...")."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: relative import")
            # `from a import b` may mean the module a.b
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "find_spec"):
            names |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return names


def imported_files(path: Path) -> set[Path]:
    """Return the source files of this repository that a file imports."""
    found = set()
    for name in imported_modules(path):
        file = Path(name.replace(".", "/") + ".py")
        if (ROOT / file).is_file():
            found.add(file)
    return found


@cache
def arrows() -> dict[str, set[str]]:
    """Return the import graph: room -> the other rooms that its files import."""
    found: dict[str, set[str]] = {}
    for path in sources():
        room = room_of(path)
        found.setdefault(room, set()).update(room_of(file) for file in imported_files(path))
        found[room].discard(room)
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return every room that `start` imports, directly or indirectly."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found
