"""Startup check: verify that FP8 and attention run as configured before training starts.

A small random batch runs forward and backward through the model, and its FP8 GEMMs are counted (gemm_counts.py).
Attention outputs and gradients are compared with torch's scaled_dot_product_attention (SDPA) in float32 at the training
sequence length. Transformer Engine chooses a backend for each length, and FlashAttention-4 has returned wrong results
at full speed because it interpreted a window of (-1, 0) literally.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MistralConfig

from model.checks.gemm_counts import count_gemms
from model.config import head_dim, softmax_scale, window_size
from model.decoder import causal_attention
from model.documents import Documents, attend, random_documents
from model.errors import UserError
from model.fp8 import te_backend, torchao_fp8
from model.fp8.modules import uses_transformer_engine
from model.fp8.precision import HEAD_GRADIENTS_ADVICE, Precision
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE
from model.fp8.state import reset_fp8_state
from model.variants import VARIANTS

PROBE_TOKENS = 256
# `sdpa` computes 256 queries at a time, or fewer if their scores would need more than 1 GiB.
QUERIES_AT_A_TIME = 256
SCORES_AT_A_TIME = 2**28
# Allowed relative error by precision.compute. bf16 has 8 significant bits, so attention with bf16 inputs is within 1e-2
# of float32. FP8 models run attention in bf16.
ATTENTION_TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "fp8": 2e-2}


class StartupCheckError(UserError, RuntimeError):
    """An error raised when the startup check finds that the model does not compute as configured."""

    code = "startup_check"


def check_startup(
    model: nn.Module,
    precision: Precision,
    attention_backend: str = "auto",
    seed: int = 0,
    seq_length: int = PROBE_TOKENS,
) -> list[str]:
    """Check that FP8 and attention run as configured, and return log lines that describe the result.

    Weights and gradients do not change. FP8 state is reset to its initial values.

    Args:
        attention_backend: the configured backend. On a GPU, unfused attention is allowed only if this is "unfused".
        seq_length: tokens per training sample. Attention is checked at this length.

    Raises StartupCheckError if a planned FP8 module did not run in FP8 (forward or backward), Transformer Engine and
    torch loaded different cuDNN versions, attention is unfused without being configured so, or attention differs from
    torch's SDPA.
    """
    te = VARIANTS[model.variant].te
    if any(getattr(module, "fp8_gradients", False) for module in model.modules()):
        precision.require("block", HEAD_GRADIENTS_ADVICE)
    is_te = te and precision.te.name == "transformer_engine"
    lines = [_check_cudnn(), te_backend.describe_gpu()] if is_te else []
    # torch.compile would need a minute to compile for this batch shape
    eager = nullcontext() if te else torch.compiler.set_stance("force_eager")
    with eager, count_gemms(model, precision) as gemms:
        _run_random_batch(model, seed)
    reset_fp8_state(model, precision)
    if problem := gemms.problem():
        raise StartupCheckError(problem, code="fp8_gemms")
    lines += gemms.lines()
    if gemms.ran:
        lines.append(
            f"FP8 GEMMs in the startup check: {gemms.forward.total()} forward, {gemms.backward} backward"
        )
    if te:
        attention = verify_attention(
            model.config, precision, attention_backend, seq_length, model.document_mask
        )
        return [*lines, attention]
    lines.append("attention: transformers with torch SDPA")
    if model.compiled:
        lines.append("torch.compile: the decoder layers and the loss are compiled during the first step")
    elif precision.torchao and not precision.emulated:
        lines.append(
            "warning: torchao's FP8 without torch.compile is slower than bf16, because scaling and rounding "
            "run as separate kernels; set model.compile to true"
        )
    return lines


@contextmanager
def verify_fp8(model: nn.Module, precision: Precision, passes: int = 1) -> Iterator[None]:
    """Check that the forward and backward passes inside this context manager run the planned FP8 GEMMs.

    Models of the variants hf and torchao are not checked, because their layers may be compiled and compiled GEMMs
    cannot be counted.

    Args:
        passes: number of forward and backward passes inside the context.

    Raises StartupCheckError if the FP8 GEMMs that ran differ from the planned ones.
    """
    if not uses_transformer_engine(model):
        yield
        return
    with count_gemms(model, precision) as gemms:
        yield
    if problem := gemms.problem(passes):
        raise StartupCheckError(problem, code="fp8_gemms")


def backend_in_use(model: nn.Module, precision: Precision) -> str:
    """Return the name and version of the package that provides the modules of `model`."""
    if not VARIANTS[model.variant].te:
        return torchao_fp8.version(precision.emulated) if precision.torchao else "transformers' own modules"
    return precision.te.version


def attention_in_use(model: nn.Module, precision: Precision) -> str:
    """Return the name of the attention backend that the last forward pass used."""
    if not VARIANTS[model.variant].te:
        return "torch SDPA"
    return te_backend.attention_backend_in_use(precision.te)


def check_attention(model: nn.Module, precision: Precision, checked: str) -> None:
    """Check after the first training step that the step used the attention backend that the startup check verified.

    The training batch has a different shape from the startup batch, so Transformer Engine may choose a different
    backend.

    Args:
        checked: the attention backend that the startup check verified.

    Raises StartupCheckError if the step used a different backend.
    """
    ran = attention_in_use(model, precision)
    # cuDNN's kernel, named after the comma, also depends on the memory layout of q, k and v
    if ran.split(",")[0] != checked.split(",")[0]:
        raise StartupCheckError(
            f"the startup check verified attention backend {checked}, but the first step used {ran}. Transformer "
            "Engine may choose a different backend for a different batch size. Set model.attention_backend to "
            f"{ran.split()[0]}, or change per_device_train_batch_size",
            code="attention_changed",
            key="model.attention_backend",
        )


def _check_cudnn() -> str:
    theirs, torchs = te_backend.cudnn_versions()
    if theirs != torchs:
        raise StartupCheckError(
            f"Transformer Engine loaded cuDNN {theirs}, but torch loaded cuDNN {torchs}. Mixing two versions "
            "makes attention slow. Start training with run_training.sh, or set CUDNN_HOME to the folder of "
            "the package nvidia.cudnn and put its lib folder first in LD_LIBRARY_PATH",
            code="two_cudnns",
            key="CUDNN_HOME",
        )
    return f"Transformer Engine and torch use the same cuDNN version, {theirs}"


def _run_random_batch(model: nn.Module, seed: int) -> None:
    """Run one forward and backward pass on random tokens and discard the gradients."""
    device = model.lm_head.weight.device
    unit = 2 * FP8_TRAIN_ROW_MULTIPLE  # mxfp8 requires a multiple of 32
    tokens = max(unit, min(PROBE_TOKENS, model.config.max_position_embeddings) // unit * unit)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), generator=generator).to(device)
    documents = None
    if model.document_mask:
        documents = random_documents(1, tokens, tokens / 4, generator).to(device)
    model.train()
    model(ids[:, :-1], labels=ids[:, 1:], documents=documents).loss.backward()
    model.zero_grad(set_to_none=True)


def verify_attention(
    config: MistralConfig, precision: Precision, requested: str, seq_length: int, document_mask: bool
) -> str:
    """Compare Transformer Engine's attention with torch's SDPA and return a log line with the relative errors.

    Args:
        requested: the configured attention backend.
        seq_length: number of tokens per sequence in the comparison.

    Raises StartupCheckError if attention is unfused although a different backend is configured, or its results differ
    from SDPA.
    """
    error_out, error_grad = attention_errors(config, precision, seq_length, document_mask=document_mask)
    backend = te_backend.attention_backend_in_use(precision.te)
    if backend == te_backend.NO_ATTENTION:
        raise StartupCheckError(
            "Transformer Engine did not report an attention backend. The installed version is probably not "
            "supported. Install the supported version with pip install -r requirements-gpu.txt",
            code="no_attention",
        )
    if backend == "unfused" and requested != "unfused":
        raise StartupCheckError(
            "Transformer Engine chose unfused attention. Unfused attention is slow and needs memory that grows with "
            "the square of the sequence length. To see the reason for the choice, set NVTE_DEBUG=1 "
            "NVTE_DEBUG_LEVEL=2. To use unfused attention anyway, set model.attention_backend to unfused",
            code="unfused_attention",
            key="model.attention_backend",
        )
    tolerance = ATTENTION_TOLERANCE[precision.config.compute]
    if not (error_out <= tolerance and error_grad <= tolerance):
        raise StartupCheckError(
            f"attention backend {backend} differs from SDPA in float32: relative error {error_out:.1e} in the forward "
            f"pass and {error_grad:.1e} in the backward pass, but at most {tolerance:.0e} is allowed. Choose another "
            "model.attention_backend",
            code="wrong_attention",
            key="model.attention_backend",
        )
    within = " within documents" if document_mask else ""
    return (
        f"attention{within}: {backend}; relative error against SDPA in float32: {error_out:.1e} forward, "
        f"{error_grad:.1e} backward (allowed {tolerance:.0e})"
    )


def attention_errors(
    config: MistralConfig,
    precision: Precision,
    tokens: int = PROBE_TOKENS,
    document_mask: bool = False,
) -> tuple[float, float]:
    """Measure the relative errors (forward, backward) of a model's attention against torch's SDPA in float32.

    The inputs are two random sequences of `tokens` tokens. With `document_mask`, they are divided into random
    documents. The error is |a - b| / |b| in the Frobenius norm. The backward error is the largest of the errors for q,
    k and v.
    """
    generator = torch.Generator().manual_seed(0)
    N, K, D = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    inputs = [
        torch.randn(2, tokens, heads, D, generator=generator).to(precision.device, precision.dtype)
        for heads in (N, K, K)
    ]
    upstream = torch.randn(2, tokens, N * D, generator=generator).to(inputs[0])
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    documents, qkv = None, leaves
    if document_mask:
        documents = random_documents(2, tokens, tokens / 4, generator).to(precision.device)
        qkv = [t.flatten(0, 1)[None] for t in leaves]
    attention = causal_attention(config, precision.te)
    with precision.te.autocast(enabled=False):
        out = attend(attention, qkv[0], qkv[1], qkv[2], documents).view_as(upstream)
        ours = [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]
    scale = softmax_scale(config)
    truth = sdpa([t.float() for t in inputs], upstream.float(), window_size(config), documents, scale)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]
    return errors[0], float(torch.tensor(errors[1:]).max())  # unlike Python's max, this keeps NaN


def sdpa(
    qkv: list[torch.Tensor],
    upstream: torch.Tensor,
    window: tuple[int, int],
    documents: Documents | None,
    scale: float | None,
) -> list[torch.Tensor]:
    """Compute torch's scaled dot-product attention and its gradients.

    The queries are processed in parts, because the scores of all queries would not fit into memory. Shapes: B batch, T
    tokens, N query heads, K key/value heads, D head dimension.

    Args:
        qkv: q [B, T, N, D], k and v [B, T, K, D].
        upstream: gradient of the output, [B, T, N * D].
        window: sliding window as returned by `window_size`.
        scale: factor of the scores as returned by `softmax_scale`.

    Returns: the output [B, T, N * D] and the gradients of q, k and v.
    """
    q, k, v = (t.transpose(1, 2) for t in qkv)
    outputs, grad_q = [], []
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    positions = torch.arange(q.shape[2], device=q.device)
    fitting = SCORES_AT_A_TIME // (q.shape[0] * q.shape[1] * q.shape[2])
    for rows in positions.split(max(1, min(QUERIES_AT_A_TIME, fitting))):
        age = rows[:, None] - positions[None, : int(rows[-1]) + 1]
        visible = (age >= 0) & (age <= window[0]) if window[0] >= 0 else age >= 0
        # a key belongs to the query's document if its age is at most the query's position in the document
        if documents is not None:
            visible = visible & (age <= documents.positions[:, None, rows, None])
        seen = slice(0, age.shape[1])
        leaves = [t.detach().requires_grad_() for t in (q[:, :, rows], k[:, :, seen], v[:, :, seen])]
        out = F.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], attn_mask=visible, scale=scale, enable_gqa=True
        )
        out = out.transpose(1, 2).flatten(2)
        grads = torch.autograd.grad(out, leaves, upstream[:, rows])
        outputs.append(out.detach())
        grad_q.append(grads[0])
        grad_k[:, :, seen] += grads[1]
        grad_v[:, :, seen] += grads[2]
    gradients = torch.cat(grad_q, 2), grad_k, grad_v
    return [torch.cat(outputs, 1), *(t.transpose(1, 2) for t in gradients)]
