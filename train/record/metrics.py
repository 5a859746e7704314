"""Write the metrics of a run to metrics.jsonl, the log, trackers and plots. Compute MFU."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from train.files import discarded_name, write_durably
from train.record.history import SET_LOSS
from train.record.plots import LivePlot
from train.record.run_folder import RunFolder
from train.record.trackers import Trackers

logger = logging.getLogger(__name__)
# Dense bf16 peak of the tensor cores of SXM GPUs (NVIDIA H100 and H200 data sheets, without sparsity). The H800 differs
# from the H100 only in NVLink and fp64.
HOPPER_SXM_BF16_TFLOPS = 989.0
NO_STEP = -1  # step of a line that cannot be parsed
# Keys that a start writes at its first step. If an earlier start saved no checkpoint, its lines with them are moved.
NOTED_AT_START = ("changes", "began_at")


def hopper_sxm(device_name: str) -> str | None:
    """Return "H100", "H200" or "H800" for an SXM GPU, else None. PCIe and NVL cards have lower clocks.

    Args:
        device_name: The result of torch.cuda.get_device_name().
    """
    found = re.search(r"\bH(100|200|800)\b", device_name)
    return found[0] if found and not re.search(r"PCIe|NVL", device_name) else None


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a GPU (see `hopper_sxm`) in TFLOP/s, or None if it is not known."""
    return HOPPER_SXM_BF16_TFLOPS if hopper_sxm(device_name) else None


def mfu(
    tokens_per_second_per_gpu: float, flops_per_token: float, peak_tflops_per_gpu: float | None
) -> float | None:
    """Return the model FLOP utilization, 0 to 1 (Chowdhery et al., arXiv:2204.02311), or None if the peak is not known.

    Args:
        tokens_per_second_per_gpu: Throughput of one GPU.
        flops_per_token: FLOPs of forward and backward, without recomputation.
        peak_tflops_per_gpu: Peak of one GPU in TFLOP/s.
    """
    if peak_tflops_per_gpu is None:
        return None
    return tokens_per_second_per_gpu * flops_per_token / (peak_tflops_per_gpu * 1e12)


class MetricsLogger:
    """Writer of the metrics of a run: metrics.jsonl, log lines, trackers and plots. Does nothing on ranks other than 0.

    A resume moves the lines of later steps from metrics.jsonl to metrics.jsonl.discarded-<time>; a new run moves all
    lines. Lines that cannot be written, for example because the disk is full, are written later.

    Args:
        folder: The folder of the run.
        config: TrainingArguments.to_dict().
        is_main: Whether this is rank 0.
        start_step: Number of steps that are already done.
        evaluates_again: The evaluation of start_step is repeated, so its old line is also moved.

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
        self.total_steps = config["max_steps"]
        folder.path.mkdir(parents=True, exist_ok=True)
        again = (*NOTED_AT_START, "eval_loss") if evaluates_again else NOTED_AT_START
        discarded = discard_after(folder.metrics, start_step or NO_STEP, again)
        if discarded:
            logger.info(
                f"metrics: {discarded[1]} lines after step {start_step} were moved to {discarded[0].name}"
            )
        self._file = folder.metrics.open("ab", buffering=0)
        self._pending = b""
        self._has_failed = False
        self._recent: deque[tuple[int, float]] = deque([(start_step, time.monotonic())], maxlen=10)
        self._trackers = Trackers(folder, config, start_step, goes_back=bool(discarded))
        self._plot = LivePlot(folder)

    def log(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of a step. They must have "step" (completed optimizer steps). The file has null for NaN."""
        if not self.is_main:
            return
        step = metrics["step"]
        metrics = {**metrics, "time": round(time.time(), 1)}  # seconds since the epoch
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._pending += json.dumps(finite, allow_nan=False).encode() + b"\n"
        self._write()
        if step > self._recent[-1][0]:
            self._recent.append((step, time.monotonic()))
        if summary := _summarize(metrics):
            left = self._time_left(step) if "loss" in metrics else ""
            logger.info(f"step {step}/{self.total_steps}  {summary}{left}")
        self._trackers.log(metrics)
        self._plot.update()

    def draw_last(self) -> None:
        """Draw loss.png and health.png of the whole run. Log a warning on failure."""
        if not self.is_main:
            return
        try:
            logger.info(f"wrote {' and '.join(map(str, self._plot.draw_last()))}")
        except Exception as error:
            logger.warning(f"no loss plot: {type(error).__name__}: {error}")

    def rewind(self, step: int) -> None:
        """Continue from an earlier step. As on a resume, move the lines of later steps out of metrics.jsonl."""
        if not self.is_main:
            return
        path = Path(self._file.name)
        self._write()
        self._file.close()
        try:
            discard_after(path, step)
        except OSError as error:
            logger.warning(f"cannot move the lines after step {step} out of {path}: {error}")
        self._pending = b""
        self._file = path.open("ab", buffering=0)
        self._recent = deque([(step, time.monotonic())], maxlen=10)
        self._trackers.rewind(step)

    def close(self) -> None:
        """Close the file and the trackers. A second call does nothing."""
        if not self.is_main or self._file.closed:
            return
        self._write()
        if self._pending:
            logger.warning(f"{self._pending.count(10)} lines of {self._file.name} are lost")
        self._file.close()
        self._plot.close()
        self._trackers.close()

    def _write(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning(f"{self._file.name} cannot be written: {error}; its lines are written later")
            self._has_failed = True

    def _time_left(self, step: int) -> str:
        """Return the estimated time for the remaining steps at the recent speed, or "" if unknown."""
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        if last_step == first_step:
            return ""
        seconds = (self.total_steps - step) * (last_time - first_time) / (last_step - first_step)
        return f"  {timedelta(seconds=int(seconds))} left"


def discard_after(path: Path, step: int, again: Sequence[str] = ()) -> tuple[Path, int] | None:
    """Move lines of metrics.jsonl to another file.

    Moves lines of steps after `step`, lines that cannot be parsed, and lines of `step` that have a key in `again`. The
    last line that stays ends with a newline.

    Args:
        path: metrics.jsonl.
        step: The last step to keep. NO_STEP: move all lines.
        again: Keys that will be written again at `step`.

    Returns:
        The other file and its number of lines, or None if no line was moved.

    Raises:
        OSError: The disk is full. `path` is unchanged.
    """
    if not path.exists():
        return None
    keep: list[str] = []
    discard: list[str] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        record = _parse(line)
        is_repeated = record["step"] == step and not record.keys().isdisjoint(again)
        (keep if 0 <= record["step"] <= step and not is_repeated else discard).append(line + "\n")
    if not discard and text.endswith("\n"):
        return None
    aside = discarded_name(path)
    try:
        if discard:
            aside.write_text("".join(discard), encoding="utf-8")
        write_durably(path, "".join(keep))
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return (aside, len(discard)) if discard else None


def _parse(line: str) -> dict[str, Any]:
    """Parse a line of metrics.jsonl. The step is NO_STEP if the line cannot be parsed."""
    try:
        record = json.loads(line)
    except ValueError:
        return {"step": NO_STEP}
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else {"step": NO_STEP}


def _summarize(metrics: dict[str, Any]) -> str:
    """Return the log line for these metrics."""
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
