"""precision.fp8_head_gradients: the loss is that of an lm_head in bf16, the gradients are FP8 products."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model.build import build_model
from model.checks.gemm_counts import count_gemms
from model.checks.health import measure, statistics
from model.checks.quantize_hooks import Source, intercept_quantizations, quantizer_slots
from model.decoder import causal_lm_loss
from model.fp8 import te_backend
from model.fp8.modules import full_gradients, use_main_grads
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.head import make_head
from model.te_reference import fp8_gradients
from model.te_reference.quantize import quantize_blocks
from tests.conftest import random_ids, small_config
from tests.model.conftest import backward, gradients, relative

M, H, V = 32, 48, 272


def trained(
    variant: str, vocab_size: int = 64, **precision: Any
) -> tuple[float, dict[str, torch.Tensor], Any]:
    resolved = Precision(PrecisionConfig(**precision))
    model = build_model(small_config(head_dim=64, vocab_size=vocab_size), variant, resolved, seed=3).train()
    with count_gemms(model, resolved) as gemms:
        loss = backward(model)
    return float(loss), gradients(model), gemms


@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
def test_fp8_head_gradients_keep_the_loss(variant: str) -> None:
    loss, exact, gemms = trained(variant, fp8_head_gradients=False)
    same, others, more = trained(variant)
    assert same == loss and not gemms.problem() and not more.problem()
    assert more.forward == gemms.forward and more.backward == gemms.backward + 2
    assert 0.01 < relative(others["lm_head.weight"], exact["lm_head.weight"]) < 0.04
    assert 0 < relative(others["model.norm.weight"], exact["model.norm.weight"]) < 0.05


def test_head_gradients_with_unsupported_sizes() -> None:
    _, found, gemms = trained("te_layer", vocab_size=72)
    assert not gemms.problem() and found["lm_head.weight"].abs().sum() > 0
    assert gemms.backward == 2 * gemms.forward.total()


def test_missing_fp8_head_gradients_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(gradient: Any, x: Any, weight: Any, into: Any, note: Any) -> tuple[Any, ...]:
        return gradient @ weight, gradient.t() @ x

    monkeypatch.setattr(te_backend.load(), "fp8_gradients", plain)
    assert trained("te_layer")[2].problem()


def operands(label: float = -0.9) -> tuple[torch.Tensor, ...]:
    """Hidden states, a weight, and logits' gradients: `label` for one of each row, the others as those of a token whose
    probability is spread; two rows of no token. On the device of the modules."""
    generator, device = torch.Generator().manual_seed(0), Precision(PrecisionConfig()).device
    hidden, weight = (torch.randn(n, H, generator=generator).to(device, torch.bfloat16) for n in (M, V))
    gradient = torch.rand(M, V, generator=generator) * 1e-5
    gradient.scatter_(1, torch.randint(128, (M, 1), generator=generator), label)
    gradient[-2:] = 0.0
    return hidden, weight, gradient.to(device, torch.bfloat16)


def head_gradients(hidden: Any, weight: Any, gradient: Any, into: Any = None) -> tuple[Any, ...]:
    head = make_head(te_backend.load(), H, V, True, params_dtype=torch.bfloat16, device=hidden.device)
    head.weight.data.copy_(weight)
    if into is not None:
        head.fuse_wgrad_accumulation, head.weight.main_grad = True, into
    leaf = hidden.clone().requires_grad_()
    out = head(leaf.view(2, M // 2, H))
    with torch.no_grad():
        assert torch.equal(out, head(leaf.view(2, M // 2, H)))
        torch.testing.assert_close(
            out.view(M, V).float(), hidden.float() @ weight.float().t(), rtol=2**-8, atol=1e-4
        )
    out.backward(gradient.view_as(out))
    return leaf.grad, head.weight.grad


def test_small_gradient_entries_are_kept() -> None:
    """Those beyond the 128 of the label: with one scale for all of them they were zero in e4m3."""
    hidden, weight, gradient = operands()
    weight[:128] = 0  # what reaches the hidden states comes of the small ones
    of_hidden, of_weight = head_gradients(hidden, weight, gradient)
    assert relative(of_hidden, gradient.float() @ weight.float()) < 0.05
    assert relative(of_weight[128:], (gradient.float().t() @ hidden.float())[128:]) < 0.05
    assert not of_hidden[-2:].any()


@pytest.mark.parametrize("labels", [16 * 64, 15 * 64, 14 * 64, 12 * 64])
def test_gradient_of_label_entries(labels: int) -> None:
    """Early in a training all are -1 / how many: rounded alike, gradients were 5 % too long with 15 micro-batches."""
    hidden, weight, gradient = operands(label=-1 / labels)
    _, of_weight = head_gradients(hidden, weight, gradient)
    expected = gradient.float().t() @ hidden.float()
    assert float((of_weight * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=4e-3)


@pytest.mark.parametrize("keys", [{"recipe": "block"}, {"recipe": "current", "power_2_scales": True}])
def test_fully_fp8_head_has_fp8_gradients(keys: dict[str, Any]) -> None:
    """Of 112 labels the entries are -1 / 112 (1 - 1 / 4096), which e4m3 with powers of two rounds by -1.5 %."""
    found = []
    for how in ({**keys, "bf16_modules": []}, {"compute": "bf16"}):
        precision = Precision(PrecisionConfig(**how))
        model = build_model(
            small_config(head_dim=64, vocab_size=4096), "te_linear", precision, seed=3
        ).train()
        ids = random_ids(model.config, 2, 57).to(precision.device)
        model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss.backward()
        found.append(model.lm_head.weight.grad.double())
    fp8, exact = found
    assert float((fp8 * exact).sum() / exact.square().sum()) == pytest.approx(1, abs=6e-3)


def test_head_weight_gradient_uses_main_grad() -> None:
    expected = head_gradients(*operands())[1]
    into = torch.ones(V, H, device=expected.device)
    _, grad = head_gradients(*operands(), into=into)
    assert grad is None
    assert relative(into - 1, expected) < 3e-3  # not rounded to bf16


def seen_in(head: Any, step: Any) -> list[list[float]]:
    """Statistics of input, weight and gradient that `head` multiplies in `step`."""
    found: dict[int, list[float]] = {}

    def note(slots: Any, source: Any, codes: torch.Tensor, scale_inv: torch.Tensor) -> None:
        if slot := quantizer_slots(te, head).keys() & set(slots):
            found[slot.pop()[1]] = statistics(measure(source, codes, scale_inv, False))[:4].tolist()

    te = te_backend.load()
    with intercept_quantizations(te, note):
        step()
    return [found[operand] for operand in range(3)]


def cast_on_the_cpu(*matrices: torch.Tensor) -> list[list[float]]:
    """The same of hidden states, weight and gradient, by the reference."""
    found = []
    for matrix, block in zip(matrices, ((128, 1), (128, 128), (1, 128)), strict=True):
        power_2 = block != (1, 128)  # of the gradient the largest of a block is not rounded
        codes, scale_inv = quantize_blocks(matrix.cpu(), block, torch.float8_e4m3fn, power_2_scale=power_2)
        totals = measure(Source("matrix", (matrix.cpu(),)), codes, scale_inv, False)
        found.append(statistics(totals)[:4].tolist())
    return found


def test_health_check_of_head_gradients() -> None:
    hidden, weight, gradient = operands(label=-60.0)  # next to which many of its 128 entries are zero in e4m3
    head = make_head(te_backend.load(), H, V, True, params_dtype=torch.bfloat16, device=hidden.device)
    head.weight.data.copy_(weight)
    out = head(hidden.clone().requires_grad_())
    found, expected = seen_in(head, lambda: out.backward(gradient)), cast_on_the_cpu(hidden, weight, gradient)
    assert expected[2][0] > 0.1
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.gpu
def test_health_check_of_fused_loss_gradient() -> None:
    te, (hidden, weight, _) = te_backend.load(), operands()
    head = make_head(te, H, V, True, params_dtype=torch.bfloat16, device=hidden.device)
    head.weight.data.copy_(weight)
    labels = some_logits(M)[1]
    loss = head(hidden.clone().requires_grad_(), labels=labels)
    logits, statistics_of_loss = te.linear(hidden, head.weight.detach()), te.fp8_cross_entropy.forward
    _, kept = statistics_of_loss(logits, labels)
    fused: Any = importlib.import_module("model.fused.cross_entropy")
    gradient = fused.gradient_in_place(logits, kept, torch.tensor(0.125, device="cuda"))
    found = seen_in(head, lambda: (loss * 0.125).backward())
    for ours, theirs in zip(found, cast_on_the_cpu(hidden, weight, gradient), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.gpu
def test_head_gradients_equal_reference_on_gpu() -> None:
    hidden, weight, gradient = operands()
    for into in (None, torch.ones(V, H, device="cuda")):
        ours = te_backend.load().fp8_gradients(gradient, hidden, weight, into)
        others = None if into is None else torch.ones(V, H)
        theirs = fp8_gradients(*(t.cpu() for t in (gradient, hidden, weight)), others)
        assert relative(ours[0].cpu(), theirs[0]) < 4e-3
        if into is None:
            assert relative(ours[1].cpu(), theirs[1]) < 4e-3
        else:
            assert ours[1] is None and relative(into.cpu() - 1, others - 1) < 4e-3


# ---------------------------------------------------------------- with the loss


def some_logits(
    tokens: int, size: int = V, ignored: slice = slice(None, None, 5)
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(tokens, size, generator=generator)).bfloat16()
    logits[3] = -1e4  # but for one entry: a row whose other gradients are zero
    logits[3, 7] = 10.0
    labels = torch.randint(size, (tokens,), generator=generator)
    labels[ignored] = -100
    device = Precision(PrecisionConfig()).device
    return logits.to(device), labels.to(device)


SOME, ALL = slice(None, None, 5), slice(None)


def torch_cross_entropy() -> SimpleNamespace:
    """Return `fp8_cross_entropy` in torch operations, with the gradient in bf16."""

    def forward(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        counted = (labels != -100).sum().clamp(min=1)
        losses = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="none")
        return losses.sum() / counted, (labels, logits.float().logsumexp(-1, keepdim=True), counted)

    def gradient(logits: torch.Tensor, statistics: Any, upstream: torch.Tensor) -> torch.Tensor:
        labels, log_totals, counted = statistics
        exact = (logits.float() - log_totals).exp()
        is_label = labels[:, None] == torch.arange(logits.shape[1], device=logits.device)
        exact = (exact - is_label.float()) * (labels != -100)[:, None]
        return (exact * upstream / counted).to(logits.dtype)

    return SimpleNamespace(forward=forward, gradient=gradient)


def use_torch_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lm_head compute the loss, also without a GPU."""
    te = te_backend.load()
    if te.fp8_cross_entropy is None:
        monkeypatch.setattr(te, "fp8_cross_entropy", torch_cross_entropy())
        monkeypatch.setattr(te, "cross_entropy", lambda logits, labels: causal_lm_loss(logits, labels))


def double_gradient_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Double the loss gradient of tokens that are not the whole batch."""
    loss = te_backend.load().fp8_cross_entropy
    right = loss.gradient

    def wrong(logits: torch.Tensor, statistics: Any, upstream: torch.Tensor) -> Any:
        labels, _, counted = statistics
        return right(logits, statistics, upstream * (1 + ((labels != -100).sum() < counted)))

    monkeypatch.setattr(loss, "gradient", wrong)


@pytest.mark.parametrize("tied", [False, True])
def test_head_gradients_in_parts(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 320 tokens, in one part and in parts of 128, most labels are in the first part."""
    use_torch_cross_entropy(monkeypatch)
    precision = Precision(PrecisionConfig(recipe="current"))
    config = small_config(head_dim=64, vocab_size=V, num_hidden_layers=1, tie_word_embeddings=tied)
    ids = random_ids(config, 2, 161).to(precision.device)
    labels = ids[:, 1:].clone()
    labels[0, ::5], labels[1, 20:] = -100, -100

    def gradients_in(rows: int, main_grad: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("model.head.HEAD_ROWS", rows)
        made = Precision(replace(precision.config, **changes), precision.device)
        model = build_model(config, "te_layer", made, seed=3, initialization="normal").train()
        if main_grad:
            use_main_grads(model, made)
        (model(ids[:, :-1], labels=labels).loss / 2).backward()
        weight = model.lm_head.weight
        assert (weight.grad is None) == (main_grad and not tied)
        return full_gradients(model)

    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    exact = gradients_in(320, fp8_head_gradients=False)
    one, parts = gradients_in(320), gradients_in(128)
    whole, added = gradients_in(320, main_grad=True), gradients_in(128, main_grad=True)
    for found in (one, parts, whole, added):
        assert relative(found[name], exact[name]) < 0.04
        assert float((found[name] * exact[name]).sum() / exact[name].square().sum()) == pytest.approx(
            1, abs=0.01
        )
    assert torch.equal(parts["model.norm.weight"], one["model.norm.weight"])
    assert relative(added[name], whole[name]) < 1e-5
    if not tied:  # added in float32, and rounded once
        assert torch.equal(parts[name], added[name].bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("ignored", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("size", [V, 2 * 4096, 4096 + 37])
def test_cross_entropy_kernels_equal_torch(size: int, ignored: slice) -> None:
    kernels: Any = importlib.import_module("model.fused.cross_entropy")
    logits, labels = some_logits(48, size, ignored)
    exact = logits.float().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=-100, reduction="sum")
    expected = losses / max(1, int((labels != -100).sum()))
    (expected / 8).backward()
    leaf = logits.view(4, 12, size).clone().requires_grad_()
    loss = kernels.cross_entropy(leaf * 1, labels.view(4, 12))
    assert loss.shape == () and loss.item() == pytest.approx(float(expected.detach()), rel=1e-6)
    (loss / 8).backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad.view(48, size).float(), exact.grad, rtol=2**-8, atol=1e-9)
    assert not leaf.grad.view(48, size)[ignored].any()
    with pytest.raises(RuntimeError):  # the logits hold their gradient now
        loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("ignored", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("tokens", [128, 144])
@pytest.mark.parametrize("power_2_scales", [False, True])
def test_fused_fp8_loss_gradient_equals_cast(tokens: int, ignored: slice, power_2_scales: bool) -> None:
    """Squares at both edges are partial."""
    kernels: Any = importlib.import_module("model.fused.cross_entropy")
    logits, labels = some_logits(tokens, ignored=ignored)
    upstream, (_, statistics) = (
        torch.tensor(0.125, device="cuda"),
        kernels.loss_and_statistics(logits, labels),
    )
    # as Transformer Engine pads them; nothing may stay as it is here
    shapes = (tokens, V), (-(-V // 128), tokens), (V, tokens), (-(-tokens // 128), V)
    rows, row_scales, columns, column_scales = made = [
        torch.full(shape, 77, dtype=dtype, device="cuda")
        for shape, dtype in zip(shapes, (torch.uint8, torch.float32) * 2, strict=True)
    ]
    kernels.gradient_in_fp8(logits, statistics, upstream, *made, power_2_scales=power_2_scales)
    gradient = kernels.gradient_in_place(logits.clone(), statistics, upstream)
    of_rows, of_columns = (
        quantize_blocks(gradient, block, torch.float8_e4m3fn, power_2_scale=power_2_scales)
        for block in ((1, 128), (128, 1))
    )
    assert torch.equal(rows, of_rows[0].view(torch.uint8)) and torch.equal(row_scales, of_rows[1].t())
    assert torch.equal(columns, of_columns[0].t().view(torch.uint8))
    assert torch.equal(column_scales, of_columns[1])
    assert rows.any() == (ignored != ALL)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 144, 4096])
def test_fused_fp8_loss_gradient_equals_transformer_engine(tokens: int) -> None:
    """Its loss and its casting kernel."""
    te, upstream = te_backend.load(), torch.tensor(0.125, device="cuda")
    logits, labels = some_logits(tokens)
    leaf = logits[None].clone().requires_grad_()
    loss_of_te = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    expected = loss_of_te(leaf, labels[None], reduce_loss=True, ignore_idx=-100).reshape(())
    expected.backward(upstream)
    loss, statistics = te.fp8_cross_entropy.forward(logits, labels)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    ours = te.fp8_cross_entropy.gradient(logits, statistics, upstream)
    theirs = ours._quantizer(leaf.grad[0])
    for name, width in (("rowwise", tokens), ("columnwise", V)):
        data, others = (getattr(x, f"_{name}_data") for x in (ours, theirs))
        # its sum of a row is in another order: now and then a value is rounded to its neighbour
        assert float((data == others).float().mean()) > 0.999 and data.any()
        scales, others = (getattr(x, f"_{name}_scale_inv")[:, :width] for x in (ours, theirs))
        assert float((scales == others).float().mean()) > 0.999


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
def test_fused_loss_is_bit_equal_on_gpu(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, found, gemms = trained(variant)
    monkeypatch.setattr(te_backend.load(), "fp8_cross_entropy", None)
    other, others, _ = trained(variant)
    assert not gemms.problem() and loss == other
    assert all(torch.equal(gradient, others[name]) for name, gradient in found.items())
