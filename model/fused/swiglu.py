"""SwiGLU, silu(gate) * up, with one kernel for the forward pass and one for both gradients (torch: two and five)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _forward(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gradient, gate, up, of_gate, of_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dy = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(of_gate + at, (dy * b * s * (1.0 + a * (1.0 - s))).to(of_gate.dtype.element_ty), mask=inside)
    tl.store(of_up + at, (dy * a * s).to(of_up.dtype.element_ty), mask=inside)


def _programs(size: int) -> tuple[int]:
    return ((size + BLOCK - 1) // BLOCK,)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _forward[_programs(out.numel())](gate, up, out, out.numel(), BLOCK=BLOCK, num_warps=4)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        gradient, of_gate, of_up = gradient.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        _backward[_programs(gate.numel())](
            gradient, gate, up, of_gate, of_up, gate.numel(), BLOCK=BLOCK, num_warps=4
        )
        return of_gate, of_up


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up (https://arxiv.org/abs/2002.05202) for tensors with the same shape and dtype. CUDA only.

    Computes in float32 and rounds once.
    """
    return _SwiGLU.apply(gate, up)
