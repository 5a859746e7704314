"""What a run will need and how long it will take, and which settings would be better: for train/plan.py, and in two
lines for the run itself."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from model.config import flops_per_token, num_parameters
from model.errors import UserError
from train.files import size_text
from train.planning.memory import Memory, checkpoint_bytes, largest_micro_batch, memory_of
from train.planning.rates import GPUS, Estimate, Gpu, estimate
from train.planning.recommend import Planned, least_gib, recommend
from train.planning.setting import Setting
from train.record.metrics import hopper_sxm

GPU_COUNTS = [2**n for n in range(11)]  # 1 to 1,024
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class PlanError(UserError):
    """What was asked for cannot be planned; the message says what is allowed."""

    code = "plan"


def parse_tokens(text: str) -> int:
    """ "600B" -> 600,000,000,000. Raises PlanError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.replace(",", "").replace("_", "").strip().upper())
    tokens = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if tokens < 1:
        raise PlanError(
            f"--tokens {text!r}: a number above 0 is expected, with K, M, B (10^9) or T (10^12) behind it, such as 600B"
        )
    return tokens


def gpu_called(name: str) -> Gpu:
    """Raises PlanError."""
    if name.lower() not in GPUS:
        raise PlanError(
            f"--gpu {name!r}: one of {', '.join(GPUS)} is expected; FP8 needs a Hopper GPU, and of others there are no "
            "figures here"
        )
    return GPUS[name.lower()]


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """A model's training of so many tokens: as configured, as recommended, and on other numbers of GPUs (None: on so
    many the model does not fit)."""

    model: str
    tokens: int
    configured: Planned
    recommended: Planned
    by_gpus: dict[int, Planned | None]

    def to_json(self) -> dict[str, Any]:
        s, gpu = self.configured.setting, self.configured.gpu
        return {
            "model": self.model,
            "parameters": s.parameters,
            "variant": s.variant,
            "compute": s.compute,
            "recipe": s.recipe if s.fp8 else None,
            "stages": [
                {"share": share, "compute": its.compute, "recipe": its.recipe if its.fp8 else None}
                for share, its in s.in_each_stage
            ],
            "seq_length": s.seq_length,
            "tokens": self.tokens,
            "gpu": asdict(gpu),
            "checkpoint_bytes": checkpoint_bytes(
                s.sizes, s.zero_stage, s.compute, s.optimizer_bytes, s.optim
            ),
            "configured": self.configured.to_json(self.tokens),
            "recommended": self.recommended.to_json(self.tokens),
            "by_gpus": {n: p and p.to_json(self.tokens) for n, p in self.by_gpus.items()},
        }


def plan(model: str, s: Setting, gpu: Gpu, tokens: int, network_gbit_s: float) -> Plan:
    """Raises PlanError: the model fits on no such number of these GPUs."""
    batch_tokens = s.step_tokens
    by_gpus = {n: recommend(s, gpu, n, batch_tokens, network_gbit_s) for n in GPU_COUNTS}
    recommended = by_gpus.get(s.ranks) or recommend(s, gpu, s.ranks, batch_tokens, network_gbit_s)
    if recommended is None:
        fewest = next((n for n, p in by_gpus.items() if p), None)
        least, how = least_gib(s, batch_tokens)
        there = next((g for g in GPUS if GPUS[g].memory_gib > least), None)
        advice = [
            *([f"--gpus {fewest}"] if fewest else []),
            *([f"--gpu {there}"] if there else []),
            "a smaller model.config, or a smaller max_seq_length",
        ]
        raise PlanError(
            f"{model}, {num_parameters(s.sizes) / 1e6:,.0f} M parameters, fits on {s.ranks} x {gpu.name} "
            f"({gpu.memory_gib:.0f} GiB) in no way: micro-batch 1 of {s.seq_length} tokens with {how} "
            f"needs {least:,.0f} GiB a GPU. Take {', or '.join(advice)}"
        )
    return Plan(model, tokens, Planned.of(s, gpu, network_gbit_s), recommended, by_gpus)


def lines(p: Plan) -> list[str]:
    """For people."""
    s, gpu = p.configured.setting, p.configured.gpu
    size = checkpoint_bytes(s.sizes, s.zero_stage, s.compute, s.optimizer_bytes, s.optim)
    out = [
        f"{p.model}: {s.parameters / 1e6:,.0f} M parameters, {flops_per_token(s.sizes, s.seq_length) / 1e9:.2f} GFLOP "
        f"a token of {s.seq_length}; {_count(p.tokens)} tokens on {s.ranks} x {gpu.name} ({gpu.memory_gib:.1f} GiB); a "
        f"checkpoint has {size_text(size)}",
        "",
        f"as configured: {s.described()}",
        *_described(p.configured, p.tokens),
    ]
    if p.recommended.setting != s:
        out += ["", f"recommended: {p.recommended.setting.described()}", *_described(p.recommended, p.tokens)]
    else:
        out += ["", "recommended: as configured"]
    out.append(f"  optimizer states: {p.recommended.states}")
    out += ["", "On other numbers of GPUs, each as recommended for it:", ""]
    titles = (
        "GPUs|ZeRO|states|recompute|micro-batch|accumulation|tokens a step|GiB a GPU|tokens/s|within|days|GPU-hours"
    ).split("|")
    rows = [
        [str(n), *(_cells(planned, p.tokens) if planned else ["does not fit"])]
        for n, planned in p.by_gpus.items()
    ]
    widths = [
        max(len(row[i]) for row in [titles, *rows] if i < len(row) > 2 or i == 0) for i in range(len(titles))
    ]
    out += [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        for row in [titles, *rows]
    ]
    others = {
        n: planned.setting
        for n, planned in p.by_gpus.items()
        if planned and planned.setting.step_tokens != s.step_tokens
    }
    one_sample = [n for n, o in others.items() if o.micro_batch * o.accumulation == 1]
    grown = [n for n in one_sample if others[n].step_tokens > s.step_tokens]
    if rounded := [str(n) for n in others if n not in grown]:
        out.append(
            f"On {', '.join(rounded)} GPUs no step has exactly the {s.step_tokens:,} tokens that were asked for; it "
            "has the nearest number."
        )
    if grown:
        out.append(
            f"From {grown[0]} GPUs on a step has more than the {s.step_tokens:,} tokens that were asked for: a GPU "
            "takes one sample at least."
        )
    return out


def _described(p: Planned, tokens: int) -> list[str]:
    s, e = p.setting, p.estimate
    verdict = "fits" if p.fits else "DOES NOT FIT"
    days = p.days(tokens)
    gpu_hours = days * 24 * s.ranks
    return [
        f"  memory: {p.memory.peak_gib:,.1f} GiB a GPU at the peak ({p.memory.moment}): {p.memory.described()}",
        f"          with CUDA's context and the allocator's waste {p.needed_gib:,.1f} of {p.gpu.memory_gib:.1f} GiB: "
        f"{verdict}; the largest micro-batch that fits is {largest_micro_batch(s, p.gpu.memory_gib)}",
        f"  speed: {e.tokens_per_second:,.0f} tokens/s, {e.tokens_per_second / s.ranks:,.0f} a GPU, within "
        f"{100 * e.within:.0f} % ({e.basis})",
        f"  time: {_span(days)}, {gpu_hours:,.{0 if gpu_hours >= 10 else 2}f} GPU-hours without saves and evaluations; "
        f"{s.step_tokens:,} tokens a step of {e.step_s:.2f} s",
    ]


def _span(days: float) -> str:
    """Of time, for people."""
    for part, unit in ((1, "days"), (24, "hours"), (24 * 60, "minutes")):
        if days * part >= 1:
            return f"{days * part:,.1f} {unit}"
    return f"{days * 24 * 3600:,.1f} seconds"


def _cells(p: Planned, tokens: int) -> list[str]:
    s, days = p.setting, p.days(tokens)
    return [
        str(s.zero_stage),
        s.optimizer_states,
        "yes" if s.recompute else "no",
        str(s.micro_batch),
        str(s.accumulation),
        f"{s.step_tokens:,}",
        f"{p.memory.peak_gib:,.1f}",
        f"{p.estimate.tokens_per_second:,.0f}",
        f"{100 * p.estimate.within:.0f} %",
        f"{days:,.1f}",
        f"{days * 24 * s.ranks:,.0f}",
    ]


def _count(tokens: int) -> str:
    unit = max((name for name in UNITS if UNITS[name] <= tokens), key=UNITS.__getitem__)
    return f"{tokens / UNITS[unit]:,.4g} {unit}".strip()


# ---------------------------------------------------------------- of a run


@dataclass(frozen=True)
class Prediction:
    """Of the run that is about to start. estimate: of all ranks; None of a GPU that there are no figures for."""

    memory: Memory
    estimate: Estimate | None

    @classmethod
    def of(cls, s: Setting, device_name: str) -> Prediction:
        """`device_name`: torch.cuda.get_device_name()'s."""
        name = hopper_sxm(device_name)
        try:
            speed = estimate(s, GPUS[name.lower()]) if name else None
        except OSError:  # a copy of the code without test_fp8/results: the run does not need them
            speed = None
        return cls(memory_of(s), speed)

    def told(self) -> str:
        speed = ""
        if e := self.estimate:
            speed = f"; {e.tokens_per_second:,.0f} tokens/s, within {100 * e.within:.0f} % ({e.basis})"
        return f"plan: {self.memory.measured_as_gib:,.2f} GiB a GPU at the peak ({self.memory.described()}){speed}"

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_gib": self.memory.measured_as_gib,
            "memory_gib": self.memory.parts,
            **(asdict(self.estimate) if self.estimate else {}),
        }

    def beside(self, peak_gib: float, tokens_per_second: float | None) -> str:
        """What was planned, with what was measured: torch.cuda.max_memory_allocated, and the speed of the steps."""
        planned = self.memory.measured_as_gib
        text = f"plan and measured: {planned:,.2f} and {peak_gib:,.2f} GiB at the peak ({_apart(planned, peak_gib)})"
        if self.estimate and tokens_per_second:
            planned = self.estimate.tokens_per_second
            text += f", {planned:,.0f} and {tokens_per_second:,.0f} tokens/s ({_apart(planned, tokens_per_second)})"
        return text


def _apart(planned: float, measured: float) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"
