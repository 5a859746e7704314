"""Proof at start: before a run takes its first step it shows what it runs on, or refuses.

One small batch goes forward and backward through the model, and its FP8 GEMMs are counted (gemms.py). The attention
is compared with torch's SDPA in float32, forward and backward, at the run's length: a backend that is fast and wrong
has been seen (a window of (-1, 0) taken literally), and Transformer Engine chooses anew for each length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MistralConfig

from model.config import head_dim, window_size
from model.documents import Documents, attend, random_documents
from model.errors import UserError
from model.fp8 import te_backend, torchao_fp8
from model.fp8.gemms import count_gemms
from model.fp8.modules import of_transformer_engine
from model.fp8.precision import Precision
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE
from model.fp8.state import reset_fp8_state
from model.mistral_base import causal_attention
from model.variants import VARIANTS

PROBE_TOKENS = 256
# Of the attention that the run's is compared with: 256 queries, fewer where their scores would take more than 1 GiB.
QUERIES_AT_A_TIME = 256
SCORES_AT_A_TIME = 2**28
# bf16 keeps 8 bits: an attention of bf16 inputs is within 1e-2 of float32's. FP8 runs attention in bf16.
ATTENTION_TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "fp8": 2e-2}


class ProofError(UserError, RuntimeError):
    """The run does not do what its configuration says; the message says what was found and what to do."""

    code = "proof"


def prove(
    model: nn.Module,
    precision: Precision,
    attention_backend: str = "auto",
    seed: int = 0,
    seq_length: int = PROBE_TOKENS,
) -> list[str]:
    """Run the proof and return its lines for the log. Weights, gradients and FP8 state are left as they were before
    the first step.

    attention_backend: what the user asked for (only "unfused" allows an unfused attention on a GPU). seq_length: tokens
    of the run's samples, at which its attention is proven.
    Raises ProofError: a module meant to run FP8 did not, forward or backward; no module did; Transformer Engine loaded
    another cuDNN than torch; an unfused attention; an attention that differs from SDPA.
    """
    te = VARIANTS[model.variant].te
    if any(getattr(module, "fp8_gradients", False) for module in model.modules()):
        precision.require("block", "set precision.fp8_head_gradients to false")
    lines = [_prove_cudnn()] if te and precision.te.name == "transformer_engine" else []
    # of the compiled variants the probe is not: a graph for its shape would cost a minute
    eager = nullcontext() if te else torch.compiler.set_stance("force_eager")
    with eager, count_gemms(model, precision) as gemms:
        _probe(model, seed)
    reset_fp8_state(model, precision)
    if problem := gemms.problem():
        raise ProofError(problem, code="fp8_gemms")
    lines += gemms.lines()
    if gemms.ran:
        lines.append(f"FP8 GEMMs of the probe: {gemms.forward.total()} forward, {gemms.backward} backward")
    if te:
        return [*lines, _prove_attention(model, precision, attention_backend, seq_length)]
    lines.append("attention: transformers with torch SDPA")
    if model.compiled:
        lines.append("torch.compile: each decoder layer, in the first step")
    elif precision.torchao and not precision.emulated:
        lines.append(
            "warning: torchao's FP8 without torch.compile is slower than bf16, since scaling and rounding take kernels "
            "of their own; remove model.compile false"
        )
    return lines


@contextmanager
def proving_fp8(model: nn.Module, precision: Precision, passes: int = 1) -> Iterator[None]:
    """A block of so many forwards, each with its backward, of a model or a module. Raises ProofError: they ran FP8
    otherwise than planned. torchao's layers may be compiled and cannot be counted then: of them nothing is asked."""
    if not of_transformer_engine(model):
        yield
        return
    with count_gemms(model, precision) as gemms:
        yield
    if problem := gemms.problem(passes):
        raise ProofError(problem, code="fp8_gemms")


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


def check_attention(model: nn.Module, precision: Precision, proven: str) -> None:
    """To be called after the first step, whose batch is another one than that of the proof. Raises ProofError: another
    attention than the one that was `proven`."""
    ran = attention_of(model, precision)
    # of cuDNN, which of its kernels follows a comma: that depends on how q, k and v lie in memory, too
    if ran.split(",")[0] != proven.split(",")[0]:
        raise ProofError(
            f"attention {proven} was proven, and the first step ran {ran}: Transformer Engine chooses by the batch, "
            f"too. Set model.attention_backend to {ran.split()[0]}, which is proven then, or change "
            "per_device_train_batch_size",
            code="attention_changed",
            key="model.attention_backend",
        )


def _prove_cudnn() -> str:
    theirs, torchs = te_backend.cudnn_versions()
    if theirs != torchs:
        raise ProofError(
            f"Transformer Engine loaded cuDNN {theirs} and torch {torchs}; two cuDNNs end in a slow attention. Set "
            "CUDNN_HOME to torch's copy (the folder of the package nvidia.cudnn) and put its lib folder first in "
            "LD_LIBRARY_PATH, as run_training.sh does",
            code="two_cudnns",
            key="CUDNN_HOME",
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


def _prove_attention(model: nn.Module, precision: Precision, asked_for: str, seq_length: int) -> str:
    error_out, error_grad = attention_errors(
        model.config, precision, seq_length, document_mask=model.document_mask
    )
    backend = attention_of(model, precision)
    if backend == te_backend.NO_ATTENTION_YET:
        raise ProofError(
            "attention ran and Transformer Engine reports no attention: a version that this was not written for; "
            "pip install -r requirements-gpu.txt",
            code="no_attention",
        )
    if backend == "unfused" and asked_for != "unfused":
        raise ProofError(
            "Transformer Engine chose its unfused attention, about five times slower and quadratic in memory. "
            "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints why; model.attention_backend unfused allows it",
            code="unfused_attention",
            key="model.attention_backend",
        )
    tolerance = ATTENTION_TOLERANCE[precision.config.compute]
    if not (error_out <= tolerance and error_grad <= tolerance):
        raise ProofError(
            f"attention backend {backend} differs from SDPA in float32: relative error {error_out:.1e} forward, "
            f"{error_grad:.1e} backward, allowed {tolerance:.0e}; choose another model.attention_backend",
            code="wrong_attention",
            key="model.attention_backend",
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
    attention = causal_attention(c, precision.te)
    if mean_document_tokens is None:
        return partial(attend, attention, documents=None), qkv, upstream, None
    documents = random_documents(*shape, mean_document_tokens, generator).to(precision.device)

    def within(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.flatten(0, 1)[None] for t in qkv)
        return attend(attention, q, k, v, documents).view_as(upstream)

    return within, qkv, upstream, documents


def attention_errors(
    c: MistralConfig,
    precision: Precision,
    tokens: int = PROBE_TOKENS,
    seed: int = 0,
    document_mask: bool = False,
) -> tuple[float, float]:
    """(forward, backward) relative error of the attention of a model of configuration `c` against SDPA in float32, on
    two random inputs of so many tokens with its head counts and head dimension, with its window where samples of this
    length reach it, with document_mask within random documents; |a - b| / |b| in the Frobenius norm."""
    generator = torch.Generator().manual_seed(seed)
    forward, inputs, upstream, documents = random_attention(
        c, precision, (2, tokens), tokens / 4 if document_mask else None, generator
    )
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with precision.te.autocast(enabled=False):
        out = forward(*leaves)
        ours = [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]
    truth = sdpa([t.float() for t in inputs], upstream.float(), window_size(c), documents)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]
    return errors[0], float(torch.tensor(errors[1:]).max())  # NaN if one is, unlike Python's max


def sdpa(
    qkv: list[torch.Tensor], upstream: torch.Tensor, window: tuple[int, int], documents: Documents | None
) -> list[torch.Tensor]:
    """torch's attention of q [B, T, N, D], k and v [B, T, K, D]: what it returns, [B, T, N * D], and the gradients of
    the three where `upstream` is its own. By pieces of the queries: its scores would not fit into memory."""
    q, k, v = (t.transpose(1, 2) for t in qkv)
    outputs, grad_q = [], []
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    positions = torch.arange(q.shape[2], device=q.device)
    fitting = SCORES_AT_A_TIME // (q.shape[0] * q.shape[1] * q.shape[2])
    for rows in positions.split(max(1, min(QUERIES_AT_A_TIME, fitting))):
        age = rows[:, None] - positions[None, : int(rows[-1]) + 1]
        visible = (age >= 0) & (age <= window[0]) if window[0] >= 0 else age >= 0
        # a key is in the query's document where it is not older than the query's position
        if documents is not None:
            visible = visible & (age <= documents.positions[:, None, rows, None])
        seen = slice(0, age.shape[1])
        leaves = [t.detach().requires_grad_() for t in (q[:, :, rows], k[:, :, seen], v[:, :, seen])]
        out = F.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], attn_mask=visible, enable_gqa=True
        )
        out = out.transpose(1, 2).flatten(2)
        grads = torch.autograd.grad(out, leaves, upstream[:, rows])
        outputs.append(out.detach())
        grad_q.append(grads[0])
        grad_k[:, :, seen] += grads[1]
        grad_v[:, :, seen] += grads[2]
    gradients = torch.cat(grad_q, 2), grad_k, grad_v
    return [torch.cat(outputs, 1), *(t.transpose(1, 2) for t in gradients)]
