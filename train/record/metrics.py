"""What a run tells: metrics.jsonl, lines for people, and what follows from these lines: trackers, loss.png; and MFU.

Only the main rank (rank 0) writes; on all others a logger does nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from train.files import discarded_name
from train.record.history import SET_LOSS
from train.record.plots import LivePlot
from train.record.run_folder import RunFolder
from train.record.trackers import Trackers

logger = logging.getLogger(__name__)
# Dense bf16 peak of the SXM parts' tensor cores (NVIDIA H100 and H200 data sheets, without sparsity; the H800 differs
# from the H100 in NVLink and fp64 only).
HOPPER_SXM_BF16_TFLOPS = 989.0
NO_STEP = -1  # of a line that cannot be read
# What a resume notes at the step that it begins at: of a start before it that saved nothing it does not hold.
NOTED_AT_START = ("changes", "began_at")


def hopper_sxm(device_name: str) -> str | None:
    """H100, H200 or H800 of their SXM parts; None of others: PCIe and NVL cards have lower clocks.
    `device_name` is torch.cuda.get_device_name()'s."""
    found = re.search(r"\bH(100|200|800)\b", device_name)
    return found[0] if found and not re.search(r"PCIe|NVL", device_name) else None


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU of this name (`hopper_sxm`), TFLOP/s; None where it is not known."""
    return HOPPER_SXM_BF16_TFLOPS if hopper_sxm(device_name) else None


def mfu(
    tokens_per_second_per_gpu: float, flops_per_token: float, peak_tflops_per_gpu: float | None
) -> float | None:
    """Model FLOP utilization, 0 to 1 (Chowdhery et al., arXiv:2204.02311), None where the peak is not known.

    `flops_per_token` counts forward and backward, without recomputation.
    """
    if peak_tflops_per_gpu is None:
        return None
    return tokens_per_second_per_gpu * flops_per_token / (peak_tflops_per_gpu * 1e12)


class MetricsLogger:
    """Where the loop sends its metrics.

    `config`: the run's, as a JSON object (TrainingArguments.to_dict). `start_step`: steps that are already done. On a
    resume the lines of later steps leave metrics.jsonl, in a new run (0) all of them; they are kept in
    metrics.jsonl.discarded-<time>.

    Lines that cannot be written, as on a full disk, are kept and written later, with a warning: whether the run goes
    on is for its next save to say, which all ranks hear of.

    `evaluates_again`: the evaluation of start_step is about to be made up for, and what is there of it goes, too.

    Raises OSError: what is there cannot be read or rewritten.
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
        again = ("eval_loss",) if evaluates_again else ()
        discarded = discard_after(folder.metrics, start_step or NO_STEP, (*NOTED_AT_START, *again))
        self._file = folder.metrics.open("ab", buffering=0)
        self._unwritten: list[bytes] = []
        self._failing = False
        self._recent: deque[tuple[int, float]] = deque([(start_step, time.monotonic())], maxlen=10)
        if discarded:
            logger.info(f"metrics: {discarded[1]} lines after step {start_step} moved to {discarded[0].name}")
        self._trackers = Trackers(folder, config, start_step, goes_back=bool(discarded))
        self._plot = LivePlot(folder)

    def log(self, metrics: dict[str, Any]) -> None:
        """Write one line, which must have "step" (optimizer steps done). In the file NaN becomes null."""
        if not self.is_main:
            return
        step = metrics["step"]
        metrics = {**metrics, "time": round(time.time(), 1)}  # seconds since the epoch
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._unwritten.append(json.dumps(finite, allow_nan=False).encode() + b"\n")
        self._write()
        if step > self._recent[-1][0]:
            self._recent.append((step, time.monotonic()))
        left = self._left(step) if "loss" in metrics else ""
        if brief := _brief(metrics):
            logger.info(f"step {step}/{self.total_steps}  {brief}{left}")
        self._trackers.log(metrics)
        self._plot.update()

    def message(self, text: str) -> None:
        """A line for people, not in metrics.jsonl."""
        if self.is_main:
            logger.info(text)

    def draw_last(self) -> None:
        """loss.png and health.png of the whole run. For want of a picture no trained model is a failure."""
        if not self.is_main:
            return
        try:
            logger.info(f"wrote {' and '.join(map(str, self._plot.draw_last()))}")
        except Exception as error:
            logger.warning(f"no loss plot: {type(error).__name__}: {error}")

    def rewind(self, step: int) -> None:
        """Go on from an earlier `step`: the lines of later ones leave metrics.jsonl, as on a resume; with a warning
        they stay where the disk has no room to keep them elsewhere."""
        if not self.is_main:
            return
        path = Path(self._file.name)
        self._write()
        self._file.close()
        try:
            discard_after(path, step)
        except OSError as error:
            logger.warning(f"the lines after step {step} stay in {path}: {error}")
        self._unwritten = [line for line in self._unwritten if _record_of(line.decode())["step"] <= step]
        self._file = path.open("ab", buffering=0)
        self._recent = deque([(step, time.monotonic())], maxlen=10)
        self._trackers.rewind(step)

    def close(self) -> None:
        """Close the file and the trackers. A second call does nothing."""
        if not self.is_main or self._file.closed:
            return
        self._write()
        if self._unwritten:
            logger.warning(f"{len(self._unwritten)} lines of {self._file.name} are lost")
        self._file.close()
        self._plot.close()
        self._trackers.close()

    def _write(self) -> None:
        """Write what is not written, whole lines only."""
        try:
            while self._unwritten:
                end = self._file.seek(0, os.SEEK_END)
                try:
                    written = self._file.write(self._unwritten[0])
                    if written < len(self._unwritten[0]):  # the disk is full within the line
                        written += self._file.write(self._unwritten[0][written:])
                except OSError:
                    self._file.truncate(end)
                    raise
                del self._unwritten[0]
        except OSError as error:
            if not self._failing:
                self._failing = True
                logger.warning(
                    f"{self._file.name} cannot be written: {error}; its lines are kept and written later"
                )
        else:
            if self._failing:
                self._failing = False
                logger.info(f"{self._file.name} could be written again; no line is missing")

    def _left(self, step: int) -> str:
        """The time that the steps after `step` take at the recent speed, "" where none is known."""
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        if last_step == first_step:
            return ""
        seconds = (self.total_steps - step) * (last_time - first_time) / (last_step - first_step)
        return f"  {timedelta(seconds=int(seconds))} left"


def discard_after(path: Path, step: int, again: Sequence[str] = ()) -> tuple[Path, int] | None:
    """Take the lines of steps after `step` (NO_STEP: all) out of the metrics `path`, a line cut off by a crash and
    those of `step` that have a key of `again`, which is about to be written again. The last line left ends as one.

    Returns the file that keeps them, and how many they are; None when there are none. Raises OSError: there is no room
    for that file; nothing is changed.
    """
    if not path.exists():
        return None
    keep: list[str] = []
    discard: list[str] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        record = _record_of(line)
        made_again = record["step"] == step and not record.keys().isdisjoint(again)
        (keep if 0 <= record["step"] <= step and not made_again else discard).append(line)
    if not discard and text.endswith("\n"):
        return None
    kept_in = discarded_name(path)
    temporary = path.with_suffix(".tmp")
    try:
        if discard:
            kept_in.write_text("\n".join(discard) + "\n", encoding="utf-8")
        temporary.write_text("".join(line + "\n" for line in keep), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        kept_in.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        raise
    return (kept_in, len(discard)) if discard else None


def _record_of(line: str) -> dict[str, Any]:
    """What the line has; step NO_STEP, which is never kept, where it cannot be read."""
    try:
        record = json.loads(line)
    except ValueError:
        return {"step": NO_STEP}
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else {"step": NO_STEP}


def _brief(metrics: dict[str, Any]) -> str:
    """The figures that a person watches, in one line."""
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
