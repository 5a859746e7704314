"""Trainings of train/train.py on the same ranks, one after another: a start of its own would take each of them as long
as its steps.

    python train/launch.py --nproc RANKS test_fp8/zero/ranks.py FOLDER

FOLDER/settings.json has a configuration for each training, by name, and until when one may begin. Of each that ended,
FOLDER/NAME.json has its configuration and its "error", null or what it raised; its figures are in its output_dir. After
an error the ranks end, for some may wait for the others for ever: `train_all` starts them again for the trainings that
are left.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from test_fp8.common.processes import none_left, own_environment
from train.files import write_durably
from train.guard.signals import at_parents_end

SETTINGS = "settings.json"
FAILED = 1
POLL_S = 0.1


@dataclass
class Trainings:
    """settings: configurations by name, to be trained on so many ranks, of which none begins after `until` (time.time).
    found: name -> what a training raised; None: nothing. What `folder` has of trainings with the same configuration
    that raised nothing is kept."""

    folder: Path
    ranks: int
    settings: dict[str, dict[str, Any]]
    until: float | None
    found: dict[str, str | None] = field(default_factory=dict)
    process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, settings in self.settings.items():
            if (there := self._said(name)) and there == {"settings": settings, "error": None}:
                self.found[name] = None
            elif there is not None:
                self._file(name).unlink()
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _said(self, name: str) -> dict[str, Any] | None:
        file = self._file(name)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def start(self, script: Path, say: Callable[[str], None]) -> None:
        """Ranks for what is left, if anything is, and there is time. They end when this process does, however."""
        left = {name: values for name, values in self.settings.items() if name not in self.found}
        if not left or (self.until is not None and time.time() > self.until):
            return
        write_durably(self.folder / SETTINGS, json.dumps({"until": self.until, "trainings": left}))
        command = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", str(self.ranks), str(script)]
        log = self.folder / "log.txt"
        say(f"{self.ranks} rank{'s' * (self.ranks > 1)}: {len(left)} trainings, see {log}")
        with log.open("a", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [*command, str(self.folder)],
                env=own_environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=at_parents_end(signal.SIGTERM),
            )

    def have_ended(self) -> bool:
        """Whether the ranks have, one of whose trainings may have failed; then `found` has it."""
        if self.process is None or (status := self.process.poll()) is None:
            return self.process is None
        self.process = None
        for name in self.settings:  # up to the one that failed, behind which none has begun
            if name in self.found:
                continue
            if (said := self._said(name)) is None:
                if status:
                    self.found[name] = f"the ranks ended with status {status}; see log.txt"
                break
            self.found[name] = said["error"]
            if said["error"] is not None:
                break
        return True


def train_all(
    script: Path, every: Sequence[Trainings], say: Callable[[str], None], stops: Sequence[int] = ()
) -> None:
    """Train them all by `script`, beside each other, until there is one of `stops`, signals that have come."""
    with none_left(every):
        for trainings in every:
            trainings.start(script, say)
        while not stops and any(trainings.process for trainings in every):
            for trainings in every:
                if trainings.process and trainings.have_ended():
                    trainings.start(script, say)
            time.sleep(POLL_S)


def main(argv: list[str]) -> int:
    import torch
    import torch.distributed as dist

    from model.fp8 import te_backend
    from train.engine.distributed import init_distributed

    folder = Path(argv[0])
    run_training: Callable[[Any], None] = runpy.run_path(str(ROOT / "train/train.py"))["run_training"]
    from train.config.arguments import TrainingArguments

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    given = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    for name, settings in given["trainings"].items():
        over = [given["until"] is not None and time.time() > given["until"]]
        dist.broadcast_object_list(over, src=0)
        if over[0]:
            break
        said, ended = folder / f"{name}.json", {"settings": settings, "error": None}
        try:
            with mock.patch(
                "train.record.plots.draw"
            ):  # a third of the time of so short a run, and nobody looks at it
                run_training(TrainingArguments.from_dict(settings).resolve(world))
        except Exception as error:
            traceback.print_exc()
            if not said.exists():  # else another rank's, of which this one is the consequence
                write_durably(said, json.dumps(ended | {"error": f"{type(error).__name__}: {error}"}))
            sys.stderr.flush()
            os._exit(FAILED)
        if rank == 0:
            write_durably(said, json.dumps(ended))
        # the scales of all models that are alive are reduced together
        gc.collect()
        te_backend.forget_models()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
