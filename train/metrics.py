"""What a run tells: metrics.jsonl, a progress bar or plain lines, wandb, the loss plot; and MFU.

Only the main rank (rank 0) writes; on all others a logger does nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import netrc
import os
import re
import secrets
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tqdm import tqdm

METRICS = "metrics.jsonl"
PLOT = "loss.png"
WANDB_RUN_ID = "wandb_run_id"

# Dense tensor-core peaks of the SXM parts, TFLOP/s (NVIDIA H100 and H200 data sheets, without sparsity; the
# H800 differs from the H100 in NVLink and fp64 only).
HOPPER_SXM_PEAK_TFLOPS = {"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0}


def peak_tflops(device_name: str, dtype: str = "bf16") -> float | None:
    """Dense peak of an H100, H200 or H800 SXM for `dtype` (bf16 | fp16 | fp8), TFLOP/s; else None.

    `device_name` is torch.cuda.get_device_name()'s. PCIe and NVL cards have lower clocks and are not in the
    table.
    """
    sxm = re.search(r"\bH(100|200|800)\b", device_name) and not re.search(r"PCIe|NVL", device_name)
    return HOPPER_SXM_PEAK_TFLOPS.get(dtype) if sxm else None


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

    `start_step`: steps that are already done. On a resume the lines of later steps leave metrics.jsonl, in a
    new run (0) all of them; they are kept in metrics.jsonl.discarded-<time>. `report_to`: none | wandb,
    online with a key (WANDB_API_KEY or netrc), offline without one.

    Lines that cannot be written, as on a full disk, are kept and written later, with a warning: whether the run goes
    on is for its next save to say, which all ranks hear of.

    Raises ValueError: wandb is asked for and not installed. OSError: what is there cannot be read or rewritten.
    """

    def __init__(
        self,
        output_dir: str | Path,
        args_dict: dict[str, Any],
        report_to: str,
        run_name: str | None,
        project: str,
        total_steps: int,
        is_main: bool,
        start_step: int = 0,
    ):
        if report_to == "wandb":
            check_wandb()  # on every rank, and before anything is written
        self.is_main = is_main
        if not is_main:
            return
        self.total_steps = total_steps
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        discarded = discard_after(folder, start_step)
        self._file = (folder / METRICS).open("ab", buffering=0)
        self._unwritten: list[bytes] = []
        self._failing = False
        # A bar that redraws itself is noise in a log file.
        self._bar = (
            tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True, file=sys.stderr)
            if sys.stderr.isatty()
            else None
        )
        self._recent: deque[tuple[int, float]] = deque([(start_step, time.monotonic())], maxlen=10)
        if discarded:
            self.message(
                f"metrics: {discarded[1]} lines after step {start_step} moved to {discarded[0].name}"
            )
        self._wandb = None
        if report_to == "wandb":
            self._wandb = self._start_wandb(folder, args_dict, run_name, project, start_step)

    def log(self, metrics: dict[str, Any]) -> None:
        """Write one line, which must have "step" (optimizer steps done). In the file NaN becomes null."""
        if not self.is_main:
            return
        step = metrics["step"]
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._unwritten.append(json.dumps(finite, allow_nan=False).encode() + b"\n")
        self._write()
        if step > self._recent[-1][0]:
            self._recent.append((step, time.monotonic()))
        if self._bar is not None:
            if "loss" in metrics:
                self._bar.set_postfix_str(_brief(metrics), refresh=False)
            else:
                self.message(f"step {step}/{self.total_steps}  {_brief(metrics)}")
            self._bar.update(step - self._bar.n)
        else:
            left = self._seconds_left(step)
            ending = f"  {_clock(left)} left" if left is not None and "loss" in metrics else ""
            _print(f"step {step}/{self.total_steps}  {_brief(metrics)}{ending}")
        if self._wandb is not None:
            # no step= argument: wandb drops what is not newer than its last step, which a resumed run's lines
            # are
            self._wandb.log(metrics)

    def message(self, text: str) -> None:
        """A line for people, above the progress bar; not in metrics.jsonl."""
        if not self.is_main:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            _print(text)

    def rewind(self, step: int) -> None:
        """Go on from an earlier `step`: the lines of later ones leave metrics.jsonl, as on a resume; with a warning
        they stay where the disk has no room to keep them elsewhere."""
        if not self.is_main:
            return
        path = Path(self._file.name)
        self._write()
        self._file.close()
        try:
            discard_after(path.parent, step)
        except OSError as error:
            self.message(f"warning: the lines after step {step} stay in {path}: {error}")
        self._unwritten = [line for line in self._unwritten if _step_of(line.decode()) <= step]
        self._file = path.open("ab", buffering=0)
        self._recent = deque([(step, time.monotonic())], maxlen=10)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Close the file, the bar and the wandb run. A second call does nothing."""
        if not self.is_main or self._file.closed:
            return
        self._write()
        if self._unwritten:
            self.message(f"warning: {len(self._unwritten)} lines of {self._file.name} are lost")
        self._file.close()
        if self._bar is not None:
            self._bar.close()
        if self._wandb is not None:
            self._wandb.finish()

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
                self.message(
                    f"warning: {self._file.name} cannot be written: {error}; its lines are kept and written later"
                )
        else:
            if self._failing:
                self._failing = False
                self.message(f"{self._file.name} could be written again; no line is missing")

    def _seconds_left(self, step: int) -> float | None:
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        if last_step == first_step:
            return None
        return (self.total_steps - step) * (last_time - first_time) / (last_step - first_step)

    def _start_wandb(
        self, folder: Path, args_dict: dict[str, Any], run_name: str | None, project: str, start_step: int
    ) -> Any:
        import wandb  # slow to import, and not needed without report_to

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        id_file = folder / WANDB_RUN_ID
        if start_step == 0 or not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        run = wandb.init(
            project=project,
            name=run_name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow" if mode == "online" else None,
            dir=str(folder),
            config=args_dict,
            mode=mode,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        if mode == "offline":
            self.message(f"wandb: no API key, so the run is recorded offline; later: wandb sync {run.dir}/..")
        return run


def check_wandb() -> None:
    """Raises ValueError where wandb cannot be imported."""
    spec = importlib.util.find_spec("wandb")
    # without an origin it is a mere folder of that name, such as wandb leaves in a working directory
    if spec is None or spec.origin is None:
        raise ValueError(
            'report_to "wandb" needs the package wandb, which is not installed; pip install wandb, or set report_to '
            'to "none"'
        )


def discard_after(folder: Path, step: int) -> tuple[Path, int] | None:
    """Take the lines of steps after `step` (0: all) out of metrics.jsonl, and a line cut off by a crash.

    Returns the file that keeps them, and how many they are; None when there are none. Raises OSError: there is no room
    for that file; nothing is changed.
    """
    path = folder / METRICS
    if not path.exists():
        return None
    keep: list[str] = []
    discard: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        (keep if 0 < _step_of(line) <= step else discard).append(line)
    if not discard:
        return None
    stamp, number = time.strftime("%Y%m%d-%H%M%S"), 0
    kept_in = folder / f"{METRICS}.discarded-{stamp}"
    while kept_in.exists():  # twice within a second
        number += 1
        kept_in = folder / f"{METRICS}.discarded-{stamp}-{number}"
    temporary = path.with_suffix(".tmp")
    try:
        kept_in.write_text("\n".join(discard) + "\n", encoding="utf-8")
        temporary.write_text("".join(line + "\n" for line in keep), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        kept_in.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        raise
    return kept_in, len(discard)


def plot_loss(output_dir: str | Path) -> Path | None:
    """Draw loss.png from metrics.jsonl: training, evaluation and unigram loss against tokens.

    Returns its path, None when no loss was logged yet.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    folder = Path(output_dir)
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    drawn = False
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o-")):
        points = [(r["tokens"], r[key]) for r in records if r.get(key) is not None and "tokens" in r]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1)
            drawn = True
    unigram = next((r["unigram_loss"] for r in records if r.get("unigram_loss") is not None), None)
    if unigram is not None:
        axes.axhline(unigram, linestyle="--", color="gray", label="unigram model")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=folder.resolve().name)
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend()
        figure.savefig(folder / PLOT, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return folder / PLOT if drawn else None


def _print(text: str) -> None:
    """For people; a console that is a file on a full disk does not end a run."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _step_of(line: str) -> int:
    """The line's step; 0, which is never kept, where it cannot be read."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return 0
    return step if isinstance(step, int) else 0


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


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
    return "  ".join(text.format(metrics[k]) for k, text in formats.items() if metrics.get(k) is not None)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
