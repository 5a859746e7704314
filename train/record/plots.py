"""Plots of runs: loss.png and health.png, which are drawn again and again while a run goes on, and comparisons of
several."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.files import drawing, unfinished
from train.record.fp8_health import draw_health
from train.record.history import EVALUATION, SET_LOSS, History, Mark, labels, read_history, smoothed
from train.record.run_folder import RunFolder

PROGRAM = Path(__file__).resolve().parent.parent / "plot.py"
REDRAWN_S = 60.0  # at most so often during a run
DRAWN_WITHIN_S = 20.0  # or it is given up, at the end of the run
LOWEST_PRIORITY = 19
MARKS = {"stopped": ("tab:red", ":"), "resumed": ("gray", "--"), "rolled back": ("tab:purple", "-.")}


def draw(histories: list[History], path: Path) -> None:
    """The PNG `path`: loss (smoothed, its lines behind it) with evaluations, learning rate, gradient norm and tokens/s
    against tokens; stops, resumes and rollbacks are marked where it is one run. Raises OSError: it cannot be
    written."""
    from matplotlib.ticker import EngFormatter

    one = len(histories) == 1
    height_ratios = [4, 1, 1.5, 1.5]
    with drawing(path, 4, figsize=(9, 10), sharex=True, height_ratios=height_ratios) as (figure, axes):
        loss, rate, norm, speed = (row[0] for row in axes)
        paths = [history.folder.path for history in histories]
        names = [_plain(name) for name in labels(paths)]
        for index, (name, history) in enumerate(zip(names, histories, strict=True)):
            _draw_run(axes, history, f"C{index % 10}", "" if one else f"{name}: ")
        unigram = [h.last("unigram_loss") for h in histories]
        if unigram[0] is not None and len(set(unigram)) == 1:
            loss.axhline(unigram[0], linestyle="--", color="gray", linewidth=1, label="unigram model")
        if one:
            _draw_marks(axes, histories[0].marks())
            figure.suptitle(names[0])
        for axis, label in ((loss, "loss (nats a token)"), (rate, "learning rate"), (norm, "gradient norm")):
            axis.set_ylabel(label)
        if any(value > 0 for h in histories for value in h.series("grad_norm")[1]):
            norm.set_yscale("log")
        speed.set(ylabel="tokens/s", xlabel="tokens", ylim=(0, None))
        speed.xaxis.set_major_formatter(EngFormatter())
        for axis in (loss, rate, norm, speed):
            axis.grid(alpha=0.3)
        loss.legend(fontsize="small")


def _draw_run(axes: Any, history: History, color: str, prefix: str) -> None:
    loss = axes[0][0]
    tokens, values = history.series("loss")
    if tokens:
        loss.plot(tokens, values, _point(values), color=color, alpha=0.3, linewidth=0.8)
        loss.plot(
            tokens, smoothed(values), _point(values), color=color, linewidth=1.4, label=f"{prefix}training"
        )
    for number, key in enumerate(history.evaluations()):
        of_set = "" if key == EVALUATION else f", {_plain(key.removeprefix(SET_LOSS))}"
        # one run: a color for each set; several: the run's color, a marker for each set
        style = {"color": f"C{number + 1}"} if not prefix else {"color": color, "linestyle": "--"}
        marker = "osD^v<>"[number % 7]
        loss.plot(
            *history.series(key),
            marker=marker,
            markersize=4,
            linewidth=1,
            label=f"{prefix}evaluation{of_set}",
            **style,
        )
    for key, row in (("learning_rate", axes[1]), ("grad_norm", axes[2]), ("tokens_per_second", axes[3])):
        tokens, values = history.series(key)
        row[0].plot(tokens, values, _point(values), color=color, linewidth=1)


def _point(values: Sequence[float]) -> str:
    """The format of a curve: one of a single point is a point."""
    return "." if len(values) == 1 else "-"


def _draw_marks(axes: Any, marks: list[Mark]) -> None:
    told: set[str] = set()
    for mark in marks:
        color, style = MARKS[mark.what]
        for number, row in enumerate(axes):
            label = mark.what if number == 0 and mark.what not in told else None
            row[0].axvline(mark.tokens, color=color, linestyle=style, linewidth=1, alpha=0.7, label=label)
        told.add(mark.what)


def _plain(text: str) -> str:
    """Without formulas, which matplotlib would see between two of these."""
    return text.replace("$", r"\$")


class LivePlot:
    """loss.png and health.png of a run that goes on, drawn by a process of the lowest priority: no step waits for it,
    and whether it succeeds is of no concern to the run."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._last = time.monotonic()
        self._process: subprocess.Popen | None = None

    def update(self) -> None:
        """Begin to draw, unless that was done a moment ago or is still under way."""
        if time.monotonic() - self._last < REDRAWN_S:
            return
        if self._process is not None and self._process.poll() is None:
            return
        self._last = time.monotonic()
        command = [
            sys.executable,
            str(PROGRAM),
            str(self.folder.path),
            "--output",
            str(self.folder.loss_plot),
        ]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            # of its own session: a Ctrl-C is none of its business
            self._process = subprocess.Popen(command, **quiet, start_new_session=True)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
        except OSError:
            pass

    def close(self) -> None:
        """Wait for what is under way, for a while: it must not replace a later plot."""
        if self._process is None:
            return
        try:
            self._process.wait(DRAWN_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for path in (self.folder.loss_plot, self.folder.health_plot):
                unfinished(path, self._process.pid).unlink(missing_ok=True)

    def draw_last(self) -> list[Path]:
        """Draw them now, in this process; returns their paths. Raises whatever stands in its way."""
        self.close()
        history = read_history(self.folder.path)
        draw([history], self.folder.loss_plot)
        if draw_health(history, self.folder.health_plot):
            return [self.folder.loss_plot, self.folder.health_plot]
        self.folder.health_plot.unlink(missing_ok=True)  # of another run that was here
        return [self.folder.loss_plot]
