"""Seconds of a step: by the work in it, corrected by whole steps that were measured and are kept in test_fp8/results/.

A step of a model that was measured is scaled from that measurement; of another the correction is the mean over the
models that were (`without_model` leaves one out of that, not of the choice of the rates below). Other GPUs than an
H200, and the links between GPUs, are from data sheets. An `Estimate` says which of these it is, and how
far off it may be.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from model.config import attention_pairs, load_sizes
from model.variants import VARIANTS
from train.config import command_line
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.files import REPOSITORY
from train.planning.memory import WORKSPACES_GIB, head_bytes, saved_by_layer
from train.planning.setting import Setting, widths_of

RESULTS = REPOSITORY / "test_fp8" / "results"
STEPS = (
    "hare_0.4b_step",
    "hare_0.4b_shipped_step",
    "hare_0.4b_fp8_head_step",
    "hare_1.1b_shipped_step",
    "hare_1.1b_step",
    "hare_1.1b_gradient_formats_step",
    "hare_2.0b_shipped_step",
    "hare_2.0b_step",
    "hare_2.0b_fp8_head_step",
)
# Of rows hf_* and torchao_*, which no training has.
OTHER_LOSSES = ("compiled", "liger")
# Trainings of one model with each recipe, one GPU, nothing beside them.
RECIPES_OF = "convergence"
# Steps with Muon and with AdamW of two models: (report, row with AdamW, row with Muon).
MUON_OF = (
    ("hare_1.1b_switches_step", "graphs", "muon_te_layer_fp8_delayed_graph"),
    ("evidence", "bf16", "muon"),
)
# What was measured before had te_linear compute SwiGLU in torch.
FUSED_SWIGLU_SINCE = "2026-11-22"
# And lm_head's gradients were in bf16.
FP8_HEAD_GRADIENTS_SINCE = "2026-11-23"
GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """memory_gib: as torch shows it. Others, of NVIDIA's data sheets of the SXM parts: terabytes a second of memory,
    gigabytes a second and direction of NVLink."""

    name: str
    memory_gib: float
    memory_tb_s: float
    nvlink_gb_s: float


GPUS = {
    "h100": Gpu("NVIDIA H100 SXM", 79.1, 3.35, 450),
    "h200": Gpu("NVIDIA H200", 139.8, 4.8, 450),
    "h800": Gpu("NVIDIA H800 SXM", 79.1, 3.35, 200),
}
MEASURED_ON = GPUS["h200"]
# What a collective gets of its link; an assumption.
LINK_SHARE = 0.5

# Rates of an H200 in whole steps, fitted to the rows of te_layer in STEPS: work a second of matrix products and of
# attention (the causal half), and bytes of saved activations a second, each of which is written and read several times.
BF16_FLOPS, FP8_FLOPS, ATTENTION_FLOPS, SAVED_BYTES = 700e12, 1300e12, 350e12, 0.5e12
# Of a micro-batch, whatever its size, bytes moved for each parameter: what the rows of hare_2.0b at micro-batch 8 and
# 16 say; without main_grad 24 more (docs/performance.md), and 4 to quantize a weight. So many are moved in a second.
EACH_BYTES, GRADIENT_BYTES, QUANTIZE_BYTES, COPIED_BYTES = 28, 24, 4, 4e12
# What DeepSpeed adds to the launches of a pass.
LAUNCH_OF_STEP = 1.1
# docs/validation.md and docs/performance.md: full_determinism, and cuDNN's attention for FlashAttention-4's.
DETERMINISTIC, NOT_FLASH = 1.02, 1.023

SURE_MEASURED, SURE_SCALED, SURE_MEAN = 0.03, 0.06, 0.08
SURE_GPU, SURE_RANKS, SURE_NODES, SURE_ZERO_3 = 0.08, 0.04, 0.15, 0.1
SURE_SMALL = 0.5


@dataclass(frozen=True)
class Measured:
    """A whole step of a committed result."""

    source: str  # file and row
    model: str
    setting: Setting
    step_s: float
    peak_gib: float
    launch_ms: float


@dataclass(frozen=True)
class Estimate:
    """Of all ranks: `tokens_per_second`; of the model's own time, `step_s`. basis: what it is derived from; within: how
    far off it may be, as a fraction."""

    step_s: float
    tokens_per_second: float
    basis: str
    within: float


@lru_cache
def _report(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@lru_cache
def measured() -> tuple[Measured, ...]:
    """The rows of STEPS that ran, of the variants here, and that configured what they ran themselves."""
    return tuple(
        Measured(
            source=f"{name}.json, {row['row']}",
            model=report["model"],
            setting=_setting(report, row),
            step_s=row["step_ms"] / 1e3,
            # without what earlier visits of the benchmark left, but the workspaces that each model would have made
            peak_gib=row["allocated_gib"] - max(0.0, row["before_gib"] - WORKSPACES_GIB),
            launch_ms=row["launch_ms"],
        )
        for name in STEPS
        for report in [_report(name)]
        for row in report["results"]
        if row["measure"] == "step" and row["variant"] in VARIANTS
        if not row["automatic"] and "reason" not in row and row.get("loss_kind") not in OTHER_LOSSES
    )


def _setting(report: dict[str, Any], row: dict[str, Any]) -> Setting:
    given = tuple((k, v if isinstance(v, str) else json.dumps(v)) for k, v in row["configuration"].items())
    configured = _configured(report["model"], given)
    return replace(
        configured,
        fused_swiglu=configured.fused_swiglu and report["date"] >= FUSED_SWIGLU_SINCE,
        fp8_head_gradients=configured.fp8_head_gradients and report["date"] >= FP8_HEAD_GRADIENTS_SINCE,
        micro_batch=row["micro_batch"],
        eval_batch=0,
        seq_length=report["seq_length"],
        accumulation=report["accumulation"],
        deterministic=report["deterministic"],
        flash=row["attention"].startswith("flash"),
    )


@lru_cache
def _configured(model: str, given: tuple[tuple[str, str], ...]) -> Setting:
    raw: dict[str, Any] = {"model": {"config": model}, "data": {"sources": {"data": "data"}}, "max_steps": 1}
    for key, text in (*given, ("gradient_accumulation_steps", "2")):
        command_line.override(raw, TrainingArguments, key, text)
    arguments = TrainingArguments.from_dict(raw)
    return Setting.of(arguments, resolve_ds_config(arguments, 1), load_sizes(model), 1)


# ---------------------------------------------------------------- by the work


def _launch_s(s: Setting) -> float:
    """Seconds that the host needs to launch a micro-batch: by the measured row with the least work in a layer, of which
    it is the most."""
    alike = [m for m in measured() if _kind(m.setting) == _kind(s) and not m.setting.cuda_graphs]
    if s.cuda_graphs or not alike:
        return 0
    least = min(alike, key=lambda m: m.setting.tokens * m.setting.layer_matrices)
    layers = s.sizes.num_hidden_layers * (4 / 3 if s.recompute else 1)
    return LAUNCH_OF_STEP * least.launch_ms / least.setting.sizes.num_hidden_layers * layers / 1e3


def _kind(s: Setting) -> tuple[str, bool, bool]:
    return s.variant, s.fp8, s.compiled


def _recipe_factor(s: Setting) -> float:
    """How much longer a step of this recipe takes than one with delayed scaling."""
    if not (s.fp8 and s.te):
        return 1
    speeds = {row["row"]: row["tokens_per_second"] for row in _report(RECIPES_OF)["results"]}
    return speeds["delayed"] / speeds[s.recipe]


def _micro_batch_s(s: Setting, gpu: Gpu) -> float:
    """Forward and backward of a micro-batch on one GPU."""
    H, _, q, _, V = s.widths
    layers = s.sizes.num_hidden_layers
    faster = math.sqrt(
        gpu.memory_tb_s / MEASURED_ON.memory_tb_s
    )  # half of this time waits for memory: an assumption
    products = 6 * s.layer_matrices
    of_layers = products * (s.fp8_layers / FP8_FLOPS + (layers - s.fp8_layers) / BF16_FLOPS)
    of_layers += 12 * layers * q * attention_pairs(s.sizes, s.seq_length) / ATTENTION_FLOPS
    saved = s.fp8_layers * saved_by_layer(s, True) + (layers - s.fp8_layers) * saved_by_layer(s, False)
    of_layers += saved / (SAVED_BYTES * faster)
    forward, gradients = (
        FP8_FLOPS if fp8 else BF16_FLOPS for fp8 in (s.fp8_head, s.fp8_head or s.fp8_head_gradients)
    )
    head = 2 * H * V / forward + 4 * H * V / gradients + head_bytes(s) / (SAVED_BYTES * faster)
    if s.compute == "fp32":
        of_layers, head = 16 * of_layers, 16 * head  # no tensor cores
    of_layers *= _recipe_factor(s) * (4 / 3 if s.recompute else 1)
    copied = (EACH_BYTES + (0 if s.main_grad else GRADIENT_BYTES)) * s.parameters
    if s.te and s.fp8 and not s.keeps_fp8_weights:
        copied += QUANTIZE_BYTES * s.parameters
    seconds = s.tokens * (of_layers + head) + copied / (COPIED_BYTES * faster)
    seconds *= (DETERMINISTIC if s.deterministic else 1) * (1 if s.flash or not s.te else NOT_FLASH)
    return max(seconds, _launch_s(s))


def _optimizer_s(s: Setting, gpu: Gpu) -> float:
    """AdamW and clipping: what plain torch took for each parameter beside the rows of hare_1.1b; and what Muon took
    beyond that, which ZeRO shares between ranks."""
    report = _report("hare_1.1b_step")
    each = min(report["optimizer_ms"]) / 1e3 / report["parameters"]
    if s.packs:
        each += _packing_s(s.optimizer_states)
    adamw = each * s.parameters * MEASURED_ON.memory_tb_s / gpu.memory_tb_s
    return (adamw + _muon_s(s)) / (s.ranks if s.zero_stage else 1)


@lru_cache
def _packing_s(states: str) -> float:
    """What a step of packed states takes longer than fp32's, for each parameter."""
    report = _report("hare_1.1b_states_step")
    steps = {
        row["configuration"].get("precision.optimizer_states", "fp32"): row["step_ms"]
        for row in report["results"]
    }
    return (steps[states] - steps["fp32"]) / 1e3 / report["parameters"]


def _muon_s(s: Setting) -> float:
    if s.optim != "muon":
        return 0
    matrices, flops = _newton_schulz(s.sizes)
    a_matrix, a_flop = _muon_rates()
    return matrices * a_matrix + flops * a_flop


@lru_cache
def _muon_rates() -> tuple[float, float]:
    """Seconds a matrix and a FLOP of Newton-Schulz that a step takes longer than AdamW's, by the two of MUON_OF. The
    hundred kernels of one matrix are too small to keep a GPU busy: of a small model their launches are all of it."""
    equations = []
    for name, adamw, muon in MUON_OF:
        report = _report(name)
        training = report.get("training", {})
        tokens = training.get("train_batch_size_tokens", 0)
        seconds = {
            row["row"]: row["step_ms"] / 1e3 if "step_ms" in row else tokens / row["tokens_per_second"]
            for row in report["results"]
        }
        model = training.get("model.config") or report["model"]
        equations.append((*_newton_schulz(load_sizes(model)), seconds[muon] - seconds[adamw]))
    (m, f, s), (n, g, t) = equations
    return (s * g - t * f) / (m * g - n * f), (m * t - n * s) / (m * g - n * f)


def _newton_schulz(sizes: Any) -> tuple[int, float]:
    """(matrices, FLOPs of a step). Of m x n, m <= n, DeepSpeed 0.19.8 (zeropower_via_gram_newtonschulz) has 14 products
    of m x m by m x m and 4 with m x n, or 15 where m = n."""
    H, I, q, kv, _ = widths_of(sizes)  # noqa: E741
    flops = 0.0
    for rows, count in ((q, 2), (kv, 2), (I, 3)):
        m, n = sorted((rows, H))
        flops += count * (30 * m**3 if m == n else 28 * m**3 + 8 * m * m * n)
    return 7 * sizes.num_hidden_layers, sizes.num_hidden_layers * flops


def _communication_s(s: Setting, gpu: Gpu, network_gbit_s: float) -> float:
    """Of a step, none of it hidden behind computing. Rings, whose slowest link counts: NVLink within a node, between
    nodes one network card a GPU."""
    if s.ranks == 1:
        return 0
    link = gpu.nvlink_gb_s * 1e9
    if s.ranks > GPUS_OF_A_NODE:
        link = min(link, GPUS_OF_A_NODE * network_gbit_s / 8 * 1e9)
    passes = (s.ranks - 1) / s.ranks * s.parameters / (link * LINK_SHARE)  # of a byte a parameter
    e = s.element
    # DeepSpeed reduces gradients in the type of the weights unless another is asked for, however they were accumulated
    g = 4 if s.reduces_in_float32 else e
    if s.zero_stage == 3:
        # transformers' own recomputation has hooks of its own, that gather once more
        return s.accumulation * passes * (g + e * (3 if s.recompute and not s.te else 2))
    if s.zero_stage == 2:
        # each rank keeps its share, and yet each bucket is all-reduced (use_multi_rank_bucket_allreduce)
        return s.accumulation * passes * 2 * g + passes * e
    return passes * (2 * g + (e if s.zero_stage else 0))


def _modelled_s(s: Setting, gpu: Gpu) -> float:
    return s.accumulation * _micro_batch_s(s, gpu) + _optimizer_s(s, gpu)


# ---------------------------------------------------------------- by measurement


def _distance(a: Setting, b: Setting) -> float:
    """How unlike what the two compute is, of one model and kind."""
    flags = sum(
        getattr(a, name) != getattr(b, name)
        for name in (
            "cuda_graphs",
            "recompute",
            "fp8_head",
            "fp8_head_gradients",
            "main_grad",
            "recipe",
            "fused_swiglu",
        )
    )
    tokens = abs(math.log2(a.micro_batch / b.micro_batch)) + abs(math.log2(a.seq_length / b.seq_length))
    corrected = (a.deterministic != b.deterministic) + (a.flash != b.flash)  # by what docs/ says of them
    return flags + (tokens + corrected) / 4


def _shape(s: Setting) -> tuple[Any, ...]:
    return (*s.widths, s.sizes.num_hidden_layers, s.sizes.num_attention_heads)


def estimate(s: Setting, gpu: Gpu, network_gbit_s: float = 400, without_model: str | None = None) -> Estimate:
    """Speed of `s` on such GPUs, of all stages of precision.schedule together. without_model: do as if this one had not
    been measured, to see how good that is."""
    each = [
        (share, its, _estimate(its, gpu, network_gbit_s, without_model)) for share, its in s.in_each_stage
    ]
    if len(each) == 1:
        return each[0][2]
    step_s = sum(share * its.step_s for share, _, its in each)
    bases = [
        f"{its.precision}, {100 * share:.3g} % of the steps: {found.basis}" for share, its, found in each
    ]
    within = max(found.within for _, _, found in each)
    return Estimate(step_s, s.step_tokens / step_s, "; ".join(bases), within)


def _estimate(s: Setting, gpu: Gpu, network_gbit_s: float, without_model: str | None) -> Estimate:
    rows = [m for m in measured() if m.model != without_model]
    alike = [m for m in rows if _kind(m.setting) == _kind(s)]
    same = [m for m in alike if _shape(m.setting) == _shape(s)]
    known = bool(alike)
    if same:
        nearest = min(same, key=lambda m: _distance(m.setting, s))
        chosen = [nearest]
        there = _distance(nearest.setting, s) == 0
        basis = f"{'measured' if there else 'scaled from'} {nearest.source}"
        within = SURE_MEASURED if there else SURE_SCALED
    else:
        pool = alike or [m for m in rows if m.setting.te and m.setting.fp8 == s.fp8]
        models = dict.fromkeys(m.model for m in pool)
        chosen = [
            min((m for m in pool if m.model == model), key=lambda m: _distance(m.setting, s))
            for model in models
        ]
        what = f"{s.variant} {'FP8' if s.fp8 else 'bf16'}" if known else "Transformer Engine's variants"
        basis = f"work, and steps of {what} measured of {', '.join(models)}"
        within = SURE_MEAN if known else 3 * SURE_MEAN
    ratios = [m.step_s / _modelled_s(m.setting, MEASURED_ON) for m in chosen]
    ratio = math.exp(sum(map(math.log, ratios)) / len(ratios))
    within += max(abs(r / ratio - 1) for r in ratios) / 2
    notes = []
    if gpu is not MEASURED_ON:
        notes, within = [f"{gpu.name} by its data sheet"], within + SURE_GPU
    if s.parameters < min(m.setting.parameters for m in rows) / 2:
        notes.append("no model as small was measured")
        within += SURE_SMALL
    if s.optim == "muon":
        notes.append("Muon by two models")
    if s.ranks > 1:
        notes.append("links between GPUs by data sheet")
        within += SURE_RANKS
    if s.ranks > GPUS_OF_A_NODE:
        notes.append(f"{network_gbit_s:g} Gbit/s of network a GPU, never measured")
        within += SURE_NODES
    if s.zero_stage == 3:
        notes.append("ZeRO 3 measured on two GPUs alone")
        within += SURE_ZERO_3
    step_s = ratio * _modelled_s(s, gpu) + _communication_s(s, gpu, network_gbit_s)
    return Estimate(step_s, s.step_tokens / step_s, "; ".join([basis, *notes]), round(within, 2))
