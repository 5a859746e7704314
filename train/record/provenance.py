"""run.json: what was proved and on what, for each start of a run: FP8, attention, versions, commit, command, hosts.

{"starts": [...]}, oldest first; what began anew in the same folder begins with a start of step 0. `ended` is null while
it runs, and stays so where it was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.files import write_durably
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Of the configuration: where it is run and how often it tells of itself changes no run.
NOT_HASHED = ("output_dir", "run_name", "wandb_project", "report_to", "resume_from_checkpoint", "log_level")


def read_starts(folder: RunFolder) -> list[dict[str, Any]]:
    """The starts of run.json; [] where there is none, or nothing that can be read as such."""
    try:
        starts = json.loads(folder.run.read_text(encoding="utf-8"))["starts"]
        return [start for start in starts if isinstance(start["step"], int) and start["time"] > 0]
    except (OSError, ValueError, KeyError, TypeError):
        return []


class RunRecord:
    """with RunRecord(folder, start, position, ...): the start is in run.json from here on, and in the end how it ended.

    start: "time" (of its begin), "step", "tokens" and what else is known of it. position: gives (steps, tokens) done.
    expected: exception -> how it says that the run ended; others say "failed", and why. `part`: which one of the run it
    is that ends so, where it is not the training. Raises OSError: the file cannot be written at the begin; later it is
    logged."""

    def __init__(
        self,
        folder: RunFolder,
        start: dict[str, Any],
        position: Callable[[], tuple[int, int]],
        expected: dict[type[BaseException], str],
    ):
        self.folder, self.position, self.expected = folder, position, expected
        self.part = ""
        self.start: dict[str, Any] = {**start, "stages": [], "ended": None}

    def __enter__(self) -> RunRecord:
        self.starts = read_starts(self.folder)
        self.starts.append(self.start)
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        how = "done" if kind is None else f"{self.part} {self.expected.get(kind, 'failed')}".strip()
        step, tokens = self.position()
        ended = {"time": round(time.time(), 1), "how": how, "step": step, "tokens": tokens}
        if kind is not None and kind not in self.expected:
            ended["why"] = f"{kind.__name__}: {error}"
        self.start["ended"] = ended
        self._try_to_write("how the run ended")

    def add_stage(self, stage: dict[str, Any]) -> None:
        """That the precision has changed is in run.json from here on: "step", "stage" (what has begun, in words),
        "new_stage" (of precision.schedule; else modules went to other levels), "took_s", "fp8", "proof"."""
        self.start["stages"].append(stage)
        self._try_to_write(f"what was proved at step {stage['step']}")

    def _try_to_write(self, what: str) -> None:
        try:
            self._write()
        except OSError as error:
            logger.warning(f"{self.folder.run} does not say {what}: {error}")

    def _write(self) -> None:
        write_durably(self.folder.run, json.dumps({"starts": self.starts}, indent=1) + "\n")


def origin(config: dict[str, Any]) -> dict[str, Any]:
    """What this process was started as: command, commit, and the hash of the resolved configuration `config`."""
    hashed = {key: value for key, value in config.items() if key not in NOT_HASHED}
    return {
        "command": sys.argv,
        "commit": commit(),
        "config_sha256": hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest(),
    }


def sources_sha256(*folders: str) -> str:
    """Of the Python files below `folders` of the repository: whose numbers those of a run are."""
    source = hashlib.sha256()
    for path in sorted(p for folder in folders for p in (REPOSITORY / folder).rglob("*.py")):
        source.update(path.read_bytes())
    return source.hexdigest()


def commit() -> str:
    """The commit of the sources, and whether files of it, but measured results, have changed since; GIT_COMMIT names it
    where a copy has no git, "unknown" where nothing does."""

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
