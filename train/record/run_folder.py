"""The folder of a run, its output_dir: what lies where in it. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

# In a folder that train/export.py wrote: which checkpoint it was made from.
EXPORTED_FROM = "exported_from.json"


def why_not_replaced(out: Path) -> str:
    """Return why an export must not replace `out`, which is the user's own, or ""."""
    if out.is_symlink():
        return f"{out} is a link"
    if out.exists() and not (out / EXPORTED_FROM).exists():
        return f"{out} exists and is no export of this program"
    return ""


class RunFolder:
    """The files of the run in `path` (output_dir of resolved arguments), whether they exist or not."""

    def __init__(self, path: str | Path | None):
        self.path = path = Path(path or "output")
        self.train_config = path / "train_config.json"  # the resolved configuration
        self.ds_config = path / "ds_config.json"  # the configuration of DeepSpeed
        self.run = path / "run.json"  # the starts (train/record/provenance.py)
        self.log = path / "train.log"  # of rank 0, of all starts
        self.logs = path / "logs"  # of the other ranks
        self.metrics = path / "metrics.jsonl"
        self.loss_plot = path / "loss.png"
        self.health_plot = path / "health.png"  # of FP8, with precision.health_steps
        self.tensorboard = path / "tensorboard"
        self.wandb_run_id = path / "wandb_run_id"
        self.checkpoints = path / "checkpoints"  # step-NNNNNNNN/ in it
        self.hf = path / "hf"  # the trained model, for transformers
        self.stopped = path / "stopped.json"  # exists after a stop on request, until the run is resumed
        self.lock = path / "run.lock"  # exists while the run is going on (train/monitor/lock.py)
        self.slurm_job = path / "slurm_job"  # which Slurm jobs began it, a line each, and what was there then

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def discarded(self) -> list[tuple[Path, int]]:
        """(folder, bytes) of checkpoints and exports that runs have set aside here, oldest first. They lie beside the
        folder itself, which may be a link to another disk."""
        found = [
            path
            for folder in (self.checkpoints.resolve(), self.hf.absolute())
            for path in sorted(folder.parent.glob(f"{folder.name}.discarded-*"))
        ]
        return [(path, sum(f.stat().st_size for f in path.rglob("*") if f.is_file())) for path in found]

    def exported(self) -> tuple[str, str]:
        """Name and identity (train/checkpoint/files.py) of the checkpoint that hf/ is the export of; "" of none."""
        try:
            origin = json.loads((self.hf / EXPORTED_FROM).read_text())
            return str(origin["checkpoint"]), str(origin["manifest_sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return "", ""

    def is_exported(self, identity: str) -> bool:
        """Whether hf/ is the export of exactly this checkpoint."""
        return self.exported()[1] == identity
