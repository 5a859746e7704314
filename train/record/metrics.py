"""Write the metrics of a run to metrics.jsonl, the log and trackers. Compute MFU."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from train.files import unused_backup_path, write_durably
from train.record import plots
from train.record.history import SET_LOSS, parse_record, read_history
from train.record.run_folder import RunFolder
from train.record.trackers import Trackers

logger = logging.getLogger(__name__)
# Dense bf16 peak of the tensor cores of SXM GPUs (NVIDIA H100 and H200 data sheets, without sparsity). The H800 differs
# from the H100 only in NVLink and fp64.
HOPPER_SXM_BF16_TFLOPS = 989.0
# Keys that are written once at the step where a run starts or resumes. If the run resumes again at the same step, the
# earlier lines with these keys are moved to another file.
START_KEYS = ("changes", "began_at")


def hopper_sxm(device_name: str) -> str | None:
    """Return the name of a Hopper SXM GPU, which is "H100", "H200" or "H800", or None for any other GPU.

    PCIe and NVL cards are excluded, because they have lower clock rates.

    Args:
        device_name: The result of torch.cuda.get_device_name().
    """
    found = re.search(r"\bH(100|200|800)\b", device_name)
    return found[0] if found and not re.search(r"PCIe|NVL", device_name) else None


def peak_tflops(device_name: str) -> float | None:
    """Return the peak throughput of a GPU for dense bf16 in TFLOP/s, or None if it is not known.

    Args:
        device_name: The result of torch.cuda.get_device_name().
    """
    return HOPPER_SXM_BF16_TFLOPS if hopper_sxm(device_name) else None


def mfu(
    tokens_per_second_per_gpu: float, flops_per_token: float, peak_tflops_per_gpu: float | None
) -> float | None:
    """Return the model FLOP utilization, 0 to 1 (Chowdhery et al., arXiv:2204.02311), or None if the peak is not known.

    Args:
        tokens_per_second_per_gpu: Throughput of one GPU.
        flops_per_token: FLOPs of the forward and backward passes for one token, without recomputation.
        peak_tflops_per_gpu: Peak throughput of one GPU in TFLOP/s.
    """
    if peak_tflops_per_gpu is None:
        return None
    return tokens_per_second_per_gpu * flops_per_token / (peak_tflops_per_gpu * 1e12)


class MetricsLogger:
    """Logger that writes the metrics of a run to metrics.jsonl, the log and the trackers, on rank 0 only.

    A resume moves the lines of later steps from metrics.jsonl to metrics.jsonl.discarded-<time>. A new run moves all
    lines. Lines that cannot be written, for example because the disk is full, are kept in memory and written later.

    Args:
        folder: The folder of the run.
        config: The configuration as returned by TrainingArguments.to_dict().
        is_main: Whether this is rank 0.
        start_step: Number of completed steps.
        evaluates_again: Whether the evaluation at start_step is repeated. If so, the line of the earlier evaluation is
            also moved.

    Raises:
        OSError: metrics.jsonl cannot be read or rewritten.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: dict[str, Any],
        is_main: bool,
        start_step: int = 0,
        evaluates_again: bool = False,
    ):
        self.is_main = is_main
        if not is_main:
            return
        self.folder, self.config = folder, config
        folder.path.mkdir(parents=True, exist_ok=True)
        again = (*START_KEYS, "eval_loss") if evaluates_again else START_KEYS
        self._open(start_step, again)

    def _open(self, step: int, again: Sequence[str] = ()) -> None:
        path = self.folder.metrics
        if path.exists() and (discarded := discard_after(path, step, again)):
            logger.info(
                f"metrics.jsonl: the run is at step {step}, so lines that no longer apply were moved to "
                f"{discarded.name}"
            )
        # the buffer keeps lines that could not be written, and the next flush writes them
        self._file = path.open("ab", buffering=2**20)
        self._trackers = Trackers(self.folder, self.config, step)

    def log(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of a step to metrics.jsonl, the log and the trackers.

        Args:
            metrics: Values by key, with "step" (the number of completed optimizer steps) and "tokens". In
                metrics.jsonl, values that are not finite become null.
        """
        if not self.is_main:
            return
        step, total = metrics["step"], self.config["max_steps"]
        metrics = {**metrics, "time": round(time.time(), 1)}  # seconds since the epoch
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        try:
            self._file.write(json.dumps(finite, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            logger.warning(
                f"{self._file.name} cannot be written: {error}. The metrics are kept in memory and written later"
            )
        if summary := _summarize(metrics):
            if speed := metrics.get("tokens_per_second"):
                seconds = (total - step) * self.config["train_batch_size_tokens"] / speed
                summary += f"  {timedelta(seconds=int(seconds))} left"
            logger.info(f"step {step}/{total}  {summary}")
        self._trackers.log(metrics)

    def draw_last(self) -> None:
        """Draw loss.png and health.png for the whole run. If this fails, log a warning."""
        try:
            history = read_history(self.folder.path)
            plots.draw([history], self.folder.loss_plot)
            logger.info(f"wrote {self.folder.loss_plot}")
            if plots.draw_health(history, self.folder.health_plot):
                logger.info(f"wrote {self.folder.health_plot}")
        except Exception as error:
            logger.warning(f"the plots of the run could not be written: {type(error).__name__}: {error}")

    def rewind(self, step: int) -> None:
        """Continue logging from an earlier step. As in a resume, move the lines of later steps to a backup file."""
        if self.is_main:
            self.close()
            self._open(step)

    def close(self) -> None:
        """Close metrics.jsonl and the trackers. A second call does nothing."""
        if not self.is_main or self._file.closed:
            return
        try:
            self._file.close()
        except OSError as error:
            logger.warning(f"the last lines of {self._file.name} could not be written and are lost: {error}")
        self._trackers.close()


def discard_after(path: Path, step: int, again: Sequence[str] = ()) -> Path | None:
    """Move the lines of all steps after `step` from metrics.jsonl to a backup file.

    Lines that cannot be parsed, and lines of `step` with a key in `again`, are also moved. After the call, the last
    line in metrics.jsonl ends with a newline.

    Args:
        path: The path of metrics.jsonl.
        step: The last step to keep. If it is 0, all lines are moved.
        again: Keys that will be written again at `step`.

    Returns:
        The path of the backup file, or None if no line was moved.

    Raises:
        OSError: A file cannot be read or written. `path` is unchanged.
    """
    keep: list[str] = []
    discard: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = parse_record(line)
        is_kept = record is not None and step > 0 and record["step"] <= step
        if record is not None and record["step"] == step:
            is_kept = is_kept and record.keys().isdisjoint(again)
        (keep if is_kept else discard).append(line + "\n")
    backup = unused_backup_path(path)
    if discard:
        backup.write_text("".join(discard), encoding="utf-8")
    write_durably(path, "".join(keep))
    return backup if discard else None


def _summarize(metrics: dict[str, Any]) -> str:
    """Format the metrics of a step as text for the log."""
    formats = {
        "loss": "loss {:.4f}",
        "eval_loss": "eval_loss {:.4f}",
        "unigram_loss": "(unigram model {:.4f})",
        "grad_norm": "grad_norm {:.3f}",
        "learning_rate": "lr {:.2e}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "mfu {:.1%}",
        "memory_gib": "{:.1f} GiB",
    }
    parts = []
    for key, text in formats.items():
        if metrics.get(key) is not None:
            parts.append(text.format(metrics[key]))
        if key == "eval_loss":
            parts += [f"{name} {metrics[name]:.4f}" for name in metrics if name.startswith(SET_LOSS)]
    return "  ".join(parts)
