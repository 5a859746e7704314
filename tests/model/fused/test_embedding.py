"""model/fused/embedding.py: the gradient against float64."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from model.fp8 import te_backend
from tests.model.triton_stand_in import use_stand_in


def check_sum_by_row(
    kernel: Callable[..., torch.Tensor], ids: list[int], V: int, H: int, dtype: torch.dtype
) -> None:
    """Against float64, each sum within the order of its additions and one rounding; ids that occur in order, out of it,
    within one program and over many; the same twice."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gradient = torch.randn(len(ids), H, generator=torch.Generator().manual_seed(1))
    gradient, places = gradient.to(device, dtype), torch.tensor(ids, dtype=torch.int64, device=device)
    ours = kernel(gradient, places, V)
    assert ours.shape == (V, H) and ours.dtype == dtype
    exact = torch.zeros(V, H, dtype=torch.float64, device=device).index_add_(0, places, gradient.double())
    allowed = torch.zeros(V, H, dtype=torch.float64, device=device).index_add_(
        0, places, gradient.double().abs()
    )
    error = (ours.double() - exact).abs()
    assert bool((error <= exact.abs() * torch.finfo(dtype).eps / 2 + allowed * 1e-6).all())
    assert torch.equal(ours, kernel(gradient, places, V))


def many_ids(M: int, V: int, kind: str) -> list[int]:
    generator = torch.Generator().manual_seed(M)
    if kind == "one":
        return [V - 1] * M
    if kind == "few":  # each over several programs, ends at and beside their borders
        return torch.randint(3, (M,), generator=generator).tolist()
    if kind == "borders":
        return [at // 16 for at in range(M)]
    return torch.randint(V, (M,), generator=generator).tolist()


SUMS = [
    (1, 5, 3, "many"), (32, 4, 8, "one"), (33, 4, 8, "one"), (97, 4, 8, "one"), (200, 7, 520, "few"),
    (128, 9, 16, "borders"), (139, 9, 16, "borders"), (150, 40, 48, "many"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("M", "V", "H", "kind"), [*SUMS, (32768, 32000, 2048, "many"), (32768, 64, 512, "one")]
)
def test_the_embeddings_gradient_is_exact_on_the_gpu(
    M: int, V: int, H: int, kind: str, dtype: torch.dtype
) -> None:
    te_backend.load()
    kernel = importlib.import_module("model.fused.embedding").sum_by_row
    check_sum_by_row(kernel, many_ids(M, V, kind), V, H, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
@pytest.mark.parametrize(("M", "V", "H", "kind"), SUMS)
def test_the_arithmetic_of_the_embeddings_gradient(
    monkeypatch: pytest.MonkeyPatch, M: int, V: int, H: int, kind: str
) -> None:
    use_stand_in(monkeypatch)
    module = importlib.import_module("model.fused.embedding")
    monkeypatch.delitem(sys.modules, "model.fused.embedding")
    check_sum_by_row(module.sum_by_row, many_ids(M, V, kind), V, H, torch.bfloat16)
    ids, weight = torch.tensor([[2, 1, 2]]), torch.randn(4, H, requires_grad=True)
    upstream = torch.randn(1, 3, H)
    of_ours = torch.autograd.grad(module.embedding(ids, weight), weight, upstream)[0]
    of_torchs = torch.autograd.grad(nn.functional.embedding(ids, weight), weight, upstream)[0]
    torch.testing.assert_close(of_ours, of_torchs)
    assert torch.equal(module.embedding(ids, weight), nn.functional.embedding(ids, weight))
    assert not torch.equal(of_ours, torch.zeros_like(of_ours))
