"""precision.fp8_head_gradients: the loss is that of an lm_head in bf16, the gradients are FP8 products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model.build import build_model
from model.fp8 import te_backend
from model.fp8.gemms import count_gemms
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.head import make_head
from model.te_reference import fp8_gradients
from tests.conftest import random_ids, small_config

M, H, V = 32, 48, 96


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def trained(
    variant: str, levels: dict[str, str] | None = None, **precision: Any
) -> tuple[float, dict[str, torch.Tensor], Any]:
    resolved = Precision(PrecisionConfig(**precision), levels=levels)
    model = build_model(small_config(head_dim=64), variant, resolved, seed=3).train()
    ids = random_ids(model.config, 2, 65).to(resolved.device)
    with count_gemms(model, resolved) as gemms:
        loss = model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}, gemms


@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
def test_the_loss_is_the_same_and_two_more_products_are_fp8(variant: str) -> None:
    loss, gradients, gemms = trained(variant)
    same, others, more = trained(variant, fp8_head_gradients=True)
    assert same == loss and not gemms.problem() and not more.problem()
    assert more.forward == gemms.forward and more.backward == gemms.backward + 2
    assert "its two gradients do (precision.fp8_head_gradients)" in more.lines()[1]
    assert 0.01 < relative(others["lm_head.weight"], gradients["lm_head.weight"]) < 0.04
    assert 0 < relative(others["model.norm.weight"], gradients["model.norm.weight"]) < 0.05


def test_a_module_with_gradients_in_bf16_beside_it_counts_as_one() -> None:
    levels = {"model.layers.0.self_attn.o_proj": "bf16_backward"}
    assert not trained("te_linear", levels, fp8_head_gradients=True)[2].problem()


def test_gradients_that_are_no_fp8_products_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(gradient: Any, x: Any, weight: Any, at: Any, into: Any) -> tuple[Any, ...]:
        return gradient @ weight, gradient.t() @ x, gradient.gather(1, at[:, None])[:, 0].float()

    monkeypatch.setattr(te_backend.load(), "fp8_gradients", plain)
    assert "FP8 GEMMs, not" in trained("te_layer", fp8_head_gradients=True)[2].problem()


def operands(label: float) -> tuple[torch.Tensor, ...]:
    """Hidden states, a weight, and logits' gradients that are `label` at labels and small elsewhere; two rows of no
    token. On the device of the modules."""
    generator, device = torch.Generator().manual_seed(0), Precision(PrecisionConfig()).device
    hidden, weight = (torch.randn(n, H, generator=generator).to(device, torch.bfloat16) for n in (M, V))
    labels = torch.randint(V, (M,), generator=generator).to(device)
    gradient = torch.rand(M, V, generator=generator).to(device) * 1e-3
    gradient.scatter_(1, labels[:, None], label)
    gradient[0, labels[0]] = -1.0  # the largest: by which the others are scaled
    gradient[-2:], labels[-2:] = 0.0, -100
    return hidden, weight, labels, gradient.to(torch.bfloat16)


def head_gradients(hidden: Any, weight: Any, labels: Any, gradient: Any, into: Any = None) -> tuple[Any, ...]:
    head = make_head(te_backend.load(), H, V, params_dtype=torch.bfloat16, device=hidden.device)
    head.weight.data.copy_(weight)
    if into is not None:
        head.fuse_wgrad_accumulation, head.weight.main_grad = True, into
    leaf = hidden.clone().requires_grad_()
    out = head(leaf.view(2, M // 2, H), labels=labels.view(2, M // 2))
    assert torch.equal(out.view(M, V), F.linear(hidden, weight))
    out.backward(gradient.view_as(out))
    return leaf.grad, head.weight.grad


def test_what_rounding_leaves_of_the_label_reaches_the_hidden_states() -> None:
    hidden, weight, labels, gradient = operands(-0.9)  # scaled by 448: 403, which e4m3 rounds to 416
    weight = weight.sign()  # rounded to itself
    of_hidden, of_weight = head_gradients(hidden, weight, labels, gradient)
    assert relative(of_hidden, gradient.float() @ weight.float()) < 0.005
    assert relative(of_weight, gradient.float().t() @ hidden.float()) < 0.05
    assert not of_hidden[-2:].any()


def test_the_weights_gradient_is_added_where_it_belongs() -> None:
    expected = head_gradients(*operands(-0.7))[1]
    into = torch.ones(V, H, device=expected.device)
    _, grad = head_gradients(*operands(-0.7), into=into)
    assert grad is None
    assert relative(into - 1, expected) < 3e-3  # not rounded to bf16


def test_without_labels_or_gradients_it_is_a_linear_module() -> None:
    hidden, weight, labels, _ = operands(-0.9)
    head = make_head(te_backend.load(), H, V, params_dtype=torch.bfloat16, device=hidden.device)
    with torch.no_grad():
        assert not head(hidden, labels=labels).requires_grad
    (expected,) = torch.autograd.grad(F.linear(hidden, head.weight).sum(), head.weight)
    (found,) = torch.autograd.grad(head(hidden).sum(), head.weight)
    assert torch.equal(found, expected)


def test_a_head_that_runs_fp8_anyway_is_refused() -> None:
    with pytest.raises(PrecisionError, match=r"fp8_head_gradients: lm_head runs FP8 as a whole"):
        trained("te_layer", fp8_head_gradients=True, bf16_modules=[])


@pytest.mark.gpu
def test_on_the_gpu_the_gradients_are_the_references() -> None:
    hidden, weight, labels, gradient = operands(-0.9)
    at = labels.clamp(min=0)
    for into in (None, torch.ones(V, H, device="cuda")):
        ours = te_backend.load().fp8_gradients(gradient, hidden, weight, at, into)
        others = None if into is None else torch.ones(V, H)
        theirs = fp8_gradients(*(t.cpu() for t in (gradient, hidden, weight, at)), others)
        assert relative(ours[0].cpu(), theirs[0]) < 4e-3
        if into is None:
            assert relative(ours[1].cpu(), theirs[1]) < 4e-3
        else:
            assert ours[1] is None and relative(into.cpu() - 1, others - 1) < 4e-3
        assert torch.equal(ours[2].cpu(), theirs[2])
