"""Create the plan that train/plan.py prints, and the prediction that a training run logs at startup.

`recommend` selects the fastest ZeRO stage, micro-batch, recomputation and optimizer states that fit into GPU memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from model.config import flops_per_token
from model.fp8.hardware import fp8_gpu_problem
from model.fp8.recipes import BF16_MOMENTS_MAX_BETA2
from model.terminal import format_table
from model.variants import GradientCheckpointing, supports_mlp
from train.config.arguments import TrainingArguments
from train.files import format_size
from train.planning.memory import (
    Memory,
    checkpoint_bytes,
    largest_micro_batch,
    offload_host_gib,
    predict_memory,
)
from train.planning.setting import REDUCE_BUCKET, ZERO_3_BUCKET, PlanError, Setting
from train.planning.speed import GPUS, Estimate, Gpu, estimate
from train.record.metrics import hopper_sxm

GPU_COUNTS = [2**n for n in range(11)]  # 1 to 1,024
TIME_UNITS = {"days": 1, "hours": 24, "minutes": 24 * 60, "seconds": 86400}  # per day
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

MAX_SUGGESTED_MICRO_BATCH = 128  # samples
MODES: tuple[GradientCheckpointing, ...] = (False, "mlp", True)  # from the most memory to the least
NEARLY_AS_FAST = 0.01  # if speeds differ by at most this fraction, the simpler setting is recommended
# Packed optimizer states are recommended only if they are faster by this fraction, because they round the moments
# (docs/validation.md).
CLEARLY_FASTER = 0.1


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


def about(value: float) -> str:
    """Format a predicted value with two significant digits, because its uncertainty is at least 6 %."""
    return f"{float(f'{value:.2g}'):,.12g}"


def duration(days: float) -> str:
    """Format a predicted time, given in days, in the largest unit in which the value is at least 2, or in seconds."""
    unit = next((name for name, per_day in TIME_UNITS.items() if days * per_day >= 2), "seconds")
    return f"{about(days * TIME_UNITS[unit])} {unit}"


# ---------------------------------------------------------------- recommendation


@dataclass(frozen=True)
class Planned:
    """A training setting with its predicted memory and speed on a GPU model."""

    setting: Setting
    gpu: Gpu
    memory: Memory
    estimate: Estimate

    @classmethod
    def predict(cls, setting: Setting, gpu: Gpu, network_gbit_s: float) -> Planned:
        """Predict GPU memory and speed for a training setting."""
        return cls(setting, gpu, predict_memory(setting), estimate(setting, gpu, network_gbit_s))

    @property
    def needed_gib(self) -> float:
        """Return the GPU memory that each rank needs, in GiB."""
        return self.memory.needed_gib(self.setting.ranks)

    @property
    def fits(self) -> bool:
        """Return whether the run fits into the memory of the GPU model."""
        return self.needed_gib <= self.gpu.memory_gib

    def days(self, tokens: int) -> float:
        """Return the predicted time for training on `tokens` tokens, in days."""
        return tokens / self.estimate.tokens_per_second / 86400

    def to_json(self, tokens: int) -> dict[str, Any]:
        """Return the setting and the predictions for training on `tokens` tokens as a JSON object."""
        s = self.setting
        return {
            "gpus": s.ranks,
            "zero_stage": s.zero_stage,
            "per_device_train_batch_size": s.micro_batch,
            "gradient_accumulation_steps": s.accumulation,
            "train_batch_size_tokens": s.step_tokens,
            "gradient_checkpointing": s.recompute,
            "optimizer_states": s.optimizer_states,
            "optimizer_moments": s.moments if s.optimizer_states == "bf16_remainder" else None,
            "offload_optimizer": s.offloads,
            "host_memory_gib": offload_host_gib(s, s.node_ranks) if s.offloads else None,
            "memory_gib": {**self.memory.parts, "peak": self.memory.peak_gib, "needed": self.needed_gib},
            "peak_is_at": self.memory.moment,
            "fits": self.fits,
            "largest_micro_batch": largest_micro_batch(s, self.gpu.memory_gib),
            **asdict(self.estimate),
            "days": self.days(tokens),
            "gpu_hours": self.days(tokens) * 24 * s.ranks,
        }


def optimizer_options(s: Setting) -> list[tuple[str, str, bool, tuple[int, ...]]]:
    """Return the candidates for the storage of optimizer states, in decreasing order of their GPU memory.

    Returns:
        Tuples of precision.optimizer_states, the data type of the moments, whether the states are offloaded, and the
        ZeRO stages to consider. Packed states need ZeRO 1. Offloading needs ZeRO 2 or 3.
    """
    if s.args.optim == "muon":
        return [("fp32", "fp32", False, (1, 2, 3))]
    moments = "bf16" if s.args.adam_beta2 <= BF16_MOMENTS_MAX_BETA2 else "fp32"
    return [
        ("fp32", "fp32", False, (1, 2, 3)),
        ("bf16_remainder", moments, False, (1,)),
        ("int8", "int8", False, (1,)),
        ("fp32", "fp32", True, (2, 3)),
    ]


def recommend(s: Setting, gpu: Gpu, ranks: int, batch_tokens: int, network_gbit_s: float) -> Planned | None:
    """Return the fastest setting that fits into GPU memory, or None if no setting fits.

    The candidates are the configured setting, and ZeRO 1 to 3 with each supported value of gradient_checkpointing. Each
    step has about `batch_tokens` tokens, rounded to whole samples for each rank, and the micro-batch size divides the
    number of samples that a rank processes per step. Optimizer states are float32 unless no float32 setting fits or
    packed states are faster by the fraction CLEARLY_FASTER. They are offloaded only if no other setting fits. If the
    speeds of settings differ by at most the fraction NEARLY_AS_FAST, the configured setting is preferred, then the
    lowest ZeRO stage, then the least recomputation, and then the least memory.

    Args:
        s: The configured setting.
        gpu: The GPU model.
        ranks: Number of GPUs.
        batch_tokens: Number of tokens per step, summed over all ranks.
        network_gbit_s: Network bandwidth between nodes, in Gbit/s per GPU.
    """
    chosen: Planned | None = None
    for states, moments, offloads, zero_stages in optimizer_options(s):
        if offloads and chosen:
            break
        packed = replace(s, ranks=ranks, optimizer_states=states, moments=moments, offloads=offloads)
        fitting = list(_fitting(packed, gpu, zero_stages, batch_tokens, network_gbit_s))
        fastest = max((p.estimate.tokens_per_second for p in fitting), default=0)
        if fastest > (chosen.estimate.tokens_per_second * (1 + CLEARLY_FASTER) if chosen else 0):
            good = [p for p in fitting if p.estimate.tokens_per_second >= (1 - NEARLY_AS_FAST) * fastest]
            chosen = min(
                good, key=lambda p: (p.setting.zero_stage, MODES.index(p.setting.recompute), p.needed_gib)
            )
    itself = Planned.predict(s, gpu, network_gbit_s)
    speeds = [planned.estimate.tokens_per_second for planned in (itself, chosen) if planned]
    is_fast = speeds[0] >= (1 - NEARLY_AS_FAST) * speeds[-1]
    return itself if ranks == s.ranks and itself.fits and is_fast else chosen


def _fitting(
    s: Setting, gpu: Gpu, zero_stages: tuple[int, ...], batch_tokens: int, network_gbit_s: float
) -> Iterator[Planned]:
    """Yield variations of a setting that fit into GPU memory.

    The number of micro-batches per step is chosen so that a step has about `batch_tokens` tokens. ZeRO stages other
    than the configured one use the DeepSpeed settings from train_args/ds_config_zero*.json.
    """
    samples = max(1, round(batch_tokens / (s.seq_length * s.ranks)))
    sizes = range(s.micro_batch_unit, min(samples, MAX_SUGGESTED_MICRO_BATCH) + 1, s.micro_batch_unit)
    packs = any(p.fp8 and supports_mlp(s.args.model.variant, s.args.speed, p.recipe) for _, p in s.phases)
    modes = [mode for mode in MODES if packs or mode != "mlp"]
    for stage, recompute in product(zero_stages, modes):
        bucket = ZERO_3_BUCKET if stage == 3 else REDUCE_BUCKET
        other: dict[str, Any] = {
            "float32_gradients": True,
            "reduce_bucket": bucket,
            "overlap_comm": stage == 3,
        }
        for micro_batch in (size for size in sizes if samples % size == 0):
            setting = replace(
                s,
                zero_stage=stage,
                micro_batch=micro_batch,
                recompute=recompute,
                accumulation=max(1, round(batch_tokens / (micro_batch * s.seq_length * s.ranks))),
                cuda_graphs=s.cuda_graphs and stage < 3 and recompute is not True,
                **({} if stage == s.zero_stage else other),
            )
            if predict_memory(setting).needed_gib(s.ranks) > gpu.memory_gib:
                break
            yield Planned.predict(setting, gpu, network_gbit_s)


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """The predictions and recommendations that train/plan.py prints for a training run.

    Attributes:
        model: Name of the model.
        given: The training arguments before they were resolved.
        tokens: Total number of training tokens.
        configured: Predictions for the configured setting.
        recommended: Predictions for the recommended setting on the same number of GPUs.
        by_gpus: Maps each number of GPUs to the recommended setting, or to None if the model does not fit.
        checkpoint_bytes: Size of a checkpoint, in bytes.
    """

    model: str
    given: TrainingArguments
    tokens: int
    configured: Planned
    recommended: Planned
    by_gpus: dict[int, Planned | None]
    checkpoint_bytes: int

    def flags(self, s: Setting) -> str:
        """Return the command-line options that change the user's configuration to the setting `s`."""
        given, c = self.given, self.configured.setting
        counts = given.gradient_accumulation_steps
        values = {  # as configured, and in `s`
            "max_steps": (given.max_steps, max(1, round(self.tokens / s.step_tokens))),
            "deepspeed": (f"ds_config_zero{c.zero_stage}.json", f"ds_config_zero{s.zero_stage}.json"),
            # another file has no section offload_optimizer
            "deepspeed.zero_optimization.offload_optimizer.device": (
                "cpu" if c.offloads and s.zero_stage == c.zero_stage else "none",
                "cpu" if s.offloads else "none",
            ),
            "gradient_checkpointing": (c.recompute, s.recompute),
            "per_device_train_batch_size": (c.micro_batch, s.micro_batch),
            "gradient_accumulation_steps": (counts, counts and s.accumulation),
            "train_batch_size_tokens": (
                given.train_batch_size_tokens,
                s.step_tokens if given.train_batch_size_tokens or not counts else None,
            ),
            "precision.optimizer_states": (c.optimizer_states, s.optimizer_states),
            "precision.optimizer_moments": (
                c.moments,
                s.moments if s.optimizer_states == "bf16_remainder" else c.moments,
            ),
            "speed.cuda_graphs": (c.cuda_graphs, s.cuda_graphs),
        }
        return " ".join(
            f"--{key} {new if isinstance(new, str) else json.dumps(new)}"
            for key, (old, new) in values.items()
            if new != old
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        s = self.configured.setting

        def entry(p: Planned) -> dict[str, Any]:
            return {"flags": self.flags(p.setting), **p.to_json(self.tokens)}

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
            "configured": entry(self.configured),
            "recommended": entry(self.recommended),
            "by_gpus": {n: p and entry(p) for n, p in self.by_gpus.items()},
        }


def plan(
    model: str, given: TrainingArguments, s: Setting, gpu: Gpu, tokens: int, network_gbit_s: float
) -> Plan:
    """Predict memory and speed of a training run, and recommend settings.

    Args:
        model: Name of the model.
        given: The training arguments before they were resolved.
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
    return Plan(
        model, given, tokens, Planned.predict(s, gpu, network_gbit_s), recommended, by_gpus, checkpoint
    )


def lines(p: Plan) -> list[str]:
    """Format a plan as the lines of text that train/plan.py prints."""
    s, gpu = p.configured.setting, p.configured.gpu
    out = [
        f"{p.model}: {s.parameters / 1e6:,.0f} M parameters, {flops_per_token(s.sizes, s.seq_length) / 1e9:.2f} GFLOP "
        f"per token at max_seq_length {s.seq_length} (the model supports {s.sizes.max_position_embeddings}); "
        f"{p.tokens:,} tokens on {s.ranks} x {gpu.name}; "
        f"a checkpoint takes {format_size(p.checkpoint_bytes)}",
        "",
        f"as configured: {s.describe()}",
        *_details(p, p.configured),
        "",
        *(
            ["recommended: as configured"]
            if p.recommended.setting == s
            else [f"recommended: {p.recommended.setting.describe()}", *_details(p, p.recommended)]
        ),
        "",
        "Recommended settings by number of GPUs, with the options to add to your command. Numbers of GPUs on which the "
        "model",
        "does not fit are not listed. Each GPU needs at least one sample per step, so with many GPUs, a step can have "
        "more tokens.",
        "",
    ]
    rows = [_row(p, found) for found in p.by_gpus.values() if found]
    table = [[*rows[0]], *([*row.values()] for row in rows)]
    return [*out, *format_table(table, [*">" * (len(rows[0]) - 1), "<"]).splitlines()]


def _details(whole: Plan, p: Planned) -> list[str]:
    """Format the options, predicted memory, speed and training time of a setting as lines of text."""
    s, e, days, flags = p.setting, p.estimate, p.days(whole.tokens), whole.flags(p.setting)
    host = []
    if s.offloads:
        gib = offload_host_gib(s, s.node_ranks)
        host = [f"  host memory: {gib:,.0f} GiB per node with {s.node_ranks} GPUs"]
    return [
        *[f"  options: {flags}"] * bool(flags),
        f"  memory: {p.memory.peak_gib:,.1f} GiB per GPU at the peak ({p.memory.moment}): {p.memory.describe()}",
        f"          {p.needed_gib:,.1f} of {p.gpu.memory_gib:.1f} GiB with CUDA context and fragmentation: "
        f"{'fits' if p.fits else 'DOES NOT FIT'}; largest micro-batch: {largest_micro_batch(s, p.gpu.memory_gib)}",
        *host,
        f"  speed: {about(e.tokens_per_second)} tokens/s, {about(e.tokens_per_second / s.ranks)} per GPU, within "
        f"{100 * e.within:.0f} % ({e.basis})",
        f"  time: {duration(days)}, {about(days * 24 * s.ranks)} GPU-hours without saves and evaluations; "
        f"{s.step_tokens:,} tokens per step of {about(e.step_s)} s",
    ]


def _row(whole: Plan, p: Planned) -> dict[str, str]:
    """Return one row of the table of recommended settings, as a dictionary by column name."""
    s, days = p.setting, p.days(whole.tokens)
    return {
        "GPUs": str(s.ranks),
        "tokens/step": f"{s.step_tokens:,}",
        "GiB/GPU": f"{p.memory.peak_gib:,.1f}",
        "tokens/s": about(p.estimate.tokens_per_second),
        "within": f"{100 * p.estimate.within:.0f} %",
        "time": duration(days),
        "GPU-hours": about(days * 24 * s.ranks),
        "options": whole.flags(s),
    }


def describe_prediction(s: Setting, device_name: str) -> tuple[str, dict[str, Any]]:
    """Predict GPU memory and speed of a run, for the startup log and run.json.

    Args:
        device_name: Name of the GPU as returned by torch.cuda.get_device_name().

    Returns:
        The log line and the JSON object for run.json. Both contain the speed only if `GPUS` contains the GPU.
    """
    memory, name = predict_memory(s), hopper_sxm(device_name)
    line = f"plan: {memory.measured_as_gib:,.2f} GiB per GPU at the peak ({memory.describe()})"
    values: dict[str, Any] = {"peak_gib": memory.measured_as_gib, "memory_gib": memory.parts}
    if name is None:
        return line, values
    e = estimate(s, GPUS[name.lower()])
    speed = f"; {about(e.tokens_per_second)} tokens/s, within {100 * e.within:.0f} % ({e.basis})"
    return line + speed, values | asdict(e)
