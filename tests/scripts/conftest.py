"""Fixtures of the scripts' tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.scripts.machine import executable

TOOLS = "bash dirname basename grep sed head tr flock env cat mkdir rm sleep ln chmod".split()


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a compiler, an active virtual environment that has everything, no GPU, and no
    package index."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    executable(tools / "c++", "exit 0")
    executable(tmp_path / "venv/bin/python", f'exec {sys.executable} "$@"')
    executable(tmp_path / "venv/bin/ninja", "exit 0")
    built = tmp_path / "venv/torch_extensions/deepspeed_shm_comm.done"
    built.parent.mkdir()
    built.touch()
    return {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    }
