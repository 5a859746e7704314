"""A machine for run_training.sh and train/launch.py, made of scripts that stand in for what they would start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Until the signal that was sent has come: a trap runs between two commands. Nothing in it is parsed anew in each turn:
# bash takes a trap that comes meanwhile for the end of what it parses, and never runs it.
AWAIT = "while [[ ! $got ]]; do read -rt 0.02 -u 9 || true; done"
STOPPED = "echo '{}' > run/stopped.json; exit 75"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    quiet = "exec 9<> <(:)\n" if AWAIT in text else ""  # for AWAIT to read from
    path.write_text(f"#!/bin/bash\n{quiet}{text}\n")
    path.chmod(0o755)
    return path


def progress(step: int) -> str:
    """What a start leaves that came to `step`: a line in metrics.jsonl."""
    return f'mkdir -p run; echo \'{{"step": {step}, "loss": 1.0}}\' >> run/metrics.jsonl'


def checkpoint(step: int) -> str:
    folder = f"run/checkpoints/step-{step:08d}"
    return f"mkdir -p {folder}; echo '{{}}' > {folder}/manifest.json"


def plan_of(folder: Path, plan: Sequence[str]) -> str:
    """A script that writes its arguments to folder/starts.txt and does what the plan says of this start; after the plan
    it exits with 0."""
    cases = "\n".join(f"{number}) {do or ':'};;" for number, do in enumerate(plan, 1))
    return "\n".join(
        [
            f'echo "$*" >> "{folder}/starts.txt"',
            f'cd "{folder}"; number=0; while read -r line; do number=$((number + 1)); done < starts.txt',
            f"case $number in\n{cases}\nesac",
            "exit 0",
        ]
    )
