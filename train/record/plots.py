"""Draw loss.png and health.png, which are updated during a run, and comparisons of several runs."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from train.files import drawing, unfinished
from train.record.fp8_health import FP8_HEALTH, OPERANDS, STATISTICS, values
from train.record.history import EVALUATION, SET_LOSS, History, is_number, labels, read_history, smoothed
from train.record.run_folder import RunFolder

PROGRAM = Path(__file__).resolve().parent.parent / "plot.py"
REDRAW_INTERVAL_S = 60.0
LOWEST_PRIORITY = 19
MARKS = {"stopped": ("tab:red", ":"), "resumed": ("gray", "--"), "rolled back": ("tab:purple", "-.")}
# Panels of loss.png: key of metrics.jsonl, label, relative height.
CURVES = (
    ("loss", "loss (nats per token)", 4),
    ("learning_rate", "learning rate", 1),
    ("grad_norm", "gradient norm", 1.5),
    ("tokens_per_second", "tokens/s", 1.5),
)
# Panels of health.png: title, minimum and maximum of the color scale, whether it is logarithmic.
PANELS = {
    "underflow": ("becomes 0", 1e-5, 1.0, True),
    "saturated": ("saturates", 1e-7, 1e-1, True),
    "range": ("amax x scale / largest value", 1e-3, 1e1, True),
    "error": ("relative error", 0.02, 0.1, False),
    "kurtosis": ("kurtosis", 1.0, 1e4, True),
}


def draw(histories: list[History], path: Path) -> None:
    """Draw loss (raw and smoothed), evaluation losses, learning rate, gradient norm and tokens/s against tokens.

    For a single run, also mark stops, resumes and rollbacks.

    Raises:
        OSError: `path` cannot be written.
    """
    from matplotlib.ticker import EngFormatter

    is_single = len(histories) == 1
    ratios = [height for *_, height in CURVES]
    with drawing(path, len(CURVES), figsize=(9, 10), sharex=True, height_ratios=ratios) as (figure, rows):
        axes = [row[0] for row in rows]
        # matplotlib parses text between two dollar signs as a formula
        names = [name.replace("$", r"\$") for name in labels([h.folder.path for h in histories])]
        for index, (name, history) in enumerate(zip(names, histories, strict=True)):
            _draw_run(axes, history, f"C{index % 10}", "" if is_single else f"{name}: ")
        unigram = [history.last("unigram_loss") for history in histories]
        if unigram[0] is not None and len(set(unigram)) == 1:
            axes[0].axhline(unigram[0], linestyle="--", color="gray", linewidth=1, label="unigram model")
        if is_single:
            figure.suptitle(names[0])
            _draw_marks(axes, histories[0])
        for axis, (_, label, _) in zip(axes, CURVES, strict=True):
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        if any(value > 0 for history in histories for value in history.series("grad_norm")[1]):
            axes[2].set_yscale("log")
        axes[3].set(xlabel="tokens", ylim=(0, None))
        axes[3].xaxis.set_major_formatter(EngFormatter())
        axes[0].legend(fontsize="small")


def _draw_run(axes: list[Any], history: History, color: str, prefix: str) -> None:
    for axis, (key, _, _) in zip(axes, CURVES, strict=True):
        tokens, series = history.series(key)
        style: dict[str, Any] = {"color": color, "marker": "." if len(series) == 1 else ""}
        if key == "loss" and series:
            axis.plot(tokens, series, alpha=0.3, linewidth=0.8, **style)
            axis.plot(tokens, smoothed(series), linewidth=1.4, label=f"{prefix}training", **style)
        else:
            axis.plot(tokens, series, linewidth=1, **style)
    for number, key in enumerate(history.evaluations()):
        name = "" if key == EVALUATION else ", " + key.removeprefix(SET_LOSS).replace("$", r"\$")
        # One run: a color per evaluation set. Several runs: a color per run, a marker per evaluation set.
        style = {"color": color, "linestyle": "--"} if prefix else {"color": f"C{number + 1}"}
        style |= {"marker": "osD^v<>"[number % 7], "markersize": 4, "linewidth": 1}
        axes[0].plot(*history.series(key), label=f"{prefix}evaluation{name}", **style)


def _draw_marks(axes: list[Any], history: History) -> None:
    labelled: set[str] = set()
    for tokens, what in history.marks():
        color, style = MARKS[what]
        for axis in axes:
            label = what if axis is axes[0] and what not in labelled else None
            axis.axvline(tokens, color=color, linestyle=style, linewidth=1, alpha=0.7, label=label)
        labelled.add(what)


def draw_health(history: History, path: Path) -> bool:
    """Draw the FP8 health of a run: one panel per statistic and operand, with layers of GEMMs against steps.

    Returns:
        Whether the run has FP8 health samples. Without them, nothing is drawn.

    Raises:
        OSError: `path` cannot be written.
    """
    records = [record for record in history.records if any(values(record.get(FP8_HEALTH)))]
    if not records:
        return False
    steps = [record["step"] for record in records]
    panels: dict[tuple[str, str], dict[tuple[str, int], list[float]]] = {}
    for index, record in enumerate(records):
        for kind, operand, what, column in values(record[FP8_HEALTH]):
            panel = panels.setdefault((what, operand), {})
            for layer, value in enumerate(column):
                row = panel.setdefault((kind, layer), [math.nan] * len(records))
                row[index] = value if value is not None and is_number(value) else math.nan
    shown = [what for what in STATISTICS if any(statistic == what for statistic, _ in panels)]
    height = min(2.0 + 0.03 * max(map(len, panels.values())), 5.0)
    with drawing(path, len(shown), len(OPERANDS), figsize=(15, len(shown) * height)) as (figure, axes):
        figure.suptitle("FP8 health: GEMM operands, layers from top to bottom, against steps")
        for what, axis_row in zip(shown, axes, strict=True):
            for operand, axis in zip(OPERANDS, axis_row, strict=True):
                if rows := panels.get((what, operand)):
                    _draw_panel(figure, axis, what, rows, steps)
                    axis.set_title(f"{operand}: {PANELS[what][0]}", fontsize="small")
                    if operand != OPERANDS[0]:
                        axis.set_yticklabels([])
                else:
                    axis.set_axis_off()
    return True


def _draw_panel(
    figure: Any, axis: Any, what: str, rows: dict[tuple[str, int], list[float]], steps: list[int]
) -> None:
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    _, low, high, is_logarithmic = PANELS[what]
    norm = (LogNorm if is_logarithmic else Normalize)(low, high, clip=True)
    table = [[value if math.isnan(value) else max(value, low) for value in row] for row in rows.values()]
    image = axis.imshow(table, aspect="auto", interpolation="nearest", norm=norm, cmap="viridis")
    begin, middles, names = 0, [], []
    for kind, layers in groupby(rows, key=lambda key: key[0]):
        if begin:
            axis.axhline(begin - 0.5, color="white", linewidth=0.8)
        count = len(list(layers))
        middles.append(begin + (count - 1) / 2)
        names.append(kind.rpartition("*.")[2])
        begin += count
    axis.set_yticks(middles, names, fontsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{steps[int(x)]:,}" if 0 <= x < len(steps) else "")
    )
    figure.colorbar(image, ax=axis)


class LivePlot:
    """Updates loss.png and health.png during a run, in a process of the lowest priority. Failures are ignored."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._last = time.monotonic()
        self._process: subprocess.Popen | None = None

    def update(self) -> None:
        """Start drawing, unless a drawing is in progress or started less than REDRAW_INTERVAL_S ago."""
        is_busy = self._process is not None and self._process.poll() is None
        if is_busy or time.monotonic() - self._last < REDRAW_INTERVAL_S:
            return
        self._last = time.monotonic()
        command = [
            sys.executable,
            str(PROGRAM),
            str(self.folder.path),
            "--output",
            str(self.folder.loss_plot),
        ]
        quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with contextlib.suppress(OSError):
            # in its own session, so that Ctrl-C does not reach it
            self._process = subprocess.Popen(command, **quiet, start_new_session=True)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)

    def close(self) -> None:
        """Kill the process, so that it cannot overwrite a later plot."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for path in (self.folder.loss_plot, self.folder.health_plot):
                unfinished(path, self._process.pid).unlink(missing_ok=True)

    def draw_last(self) -> list[Path]:
        """Draw in this process and return the paths. Errors are raised."""
        self.close()
        history = read_history(self.folder.path)
        draw([history], self.folder.loss_plot)
        if draw_health(history, self.folder.health_plot):
            return [self.folder.loss_plot, self.folder.health_plot]
        self.folder.health_plot.unlink(missing_ok=True)  # an earlier run in this folder may have written it
        return [self.folder.loss_plot]
