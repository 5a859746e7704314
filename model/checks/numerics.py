"""Numeric check before training: compare the loss and gradients of a one-layer model with a float32 reference.

The startup check (startup.py) counts FP8 GEMMs, but does not check their results. A kernel can apply a scale twice,
drop the mantissa of a scale, transpose bytes wrongly or use an outdated FP8 copy of a weight. Training would then
continue with wrong gradients.

`choose_kernels` therefore runs the forward and backward pass of a model with one layer and random weights. It uses the
same kernels as the training run. The reference computes the loss and the gradient of every weight with plain torch
operations in float32. If an optional kernel (section "speed") causes an error, the kernel is disabled with a warning.

Shape suffixes: B batch, T tokens, H hidden size, N query heads, D head dimension.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import MistralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.build import build_model
from model.checks.startup import StartupCheckError
from model.config import has_qk_norm, head_dim, rope_parameters
from model.conversion import to_hf, to_hf_state_dict
from model.documents import Documents
from model.fp8 import te_backend
from model.fp8.modules import full_gradients, use_main_grads
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import HEAD_ROWS, fp8_multiple
from model.initialization import init_weights
from model.variants import GradientCheckpointing, SpeedConfig

# Limits for the relative error and the scale error of the loss and of each gradient, keyed by precision.compute.
# Rounding errors average out in the scale error. Its limit is therefore lower, which also detects scales that are only
# slightly wrong.
LIMITS = {"fp8": (0.35, 0.06), "bf16": (0.03, 0.008), "fp16": (5e-3, 1.5e-3), "fp32": (5e-3, 1e-3)}
# Optional kernels (keys of the section "speed"). When a kernel is disabled, torch or Transformer Engine replaces it.
KERNELS = ("fused_rope", "fused_swiglu", "fused_embedding", "fused_cross_entropy", "main_grad")
# Relative error |a - b| / |b| and scale error a.b / b.b - 1, keyed by Hugging Face name. a is the measured value and b
# the float32 reference.
Errors = dict[str, tuple[float, float]]
MAX_TOKENS = 4096  # the attention check covers longer sequences
EMULATED_TOKENS = 64
MAX_LOGITS = 2**28  # maximum number of float32 logits in the reference (1 GiB)
FP16_LOSS_SCALE = 2.0**16  # DeepSpeed's initial loss scale
IGNORED = -100


def choose_kernels(
    config: MistralConfig,
    variant: str,
    precision: Precision,
    speed: SpeedConfig,
    batch_size: int,
    seq_length: int,
    *,
    document_mask: bool = False,
    gradient_checkpointing: GradientCheckpointing = False,
    seed: int = 0,
) -> tuple[SpeedConfig, list[str]]:
    """Compare the kernels of a training run with a float32 reference, and disable optional kernels that fail.

    The global random state does not change.

    Args:
        variant: te_linear or te_layer.
        batch_size: number of samples per micro-batch. The check uses fewer samples if the float32 logits would need
            more than 1 GiB.
        gradient_checkpointing: the value of gradient_checkpointing in the training configuration.
        seq_length: number of tokens per sample. The check uses at most 4096 tokens, or 64 tokens with the CPU reference
            implementation.

    Returns:
        `speed` with the failed kernels disabled, and the lines to log.

    Raises:
        StartupCheckError: If the results are wrong even with all optional kernels disabled.
    """
    probe = _Probe(
        config, variant, precision, batch_size, seq_length, document_mask, gradient_checkpointing, seed
    )
    try:
        errors = probe.errors(speed)
    except PrecisionError as error:  # for example, bf16_modules names the layers whose sizes do not fit FP8
        return speed, [
            f"numeric check: skipped, because a model with one layer cannot be built with this configuration ({error})"
        ]
    if probe.accepts(errors):
        return speed, [probe.describe(errors)]
    off = replace(speed, **dict.fromkeys(KERNELS, False))
    if not probe.accepts(without := probe.errors(off)):
        raise StartupCheckError(
            f"{probe.describe(without)}. The GPU or an installed package computes wrong results. Install the package "
            "versions in requirements-gpu.txt, or choose another precision.recipe. If precision.margin or "
            "precision.amax_epsilon is set, remove the key. If only lm_head is wrong, set "
            "precision.fp8_head_gradients to false",
            code="wrong_numbers",
            key="precision.recipe",
        )
    wrong = [
        name
        for name in KERNELS
        if getattr(speed, name) and not probe.accepts(probe.errors(replace(off, **{name: True})))
    ] or list(KERNELS)  # no kernel fails alone, so disable all of them
    return replace(speed, **dict.fromkeys(wrong, False)), [
        f"warning: {probe.describe(errors)}. Disabled the kernels that cause this error: "
        + ", ".join(f"speed.{name}" for name in wrong),
        probe.describe(without),
    ]


class _Probe:
    """Random batch for a one-layer model, with the float32 reference for the loss and the gradients of the model."""

    def __init__(
        self,
        config: MistralConfig,
        variant: str,
        precision: Precision,
        batch_size: int,
        seq_length: int,
        document_mask: bool,
        gradient_checkpointing: GradientCheckpointing,
        seed: int,
    ):
        self.config = copy.deepcopy(config)
        self.config.num_hidden_layers = 1
        self.variant, self.document_mask, self.seed = variant, document_mask, seed
        self.gradient_checkpointing = gradient_checkpointing
        # The layer represents all layers, so patterns with layer numbers do not apply.
        patterns = [p for p in precision.config.bf16_modules if not re.search(r"layers\.[\d\[?]", p)]
        own: dict[str, Any] = {"bf16_modules": [*patterns, "lm_head"]} if precision.fp8 else {}
        self.precision = Precision(replace(precision.config, **own), precision.device)
        compute = precision.config.compute
        self.limits = LIMITS[compute]
        self.loss_scale = FP16_LOSS_SCALE if compute == "fp16" else 1.0
        V = config.vocab_size
        T = min(seq_length, MAX_LOGITS // V, EMULATED_TOKENS if precision.emulated else MAX_TOKENS)
        multiple = fp8_multiple(precision.config.recipe)
        T = max(1, T // multiple) * multiple
        B = 1 if precision.emulated else max(1, min(batch_size, MAX_LOGITS // (T * V)))
        generator = torch.Generator().manual_seed(seed)
        # half of the tokens come from 16 frequent token ids, and an eighth of the labels are ignored
        ids = torch.randint(V, (B, T + 1), generator=generator)
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, ids, ids % 16)
        labels = ids[:, 1:].masked_fill(torch.rand(B, T, generator=generator) < 0.125, IGNORED)
        self.ids, self.labels = ids[:, :-1].to(precision.device), labels.to(precision.device)
        # with a document mask, each row contains two documents of different lengths
        positions_T = torch.arange(T) % (5 * T // 8 if document_mask else T)
        documents = Documents.from_positions(positions_T.expand(B, T)).to(precision.device)
        self.documents, self.positions = documents if document_mask else None, documents.positions[0]
        self.run_tokens = batch_size * seq_length
        self.truth: dict[str, torch.Tensor] = {}

    def errors(self, speed: SpeedConfig) -> Errors:
        """Return the errors of the loss and of each weight's gradient, relative to the float32 reference.

        An FP8 model runs five passes. The first pass uses different weights, so the second pass must replace the FP8
        copies of the weights. The other passes reuse the FP8 copies from the second pass. With delayed scaling, the
        first three passes also set the scales. While a scale is too small, the gradients of all earlier modules are
        rounded to zero.

        A bf16, fp16 or fp32 model runs two passes. The last two passes are compared with the reference. If
        speed.main_grad is on, the last bf16 or FP8 pass uses it.
        """
        passes = [True, True, False, False, False] if self.precision.fp8 else [None, None]
        errors: Errors = {}
        devices = [self.precision.device] if self.precision.device.type == "cuda" else []
        with torch.random.fork_rng(devices), te_backend.isolated_fp8_state(self.precision.te):
            model = build_model(
                self.config,
                self.variant,
                self.precision,
                seed=self.seed + self.precision.fp8,
                initialization="normal",  # its gradients depend on every operation
                speed=speed,
                document_mask=self.document_mask,
                gradient_checkpointing=self.gradient_checkpointing,
            ).train()
            # lm_head computes its gradients in about as many parts as in the run
            model.lm_head.rows = max(32, HEAD_ROWS * self.ids.numel() // self.run_tokens // 32 * 32)
            for number, is_first in enumerate(passes, 1):
                if number == 2:
                    init_weights(model, self.seed, "normal")
                adds = speed.main_grad and number == len(passes) and self.precision.dtype == torch.bfloat16
                if adds:
                    use_main_grads(model, self.precision)
                model.zero_grad(set_to_none=True)
                loss = model(
                    self.ids, labels=self.labels, is_first_microbatch=is_first, documents=self.documents
                ).loss
                (loss * self.loss_scale).backward()
                if number < len(passes) - 1:
                    continue
                self.truth = self.truth or _reference(
                    self.config,
                    to_hf_state_dict(model),
                    self.ids,
                    self.labels,
                    self.positions,
                    self.loss_scale,
                )
                ours = {"loss": loss.detach(), **to_hf(full_gradients(model), self.config)}
                pairs = {name: (ours[name].float(), truth) for name, truth in self.truth.items()}
                errors |= {
                    name + ", main_grad" * adds: (
                        float((a - b).norm() / b.norm()),
                        float((a * b).sum() / (b * b).sum()) - 1,
                    )
                    for name, (a, b) in pairs.items()
                }
        return errors

    def accepts(self, errors: Errors) -> bool:
        # NaN <= limit is False, so NaN is not accepted
        return all(
            abs(value) <= limit
            for pair in errors.values()
            for value, limit in zip(pair, self.limits, strict=True)
        )

    def describe(self, errors: Errors) -> str:
        """Return a log line with the largest relative error and the largest scale error.

        The scale error is the relative difference in magnitude between a gradient and its reference. The two errors can
        belong to different gradients.
        """
        parts = []
        for index, what in enumerate(("relative error", "scale error")):
            size = {name: abs(pair[index]) for name, pair in errors.items()}
            name = max(size, key=lambda n: math.inf if math.isnan(size[n]) else size[n])
            short = name.removeprefix("model.layers.0.")
            parts.append(f"{what} {size[name]:.1e} ({short}, allowed {self.limits[index]:.1e})")
        return f"numeric check of one layer against float32: {', '.join(parts)}"


def _reference(
    config: MistralConfig,
    weights: Mapping[str, torch.Tensor],
    ids_BT: torch.Tensor,
    labels_BT: torch.Tensor,
    positions_T: torch.Tensor,
    loss_scale: float,
) -> dict[str, torch.Tensor]:
    """Compute the loss and the gradients of a one-layer model in float32 with plain torch operations.

    Scaled RoPE is computed as in transformers, which detects errors in `rope_frequencies` and `softmax_scale`.

    Args:
        weights: weights keyed by Hugging Face name.
        positions_T: position of each token in its document, the same in all rows. Attention is restricted to documents.
        loss_scale: factor by which the gradients are multiplied.

    Returns:
        float32 gradients keyed by Hugging Face name, and the loss with the key "loss".
    """
    w = {name: tensor.detach().float().requires_grad_() for name, tensor in weights.items()}
    layer, D = "model.layers.0.", head_dim(config)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * w[name]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{layer}{name}.weight"])

    x = F.embedding(ids_BT, w["model.embed_tokens.weight"])
    rope = rope_parameters(config)
    frequencies, factor = (
        (rope["rope_theta"] ** (-torch.arange(0, D, 2, device=x.device) / D), 1.0)
        if rope["rope_type"] == "default"
        else ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, x.device)
    )
    angles = (positions_T[:, None] * frequencies).repeat(1, 2)
    cos, sin = factor * angles.cos(), factor * angles.sin()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    index = torch.arange(len(positions_T), device=x.device)
    age, start = index[:, None] - index, index - positions_T
    mask = (age >= 0) & (age < (config.sliding_window or len(index))) & (start[:, None] == start)
    h = norm(x, f"{layer}input_layernorm.weight")
    q, k, v = (linear(h, f"self_attn.{n}_proj").unflatten(-1, (-1, D)).transpose(1, 2) for n in "qkv")
    if has_qk_norm(config):
        q, k = norm(q, f"{layer}self_attn.q_norm.weight"), norm(k, f"{layer}self_attn.k_norm.weight")
    repeats = config.num_attention_heads // config.num_key_value_heads
    q, k = rotate(q), rotate(k).repeat_interleave(repeats, 1)
    out = F.scaled_dot_product_attention(q, k, v.repeat_interleave(repeats, 1), attn_mask=mask)
    x = x + linear(out.transpose(1, 2).flatten(2), "self_attn.o_proj")
    h = norm(x, f"{layer}post_attention_layernorm.weight")
    x = x + linear(F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    logits = F.linear(norm(x, "model.norm.weight"), head)
    loss = F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED)
    gradients = torch.autograd.grad(loss * loss_scale, list(w.values()))
    return {"loss": loss.detach(), **dict(zip(w, gradients, strict=True))}
