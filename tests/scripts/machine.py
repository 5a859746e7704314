"""A machine for run_training.sh, made of scripts that stand in for what it would start."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def run_training(
    machine: dict[str, str], tmp_path: Path, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "run_training.sh"), *map(str, arguments)]
    return subprocess.run(command, env=machine, cwd=tmp_path, capture_output=True, text=True, timeout=120)
