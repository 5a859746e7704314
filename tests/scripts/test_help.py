"""--help of every program answers at once: it imports neither torch nor transformers, nor what else is slow. Where the
environment is not activated, it says so."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from tests.scripts.machine import ROOT

PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("train", "test_fp8", "fp8_inference_demo")
    for path in (ROOT / folder).glob("*.py")
    if 'if __name__ == "__main__":\n    ' in path.read_text(encoding="utf-8")
)


def test_list_of_programs() -> None:
    assert {"train/train.py", "train/launch.py", "fp8_inference_demo/fp8_inference.py"} <= set(PROGRAMS)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_fast(program: str) -> None:
    """Of a processor: how long it waits for one on a machine that is busy is not its own doing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, ROOT / program, "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and len(done.stdout) > 200 and not done.stderr, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "words", ["train/train.py --help", "train/plan.py --help", "train/plan.py tiny --tokens 1B"]
)
def test_reader_exits_first(words: str) -> None:
    """As in a pipe to head."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *words.split()], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.interpreter
@pytest.mark.parametrize("program", [name for name in PROGRAMS if not name.startswith("test_fp8")])
def test_missing_packages_error(program: str) -> None:
    """-IS: without the installed packages. inspect_checkpoint.py needs none."""
    done = subprocess.run([sys.executable, "-IS", ROOT / program, "--help"], capture_output=True, text=True)
    if program == "train/inspect_checkpoint.py":
        assert done.returncode == 0
    else:
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert f"(. {ROOT}/.venv/bin/activate)" in done.stderr
        assert "pip install -r requirements.txt" in done.stderr or "-r requirements-prep.txt" in done.stderr
