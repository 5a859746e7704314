"""Paths of the files in a run's output_dir. This module does not import torch."""

from __future__ import annotations

import json
from pathlib import Path

# Name of the file in an exported folder that identifies the exported checkpoint.
EXPORTED_FROM = "exported_from.json"


def export_folder_problem(out: Path) -> str:
    """Return the reason why an export must not replace the folder `out`, or "" if the export may replace it."""
    if out.is_symlink():
        return f"{out} is a link"
    if out.exists() and not (out / EXPORTED_FROM).exists():
        return f"{out} exists and was not written by an export"
    return ""


class RunFolder:
    """Paths of the files in a run folder. The files do not necessarily exist.

    Args:
        path: output_dir of the resolved arguments.
    """

    def __init__(self, path: str | Path | None):
        self.path = path = Path(path or "output")
        self.train_config = path / "train_config.json"  # resolved configuration
        self.ds_config = path / "ds_config.json"  # DeepSpeed configuration
        self.run = path / "run.json"  # one entry for each start of the run (train/record/provenance.py)
        self.log = path / "train.log"  # log of rank 0
        self.logs = path / "logs"  # logs of the other ranks
        self.metrics = path / "metrics.jsonl"
        self.loss_plot = path / "loss.png"
        self.health_plot = path / "health.png"  # FP8 health, with precision.health_steps
        self.profile = path / "profile"  # trace and table of kernels, with profile_steps
        self.hang = path / "hang"  # what each rank writes if a rank hangs (train/monitor/watchdog.py)
        self.tensorboard = path / "tensorboard"
        self.wandb_run_id = path / "wandb_run_id"
        self.checkpoints = path / "checkpoints"  # contains step-NNNNNNNN/
        self.hf = path / "hf"  # trained model in Hugging Face format
        self.stopped = path / "stopped.json"  # exists from a requested stop until the run is resumed
        self.lock = path / "run.lock"  # exists while the run is in progress (train/monitor/lock.py)

    def exported(self) -> tuple[str, str]:
        """Return the name and the manifest hash of the checkpoint exported to hf/, or ("", "") without an export."""
        try:
            origin = json.loads((self.hf / EXPORTED_FROM).read_text())
            return str(origin["checkpoint"]), str(origin["manifest_sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return "", ""
