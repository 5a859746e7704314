"""Create the plan that train/plan.py prints, and the prediction that a training run logs at startup."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from model.config import flops_per_token
from model.fp8.hardware import fp8_gpu_problem
from train.files import format_size
from train.planning.memory import Memory, checkpoint_bytes, largest_micro_batch, predict_memory
from train.planning.recommend import Planned, recommend
from train.planning.setting import PlanError, Setting
from train.planning.speed import GPUS, Estimate, Gpu, estimate
from train.record.metrics import hopper_sxm

GPU_COUNTS = [2**n for n in range(11)]  # 1 to 1,024
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_tokens(text: str) -> int:
    """Parse a number of tokens such as "600B", which means 600,000,000,000.

    Raises:
        PlanError: The text is not a positive number of tokens.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.replace(",", "").replace("_", "").strip().upper())
    tokens = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if tokens < 1:
        raise PlanError(
            f"--tokens {text!r} is not a positive number of tokens. Pass a number such as 600B; the suffix K, M, B or "
            "T is optional"
        )
    return tokens


@dataclass(frozen=True)
class Plan:
    """The predictions and recommendations that train/plan.py prints for a training run.

    Attributes:
        model: Name of the model.
        tokens: Total number of training tokens.
        configured: Predictions for the configured setting.
        recommended: Predictions for the recommended setting on the same number of GPUs.
        by_gpus: Maps each number of GPUs to the recommended setting, or to None if the model does not fit.
        checkpoint_bytes: Size of a checkpoint, in bytes.
    """

    model: str
    tokens: int
    configured: Planned
    recommended: Planned
    by_gpus: dict[int, Planned | None]
    checkpoint_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        s = self.configured.setting
        return {
            "model": self.model,
            "parameters": s.parameters,
            "variant": s.args.model.variant,
            "phases": [
                {"share": share, "compute": phase.compute, "recipe": phase.recipe if phase.fp8 else None}
                for share, phase in s.phases
            ],
            "seq_length": s.seq_length,
            "tokens": self.tokens,
            "gpu": asdict(self.configured.gpu),
            "checkpoint_bytes": self.checkpoint_bytes,
            "configured": self.configured.to_json(self.tokens),
            "recommended": self.recommended.to_json(self.tokens),
            "by_gpus": {n: p and p.to_json(self.tokens) for n, p in self.by_gpus.items()},
        }


def plan(model: str, s: Setting, gpu: Gpu, tokens: int, network_gbit_s: float) -> Plan:
    """Predict memory and speed of a training run, and recommend settings.

    Args:
        model: Name of the model.
        s: The configured setting.
        gpu: The GPU model.
        tokens: Total number of training tokens.
        network_gbit_s: Network bandwidth between nodes, in Gbit/s per GPU.

    Raises:
        PlanError: The model does not fit on `s.ranks` GPUs in any setting.
    """
    for recipe in {phase.recipe for _, phase in s.phases if phase.fp8}:
        if problem := fp8_gpu_problem(gpu.name, gpu.capability, recipe):
            raise PlanError(problem, key="precision.recipe")
    by_gpus = {n: recommend(s, gpu, n, s.step_tokens, network_gbit_s) for n in GPU_COUNTS}
    recommended = by_gpus.get(s.ranks) or recommend(s, gpu, s.ranks, s.step_tokens, network_gbit_s)
    if recommended is None:
        enough = [f"--gpus {n}" for n, planned in by_gpus.items() if planned][:1]
        raise PlanError(
            f"{model} with {s.parameters / 1e6:,.0f} M parameters does not fit on {s.ranks} x {gpu.name} "
            f"({gpu.memory_gib:.0f} GiB) in any setting. Use "
            + ", or ".join(
                [*enough, "a GPU with more memory", "a smaller model.config", "a smaller max_seq_length"]
            )
        )
    checkpoint = checkpoint_bytes(s.sizes, s.zero_stage, s.compute, s.optimizer_bytes, s.args.optim)
    return Plan(model, tokens, Planned.predict(s, gpu, network_gbit_s), recommended, by_gpus, checkpoint)


def lines(p: Plan) -> list[str]:
    """Format a plan as the lines of text that train/plan.py prints."""
    s, gpu = p.configured.setting, p.configured.gpu
    out = [
        f"{p.model}: {s.parameters / 1e6:,.0f} M parameters, {flops_per_token(s.sizes, s.seq_length) / 1e9:.2f} GFLOP "
        f"per token at {s.seq_length} tokens; {p.tokens:,} tokens on {s.ranks} x {gpu.name}; "
        f"a checkpoint takes {format_size(p.checkpoint_bytes)}",
        "",
        f"as configured: {s.describe()}",
        *_details(p.configured, p.tokens),
        "",
        *(
            ["recommended: as configured"]
            if p.recommended.setting == s
            else [f"recommended: {p.recommended.setting.describe()}", *_details(p.recommended, p.tokens)]
        ),
        "",
        "Recommended settings by number of GPUs. If a number is not listed, the model does not fit on that many GPUs.",
        "",
    ]
    rows = [_row(found, p.tokens) for found in p.by_gpus.values() if found]
    table = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return out + [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in table
    ]


def _details(p: Planned, tokens: int) -> list[str]:
    """Format the predicted memory, speed and training time of a setting as lines of text."""
    s, e, days = p.setting, p.estimate, p.days(tokens)
    return [
        f"  memory: {p.memory.peak_gib:,.1f} GiB per GPU at the peak ({p.memory.moment}): {p.memory.describe()}",
        f"          {p.needed_gib:,.1f} of {p.gpu.memory_gib:.1f} GiB with CUDA context and fragmentation: "
        f"{'fits' if p.fits else 'DOES NOT FIT'}; largest micro-batch: {largest_micro_batch(s, p.gpu.memory_gib)}",
        f"  speed: {e.tokens_per_second:,.0f} tokens/s, {e.tokens_per_second / s.ranks:,.0f} per GPU, within "
        f"{100 * e.within:.0f} % ({e.basis})",
        f"  time: {days:,.3g} days ({24 * days:,.3g} hours), {days * 24 * s.ranks:,.2f} GPU-hours without saves and "
        f"evaluations; {s.step_tokens:,} tokens per step of {e.step_s:.2f} s",
    ]


def _row(p: Planned, tokens: int) -> dict[str, str]:
    """Return one row of the table of recommended settings, as a dictionary by column name."""
    s, days = p.setting, p.days(tokens)
    return {
        "GPUs": str(s.ranks),
        "ZeRO": str(s.zero_stage),
        "states": s.optimizer_states,
        "recompute": s.recompute if isinstance(s.recompute, str) else "yes" if s.recompute else "no",
        "micro-batch": str(s.micro_batch),
        "accumulation": str(s.accumulation),
        "tokens/step": f"{s.step_tokens:,}",
        "GiB/GPU": f"{p.memory.peak_gib:,.1f}",
        "tokens/s": f"{p.estimate.tokens_per_second:,.0f}",
        "within": f"{100 * p.estimate.within:.0f} %",
        "days": f"{days:,.1f}",
        "GPU-hours": f"{days * 24 * s.ranks:,.0f}",
    }


@dataclass(frozen=True)
class Prediction:
    """The predicted GPU memory and speed of a run, which the run logs at startup.

    Attributes:
        memory: The predicted GPU memory of a rank.
        estimate: The predicted speed, or None if the GPU is not in `GPUS`.
    """

    memory: Memory
    estimate: Estimate | None

    @classmethod
    def make(cls, s: Setting, device_name: str) -> Prediction:
        """Predict GPU memory and speed of a run.

        Args:
            device_name: Name of the GPU as returned by torch.cuda.get_device_name().
        """
        name = hopper_sxm(device_name)
        return cls(predict_memory(s), estimate(s, GPUS[name.lower()]) if name else None)

    def line(self) -> str:
        """Format the predicted memory and speed as a log line."""
        e = self.estimate
        speed = (
            f"; {e.tokens_per_second:,.0f} tokens/s, within {100 * e.within:.0f} % ({e.basis})" if e else ""
        )
        return f"plan: {self.memory.measured_as_gib:,.2f} GiB per GPU at the peak ({self.memory.describe()}){speed}"

    def to_json(self) -> dict[str, Any]:
        """Return the predicted memory and speed as a JSON object."""
        memory = {"peak_gib": self.memory.measured_as_gib, "memory_gib": self.memory.parts}
        return memory | (asdict(self.estimate) if self.estimate else {})
