"""Proof at start: before a run takes its first step it shows what it runs on, or refuses.

One small batch goes forward and backward through the model; afterwards it is known, not assumed, which modules ran FP8
and which attention was used. The attention is compared with torch's SDPA in float32, forward and backward: an attention
backend that is fast and wrong has been seen (a window of (-1, 0) taken literally).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MistralConfig

from model.config import UserError, head_dim, window_size
from model.documents import Documents, attend, random_documents
from model.fp8 import te_backend, torchao_fp8
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE
from model.fp8.state import reset_fp8_state
from model.mistral_base import causal_attention
from model.variants import VARIANTS

PROBE_TOKENS = 256
# bf16 keeps 8 bits: an attention of bf16 inputs is within 1e-2 of float32's. FP8 runs attention in bf16.
ATTENTION_TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "fp8": 2e-2}


class ProofError(UserError):
    """The run does not do what its configuration says; the message says what was found and what to do."""


def prove(
    model: nn.Module, precision: Precision, attention_backend: str = "auto", seed: int = 0
) -> list[str]:
    """Run the proof and return its lines for the log. Weights, gradients and FP8 state are left as they were before
    the first step.

    attention_backend: what the user asked for (only "unfused" allows an unfused attention on a GPU).
    Raises ProofError: a module meant to run FP8 did not; no module did; Transformer Engine loaded another cuDNN than
    torch; an unfused attention; an attention that differs from SDPA.
    """
    if not VARIANTS[model.variant].te:
        return _prove_transformers(model, precision, seed)
    lines = []
    if precision.te.name == "transformer_engine":
        lines.append(_prove_cudnn())
    _probe(model, seed)
    lines += _prove_fp8(model, precision)
    lines.append(_prove_attention(model, precision, attention_backend))
    return lines


def backend_of(model: nn.Module, precision: Precision) -> str:
    """Whose modules `model` is made of, with the version."""
    if not VARIANTS[model.variant].te:
        return torchao_fp8.version(precision.emulated) if precision.torchao else "transformers' own modules"
    return precision.te.version


def attention_of(model: nn.Module, precision: Precision) -> str:
    """The attention that the last forward used."""
    if not VARIANTS[model.variant].te:
        return "torch SDPA"
    return te_backend.attention_backend_in_use(precision.te)


def _prove_transformers(model: nn.Module, precision: Precision, seed: int) -> list[str]:
    """The variants hf and torchao. Their probe is not compiled: counting GEMMs needs that, and a graph for the probe's
    shape would cost a minute."""
    attention = "attention: transformers with torch SDPA"
    if precision.torchao:
        with torchao_fp8.observe(model, precision.emulated) as gemms:
            _probe(model, seed)
        lines = [*_prove_fp8(model, precision), _prove_torchao_backward(gemms, precision), attention]
    else:
        with torch.compiler.set_stance("force_eager"):
            _probe(model, seed)
        lines = [f"{attention}; FP8: none (variant hf)"]
    if model.compiled:
        lines.append("torch.compile: each decoder layer, in the first step")
    elif precision.torchao and not precision.emulated:
        lines.append(
            "warning: torchao's FP8 without torch.compile is slower than bf16, since scaling and rounding take kernels "
            "of their own; remove model.compile false"
        )
    return lines


def _prove_torchao_backward(gemms: torchao_fp8.Gemms, precision: Precision) -> str:
    forward, backward = len(gemms.forward), gemms.backward
    # the gradients of input and weight
    if backward != 2 * forward:
        raise ProofError(f"the backward of {forward} FP8 modules ran {backward} FP8 GEMMs, not {2 * forward}")
    return (
        f"FP8 GEMMs of the probe: {forward} forward, {backward} backward; "
        f"{torchao_fp8.version(precision.emulated)}"
    )


def _prove_cudnn() -> str:
    theirs, torchs = te_backend.cudnn_versions()
    if theirs != torchs:
        raise ProofError(
            f"Transformer Engine loaded cuDNN {theirs} and torch {torchs}; two cuDNNs end in a slow attention. Set "
            "CUDNN_HOME to torch's copy (the folder of the package nvidia.cudnn) and put its lib folder first in "
            "LD_LIBRARY_PATH, as run_training.sh does"
        )
    return f"cuDNN {theirs}, the same in Transformer Engine and torch"


def probe_tokens(config: MistralConfig) -> int:
    """Tokens of the probe's sequence: what the model's positions allow, in a number that FP8 GEMMs take."""
    unit = FP8_TRAIN_ROW_MULTIPLE
    return max(unit, min(PROBE_TOKENS, config.max_position_embeddings) // unit * unit)


def _probe(model: nn.Module, seed: int) -> None:
    """One forward and backward on random tokens; gradients are dropped."""
    config = model.config
    device = model.lm_head.weight.device
    tokens = probe_tokens(config)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (1, tokens + 1), generator=generator).to(device)
    within = (
        {"documents": random_documents(1, tokens, tokens / 4, generator).to(device)}
        if model.document_mask
        else {}
    )
    model.train()
    model(ids[:, :-1], labels=ids[:, 1:], **within).loss.backward()
    model.zero_grad(set_to_none=True)


def _prove_fp8(model: nn.Module, precision: Precision) -> list[str]:
    report = fp8_modules(model, precision)
    reset_fp8_state(model, precision)
    if precision.fp8 and not report.ran:
        raise ProofError(
            "FP8 was asked for and no module ran FP8; set precision.compute to bf16 if that is meant"
        )
    if sorted(report.ran) != sorted(report.planned):
        wrong = sorted(set(report.planned) ^ set(report.ran))
        raise ProofError(
            f"{len(wrong)} modules did not run in the precision they were meant to run in, such as {wrong[0]}; "
            "check precision.bf16_modules"
        )
    return report.lines(precision.config.recipe if precision.fp8 else None)


def _prove_attention(model: nn.Module, precision: Precision, asked_for: str) -> str:
    backend = attention_of(model, precision)
    if backend == te_backend.NO_ATTENTION_YET:
        raise ProofError(
            "the probe ran and Transformer Engine reports no attention: a version that this was not written for; "
            "pip install -r requirements-gpu.txt"
        )
    if backend == "unfused" and asked_for != "unfused":
        raise ProofError(
            "Transformer Engine chose its unfused attention, about five times slower and quadratic in memory. "
            "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints why; model.attention_backend unfused allows it"
        )
    error_out, error_grad = attention_errors(model.config, precision, document_mask=model.document_mask)
    tolerance = ATTENTION_TOLERANCE[precision.config.compute]
    if not (error_out <= tolerance and error_grad <= tolerance):
        raise ProofError(
            f"attention backend {backend} differs from SDPA in float32: relative error {error_out:.1e} forward, "
            f"{error_grad:.1e} backward, allowed {tolerance:.0e}; choose another model.attention_backend"
        )
    within = " within documents" if model.document_mask else ""
    return (
        f"attention{within}: {backend}; against SDPA in float32: relative error {error_out:.1e} forward, "
        f"{error_grad:.1e} backward (allowed {tolerance:.0e})"
    )


def random_attention(
    c: MistralConfig,
    precision: Precision,
    shape: tuple[int, int],
    window: tuple[int, int],
    mean_document_tokens: float | None,
    generator: torch.Generator,
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], torch.Tensor, Documents | None]:
    """(forward of q, k and v; these; a gradient of what it returns; documents): the attention of a model of
    configuration `c` on random inputs, shape (batch, tokens), within random documents unless their mean is None.
    generator: on the CPU."""
    D, K = head_dim(c), c.num_key_value_heads
    sizes = [(*shape, heads, D) for heads in (c.num_attention_heads, K, K)]
    qkv = [torch.randn(s, generator=generator).to(precision.device, precision.dtype) for s in sizes]
    upstream = torch.randn(*shape, c.num_attention_heads * D, generator=generator).to(qkv[0])
    attention = causal_attention(c, precision.te, window)
    if mean_document_tokens is None:
        return attention, qkv, upstream, None
    documents = random_documents(*shape, mean_document_tokens, generator).to(precision.device)

    def within(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.flatten(0, 1)[None] for t in qkv)
        return attend(attention, q, k, v, documents).view_as(upstream)

    return within, qkv, upstream, documents


def attention_errors(
    c: MistralConfig, precision: Precision, seed: int = 0, document_mask: bool = False
) -> tuple[float, float]:
    """(forward, backward) relative error of the attention of a model of configuration `c` against SDPA in float32, on
    random inputs of its head counts, head dimension and window, with document_mask within random documents;
    |a - b| / |b| in the Frobenius norm."""
    tokens = probe_tokens(c)
    # a window longer than the probe would not be tested, so it is cut to half of it
    window = (min(c.sliding_window, tokens // 2) - 1, 0) if c.sliding_window else window_size(c)
    generator = torch.Generator().manual_seed(seed)
    forward, inputs, upstream, documents = random_attention(
        c, precision, (2, tokens), window, tokens / 4 if document_mask else None, generator
    )

    def run(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        age = torch.arange(tokens, device=q.device)[:, None] - torch.arange(tokens, device=q.device)[None, :]
        visible = (age >= 0) & (age <= window[0]) if window[0] >= 0 else age >= 0
        # a key is in the query's document where it is not older than the query's position
        if documents is not None:
            visible = visible & (age <= documents.positions[:, None, :, None])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2).flatten(2)

    with precision.te.autocast(enabled=False):
        ours = run(forward, inputs)
    truth = run(sdpa, [t.float() for t in inputs])
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]
    return errors[0], max(errors[1:])
