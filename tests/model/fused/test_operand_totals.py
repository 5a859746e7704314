"""model/fused/operand_totals.py: the sums over an operand against float64, of each kind of source."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.fp8.health import TOTALS, measure
from model.fp8.quantizers import Source
from model.te_reference.quantize import dequantize, quantize_blocks

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BEYOND = {E4M3: 464.0, E5M2: 61440.0}
# Several blocks by rows and by columns, at whose edges there is less; a gate that ends within a tile, and at its end.
SHAPES = [(70, 200), (33, 512)]
CASES = [
    (kind, rounded, dtype, tiles)
    for kind, rounded, dtype in [
        ("matrix", False, E4M3), ("matrix", False, E5M2), ("norm", False, E4M3), ("norm", True, E4M3),
        ("swiglu", False, E4M3), ("swiglu", True, E5M2), ("swiglu_gradient", False, E5M2),
        ("swiglu_gradient", True, E4M3), ("loss_gradient", True, E4M3),
    ]
    for tiles in ((0, 0), (1, 128), (128, 128))
]  # fmt: skip


def source_and_matrix(kind: str, rounded: bool, M: int, N: int, device: str) -> tuple[Source, Tensor]:
    """A source, and in float64 what it stands for."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator)
        return (x * torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator).exp()).bfloat16()

    parts: tuple[Tensor, ...]
    if kind == "matrix":
        parts = (random(M, N),)
        parts[0][3, 5:9] = 0
        exact = parts[0].double()
    elif kind == "norm":
        x, weight = random(M, N), 1 + random(1, N)[0] / 8
        inverse_rms = torch.rsqrt(x.double().square().mean(-1) + 1e-5).float()
        parts, exact = (x, inverse_rms, weight), x.double() * inverse_rms.double()[:, None] * weight.double()
    elif kind == "swiglu":
        parts = (random(M, 2 * N),)
        gate, up = parts[0].double().chunk(2, -1)
        exact = F.silu(gate) * up
    elif kind == "loss_gradient":
        logits, labels = (
            (3 * random(M, N).float().clamp(-3, 3)).bfloat16(),
            torch.randint(N, (M,), generator=generator),
        )
        labels[::5] = -100
        wide = logits.double()
        largest, counted, upstream = wide.max(1).values, (labels != -100).sum(), torch.tensor(0.125)
        stats = torch.stack([largest, (wide - largest[:, None]).exp().sum(1)], 1).float()
        parts = logits, labels, stats, counted, upstream
        leaf = wide.requires_grad_()
        loss = F.cross_entropy(leaf, labels, ignore_index=-100) * upstream
        (exact,) = torch.autograd.grad(loss, leaf)
    else:
        parts = random(M, N), random(M, N // 2)
        leaf = parts[0].double().requires_grad_()
        gate, up = leaf.chunk(2, -1)
        (exact,) = torch.autograd.grad(F.silu(gate) * up, leaf, parts[1].double())
    exact = exact.bfloat16().double() if rounded else exact
    return Source(kind, tuple(part.to(device) for part in parts), rounded), exact


def quantized(exact: Tensor, dtype: torch.dtype, tiles: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and inverse scales; one scale for all is such that some elements are cut and some are lost."""
    if tiles != (0, 0):
        return quantize_blocks(exact.float(), tiles, dtype)
    scale = LARGEST[dtype] / float(exact.abs().max()) * 1.5
    scale = scale / 2**9 if dtype == E4M3 else scale
    scaled = (exact.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.to(dtype), torch.tensor(1 / scale, dtype=torch.float32)


def expected_totals(exact: Tensor, codes: Tensor, scale_inv: Tensor, moments: bool) -> list[float]:
    """TOTALS in float64."""
    one = torch.ones_like(codes.float()).to(codes.dtype)
    inverse = scale_inv.double() if scale_inv.dim() == 0 else dequantize(one, scale_inv).double()
    ratio, q = exact.abs() / inverse, codes.float().double()
    powers = [float((exact**power).sum()) * moments for power in (1, 3, 4)]
    return [
        int((exact != 0).sum()),
        int((q != 0).sum()),
        int((ratio > BEYOND[codes.dtype]).sum()),
        float((q * inverse - exact).square().sum()),
        float(exact.square().sum()),
        *powers,
        exact.numel(),
        float(ratio.max() / LARGEST[codes.dtype]),
    ]


@pytest.mark.parametrize(("kind", "rounded", "dtype", "tiles"), CASES)
def test_the_sums_are_those_of_float64(
    device: str, kind: str, rounded: bool, dtype: torch.dtype, tiles: tuple[int, int]
) -> None:
    for shape, moments in product(SHAPES, (True, False)):
        source, exact = source_and_matrix(kind, rounded, *shape, device)
        codes, scale_inv = quantized(exact, dtype, tiles)
        found = measure(source, codes.to(device), scale_inv.to(device), moments).tolist()
        expected = expected_totals(exact, codes, scale_inv, moments)
        if tiles == (0, 0):
            assert expected[1] < expected[0] or expected[2]  # some are lost, or cut
        # what rounds in float32 first may come to the other side of a limit, or of a step of bf16
        slack = 0 if kind == "matrix" else 2
        sizes = {f"x{power}": float(exact.abs().pow(power).sum()) for power in (1, 3, 4)}
        for what, ours, theirs in zip(TOTALS, found, expected, strict=True):
            if what in ("nonzero", "kept", "saturated", "elements"):
                assert abs(ours - theirs) <= slack, (shape, what)
            else:  # odd powers cancel: against the sum of magnitudes
                allowed = sizes[what] * 1e-5 if what in sizes else abs(theirs) * 1e-4
                assert abs(ours - theirs) <= allowed, (shape, what)


def test_memory_in_another_order_makes_no_difference() -> None:
    """A matrix that is a part of rows, codes that are a transpose, scales that lie by columns."""
    x = torch.randn(160, 512, device="cuda").bfloat16()
    codes, scale_inv = (t.cuda() for t in quantize_blocks(x.cpu()[:, :256].contiguous(), (1, 128), E4M3))
    plain = measure(Source("matrix", (x[:, :256].contiguous(),)), codes, scale_inv, True)
    turned = codes.view(torch.uint8).t().contiguous().t().view(E4M3)
    by_columns = scale_inv.t().contiguous().t()
    assert not turned.is_contiguous() and not by_columns.is_contiguous()
    assert torch.equal(measure(Source("matrix", (x[:, :256],)), turned, by_columns, True), plain)


def test_what_is_not_finite_is_not_hidden(device: str) -> None:
    codes = torch.tensor([[1.0, math.nan, 448.0, 0.0]], device=device).to(E4M3)
    for second, beyond in ((math.nan, math.isnan), (2.0, math.isinf)):
        x = torch.tensor([[1.0, second, math.inf, 0.0]], device=device)
        found = measure(Source("matrix", (x,)), codes, torch.ones((), device=device), False)
        of = dict(zip(TOTALS, found.tolist(), strict=True))
        assert [of[what] for what in ("nonzero", "kept", "saturated", "elements")] == [3, 3, 1, 4]
        assert beyond(of["x2"]) and beyond(of["range"]) and math.isnan(of["error2"])
