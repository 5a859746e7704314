"""The launches of `bench_scaling.py`: bench_model.py on some of the host's GPUs, a process of its own, which measures
each row once. What a launch has measured is kept in a file, and is not measured again."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from test_fp8.common.options import ROOT
from test_fp8.common.processes import none_left, own_environment
from test_fp8.common.report import Result, measured
from test_fp8.common.rows import Row
from train.files import write_durably
from train.guard.signals import at_parents_end

POLL_S = 0.1


@dataclass
class Launch:
    """Of `rows` on the GPUs with these `places` among the host's (None: on so many ranks without a GPU), with so many
    micro-batches a step. found: row -> its result of bench_model.py, which has a "reason" where it was not measured."""

    name: str
    folder: Path
    ranks: int
    places: Sequence[int] | None
    accumulation: int
    rows: Mapping[str, Row]
    found: dict[str, Result] = field(default_factory=dict)
    process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        if self._kept.is_file():
            self.found = json.loads(self._kept.read_text(encoding="utf-8"))

    @property
    def _kept(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def _report(self) -> Path:
        return self.folder / f"{self.name}.report.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def left(self) -> list[str]:
        return [name for name in self.rows if name not in self.found]

    def command(self, options: argparse.Namespace) -> list[str]:
        words: list[Any] = [sys.executable, ROOT / "train/launch.py", "--nproc", self.ranks]
        words += [ROOT / "test_fp8/bench_model.py", "--config", options.config, "--measure", "step"]
        words += ["--rows", "--step_rows", "--rounds", 1, "--accumulation", self.accumulation]
        for key in ("micro_batch", "seq_length", "attention", "steps", "seconds", "seed"):
            words += [f"--{key}", getattr(options, key)]
        words += [*["--deterministic"] * options.deterministic, "--output", self._report]
        for name in self.left:
            pairs = self.rows[name].settings.items()
            words += ["--row", name, *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in pairs)]
        return list(map(str, words))

    def start(self, options: argparse.Namespace) -> None:
        """Measure what is left, if anything is. The process ends when this one does, however it ends."""
        if not self.left:
            return
        self._report.unlink(missing_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                self.command(options),
                env=own_environment(self.places),
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=at_parents_end(signal.SIGTERM),
            )

    def goes_on(self, options: argparse.Namespace) -> bool:
        """Whether it is still at work. A row that ended it, as one does on several ranks, is left out, and those behind
        it are measured by another process."""
        if self.process is None or (status := self.process.poll()) is None:
            return self.process is not None
        self.process = None
        results = (
            json.loads(self._report.read_text(encoding="utf-8"))["results"] if self._report.is_file() else []
        )
        self.found |= {r["row"]: r for r in measured(results)}
        self.found |= {r["row"]: r for r in results if "reason" in r and r["tried"]}
        if self.left:  # the first of them is what ended the process
            said = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
            why = f"bench_model.py ended with status {status}: {last[:300]}"
            self.found[self.left[0]] = {"row": self.left[0], "reason": why}
        write_durably(self._kept, json.dumps(self.found, indent=1) + "\n")
        self.start(options)
        return self.process is not None


def run_together(launches: Sequence[Launch], options: argparse.Namespace, stops: Sequence[int] = ()) -> None:
    """All of them at the same time, to their end, or until there is one of `stops`, signals that have come. However
    this ends, none of their processes is left."""
    with none_left(launches):
        for launch in launches:
            launch.start(options)
        while not stops and any([launch.goes_on(options) for launch in launches]):
            time.sleep(POLL_S)
