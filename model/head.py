"""An lm_head with a bf16 forward pass and FP8 gradient GEMMs with block scaling.

In the logits gradient of a token, the entry for the label is thousands of times larger than most others. With one e4m3
scale per tensor, the small entries would become zero, and the gradients of all earlier layers would be wrong. One scale
per 128 entries preserves them. The forward pass stays in bf16, because FP8 would add as much error there as in all
decoder layers together (docs/validation.md).

If labels are passed, the head also computes the loss. The gradient kernel of the loss then writes FP8 directly, so the
bf16 gradient of the logits is never stored. The backward pass handles `rows` tokens at a time, so the FP8 gradient
of all logits is never stored either. Shape suffixes: M tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from model.checks.gemm_counts import pause_counting
from model.checks.quantize_hooks import Source, report_operand
from model.fp8.recipes import HEAD_ROWS


def make_head(te: Any, hidden_size: int, vocab_size: int, fp8_gradients: bool, **placement: Any) -> nn.Module:
    """Build an lm_head from `te.Linear`.

    With `fp8_gradients`, the gradients of the input and the weight are computed by FP8 GEMMs, and all sizes must be
    multiples of 16.
    """
    if not fp8_gradients:
        return te.Linear(hidden_size, vocab_size, bias=False, **placement)

    class Head(te.Linear):  # type: ignore[misc,name-defined]
        fp8_gradients = True
        rows = HEAD_ROWS  # number of tokens that a part of the backward pass handles

        def forward(
            self,
            inp: torch.Tensor,
            is_first_microbatch: bool | None = None,
            labels: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """Compute the logits, or the mean cross entropy if `labels` is given.

            Args:
                inp: hidden states.
                labels: one token id for each row of hidden states. Labels of -100 are ignored.
            """
            hidden_MH = inp.reshape(-1, inp.shape[-1])
            if labels is not None:
                return _Head.apply(hidden_MH, self.weight, labels.flatten(), self, te)
            if not torch.is_grad_enabled():
                return super().forward(inp, is_first_microbatch=is_first_microbatch)
            logits_MV = _Head.apply(hidden_MH, self.weight, None, self, te)
            return logits_MV.view(*inp.shape[:-1], -1)

    return Head(hidden_size, vocab_size, bias=False, **placement)


class _Head(torch.autograd.Function):
    """Autograd function for an lm_head: returns logits, or the mean cross entropy if labels are given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_M: torch.Tensor | None,
        module: nn.Module,
        te: Any,
    ) -> torch.Tensor:
        ctx.module, ctx.te = module, te
        logits_MV = te.linear(hidden_MH, weight_VH)
        if labels_M is None:
            ctx.save_for_backward(hidden_MH, weight_VH)
            return logits_MV
        loss, statistics = te.fp8_cross_entropy.forward(logits_MV, labels_M)
        ctx.save_for_backward(hidden_MH, weight_VH, logits_MV, *statistics)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden_MH, weight_VH, *of_loss = ctx.saved_tensors
        fused = getattr(ctx.module, "fuse_wgrad_accumulation", False)
        into = weight_VH.main_grad if fused else None
        if not of_loss:
            return *_gradients(ctx, gradient, hidden_MH, weight_VH, into), None, None, None
        logits_MV, labels_M, stats_M2, counted = of_loss
        total: Any = into
        if not fused and len(hidden_MH) > ctx.module.rows:
            total = torch.zeros_like(weight_VH, dtype=torch.float32)
        parts: list[torch.Tensor] = []
        for hidden, logits, labels, stats in zip(
            *(t.split(ctx.module.rows) for t in (hidden_MH, logits_MV, labels_M, stats_M2)), strict=True
        ):
            statistics = labels, stats, counted
            of_logits = ctx.te.fp8_cross_entropy.gradient(logits, statistics, gradient)
            source = Source("loss_gradient", (logits, *statistics, gradient), rounded=True)
            report_operand(ctx.module, 2, source, of_logits)
            with pause_counting() if parts else nullcontext():
                of_hidden, of_weight = _gradients(ctx, of_logits, hidden, weight_VH, total)
            parts.append(of_hidden)
            del of_logits  # before the next part is computed
        if total is not None:
            of_weight = None if fused else total.to(weight_VH.dtype)
        return torch.cat(parts), of_weight, None, None, None


def _gradients(
    ctx: Any, gradient: Any, hidden_MH: torch.Tensor, weight_VH: torch.Tensor, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of the hidden states and of the weight with FP8 GEMMs.

    Args:
        gradient: gradient of the logits.
        into: buffer to which the weight gradient is added, or None to return the weight gradient.
    """

    def note(operand: int, matrix: torch.Tensor, made: Any) -> None:
        report_operand(ctx.module, operand, Source("matrix", (matrix.detach(),)), made)

    return ctx.te.fp8_gradients(gradient, hidden_MH, weight_VH, into, note)
