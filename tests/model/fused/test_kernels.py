"""model/fused: the Triton kernels against torch, float64 and the reference, on a GPU."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.build import build_model
from model.checks.health import TOTALS, measure
from model.checks.quantize_hooks import Source
from model.fp8 import te_backend, te_patches
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.te_layer import split_and_rotate
from model.te_reference.attention import RotaryPositionEmbedding, apply_rotary_pos_emb
from model.te_reference.quantize import dequantize, quantize_blocks
from tests.conftest import random_ids, small_config
from tests.model.conftest import BEYOND, E4M3, E5M2, LARGEST, relative

pytestmark = pytest.mark.gpu


def fused(name: str) -> Any:
    """Return the module model.fused.`name`, which cannot be imported without CUDA."""
    return importlib.import_module(f"model.fused.{name}")


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
    (128, 9, 16, "borders"), (139, 9, 16, "borders"), (150, 40, 48, "many"), (32768, 32000, 2048, "many"),
    (32768, 64, 512, "one"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "V", "H", "kind"), SUMS)
def test_embedding_gradient(M: int, V: int, H: int, kind: str, dtype: torch.dtype) -> None:
    """Against float64, each sum within the order of its additions and one rounding; ids that occur in order, out of it,
    within one program and over many; the same twice."""
    kernel = fused("embedding").sum_by_row
    gradient = torch.randn(M, H, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    ids = torch.tensor(many_ids(M, V, kind), dtype=torch.int64, device="cuda")
    ours = kernel(gradient, ids, V)
    assert ours.shape == (V, H) and ours.dtype == dtype
    zeros = torch.zeros(V, H, dtype=torch.float64, device="cuda")
    exact = zeros.index_add(0, ids, gradient.double())
    allowed = zeros.index_add(0, ids, gradient.double().abs())
    error = (ours.double() - exact).abs()
    assert bool((error <= exact.abs() * torch.finfo(dtype).eps / 2 + allowed * 1e-6).all())
    assert torch.equal(ours, kernel(gradient, ids, V))


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


def source_and_matrix(kind: str, rounded: bool, M: int, N: int) -> tuple[Source, Tensor]:
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
    return Source(kind, tuple(part.to("cuda") for part in parts), rounded), exact


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
def test_operand_totals_equal_float64(
    kind: str, rounded: bool, dtype: torch.dtype, tiles: tuple[int, int]
) -> None:
    for shape, moments in product(SHAPES, (True, False)):
        source, exact = source_and_matrix(kind, rounded, *shape)
        codes, scale_inv = quantized(exact, dtype, tiles)
        found = measure(source, codes.to("cuda"), scale_inv.to("cuda"), moments).tolist()
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


def test_operand_totals_with_other_strides() -> None:
    """A matrix that is a part of rows, codes that are a transpose, scales that lie by columns."""
    x = torch.randn(160, 512, device="cuda").bfloat16()
    codes, scale_inv = (t.cuda() for t in quantize_blocks(x.cpu()[:, :256].contiguous(), (1, 128), E4M3))
    plain = measure(Source("matrix", (x[:, :256].contiguous(),)), codes, scale_inv, True)
    turned = codes.view(torch.uint8).t().contiguous().t().view(E4M3)
    by_columns = scale_inv.t().contiguous().t()
    assert not turned.is_contiguous() and not by_columns.is_contiguous()
    assert torch.equal(measure(Source("matrix", (x[:, :256],)), turned, by_columns, True), plain)


def test_operand_totals_with_non_finite_values() -> None:
    codes = torch.tensor([[1.0, math.nan, 448.0, 0.0]], device="cuda").to(E4M3)
    for second, beyond in ((math.nan, math.isnan), (2.0, math.isinf)):
        x = torch.tensor([[1.0, second, math.inf, 0.0]], device="cuda")
        found = measure(Source("matrix", (x,)), codes, torch.ones((), device="cuda"), False)
        of = dict(zip(TOTALS, found.tolist(), strict=True))
        assert [of[what] for what in ("nonzero", "kept", "saturated", "elements")] == [3, 3, 1, 4]
        assert beyond(of["x2"]) and beyond(of["range"]) and math.isnan(of["error2"])


@pytest.mark.parametrize(
    "heads,kv_heads,D,tokens",
    [(32, 8, 64, 256), (8, 2, 16, 40), (4, 2, 128, 33), (3, 1, 80, 17), (2, 2, 8, 16)],
)
def test_split_and_rotate_equals_the_reference(heads: int, kv_heads: int, D: int, tokens: int) -> None:
    kernel = fused("qkv_rope").split_and_rotate
    freqs = RotaryPositionEmbedding(D).to("cuda")(tokens)
    torch.manual_seed(0)
    packed = torch.randn(2, tokens, (heads + 2 * kv_heads) * D, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (kernel, partial(split_and_rotate, apply_rotary_pos_emb)):
        leaf = packed.clone().requires_grad_()
        parts = function(leaf, freqs, heads, kv_heads)
        assert [tuple(p.shape) for p in parts] == [(2, tokens, n, D) for n in (heads, kv_heads, kv_heads)]
        assert all(p.is_contiguous() for p in parts)
        turned = [p.transpose(1, 2) for p in parts]  # as attention's gradients are not contiguous either
        weights = [torch.linspace(-1, 1, p.numel(), device="cuda").view(p.shape) for p in turned]
        sum((p.float() * w).sum() for p, w in zip(turned, weights, strict=True)).backward()
        results.append([*parts, leaf.grad])
    for ours, theirs in zip(*results, strict=True):
        # the same float32 arithmetic but for the last bit of sine and cosine, then one rounding to bf16
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=1e-2)
        assert float((ours == theirs).float().mean()) > 0.999
    assert torch.equal(results[0][2], results[1][2])  # v is only moved


@pytest.mark.parametrize(
    "heads,kv_heads,D,tokens",
    [(16, 8, 128, 2048), (32, 8, 128, 100), (8, 2, 16, 40), (3, 1, 80, 17), (2, 2, 8, 16)],
)
def test_split_and_rotate_with_norms(heads: int, kv_heads: int, D: int, tokens: int) -> None:
    """Against float32, it errs by one rounding to bf16; the torch operations round twice."""
    freqs = RotaryPositionEmbedding(D).to("cuda")(tokens)
    torch.manual_seed(0)
    packed = 3 * torch.randn(2, tokens, (heads + 2 * kv_heads) * D, device="cuda").bfloat16()
    norms = (0.5 + torch.rand(2, D, device="cuda")).bfloat16()
    results = []
    for function, dtype in (
        (fused("qkv_rope").split_and_rotate, torch.bfloat16),
        (partial(split_and_rotate, apply_rotary_pos_emb), torch.float32),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in (packed, *norms)]
        parts = function(leaves[0], freqs, heads, kv_heads, *leaves[1:], 1e-2)
        assert all(p.is_contiguous() for p in parts)
        turned = [p.transpose(1, 2) for p in parts]  # as attention's gradients are not contiguous either
        upstream = [torch.linspace(-1, 1, p.numel(), device="cuda").view(p.shape).bfloat16() for p in turned]
        gradients = torch.autograd.grad(turned, leaves, [g.to(dtype) for g in upstream])
        results.append([*parts, *gradients])
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape and ours.dtype == torch.bfloat16
        assert relative(ours, exact) < 2**-8


@pytest.mark.parametrize("heads,D,tokens", [(32, 64, 256), (8, 32, 33), (3, 80, 17), (1, 8, 16)])
def test_rotate_equals_the_reference(heads: int, D: int, tokens: int) -> None:
    kernel = fused("qkv_rope").rotate
    freqs = RotaryPositionEmbedding(D).to("cuda")(tokens)
    torch.manual_seed(0)
    # neither x nor the gradient is contiguous
    x, upstream = (torch.randn(2, heads, tokens, D, device="cuda").bfloat16().transpose(1, 2) for _ in "ab")
    leaves = [x.detach().requires_grad_() for _ in "ab"]
    ours, theirs = kernel(leaves[0], freqs), apply_rotary_pos_emb(leaves[1], freqs, "bshd", fused=True)
    gradients = [
        torch.autograd.grad(y, leaf, upstream) for y, leaf in zip((ours, theirs), leaves, strict=True)
    ]
    assert ours.is_contiguous() and ours.shape == x.shape
    for a, b in ((ours, theirs), (gradients[0][0], gradients[1][0])):
        torch.testing.assert_close(a, b, rtol=8e-3, atol=1e-2)
        assert float((a == b).float().mean()) > 0.999


@pytest.mark.parametrize("shape", [(2, 33, 80), (1, 1024), (4, 257)])
def test_swiglu_equals_torch(shape: tuple[int, ...]) -> None:
    kernel = fused("swiglu").swiglu
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 3 for _ in range(3))
    # none is contiguous: another order of dimensions, a part of each row, each second value
    parts = gate.mT.contiguous().mT, torch.cat([up, dy], -1)[..., : shape[-1]]
    leaves, strided = [t.detach().requires_grad_() for t in parts], dy.repeat_interleave(2, -1)[..., ::2]
    exact = [t.float().requires_grad_() for t in (gate, up)]
    out, wide = kernel(*leaves), nn.functional.silu(exact[0]) * exact[1]
    results = [out, *torch.autograd.grad(out, leaves, strided)]
    for ours, theirs in zip(results, [wide, *torch.autograd.grad(wide, exact, dy.float())], strict=True):
        assert ours.shape == theirs.shape
        # float32 up to the order of its roundings, then one to bf16
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-6)


def te_kernels() -> Any:
    te_backend.load()  # makes it importable
    return importlib.import_module("transformer_engine_torch")


def of_format(name: str, scale: float) -> Any:
    """Transformer Engine's quantizer of delayed scaling."""
    kernels = te_kernels()
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    scales, amax = torch.full((1,), scale, device="cuda"), torch.zeros(1, device="cuda")
    return tensors.Float8Quantizer(scales, amax, getattr(kernels.DType, f"kFloat8{name}"))


def delayed_swiglu() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward with cast, from where LayerNormMLP takes them."""
    te_backend.load()  # registers the activation
    module = importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")
    forward, _, cast = module._get_act_func_supported_list(Precision(PrecisionConfig()).recipe)[
        te_patches.FUSED_SWIGLU
    ]
    return forward, lambda above, x, quantizer: cast(above, x, quantizer)[1]


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
@pytest.mark.parametrize(("M", "F"), [(16, 80), (4, 16), (36, 48), (136, 1040), (4096, 5632)])
def test_fp8_swiglu_equals_reference(M: int, F: int, name: str) -> None:
    """Against float64: each value within half a step of FP8, the neighbour's code in a thousandth at most (float32's
    rounding); the transposed bytes are those of the rows; largest value and inverse scale as they have to be."""
    swiglu, dswiglu = delayed_swiglu()
    generator = torch.Generator().manual_seed(0)
    x, above = (torch.randn(2, M, w, generator=generator).bfloat16().to("cuda") for w in (2 * F, F))
    leaf = x.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    y = nn.functional.silu(gate) * up
    exact = (y.detach(), torch.autograd.grad(y, leaf, above.double())[0])
    for call, expected, turned in ((swiglu, exact[0], False), (dswiglu, exact[1], True)):
        largest = float(expected.abs().max())
        maker = of_format(name, 400.0 / largest)
        made = call(x, maker) if call is swiglu else call(above, x, maker)
        dtype = E4M3 if name == "E4M3" else E5M2
        codes = made._data.view(dtype)
        assert codes.shape == expected.shape
        assert made._scale_inv.item() == (1 / maker.scale).item()
        assert maker.amax.item() == pytest.approx(largest, rel=1e-6)
        scaled = expected * maker.scale.double()
        step, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        assert bool(
            ((codes.double() - scaled).abs() <= scaled.abs().clamp(min=smallest) * step * 0.501).all()
        )
        others = int((codes.float() != scaled.float().to(dtype).float()).sum())
        assert others <= max(1, codes.numel() // 1000)
        if turned:
            assert not made._transpose_invalid
            assert torch.equal(made._transpose.flatten(1), made._data.flatten(0, 1).t())
        else:
            assert made._transpose is None


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_fp8_swiglu_saturates_like_transformer_engine(name: str) -> None:
    """Beyond the largest value that one, both ways; NaN stays NaN and is no largest value; infinities as theirs."""
    kernels = te_kernels()
    swiglu, dswiglu = delayed_swiglu()
    torch.manual_seed(0)
    x = torch.randn(272, 2 * 208, device="cuda").bfloat16()
    above = torch.randn(272, 208, device="cuda").bfloat16()
    x[3, 7], x[5, 300], above[9, 11] = float("nan"), float("inf"), float("-inf")
    dtype, largest = (torch.float8_e4m3fn, 448.0) if name == "E4M3" else (torch.float8_e5m2, 57344.0)
    for ours, theirs, arguments in ((swiglu, kernels.swiglu, (x,)), (dswiglu, kernels.dswiglu, (above, x))):
        quantizers = [of_format(name, largest) for _ in range(2)]
        made, wanted = ours(*arguments, quantizers[0]), theirs(*arguments, quantizers[1])
        codes, others = (t._data.view(dtype).float() for t in (made, wanted))
        assert int((codes.abs() == largest).sum()) > codes.numel() // 50
        assert torch.equal(codes.isnan(), others.isnan()) and 0 < int(codes.isnan().sum()) < 10
        same = codes.nan_to_num() == others.nan_to_num()
        assert float(same.float().mean()) > 0.999
        counts = [int((t.abs() == largest).sum()) for t in (codes, others)]
        assert abs(counts[0] - counts[1]) <= codes.numel() // 1000
        assert quantizers[0].amax.item() == quantizers[1].amax.item() == float("inf")
    assert torch.equal(made._transpose, made._data.t())


def test_residual_gradients_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sum as with two roundings, but for the second rounding."""
    te = te_backend.load("transformer_engine")
    found = []
    for add in (te.add_residual, torch.add):
        monkeypatch.setattr(te, "add_residual", add)
        precision = Precision(PrecisionConfig(compute="bf16"))
        model = build_model(small_config(num_hidden_layers=3), "te_layer", precision).train()
        ids = random_ids(model.config, 2, 65, 0).to("cuda")
        model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
        found.append(model.model.embed_tokens.weight.grad.float())
    difference = float((found[0] - found[1]).norm() / found[1].norm())
    assert 0 < difference < 0.02


def test_residual_gradients_do_not_outlive_a_failed_backward_pass() -> None:
    te = te_backend.load("transformer_engine")
    block = te.LayerNormLinear(64, 64, normalization="RMSNorm", bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    te.add_residual(x, x * 2).sum().backward()  # no norm takes the gradient, as after an error
    (gradient,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(("M", "F"), [(16, 80), (48, 256), (136, 1040), (4096, 5632)])
def test_packed_swiglu(M: int, F: int) -> None:
    """The output does not depend on packing; values keep 7 bits of the largest in their group of 128; what the backward
    pass makes of them is what it makes of the unpacked values."""
    kernels = fused("swiglu_fp8")
    delayed_swiglu()
    torch.manual_seed(0)
    x = (torch.randn(M, 2 * F, device="cuda") * torch.rand(M, 1, device="cuda").mul(6).exp()).bfloat16()
    above = torch.randn(M, F, device="cuda").bfloat16()
    x[3], x[4, 5] = 0, 3e38
    packed, scale = kernels.empty_packed(x), 400.0 / 50
    plain, made = (
        kernels.swiglu(x, of_format("E4M3", scale)),
        kernels.swiglu(x, of_format("E4M3", scale), packed),
    )
    assert torch.equal(plain._data, made._data)
    values = kernels.unpack(packed.view(torch.bfloat16), F, torch.float32)
    groups = torch.cat([nn.functional.pad(t, (0, -F % 128)) for t in x.float().chunk(2, -1)], -1).unflatten(
        -1, (-1, 128)
    )
    step = (groups.abs().amax(-1, keepdim=True) / 127).expand_as(groups).flatten(1)
    step = torch.cat([t[:, :F] for t in step.chunk(2, -1)], -1)
    assert bool(((values - x.float()).abs() <= step * 0.5001).all())
    gate, up = values.double().chunk(2, -1)
    exact = nn.functional.silu(gate) * up * scale
    turned = kernels.swiglu_transposed(packed, F, made._scale_inv, True).t().view(E4M3).double()
    exact = exact.clamp(-448, 448)
    assert bool(((turned - exact).abs() <= exact.abs().clamp(min=2**-6) * 2**-4 * 1.01).all())
    rounded = values.bfloat16()
    gradients = [
        kernels.dswiglu(above, t, of_format("E5M2", 16.0)) for t in (rounded, packed.view(torch.bfloat16))
    ]
    a, b = (made._data.view(E5M2).float() for made in gradients)
    assert torch.equal(gradients[1]._transpose, gradients[1]._data.t())
    finite = a.isfinite() & b.isfinite()
    assert float((a == b)[finite].float().mean()) > 0.97  # bf16 rounds the unpacked values


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_miscompiled_kernel_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fused("swiglu_fp8")
    dswiglu = module.dswiglu
    assert module.matches_reference(of_format(name, 16.0))

    def miscompiled(above: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
        made = dswiglu(above, x, quantizer)
        made._transpose[-1, -1] ^= 1
        return made

    monkeypatch.setattr(module, "dswiglu", miscompiled)
    assert not module.matches_reference(of_format(name, 16.0))
