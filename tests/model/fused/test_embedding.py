"""model/fused/embedding.py: the gradient against float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu


def check_sum_by_row(
    kernel: Callable[..., torch.Tensor], device: str, ids: list[int], V: int, H: int, dtype: torch.dtype
) -> None:
    """Against float64, each sum within the order of its additions and one rounding; ids that occur in order, out of it,
    within one program and over many; the same twice."""
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "V", "H", "kind"), SUMS)
def test_the_embeddings_gradient_is_exact(
    fused: Callable, device: str, M: int, V: int, H: int, kind: str, dtype: torch.dtype
) -> None:
    check_sum_by_row(fused("embedding").sum_by_row, device, many_ids(M, V, kind), V, H, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "V", "H", "kind"), [(32768, 32000, 2048, "many"), (32768, 64, 512, "one")])
def test_the_gradient_of_large_embeddings_is_exact(
    M: int, V: int, H: int, kind: str, dtype: torch.dtype
) -> None:
    kernel = importlib.import_module("model.fused.embedding").sum_by_row
    check_sum_by_row(kernel, "cuda", many_ids(M, V, kind), V, H, dtype)


def test_the_embedding_is_torchs(fused: Callable, device: str) -> None:
    ids, weight = (
        torch.tensor([[2, 1, 2]], device=device),
        torch.randn(4, 8, device=device, requires_grad=True),
    )
    upstream = torch.randn(1, 3, 8, device=device)
    ours, theirs = (f(ids, weight) for f in (fused("embedding").embedding, nn.functional.embedding))
    assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad(out, weight, upstream)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()
