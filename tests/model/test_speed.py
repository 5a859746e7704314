"""The switches of the section "speed" change how a model is computed, not what: parity of each with the plain way."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.build import build_model, make_modules
from model.fp8 import te_backend
from model.fp8.gemms import count_gemms
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.modeling_mistral_fp8_trans import FusedTransformerLayer
from model.te_reference.recipe import DelayedScaling, Float8CurrentScaling
from model.te_reference.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from model.te_reference.rotary import split_and_rotate as reference_split
from model.variants import SpeedConfig
from tests.conftest import random_ids, small_config
from tests.model.triton_stand_in import use_stand_in

SWITCHES = [f.name for f in dataclasses.fields(SpeedConfig)]
COMPUTES = [{"compute": "bf16"}, {"recipe": "delayed"}, {"recipe": "current"}, {"recipe": "block"}]


def only(switch: str | None) -> SpeedConfig:
    return dataclasses.replace(SpeedConfig.off(), **({switch: True} if switch else {}))


def passes(speed: SpeedConfig, variant: str = "te_layer", number: int = 2, **precision: object) -> tuple:
    """(losses, gradients of the last pass by name, model) of `number` passes; later ones use learned FP8 scales."""
    resolved = Precision(PrecisionConfig(**precision))
    model = build_model(small_config(head_dim=64), variant, resolved, seed=3, speed=speed).train()
    ids = random_ids(model.config, 2, 65).to(resolved.device)
    losses = []
    for _ in range(number):
        model.zero_grad(set_to_none=True)
        loss = model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: p.grad for name, p in model.named_parameters()}, model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_off_is_everything_off_and_unless_somebody_asks_fusions_are_on() -> None:
    assert not any(dataclasses.asdict(SpeedConfig.off()).values())
    precision = Precision(PrecisionConfig(compute="bf16", backend="reference"))
    model = build_model(small_config(num_hidden_layers=1), "te_layer", precision)
    assert model.speed == SpeedConfig() and [s for s in SWITCHES if getattr(model.speed, s)] == SWITCHES[:5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_on_the_reference_switches_change_no_bit(switch: str, variant: str) -> None:
    losses, gradients, model = passes(only(None), variant)
    others, other_gradients, other_model = passes(only(switch), variant)
    assert losses == others
    assert gradients.keys() == other_gradients.keys()  # the same parameters under the same names
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
    ours, theirs = (fp8_modules(m, m.precision).planned for m in (model, other_model))
    assert ours == theirs


def with_fusions(variant: str, speed: SpeedConfig, **precision: object) -> tuple[nn.Module, set[str]]:
    """A model of modules without memory, and which of the fusions that a GPU has are in it, by their switches."""
    resolved = Precision(PrecisionConfig(**{"backend": "reference", **precision}), torch.device("meta"))
    loss, swiglu, rotate = (lambda: None), (lambda gate, up: None), (lambda x, freqs: None)
    embedding = lambda ids, weight: None  # noqa: E731
    stand_ins = {"cross_entropy": loss, "swiglu": swiglu, "rotate": rotate, "embedding": embedding}
    stand_ins |= {"fused_swiglu": te_backend.FUSED_SWIGLU}
    resolved.te = SimpleNamespace(**{**vars(resolved.te), **stand_ins})
    model = make_modules(small_config(num_hidden_layers=3), variant, resolved, speed)
    found = {"fused_cross_entropy"} if model.fused_cross_entropy is loss else set()
    found |= {"fused_embedding"} if model.model.embed_tokens.fused is embedding else set()
    for layer in model.model.layers:
        if variant == "te_linear":
            fused = {"fused_swiglu"} if layer.mlp.swiglu is swiglu else set()
            fused |= {"fused_rope"} if layer.self_attn.rotate is rotate else set()
        else:
            fused = {"fused_rope"} if isinstance(layer, FusedTransformerLayer) else set()
            activation = getattr(layer.layernorm_mlp, "activation", "swiglu")
            fused |= {"fused_swiglu"} if activation == te_backend.FUSED_SWIGLU else set()
        found |= {f"{switch} of layer" for switch in fused} if layer is model.model.layers[0] else set()
        assert {f"{switch} of layer" for switch in fused} == {switch for switch in found if " " in switch}
    return model, {switch.removesuffix(" of layer") for switch in found}


@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("switch", [None, *SWITCHES])
def test_each_switch_is_its_own_fusion_in_every_layer(switch: str | None, variant: str) -> None:
    fusions = {name for name in SWITCHES if name.startswith("fused")}
    its = {switch} & fusions
    model, found = with_fusions(variant, only(switch))
    assert found == its and model.speed == only(switch)
    others, found = with_fusions(
        variant, dataclasses.replace(SpeedConfig(), **({switch: False} if switch else {}))
    )
    assert found == fusions - its


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32", "fp8"])
def test_the_fused_loss_is_not_for_float16(compute: str) -> None:
    """Transformer Engine has it for bf16 and float32 logits."""
    _, found = with_fusions("te_layer", only("fused_cross_entropy"), compute=compute)
    assert bool(found) == (compute != "fp16")


@pytest.mark.parametrize(
    ("variant", "speed"), [("te_layer", None), ("te_layer", SpeedConfig.off()), ("te_linear", None)]
)
def test_layers_have_their_numbers_and_the_window_of_the_model(
    variant: str, speed: SpeedConfig | None
) -> None:
    """For Transformer Engine, from 1 on; the reference asks for none."""
    precision = Precision(PrecisionConfig(backend="reference"), torch.device("meta"))
    given: list[tuple[int, tuple[int, int]]] = []

    def noted(module: type[nn.Module]) -> type[nn.Module]:
        class Noted(module):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: object, **options: object) -> None:
                given.append((options["layer_number"], options["window_size"]))  # type: ignore[arg-type]
                super().__init__(*arguments, **options)

        return Noted

    te = vars(precision.te)
    names = ("DotProductAttention", "TransformerLayer")
    precision.te = SimpleNamespace(**te | {name: noted(te[name]) for name in names})
    config = small_config(num_hidden_layers=3, sliding_window=24)
    make_modules(config, variant, precision, speed or SpeedConfig())
    assert given == [(number, (23, 0)) for number in (1, 2, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("compute", COMPUTES, ids=lambda c: str(*c.values()))
@pytest.mark.parametrize("switch", [s for s in SWITCHES if s.startswith("fused")])
def test_each_fusion_computes_the_same_on_the_gpu(switch: str, compute: dict, variant: str) -> None:
    """Fused kernels round less often: losses agree within bf16's rounding of the logits, gradients within what FP8
    makes of a value that was rounded to the neighbouring one."""
    losses, gradients, _ = passes(only(None), variant, **compute)
    others, other_gradients, model = passes(only(switch), variant, **compute)
    assert others == pytest.approx(losses, rel=2e-3)
    tolerance = 2e-2 if compute.get("compute") == "bf16" else 0.15
    errors = {name: relative(other_gradients[name], grad) for name, grad in gradients.items()}
    assert max(errors.values()) <= tolerance, max(errors, key=errors.__getitem__)
    with count_gemms(model, model.precision) as gemms:
        ids = random_ids(model.config, 2, 65).to(model.precision.device)
        model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss.backward()
    products = {"te_layer": 6, "te_linear": 14}[variant]
    assert not gemms.problem() and len(gemms.ran) == (0 if compute.get("compute") == "bf16" else products)


@pytest.mark.gpu
def test_the_gradient_of_swiglu_is_cast_once() -> None:
    """The fused cast is nearer to float32 than the way over bf16, and both copies of the gradient are the same."""
    passes(only("fused_swiglu"))  # registers the activation
    kernels = importlib.import_module("transformer_engine_torch")
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    table = importlib.import_module(
        "transformer_engine.pytorch.module.layernorm_mlp"
    )._get_act_func_supported_list
    recipe = Precision(PrecisionConfig(recipe="delayed")).recipe
    cast = table(recipe)[te_backend.FUSED_SWIGLU][2]

    torch.manual_seed(0)
    x = torch.randn(96, 2 * 80, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(96, 80, device="cuda", dtype=torch.bfloat16)

    def quantizer() -> object:
        scale, amax = torch.full((1,), 2000.0, device="cuda"), torch.zeros(1, device="cuda")
        return tensors.Float8Quantizer(scale, amax, kernels.DType.kFloat8E5M2)

    a, b = (t.float().requires_grad_() for t in x.chunk(2, dim=1))
    exact = torch.cat(torch.autograd.grad(nn.functional.silu(a) * b, (a, b), dy.float()), dim=1)
    once_quantizer, twice_quantizer = quantizer(), quantizer()
    _, once = cast(dy, x, once_quantizer)
    _, twice = kernels.bgrad_quantize(kernels.dswiglu(dy, x, None), twice_quantizer)
    once.update_usage(columnwise_usage=True)
    assert torch.equal(once._data.t(), once._transpose)
    assert relative(once.dequantize(), exact) <= relative(twice.dequantize(), exact) * 1.001 <= 0.1
    assert float(once_quantizer.amax) == pytest.approx(float(exact.abs().max()), rel=1e-3)


def check_split_and_rotate(
    kernel: Callable[..., tuple], heads: int, kv_heads: int, D: int, tokens: int
) -> None:
    device = Precision(PrecisionConfig()).device
    freqs = RotaryPositionEmbedding(D).to(device)(tokens)
    torch.manual_seed(0)
    packed = torch.randn(2, tokens, (heads + 2 * kv_heads) * D, device=device, dtype=torch.bfloat16)
    results = []
    for function in (kernel, reference_split):
        leaf = packed.clone().requires_grad_()
        parts = function(leaf, freqs, heads, kv_heads)
        assert [tuple(p.shape) for p in parts] == [(2, tokens, n, D) for n in (heads, kv_heads, kv_heads)]
        assert all(p.is_contiguous() for p in parts)
        turned = [p.transpose(1, 2) for p in parts]  # as attention's gradients are not contiguous either
        weights = [torch.linspace(-1, 1, p.numel(), device=device).view(p.shape) for p in turned]
        sum((p.float() * w).sum() for p, w in zip(turned, weights, strict=True)).backward()
        results.append([*parts, leaf.grad])
    for ours, theirs in zip(*results, strict=True):
        # the same float32 arithmetic but for the last bit of sine and cosine, then one rounding to bf16
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=1e-2)
        assert float((ours == theirs).float().mean()) > 0.999
    assert torch.equal(results[0][2], results[1][2])  # v is only moved


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads,kv_heads,D,tokens", [(32, 8, 64, 256), (4, 2, 128, 33), (3, 1, 80, 17), (2, 2, 8, 16)]
)
def test_split_and_rotate_equals_the_reference(heads: int, kv_heads: int, D: int, tokens: int) -> None:
    check_split_and_rotate(te_backend.load().split_and_rotate, heads, kv_heads, D, tokens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
@pytest.mark.parametrize("heads,kv_heads,D,tokens", [(8, 2, 16, 40), (3, 1, 80, 17), (2, 2, 8, 16)])
def test_the_arithmetic_of_split_and_rotate(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, D: int, tokens: int
) -> None:
    use_stand_in(monkeypatch)
    kernel = importlib.import_module("model.fused.qkv_rope").split_and_rotate
    monkeypatch.delitem(sys.modules, "model.fused.qkv_rope")
    check_split_and_rotate(kernel, heads, kv_heads, D, tokens)


def check_rotate(kernel: Callable[..., torch.Tensor], heads: int, D: int, tokens: int) -> None:
    device = Precision(PrecisionConfig()).device
    freqs = RotaryPositionEmbedding(D).to(device)(tokens)
    torch.manual_seed(0)
    # neither x nor the gradient is contiguous
    x, upstream = (torch.randn(2, heads, tokens, D, device=device).bfloat16().transpose(1, 2) for _ in "ab")
    leaves = [x.detach().requires_grad_() for _ in "ab"]
    ours, theirs = kernel(leaves[0], freqs), apply_rotary_pos_emb(leaves[1], freqs, "bshd", fused=True)
    gradients = [
        torch.autograd.grad(y, leaf, upstream) for y, leaf in zip((ours, theirs), leaves, strict=True)
    ]
    assert ours.is_contiguous() and ours.shape == x.shape
    for a, b in ((ours, theirs), (gradients[0][0], gradients[1][0])):
        torch.testing.assert_close(a, b, rtol=8e-3, atol=1e-2)
        assert float((a == b).float().mean()) > 0.999


HEADS = [(32, 64, 256), (8, 32, 33), (3, 80, 17), (1, 8, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("heads,D,tokens", HEADS)
def test_rotate_equals_the_reference(heads: int, D: int, tokens: int) -> None:
    check_rotate(te_backend.load().rotate, heads, D, tokens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
@pytest.mark.parametrize("heads,D,tokens", HEADS)
def test_the_arithmetic_of_rotate(monkeypatch: pytest.MonkeyPatch, heads: int, D: int, tokens: int) -> None:
    use_stand_in(monkeypatch)
    kernel = importlib.import_module("model.fused.qkv_rope").rotate
    monkeypatch.delitem(sys.modules, "model.fused.qkv_rope")
    check_rotate(kernel, heads, D, tokens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
def test_te_linear_rotates_by_it_where_there_are_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    rotated: list[int] = []

    def rotate(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        rotated.append(x.shape[2])
        return apply_rotary_pos_emb(x, freqs, "bshd", fused=True)

    losses, gradients, _ = passes(SpeedConfig(), "te_linear")
    monkeypatch.setattr(te_backend.load(), "rotate", rotate)
    others, other_gradients, model = passes(SpeedConfig(), "te_linear")
    heads = [model.config.num_attention_heads, model.config.num_key_value_heads]
    assert rotated == heads * model.config.num_hidden_layers * 2 and losses == others
    assert all(torch.equal(gradients[name], gradient) for name, gradient in other_gradients.items())
    with torch.no_grad():
        model(random_ids(model.config, 1, 32))
    assert len(rotated) == 4 * model.config.num_hidden_layers


def check_swiglu(kernel: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    device = Precision(PrecisionConfig()).device
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) * 3 for _ in range(3))
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


SHAPES = [(2, 33, 80), (1, 1024), (4, 257)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_equals_torch(shape: tuple[int, ...]) -> None:
    check_swiglu(te_backend.load().swiglu, shape)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_arithmetic_of_swiglu(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    use_stand_in(monkeypatch)
    kernel = importlib.import_module("model.fused.swiglu").swiglu
    monkeypatch.delitem(sys.modules, "model.fused.swiglu")
    check_swiglu(kernel, shape)


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


def test_fused_swiglu_is_one_more_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for TE's private table and kernels: its own ways stay, the cast is there for delayed scaling only,
    and a TE without the table keeps its own SwiGLU."""
    table = {"swiglu": ("forward", "backward", None), "gelu": ("f", "b", "c")}
    name = "transformer_engine.pytorch.module.layernorm_mlp"
    module = SimpleNamespace(_get_act_func_supported_list=lambda recipe=None: dict(table))
    kernels = SimpleNamespace(dswiglu=lambda dy, x, quantizer: ("cast", dy, x, quantizer))
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", kernels)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    assert te_backend._register_fused_swiglu() == "swiglu"
    monkeypatch.setitem(sys.modules, name, module)
    fused = te_backend._register_fused_swiglu()
    assert fused == te_backend.FUSED_SWIGLU
    for recipe, casts in ((None, False), (DelayedScaling(), True), (Float8CurrentScaling(), False)):
        found = module._get_act_func_supported_list(recipe)
        assert {key: found[key] for key in table} == table
        forward, backward, cast = found[fused]
        assert (forward, backward, cast is not None) == ("forward", "backward", casts)
    cast = module._get_act_func_supported_list(DelayedScaling())[fused][2]
    usage: dict[str, bool] = {}
    quantizer = SimpleNamespace(set_usage=usage.update)
    assert cast("dy", "x", quantizer) == (None, ("cast", "dy", "x", quantizer))
    assert usage == {"columnwise": False}
