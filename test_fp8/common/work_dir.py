"""--work_dir of the programs of test_fp8/: a folder that keeps what was measured, of one run of a program, for one call
at a time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from test_fp8.common.report import Result
from train.files import locks, write_durably

LOCK, MADE_FOR = ".lock", "made_for.json"


@contextmanager
def work_dir(given: Path | None, own: Result, what: str) -> Iterator[Path]:
    """The folder `given`, made where it is not there and held for this call; None: one that the end removes. own: what
    `what` in it, in words with its verb, is made for. Raises ValueError: it is of something else, or another call is at
    work in it."""
    with ExitStack() as stack:
        folder = Path(given or stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        problem = _made_for_another(folder, json.loads(json.dumps(own)), what)
        if not problem and not locks(stack.enter_context((folder / LOCK).open("a"))):
            problem = "another call is at work in it; wait for its end"
        if problem:
            raise ValueError(f"--work_dir {folder}: {problem}")
        if not (folder / MADE_FOR).is_file():
            write_durably(folder / MADE_FOR, json.dumps(own))
        yield folder


def _made_for_another(folder: Path, own: Result, what: str) -> str:
    """Why what `folder` has is of something else than `own`; "" where it is of that, or there is nothing yet."""
    file = folder / MADE_FOR
    if not file.is_file():
        others = any(path.name != LOCK for path in folder.iterdir())
        return "it has other files; give an empty folder, or a new one" if others else ""
    there = json.loads(file.read_text(encoding="utf-8"))
    different = [key for key in own if there.get(key) != own[key]]
    return f"{what} of other {', '.join(different)}; give another folder" if different else ""
