"""An lm_head with the forward in bf16 and both gradients as FP8 products.

What FP8 costs an lm_head is the forward: logits of e4m3 operands are off by 3 %, and the loss's gradient with them. Its
gradients cost little, but for the label's entry: it is the largest of a token's row and always rounded the same way, as
probability - 1 of the same few values. What its rounding leaves goes to the hidden states' gradient as it is.
Shape suffixes: M tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def make_head(te: Any, hidden_size: int, vocab_size: int, **placement: Any) -> nn.Module:
    """`te`'s Linear, called as head(hidden, is_first_microbatch=..., labels=...): with labels, int64 of hidden's rows,
    -100 ignored, and gradients enabled, these are FP8 products with current scaling."""

    class Head(te.Linear):  # type: ignore[misc,name-defined]
        def forward(
            self,
            inp: torch.Tensor,
            is_first_microbatch: bool | None = None,
            labels: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if labels is None or not torch.is_grad_enabled():
                return super().forward(inp, is_first_microbatch=is_first_microbatch)
            hidden_MH = inp.reshape(-1, inp.shape[-1])
            logits_MV = _Head.apply(hidden_MH, self.weight, labels.reshape(-1), self, te.fp8_gradients)
            return logits_MV.view(*inp.shape[:-1], -1)

    return Head(hidden_size, vocab_size, bias=False, **placement)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_M: torch.Tensor,
        module: nn.Module,
        gradients: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_MH, weight_VH, labels_M)
        ctx.module, ctx.gradients = module, gradients
        return F.linear(hidden_MH, weight_VH)

    @staticmethod
    def backward(ctx: Any, gradient_MV: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden_MH, weight_VH, labels_M = ctx.saved_tensors
        # an ignored token has a row of zeros, whose first entry is as good as any
        at_M = labels_M.clamp(min=0)
        into = weight_VH.main_grad if getattr(ctx.module, "fuse_wgrad_accumulation", False) else None
        of_hidden, of_weight, rounded_M = ctx.gradients(gradient_MV, hidden_MH, weight_VH, at_M, into)
        left_M = gradient_MV.gather(1, at_M[:, None])[:, 0].float() - rounded_M
        of_hidden.addcmul_(left_M[:, None].to(of_hidden.dtype), weight_VH[at_M])
        return of_hidden, of_weight, None, None, None
