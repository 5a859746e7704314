"""What the visits of `bench_model.py` come to: the best setting of each row, its speed, the ratios; table and plot."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.fp8.machine import describe
from model.fp8.precision import PrecisionError
from model.proof import ProofError
from test_fp8.common import report
from test_fp8.common.report import Result, measured
from test_fp8.common.rows import NotHere, Row
from test_fp8.common.same_model import DifferentModel
from test_fp8.common.timing import mean_pass_ms
from test_fp8.model.rows import BASELINE, Setting
from test_fp8.model.visit import Visit
from train.config.arguments import TrainingArguments
from train.config.differences import leaves
from train.files import drawing

OUT_OF_MEMORY = "out of memory"
# Errors whose message says all that there is to say.
EXPLAINED = (DifferentModel, ProofError, PrecisionError, NotHere)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it came from, is a lack of GPU memory; a failed capture hides it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class Series:
    """All visits to `row` in one measure, by setting. `failed` says what is wrong with the row, which then is not
    visited again and has no speed. `choices`: what precision.auto chose."""

    row: Row
    measure: str
    settings: dict[Setting, TrainingArguments]
    visits: dict[Setting, list[Visit]] = field(default_factory=dict)
    reasons: dict[Setting, str] = field(default_factory=dict)
    failed: str | None = None
    choices: dict[Setting, dict[str, Any]] = field(default_factory=dict)

    def candidates(self, turn: int, bare: Series | None) -> Iterator[Setting]:
        """The settings to visit in round `turn`: in the first all, the fastest of `bare` first, but of the losses
        behind the first one only those with the attention that was fastest; later the best one."""
        if turn:
            best = self.best()
            yield from [] if best is None else [best]
            return
        order = list(self.settings)
        if bare is not None:
            self.reasons |= bare.reasons
            order = sorted(bare.visits, key=bare.tokens_per_second, reverse=True)
        for setting in order:
            if any(
                why == OUT_OF_MEMORY
                and (s.attention, s.loss) == (setting.attention, setting.loss)
                and s.micro_batch <= setting.micro_batch
                for s, why in self.reasons.items()
            ):
                self.reasons.setdefault(setting, OUT_OF_MEMORY)
            elif (
                setting.loss == order[0].loss
                or (best := self.best()) is None
                or best.attention == setting.attention
            ):
                yield setting

    def refuse(self, setting: Setting, error: BaseException) -> bool:
        """Note that a visit ended in `error`. Returns whether that is a fault of the row, rather than of the machine's
        size or kind."""
        if is_out_of_memory(error):
            self.reasons[setting] = OUT_OF_MEMORY
            return False
        text = " ".join(str(error).split())
        if not isinstance(error, EXPLAINED):
            text = f"{type(error).__name__}: {text[:300]}"
        self.reasons[setting] = text
        if isinstance(error, NotHere):
            return False
        self.failed = text
        return True

    def best(self) -> Setting | None:
        return max(self.visits, key=self.tokens_per_second, default=None)

    def tokens_per_second(self, setting: Setting, visits: Sequence[Visit] | None = None) -> float:
        """From the medians over `visits`, or all of `setting`."""
        arguments = self.settings[setting]
        tokens = arguments.per_device_train_batch_size * arguments.max_seq_length
        laps = merged(visits or self.visits[setting])
        if self.measure == "step":
            return (arguments.train_batch_size_tokens or tokens) / statistics.median(laps["step"]) * 1e3
        return tokens / (self.pass_ms(setting, laps) or math.inf) * 1e3

    def pass_ms(self, setting: Setting, laps: Mapping[str, Sequence[float]]) -> float | None:
        """None: passes were not timed by themselves."""
        if "later" not in laps:
            return None
        return mean_pass_ms(laps, self.settings[setting].gradient_accumulation_steps or 1)


def merged(visits: Sequence[Visit]) -> dict[str, list[float]]:
    laps: dict[str, list[float]] = {}
    for visit in visits:
        for name, times in visit.laps.items():
            laps.setdefault(name, []).extend(times)
    return laps


def results_of(
    series: Sequence[Series], optimizer_ms: Sequence[float], flops_per_token: float
) -> list[Result]:
    """One result for each row and measure, with the ratios to `BASELINE` and to the fastest bf16 row of its measure.

    optimizer_ms: of the optimizer alone (visit.optimizer_ms); empty: not known.
    """
    results = [_result(one, optimizer_ms, flops_per_token) for one in series]
    for measure in dict.fromkeys(r["measure"] for r in results):
        _add_ratios([r for r in measured(results) if r["measure"] == measure])
    return results


def other_conditions(options: argparse.Namespace, parameters: int) -> str:
    """In what a report of options.one_rank is of something else than these options, a model of so many parameters, and
    this GPU and these versions; "" where none is."""
    machine, versions = describe()
    wanted = {
        name: getattr(options, name)
        for name in ("seq_length", "document_length", "accumulation", "deterministic")
    }
    wanted |= {"model": Path(options.config).name, "parameters": parameters, "ranks": 1}
    wanted |= leaves({"machine": {"gpu": machine.get("gpu")}, "versions": versions})
    problems: dict[str, None] = {}
    for one in map(leaves, options.one_rank):
        versions_there = (name for name in one if name.startswith("versions.") and name not in wanted)
        for name in (*wanted, *versions_there):
            if one.get(name) != wanted.get(name):
                problems[f"{name} is {one.get(name)} there, and {wanted.get(name)} is expected"] = None
    return "; ".join(problems)


def add_ratio_to_one_rank(results: Sequence[Result], ones: Sequence[Mapping[str, Any]], ranks: int) -> None:
    """To so many times the speed of the same row in the reports `ones`, their mean; None where one has no such row."""
    same = ("row", "measure", "configuration", "micro_batch", "attention")
    for r in measured(results):
        alike = [
            [
                o["tokens_per_second"]
                for o in measured(one["results"])
                if all(o[name] == r[name] for name in same)
            ]
            for one in ones
        ]
        r["ranks"], r["ratio_to_one_rank"] = ranks, None
        if all(alike):
            mean = statistics.fmean(speeds[0] for speeds in alike)
            r["one_rank_tokens_per_second"] = mean
            r["ratio_to_one_rank"] = r["tokens_per_second"] / (ranks * mean)


def _add_ratios(results: Sequence[Result]) -> None:
    """results: of one measure."""
    base = next((r["tokens_per_second"] for r in results if r["row"] == BASELINE), None)
    # a row that precision.auto gave bf16 is not one of those it has to keep up with
    candidates = [r for r in results if r["compute"] == "bf16" and not r["automatic"]]
    best = max(candidates, key=lambda r: r["tokens_per_second"], default=None)
    for r in results:
        speed = r["tokens_per_second"]
        r[f"ratio_to_{BASELINE}"] = speed / base if base else None
        r["ratio_to_best_bf16"] = speed / best["tokens_per_second"] if best else None
        r["ratio_noise"] = ratio_noise(r, best) if best and r is not best else None
        r["best_bf16"] = r is best
        r["even_with"] = [other["row"] for other in results if other is not r and are_even(r, other)]


def ratio_noise(a: Result, b: Result) -> float | None:
    """How far the ratio of the speeds of two rows moved between the rounds that visited both: the largest less the
    smallest, as a share. None: there are no two such rounds."""
    pairs = [zip(r["round_numbers"], r["rounds"], strict=True) for r in (a, b)]
    ours, theirs = (dict(pair) for pair in pairs)
    ratios = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    return max(ratios) - min(ratios) if len(ratios) > 1 else None


def are_even(a: Result, b: Result) -> bool:
    """Whether the ratio of two speeds is no further from 1 than it moved between the rounds."""
    noise = ratio_noise(a, b)
    return noise is not None and abs(a["tokens_per_second"] / b["tokens_per_second"] - 1) <= noise


def _result(series: Series, optimizer_ms: Sequence[float], flops_per_token: float) -> Result:
    setting = None if series.failed else series.best()
    arguments = series.settings[setting or next(iter(series.settings))]
    result: Result = {
        "row": series.row.name,
        "measure": series.measure,
        "variant": arguments.model.variant if series.row.megatron is None else "megatron_core",
        "compute": arguments.precision.compute,
        "configuration": {**series.row.settings, **(series.row.megatron or {})},
        "automatic": "precision.auto" in series.row.settings,
        "tried": _tried(series),
    }
    if setting is None:
        first = next(iter(series.reasons.values()), "not visited")
        return result | {"reason": series.failed or first, "failed": bool(series.failed)}
    visits = series.visits[setting]
    laps, speed, last = merged(visits), series.tokens_per_second(setting), visits[-1]
    pass_ms = series.pass_ms(setting, laps)
    rounds = [series.tokens_per_second(setting, [visit]) for visit in visits]
    result |= {
        "choice": series.choices.get(setting),
        "micro_batch": setting.micro_batch,
        "attention": last.attention,
        "attention_kernels": last.kernels,
        "loss_kind": last.loss_kind,
        "tokens_per_second": speed,
        "tflops": speed * flops_per_token / 1e12,
        "pass_ms": pass_ms,
        "launch_ms": statistics.median(visit.launch_ms for visit in visits),
        "prepare_s": visits[0].prepare_s,
        "capture_s": visits[0].capture_s,
        "allocated_gib": max((v.allocated_gib for v in visits if v.allocated_gib), default=None),
        "reserved_gib": max((v.reserved_gib for v in visits if v.reserved_gib), default=None),
        "before_gib": last.before_gib,
        "fp8_modules": last.proof.fp8_modules,
        "loss": last.loss,
        "loss_error": max(visit.loss_error for visit in visits),
        "logits_error": last.proof.logits_error,
        "proof": last.proof.lines + last.notes,
        "rounds": rounds,
        "round_numbers": [visit.turn for visit in visits],
        "drift": max(rounds) / min(rounds) - 1,
        "samples": len(laps["step" if series.measure == "step" else "later"]),
        "visit_s": [visit.seconds for visit in visits],
    }
    if series.measure == "step":
        step_ms = statistics.median(laps["step"])
        result |= {"step_ms": step_ms, "deepspeed_share": None}
        if optimizer_ms and pass_ms is not None:
            passes_ms = (arguments.gradient_accumulation_steps or 1) * pass_ms
            result["deepspeed_share"] = 1 - (passes_ms + statistics.median(optimizer_ms)) / step_ms
    return result


def _tried(series: Series) -> list[Result]:
    return [
        setting._asdict()
        | (
            {"tokens_per_second": series.tokens_per_second(setting)}
            if setting in series.visits
            else {"reason": series.reasons[setting]}
        )
        for setting in series.settings
        if setting in series.visits or setting in series.reasons
    ]


# ---------------------------------------------------------------- shown


COLORS = {"bf16": "tab:blue", "fp8": "tab:red", "torchao": "tab:orange"}
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the dashed line


COLUMNS: report.Columns = {
    "measure": ("measure", "<"),
    "row": (lambda r: r["row"] + " *" * r["best_bf16"], "<"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    f"x {BASELINE}": (f"ratio_to_{BASELINE}", ".2f"),
    "x bf16": ("ratio_to_best_bf16", ".2f"),
    "TFLOP/s": ("tflops", ".3g"),
    "batch": ("micro_batch", "d"),
    "pass ms": ("pass_ms", ".2f"),
    "launch ms": ("launch_ms", ".2f"),
    "GiB": ("allocated_gib", ".1f"),
    "reserved": ("reserved_gib", ".1f"),
    "prepare s": ("prepare_s", ".1f"),
    "capture s": ("capture_s", ".1f"),
    "DeepSpeed": ("deepspeed_share", ".1%"),
    "drift": ("drift", ".1%"),
    "FP8": ("fp8_modules", "d"),
    "loss": ("loss", ".4f"),
    "loss by": ("loss_kind", "<"),
    "attention": ("attention", "<"),
}


def lines(results: Sequence[Result]) -> list[str]:
    """The results as a text table; below it which rows are even, the attention kernels of each, what precision.auto
    chose, and the rows without a speed with the reason."""
    shown = [report.table(measured(results), COLUMNS)]
    shown.append("* the fastest bf16 of its measure; x bf16: the ratio to it")
    shown += _even_lines(measured(results))
    shown += [_share_of_one_rank(r) for r in measured(results) if "ratio_to_one_rank" in r]
    for r in measured(results):
        kernels = ", ".join(r["attention_kernels"]) or "none seen by the profiler"
        shown.append(f"{r['measure']} {r['row']}: attention {r['attention']}; kernels: {kernels}")
    for r in results:
        if choice := r.get("choice"):
            named = ", ".join(f"{key} {value}" for key, value in choice.items() if key != "why")
            shown.append(f"{r['measure']} {r['row']} chose: {named}")
    return shown + [
        f"{r['measure']} {r['row']} not measured: {r['reason']}" for r in results if "reason" in r
    ]


def _share_of_one_rank(r: Result) -> str:
    if r["ratio_to_one_rank"] is None:
        return (
            f"{r['measure']} {r['row']}: not in --one_rank with this configuration, micro-batch "
            f"{r['micro_batch']} and attention {r['attention']}"
        )
    return (
        f"{r['measure']} {r['row']}: {r['tokens_per_second']:,.0f} tokens/s on {r['ranks']} ranks are "
        f"{r['ratio_to_one_rank']:.3f} of {r['ranks']} x {r['one_rank_tokens_per_second']:,.0f}"
    )


def _even_lines(results: Sequence[Result]) -> list[str]:
    """A line for each pair of rows that is even."""
    found = []
    for a, b in itertools.combinations(results, 2):
        if a["measure"] == b["measure"] and b["row"] in a["even_with"]:
            ratio, noise = a["tokens_per_second"] / b["tokens_per_second"], ratio_noise(a, b)
            found.append(
                f"{a['measure']} {a['row']} and {b['row']} are even: {ratio:.4f}, between rounds the ratio moved by "
                f"{noise:.4f}"
            )
    return found


def panel_title(results: Sequence[Result]) -> str:
    """results: of one measure."""
    if results[0]["measure"] == "bare":
        return "forward + backward"
    megatron = any(r["variant"] == "megatron_core" for r in results)  # whose steps are its own
    return "whole step" if megatron else "whole DeepSpeed step"


def plot(results: Sequence[Result], title: str, output: Path) -> None:
    """Bars of tokens/s, a panel a measure, the fastest bf16 row marked by a line, as a PNG beside `output`; none where
    there is nothing to draw."""
    rows = measured(results)
    measures = [[r for r in rows if r["measure"] == m] for m in dict.fromkeys(r["measure"] for r in rows)]
    if not rows:
        return
    heights = [len(rows) + 1 for rows in measures]
    size: dict[str, Any] = {"figsize": (10, 0.32 * sum(heights) + 1.6), "height_ratios": heights}
    with drawing(output.with_suffix(".png"), len(measures), sharex=True, **size) as (figure, axes):
        for axis, rows in zip(axes[:, 0], measures, strict=True):
            kinds = ["torchao" if r["variant"] == "torchao" else r["compute"] for r in rows]
            speeds = [r["tokens_per_second"] for r in rows]
            report.bars(axis, [r["row"] for r in rows], speeds, color=[COLORS[kind] for kind in kinds])
            for place, r in enumerate(rows):
                ratio = r["ratio_to_best_bf16"]
                even = (
                    ", even"
                    if any(other["best_bf16"] for other in rows if other["row"] in r["even_with"])
                    else ""
                )
                text = f" {r['tokens_per_second']:,.0f}" + ("" if ratio is None else f" ({ratio:.2f}{even})")
                axis.text(r["tokens_per_second"], place, text, va="center", fontsize=8, bbox=LABEL_BOX)
                if r["best_bf16"]:
                    axis.axvline(r["tokens_per_second"], color=COLORS["bf16"], linestyle="--", linewidth=1)
            axis.set_title(panel_title(rows), fontsize=10)
        axes[0, 0].set_xlim(0, 1.18 * max(r["tokens_per_second"] for r in measured(results)))
        axes[-1, 0].set_xlabel("tokens/s (ratio to the fastest bf16 row, dashed)")
        figure.suptitle(title, fontsize=11)
