"""Fixtures of the scripts' tests."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.scripts.machine import executable

TOOLS = "bash dirname basename df awk grep sed head nproc tr flock env cat mkdir rm".split()


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a compiler, an active virtual environment that has everything, no GPU, and no
    package index. Starting a training process there writes its arguments to started.txt and fails with status 7."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    executable(tools / "c++", "exit 0")
    started = f'echo "$0 $*" > "{tmp_path}/started.txt"; exit 7'
    executable(
        tmp_path / "venv/bin/python",
        f'[[ "$*" == *train/launch.py* ]] && {{ {started}; }}\nexec {sys.executable} "$@"',
    )
    executable(tmp_path / "venv/bin/ninja", "exit 0")
    executable(tmp_path / "slurm/srun", started)
    executable(tmp_path / "slurm/scontrol", "echo node-a; echo node-b")
    return {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"model": {"config": "tiny"}, "data": {"sources": {"x": str(tmp_path / "x")}}, "max_steps": 10}
        )
    )
    return path
