"""Modules at levels above the recipe (precision.on_trouble), and the scales that delayed scaling starts with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from model.build import build_model
from model.checks.gemm_counts import count_gemms
from model.checks.health import HealthCheck, check_due
from model.checks.startup import StartupCheckError, check_startup
from model.fp8.modules import gemm_modules
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import FALLBACK_ORDER, PrecisionConfig
from model.fp8.state import calibrate, fp8_state, load_fp8_state, snapshot_fp8_state
from tests.conftest import numbers, random_ids, refused, small_config
from tests.model.conftest import backward, gradients, relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# of te_linear's modules, one at each level that is above delayed scaling; the first FP8 module among them
LINEAR = {
    "model.layers.0.self_attn.q_proj": "bf16_backward",
    "model.layers.0.self_attn.o_proj": "current",
    "model.layers.1.self_attn.q_proj": "block",
    "model.layers.1.mlp.down_proj": "bf16",
}
LAYER = {
    "model.layers.0.self_attention.layernorm_qkv": "bf16_backward",
    "model.layers.0.layernorm_mlp": "current",
    "model.layers.1.self_attention.proj": "block",
    "model.layers.1.layernorm_mlp": "bf16",
}
OF = {"te_linear": LINEAR, "te_layer": LAYER}


def precision_on(device: str, fallbacks: dict[str, str] | None = None, **keys: object) -> Precision:
    backend = "reference" if device == "cpu" else "transformer_engine"
    return Precision(PrecisionConfig(backend=backend, **keys), torch.device(device), fallbacks)


def model_of(
    variant: str, fallbacks: dict[str, str], device: str = "cpu", checkpointing: bool = False, **keys: object
) -> tuple[nn.Module, Precision]:
    precision = precision_on(device, fallbacks, **keys)
    model = build_model(
        small_config(head_dim=64),
        variant,
        precision,
        seed=3,
        initialization="normal",  # gradients large enough for scales that are not calibrated
        gradient_checkpointing=checkpointing,
    )
    return model.train(), precision


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", OF)
def test_startup_check_counts_gemms_of_each_fallback(variant: str, device: str) -> None:
    """FP8 GEMMs forward and backward, the operands that are looked at, and whose scales are state."""
    fallbacks = OF[variant]
    model, precision = model_of(variant, fallbacks, device)
    names = {level: name for name, level in fallbacks.items()}
    check_startup(model, precision)
    total, matrices = (15, 13) if variant == "te_linear" else (7, 6)
    with count_gemms(model, precision) as gemms:
        backward(model)
    assert (len(gemms.ran), gemms.forward.total(), gemms.backward) == (total - 2, matrices, 2 * matrices)
    assert gemms.report.fallbacks == {names[level]: level for level in ("bf16_backward", "current", "block")}
    assert gemms.report.kept.keys() == {"lm_head", names["bf16"]}

    check = HealthCheck(model, precision)
    with check.collecting():
        backward(model)
    seen = check.totals().isfinite().all(-1)
    exact = check.gemms.index(names["bf16_backward"])
    assert seen[exact].tolist() == [True, True, False]
    assert seen[[row for row in range(len(check.gemms)) if row != exact]].all()
    assert not any(gemm.startswith(names["bf16"]) for gemm in check.gemms)
    with_state = {key.partition(".scaling")[0] for key in fp8_state(model, precision)}
    assert with_state == gemm_modules(model, precision).keys() - fallbacks.keys() - {"lm_head"}


def test_startup_check_detects_missing_fp8_gradient() -> None:
    model, precision = model_of(
        "te_linear", {"model.layers.0.self_attn.q_proj": "bf16_backward"}, recipe="block"
    )
    precision.recipe.backward_override = "high_precision"
    with refused(StartupCheckError, code="fp8_gemms") as error:
        check_startup(model, precision)
    assert numbers(error.value) == [13, 2, 28]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", OF)
@pytest.mark.parametrize("level", FALLBACK_ORDER[1:4])
def test_delayed_scales_update_with_any_first_module(variant: str, level: str, device: str) -> None:
    """Its backward, which is the last one, moves the gradients' scales of all others; they are those of a run in which
    it is delayed."""
    first = next(iter(OF[variant]))
    model, precision = model_of(variant, {first: level}, device)
    for seed in range(3):
        backward(model, seed)
    histories = [t for key, t in fp8_state(model, precision).items() if key.endswith("bwd.amax_history")]
    assert len(histories) == (13 if variant == "te_linear" else 5)
    for history in histories:
        assert ((history[-3:, 0] > 0).tolist(), float(history[0, 0])) == ([True] * 3, 0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_high_precision_backward_uses_unquantized_operands(kind: str, device: str) -> None:
    """The forward is that of block scaling, gradients are those of bf16's GEMMs, which block scaling's are not."""
    precision = precision_on(device, recipe="block")
    te, generator = precision.te, torch.Generator().manual_seed(1)
    options = {"normalization": "RMSNorm"} if kind == "LayerNormLinear" else {}
    placement = {"params_dtype": torch.bfloat16, "device": precision.device}
    weight = torch.randn(128, 256, generator=generator)
    x, upstream = (torch.randn(64, n, generator=generator) for n in (256, 128))
    outputs, grads = {}, {}
    for level in ("block", "bf16_backward", "bf16"):
        module = getattr(te, kind)(256, 128, bias=False, **placement, **options)
        with torch.no_grad():
            module.weight.copy_(weight)
        given = x.to(precision.device, torch.bfloat16).requires_grad_()
        with te.autocast(enabled=level != "bf16", recipe=precision.make_recipe(level)):
            out = module(given)
        out.backward(upstream.to(out))
        outputs[level] = out.detach()
        grads[level] = [given.grad, *(p.grad for p in module.parameters())]
    assert torch.equal(outputs["block"], outputs["bf16_backward"])
    for exact, wanted, quantized in zip(*(grads[n] for n in ("bf16_backward", "bf16", "block")), strict=True):
        assert relative(exact, wanted) < 4e-3 < 2e-2 < relative(quantized, wanted)


def test_fused_mlp_skips_bf16_backward() -> None:
    model, precision = model_of("te_layer", {})
    ladder = {}
    for name in ("model.layers.0.self_attention.proj", "model.layers.0.layernorm_mlp"):
        module, precision.fallbacks = model.get_submodule(name), {}
        while precision.module_recipe(name) != "bf16":
            precision.fallbacks[name] = precision.next_fallback(name, module)[1]
            ladder.setdefault(name.rpartition(".")[2], []).append(precision.fallbacks[name])
    assert ladder == {"proj": list(FALLBACK_ORDER[1:]), "layernorm_mlp": ["current", "block", "bf16"]}
    with pytest.raises(ValueError):
        backward(model_of("te_layer", {"model.layers.0.layernorm_mlp": "bf16_backward"})[0])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", OF)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "fallbacks"])
def test_recomputation_gives_the_same_bits(variant: str, recipe: str) -> None:
    torch.use_deterministic_algorithms(True)
    keys: Any = {"fallbacks": OF[variant]} if recipe == "fallbacks" else {"fallbacks": {}, "recipe": recipe}
    results = []
    for checkpointing in (False, True):
        model, precision = model_of(variant, device="cuda", checkpointing=checkpointing, **keys)
        losses = [backward(model, seed) for seed in range(2)]
        results.append([*losses, *gradients(model).values(), *fp8_state(model, precision).values()])
    assert all(map(torch.equal, *results))


def test_loading_fp8_state_skips_modules_with_fallback() -> None:
    """Loaded as a run does: after the startup check, with which each module has run at its level."""
    before, delayed = model_of("te_layer", {}, amax_history_len=4)
    backward(before)
    saved = snapshot_fp8_state(before, delayed)
    model, precision = model_of("te_layer", LAYER, amax_history_len=4)
    backward(model)
    load_fp8_state(model, precision, saved)
    kept = fp8_state(model, precision)
    assert 0 < len(kept) < len(saved) and all(torch.equal(t, saved[key]) for key, t in kept.items())
    lacking = {key: t for key, t in saved.items() if "layers.0.self_attention.proj" not in key}
    with refused(PrecisionError, code="fp8_state") as error:
        load_fp8_state(model, precision, lacking)
    assert error.value.key.startswith("model.layers.0.self_attention.proj.")


def test_model_with_all_modules_in_bf16_trains() -> None:
    model, precision = model_of("te_layer", {})
    every = dict.fromkeys(gemm_modules(model, precision), "bf16")
    model, precision = model_of("te_layer", every, health_steps=1)
    check_startup(model, precision)
    assert check_due(model, precision, 1) is None and fp8_state(model, precision) == {}
    assert HealthCheck(model, precision).totals().shape[0] == 0
    with count_gemms(model, precision) as gemms:
        backward(model)
    assert gemms.problem() == "" and not gemms.ran


# As many micro-batches as make the gradients of so small a model as small as those of a real one.
ACCUMULATION = 4096


def model_and_batch(**precision: object) -> tuple[nn.Module, Precision, torch.Tensor, torch.Tensor]:
    resolved = Precision(PrecisionConfig(**precision))
    model = build_model(small_config(), "te_layer", resolved, seed=5).train()
    ids = random_ids(model.config, 2, 65).to(resolved.device)
    return model, resolved, ids[:, :-1], ids[:, 1:].contiguous()


def first_gradients(**precision: object) -> dict[str, torch.Tensor]:
    """Of the first pass of a run."""
    model, resolved, inputs, labels = model_and_batch(**precision)
    calibrate(model, resolved, inputs, labels, ACCUMULATION)
    (model(inputs, labels=labels).loss / ACCUMULATION).backward()
    return gradients(model)


def test_calibration_includes_the_first_backward(device: str) -> None:
    exact = first_gradients(compute="bf16")
    # of all matrices, those whose gradient is made of gradients that were cast on their way
    names = [name for name, gradient in exact.items() if "layers" in name and gradient.dim() == 2]

    def errors(found: dict[str, torch.Tensor]) -> list[float]:
        return [relative(found[name], exact[name]) for name in names]

    lost = errors(first_gradients(recipe="delayed", calibration_passes=0))
    kept = errors(first_gradients(recipe="delayed"))
    # measured: 1.00 each with 1 as a scale, 0.064 to 0.097 with calibration, 0.062 to 0.097 with scales of the tensors
    # at hand, which is what FP8 leaves at best; after 2 passes in place of 4 it is 0.19
    best = errors(first_gradients(recipe="current"))
    assert min(lost) > 0.99
    assert all(a < 1.05 * b for a, b in zip(kept, best, strict=True))
    assert max(kept) < 0.105


def test_calibration_changes_only_scales() -> None:
    model, precision, inputs, labels = model_and_batch(recipe="delayed", calibration_passes=2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert calibrate(model, precision, inputs, labels, 1)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    state = fp8_state(model, precision)
    assert any(key.endswith("scaling_bwd.scale") and bool((t > 1e3).any()) for key, t in state.items())
