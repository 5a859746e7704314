"""The switches of the section "speed" change how a model is computed, not what: parity of each with the plain way."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from model.build import build_model, make_modules
from model.fp8 import te_backend
from model.fp8.gemms import count_gemms
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.variants import SpeedConfig
from tests.conftest import random_ids, small_config

SWITCHES = [f.name for f in dataclasses.fields(SpeedConfig)]
KERNELS = ("cross_entropy", "swiglu", "rotate", "split_and_rotate", "embedding")
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
    """A model of modules without memory, and which of a GPU's fusions are in all of it, by their switches."""
    resolved = Precision(PrecisionConfig(**{"backend": "reference", **precision}), torch.device("meta"))
    fusions: dict[str, Any] = {name: Mock() for name in KERNELS}
    resolved.te = SimpleNamespace(**{**vars(resolved.te), **fusions, "fused_swiglu": te_backend.FUSED_SWIGLU})
    model = make_modules(small_config(num_hidden_layers=3), variant, resolved, speed)
    layers = list(model.model.layers)
    found = {
        "fused_cross_entropy": model.fused_cross_entropy is fusions["cross_entropy"],
        "fused_embedding": model.model.embed_tokens.fused is fusions["embedding"],
    }
    if variant == "te_linear":
        found["fused_swiglu"] = all(layer.mlp.swiglu is fusions["swiglu"] for layer in layers)
        found["fused_rope"] = all(layer.self_attn.rotate is fusions["rotate"] for layer in layers)
    else:
        activations = {getattr(layer.layernorm_mlp, "activation", "") for layer in layers}
        found["fused_swiglu"] = activations == {te_backend.FUSED_SWIGLU}
        split = {layer.self_attention.split_and_rotate for layer in layers}
        found["fused_rope"] = split == {fusions["split_and_rotate"]}
    return model, {switch for switch, is_on in found.items() if is_on}


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
