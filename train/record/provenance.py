"""Write and read run.json, which has the form {"starts": [...]}.

Each entry describes one start or resume of the run: startup check, versions, commit, command and hosts. A new run in
the same folder begins with an entry at step 0. `ended` is null while the run is in progress, or if it was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.files import write_durably
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Configuration keys that do not change the computation of a run, only its location and output.
NOT_HASHED = ("output_dir", "run_name", "wandb_project", "report_to", "resume_from_checkpoint", "log_level")
# Keys that earlier versions wrote to run.json, and their names today.
FORMER_KEYS = {"proof": "startup_checks", "stages": "phases", "stage": "phase", "new_stage": "new_phase"}


def read_starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the entries of run.json, one for each launch and resume, or [] if the file is missing or unreadable."""
    try:
        text = folder.run.read_text(encoding="utf-8")
        return json.loads(text, object_hook=lambda item: {FORMER_KEYS.get(k, k): v for k, v in item.items()})[
            "starts"
        ]
    except (OSError, ValueError):
        return []


class RunRecord:
    """Context manager that adds an entry to run.json when a run starts, and updates the entry when the run ends.

    While the run does something other than training, set the attribute `part` to a name such as "export". If run.json
    cannot be written, a warning is logged.

    Args:
        folder: The folder of the run.
        start: The values of the entry, including "time" (seconds since the epoch), "step" and "tokens".
        position: Function that returns the number of completed steps and tokens.
        expected: Maps exception types to descriptions of how the run ended. Other exceptions are recorded as "failed",
            with the message as "why".
        is_main: Whether this is rank 0. Other ranks write nothing.
    """

    def __init__(
        self,
        folder: RunFolder,
        start: dict[str, Any],
        position: Callable[[], tuple[int, int]],
        expected: dict[type[BaseException], str],
        is_main: bool = True,
    ):
        self.folder, self.position, self.expected, self.is_main = folder, position, expected, is_main
        self.part = ""
        self.start: dict[str, Any] = {**start, "phases": [], "ended": None}

    def __enter__(self) -> RunRecord:
        self.starts = [*read_starts(self.folder), self.start]
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        how = "done" if kind is None else f"{self.part} {self.expected.get(kind, 'failed')}".strip()
        step, tokens = self.position()
        ended = {"time": round(time.time(), 1), "how": how, "step": step, "tokens": tokens}
        if kind is not None and kind not in self.expected:
            ended["why"] = f"{kind.__name__}: {error}"
        self.start["ended"] = ended
        self._write()

    def add_phase(self, phase: dict[str, Any]) -> None:
        """Record a change of the precision during the run.

        Args:
            phase: The values to record, with the keys "step", "phase" (description), "new_phase" (true: a phase of
                precision.schedule, false: fallbacks), "took_s" (seconds), "fp8" and "startup_checks".
        """
        self.start["phases"].append(phase)
        self._write()

    def _write(self) -> None:
        if not self.is_main:
            return
        try:
            write_durably(self.folder.run, json.dumps({"starts": self.starts}, indent=1) + "\n")
        except OSError as error:
            logger.warning(f"{self.folder.run} cannot be updated: {error}")


def origin(config: dict[str, Any]) -> dict[str, Any]:
    """Return the command, the version, the commit, and the hash of `config`, the resolved configuration."""
    hashed = {key: value for key, value in config.items() if key not in NOT_HASHED}
    return {
        "command": sys.argv,
        "version": tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"],
        "commit": commit(),
        "config_sha256": hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest(),
    }


def sources_sha256(*folders: str) -> str:
    """Return the SHA-256 hash of all Python files in the given folders of the repository."""
    source = hashlib.sha256()
    for path in sorted(p for folder in folders for p in (REPOSITORY / folder).rglob("*.py")):
        source.update(path.read_bytes())
    return source.hexdigest()


def commit() -> str:
    """Return the git commit of the sources. Without git, return the environment variable GIT_COMMIT or "unknown".

    If files other than benchmark results differ from the commit, ", changed since" is appended to the commit.
    """

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!test_fp8/results")
        return git("rev-parse", "HEAD") + (", changed since" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GIT_COMMIT", "unknown")
