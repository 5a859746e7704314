"""The folder of a run: what lies where in `output_dir`.

    train_config.json ds_config.json    what the run was started with
    metrics.jsonl loss.png              how it goes
    checkpoints/step-NNNNNNNN/          to go on from
    hf/                                 the trained model, as a Hugging Face folder
    autotune.json                       what precision.auto measured
    stopped.json slurm_job              for train/job.py: stopped on request; which Slurm job has begun the run

Nothing here needs torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# In a folder that train/export.py wrote: which checkpoint it was made from.
EXPORTED_FROM = "exported_from.json"


@dataclass(frozen=True)
class RunFolder:
    """`path` is a run's output_dir; the properties name its parts, whether they are there or not."""

    path: Path

    @property
    def train_config(self) -> Path:
        return self.path / "train_config.json"

    @property
    def ds_config(self) -> Path:
        return self.path / "ds_config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def autotune(self) -> Path:
        return self.path / "autotune.json"

    @property
    def stopped(self) -> Path:
        return self.path / "stopped.json"

    @property
    def slurm_job(self) -> Path:
        return self.path / "slurm_job"

    def is_exported(self, identity: str) -> bool:
        """Whether hf/ is the export of exactly the checkpoint with this `identity` (train/checkpoint/files.py)."""
        try:
            return json.loads((self.hf / EXPORTED_FROM).read_text())["manifest_sha256"] == identity
        except (OSError, ValueError, KeyError):
            return False
