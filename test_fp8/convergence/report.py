"""How `compare_convergence.py` shows its results: table, plot, and what of a configuration belongs into a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from test_fp8.common import report
from test_fp8.common.rows import is_under
from test_fp8.convergence.rows import ROW_KEYS
from test_fp8.convergence.trainings import Record
from train.config.differences import leaves
from train.files import drawing

# Keys that say where a run is kept and told of, not what it is.
NOT_TRAINING = (
    "output_dir save_steps save_strategy save_total_limit resume_from_checkpoint report_to run_name "
    "wandb_project".split()
)


def training_of(config: dict[str, Any]) -> Record:
    """What a resolved configuration says of the training that all rows share, dotted key -> value, without paths."""
    left_out = (*ROW_KEYS, *NOT_TRAINING)
    values = {key: value for key, value in leaves(config).items() if not is_under(key, left_out)}
    for key in ("model.config", "model.init_from"):
        values[key] = values[key] and Path(values[key]).name
    sources = [key for key in values if key.startswith("data.sources.")]
    values = {key: value for key, value in values.items() if key not in sources}
    values["data.sources"] = [key.removeprefix("data.sources.") for key in sources]
    return values


def settings_of(config: dict[str, Any]) -> Record:
    """How a row computes, dotted key -> value: what a row may change, of the DeepSpeed configuration the ZeRO stage."""
    values = {
        key: value
        for key, value in leaves(config).items()
        if is_under(key, ROW_KEYS) and not is_under(key, ["deepspeed"])
    }
    return {**values, "zero_stage": config["deepspeed"].get("zero_optimization", {}).get("stage", 0)}


def print_table(results: Sequence[Record], warmup_steps: int) -> None:
    """The results on the terminal; the first row is the baseline."""
    base = results[0]

    def to_base(get: Callable[[Record], str]) -> Callable[[Record], str]:
        return lambda r: "-" if r is base else get(r)

    columns: report.Columns = {
        "row": ("row", ""),
        "eval loss": ("eval_loss", ".4f"),
        "difference": (to_base(lambda r: f"{r['eval_difference_percent']:+.2f} %"), ""),
        "largest": (to_base(lambda r: _at_step(r, "difference_percent")), ""),
        "smoothed": (to_base(lambda r: _at_step(r, "smoothed_difference_percent")), ""),
        "rise": (lambda r: f"{r['largest_rise_percent']:.1f} %", ""),
        "grad norm": ("largest_grad_norm", ".2f"),
        "x median": ("largest_grad_norm_to_median", ".1f"),
        "skipped": ("skipped_steps", ""),
        "tokens/s": ("tokens_per_second", ",.0f"),
        "ratio": ("speed_to_baseline", ".2f"),
        "GiB": ("memory_gib", ".1f"),
    }
    print(
        f"\n{report.table(results, columns)}\n"
        f"difference: to {base['row']}; largest, smoothed: of the training loss. These, the rise of the loss "
        f"over its minimum until then, and the gradient norm: after warmup (step {warmup_steps})."
    )
    for r in results:
        if r["fp8"] and r["settings"]["precision.compute"] == "fp8":
            print(f"{r['row']}: {r['fp8']}")
        if r["measures_noise"]:
            print(
                f"{r['row']} differs from {base['row']} in initial weights and in the order of samples: "
                f"evaluation losses {abs(r['eval_difference_percent']):.2f} % apart, or less, may be so by chance."
            )


def _at_step(result: Record, kind: str) -> str:
    point = result.get(f"largest_{kind}_after_warmup")
    return f"{point['percent']:+.2f} % at {point['step']}" if point else "-"


def plot(results: Sequence[Record], training: Record, tolerance: float, output: Path) -> Path:
    """Losses above, their differences to the baseline below, into the PNG beside `output`; returns its path."""
    path = output.with_suffix(".png")
    with drawing(path, 2, figsize=(9, 8), sharex=True, height_ratios=[3, 2]) as (_, ((above,), (below,))):
        _draw(above, below, results, training, tolerance * 100)
    return path


def _draw(above: Any, below: Any, results: Sequence[Record], training: Record, allowed: float) -> None:
    warmup = training["warmup_steps"]
    inside = [allowed]  # what the lower axis must show; what happens in warmup must not flatten it
    for number, r in enumerate(results):
        curve, color = r["curves"], f"C{number}"
        difference = f" ({r['eval_difference_percent']:+.2f} %)" if number else ""
        label = f"{r['row']}: eval loss {r['eval_loss']:.4f}{difference}"
        style = "--" if r["measures_noise"] else "-"
        above.plot(curve["step"], curve["loss"], style, color=color, linewidth=1, label=label)
        above.plot(curve["eval_step"], curve["eval_loss"], "o", color=color, markersize=4)
        if not number:
            continue
        evaluated = curve["eval_difference_percent"]
        below.plot(curve["eval_step"], evaluated, "o", color=color, markersize=4, label=r["row"])
        inside += map(abs, evaluated[-1:])
        if not r["measures_noise"]:
            raw, smooth = curve["difference_percent"], curve["smoothed_difference_percent"]
            below.plot(curve["step"], raw, color=color, linewidth=0.6, alpha=0.5)
            below.plot(curve["step"], smooth, color=color, linewidth=1.8)
            inside += [abs(d) for step, d in zip(curve["step"], smooth, strict=True) if step > warmup]
    below.set_ylim(-2 * max(inside), 2 * max(inside))
    below.axhspan(-allowed, allowed, color="gray", alpha=0.15, label=f"± {allowed:g} %")
    for axis in (above, below):
        axis.axvline(warmup, color="gray", linestyle=":", linewidth=1)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    above.set(
        ylabel="loss (nats a token); dots: evaluation",
        title=f"{training['model.config']}, {training['parameters'] / 1e6:,.1f} M parameters, "
        f"{training['train_batch_size_tokens']:,} tokens a step, seed {training['seed']}",
    )
    below.set(
        xlabel="step (dotted: end of warmup); thick: smoothed, dots: evaluation",
        ylabel=f"difference to {results[0]['row']} (%)",
    )
