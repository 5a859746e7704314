"""Draw loss.png and health.png for a run, and comparison plots for several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model.fp8.recipes import OPERANDS, STATISTICS
from train.files import open_figure
from train.record.fp8_health import FP8_HEALTH, LIMITS, values
from train.record.history import EVALUATION, SET_LOSS, History, smoothed

MARKS = {"stopped": ("tab:red", ":"), "resumed": ("gray", "--"), "rolled back": ("tab:purple", "-.")}
# Panels of loss.png: key of metrics.jsonl, axis label, relative height.
CURVES = (
    ("loss", "loss (nats per token)", 4),
    ("learning_rate", "learning rate", 1),
    ("grad_norm", "gradient norm", 1.5),
    ("tokens_per_second", "tokens/s", 1.5),
)
# Panels of health.png: title, minimum and maximum of the logarithmic color scale.
PANELS = {
    "underflow": ("becomes 0", 1e-5, 1.0),
    "saturated": ("saturates", 1e-7, 1e-1),
    "range": ("amax x scale / largest value", 1e-3, 1e1),
    "error": ("relative error", 0.02, 0.5),
    "kurtosis": ("kurtosis", 1.0, 1e4),
}


def draw(histories: list[History], path: Path) -> None:
    """Plot loss (raw and smoothed), evaluation losses, learning rate, gradient norm and tokens/s against tokens.

    For a single run, stops, resumes and rollbacks are also marked.

    Raises:
        OSError: `path` cannot be written.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    is_single = len(histories) == 1
    ratios = [height for *_, height in CURVES]
    with open_figure(path, len(CURVES), figsize=(9, 10), sharex=True, height_ratios=ratios) as (figure, rows):
        axes = [row[0] for row in rows]
        for index, history in enumerate(histories):
            _draw_run(axes, history, f"C{index % 10}", "" if is_single else f"{history.path}: ")
        unigram = {history.last("unigram_loss") for history in histories}
        if len(unigram) == 1 and None not in unigram:
            axes[0].axhline(unigram.pop(), linestyle="--", color="gray", linewidth=1, label="unigram model")
        if is_single:
            figure.suptitle(histories[0].path.resolve().name)
            _draw_marks(axes, histories[0])
        for axis, (_, label, _) in zip(axes, CURVES, strict=True):
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[2].set_yscale("log", nonpositive="clip")
        # plain numbers; the default labels would be powers of ten, such as 9 x 10^-1
        low, high = axes[2].get_ylim()
        axes[2].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(5))
        axes[2].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes[2].yaxis.set_minor_locator(NullLocator())
        axes[3].set(xlabel="training tokens", ylim=(0, None))
        axes[3].xaxis.set_major_formatter(EngFormatter())
        axes[0].legend(fontsize="small")


def _draw_run(axes: list[Any], history: History, color: str, prefix: str) -> None:
    for axis, (key, _, _) in zip(axes, CURVES, strict=True):
        tokens, series = history.series(key)
        style: dict[str, Any] = {"color": color, "marker": "." if len(series) == 1 else ""}
        if key == "loss":
            axis.plot(tokens, smoothed(series), linewidth=1.4, label=f"{prefix}training", **style)
            style["alpha"] = 0.3
        axis.plot(tokens, series, linewidth=1, **style)
    keys = dict.fromkeys(key for record in history.records for key in record)
    losses = [key for key in keys if key == EVALUATION or key.startswith(SET_LOSS)]
    for number, key in enumerate(losses):
        name = "" if key == EVALUATION else f", {key.removeprefix(SET_LOSS)}"
        # One run: a color per evaluation set. Several runs: a color per run, a marker per evaluation set.
        style = {"color": color, "linestyle": "--"} if prefix else {"color": f"C{number + 1}"}
        style |= {"marker": "osD^v<>"[number % 7], "markersize": 4, "linewidth": 1}
        axes[0].plot(*history.series(key), label=f"{prefix}evaluation{name}", **style)


def _draw_marks(axes: list[Any], history: History) -> None:
    marks = history.marks()
    for kind, (color, style) in MARKS.items():
        positions = [tokens for tokens, mark in marks if mark == kind]
        for axis in axes:
            lines = [axis.axvline(x, color=color, linestyle=style, linewidth=1, alpha=0.7) for x in positions]
            if lines:
                lines[0].set_label(kind)


def draw_health(history: History, path: Path) -> bool:
    """Plot the FP8 health samples of a run as heat maps, with one panel for each statistic and GEMM operand.

    The vertical axis shows the GEMMs of all layers, and the horizontal axis shows the steps. A red line in a color bar
    marks the alarm limit.

    Returns:
        Whether the run has FP8 health samples. Without samples, no file is written.

    Raises:
        OSError: `path` cannot be written.
    """
    records = [record for record in history.records if record.get(FP8_HEALTH)]
    if not records:
        return False
    steps = [record["step"] for record in records]
    panels: dict[tuple[str, str], dict[tuple[str, int], list[float | None]]] = {}
    for index, record in enumerate(records):
        for kind, operand, statistic, column in values(record[FP8_HEALTH]):
            rows = panels.setdefault((statistic, operand), {})
            for layer, value in enumerate(column):
                rows.setdefault((kind, layer), [None] * len(records))[index] = value
    shown = [name for name in STATISTICS if any(statistic == name for statistic, _ in panels)]
    height = min(2.0 + 0.03 * max(map(len, panels.values())), 5.0)
    with open_figure(path, len(shown), len(OPERANDS), figsize=(15, len(shown) * height)) as (figure, axes):
        figure.suptitle("FP8 health of the GEMM operands (layers from top to bottom; red line: alarm limit)")
        figure.supxlabel("training step")
        for statistic, axis_row in zip(shown, axes, strict=True):
            for operand, axis in zip(OPERANDS, axis_row, strict=True):
                if rows := panels.get((statistic, operand), {}):
                    image = _draw_panel(axis, statistic, rows, steps)
                    limit = LIMITS.get((statistic, operand))  # None for kurtosis
                    bound = "" if limit is None else f", alarm above {limit:g}"
                    axis.set_title(f"{operand}: {PANELS[statistic][0]}{bound}", fontsize="small")
                    bar = figure.colorbar(image, ax=axis)
                    if limit is not None:
                        bar.ax.axhline(limit, color="red", linewidth=2)
                else:
                    axis.set_axis_off()
    return True


def _draw_panel(
    axis: Any, statistic: str, rows: dict[tuple[str, int], list[float | None]], steps: list[int]
) -> Any:
    """Draw a heat map of one FP8 health statistic with one row per GEMM and layer, and return the image.

    Each cell covers the steps since the previous sample.
    """
    import numpy as np
    from matplotlib.colors import LogNorm

    _, low, high = PANELS[statistic]
    table = np.maximum(np.array([*rows.values()], dtype=float), low)
    image = axis.pcolormesh(
        [0, *steps], range(len(table) + 1), table, norm=LogNorm(low, high, clip=True), cmap="viridis"
    )
    axis.invert_yaxis()
    kinds = [kind for kind, _ in rows]
    middles = {kind: kinds.index(kind) + kinds.count(kind) / 2 for kind in kinds}
    axis.set_yticks([*middles.values()], [kind.rpartition("*.")[2] for kind in middles], fontsize=7)
    return image
