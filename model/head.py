"""An lm_head with the forward in bf16 and both gradients as FP8 products with block scaling.

In a token's gradient of the logits the label's entry is thousands of times larger than most others: e4m3 with one scale
for the tensor makes these zero, and all gradients behind them wrong. A scale for each 128 entries keeps them. What the
forward, in FP8, would add is as large as all that the layers' FP8 leaves room for (docs/performance.md).
Shape suffixes: M tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def make_head(te: Any, hidden_size: int, vocab_size: int, fp8_gradients: bool, **placement: Any) -> nn.Module:
    """`te`'s Linear; with fp8_gradients its gradients are FP8 products, which take sizes that are multiples of 16."""
    if not fp8_gradients:
        return te.Linear(hidden_size, vocab_size, bias=False, **placement)

    class Head(te.Linear):  # type: ignore[misc,name-defined]
        fp8_gradients = True

        def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return super().forward(inp, is_first_microbatch=is_first_microbatch)
            logits_MV = _Head.apply(inp.reshape(-1, inp.shape[-1]), self.weight, self, te.fp8_gradients)
            return logits_MV.view(*inp.shape[:-1], -1)

    return Head(hidden_size, vocab_size, bias=False, **placement)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MH: torch.Tensor, weight_VH: torch.Tensor, module: nn.Module, gradients: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_MH, weight_VH)
        ctx.module, ctx.gradients = module, gradients
        return F.linear(hidden_MH, weight_VH)

    @staticmethod
    def backward(ctx: Any, gradient_MV: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden_MH, weight_VH = ctx.saved_tensors
        into = weight_VH.main_grad if getattr(ctx.module, "fuse_wgrad_accumulation", False) else None
        return *ctx.gradients(gradient_MV, hidden_MH, weight_VH, into), None, None
