"""model/serving.py: the FP8 weights for serving are those that a training multiplies with, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MistralForCausalLM

from model.build import build_model
from model.conversion import hf_parts, to_hf_state_dict
from model.fp8.hf_fp8 import Quantized
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import snapshot_fp8_state
from model.serving import TrainedFP8, by_row, differences, untrained_fp8
from tests.conftest import random_ids, refused, small_config

SIZES = {"num_key_value_heads": 4, "intermediate_size": 256}
"""Of a model that blocks of 128 divide."""


def train(
    variant: str, steps: int = 2, levels: dict[str, str] | None = None, **keys: Any
) -> tuple[Any, Any, dict, dict, dict]:
    """A model, with modules at `levels`, that took some steps: configurations, weights, FP8 state, and the FP8 copies
    that its modules keep in the next step's first forward, by module and GEMM."""
    config, precision_config = small_config(**SIZES), PrecisionConfig(**keys)
    precision = Precision(precision_config, levels=levels)
    model: Any = build_model(config, variant, precision, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        ids = random_ids(config, 2, 33, step).to(precision.device)
        model(ids[:, :-1], labels=ids[:, 1:], is_first_microbatch=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.cpu() for name, tensor in to_hf_state_dict(model).items()}
    state = {name: tensor.cpu() for name, tensor in snapshot_fp8_state(model, precision).items()}
    model(random_ids(config, 2, 32, 9).to(precision.device), is_first_microbatch=True)
    copies = {
        f"{name}.{gemm}": kept
        for name, module in model.named_modules()
        for gemm, kept in enumerate(getattr(module, "_fp8_workspaces", {}).values())
    }
    return config, precision_config, weights, state, copies


def expected(config: Any, copies: dict) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of the Hugging Face tensors of the layers in the FP8 copies of a model."""
    parameters = {
        "layernorm_mlp.0": "layernorm_mlp.fc1_weight",
        "layernorm_mlp.1": "layernorm_mlp.fc2_weight",
    }
    out = {}
    for key, kept in copies.items():
        end = next((end for end in parameters if key.endswith(end)), None)
        name = key.removesuffix(end) + parameters[end] if end else f"{key.removesuffix('.0')}.weight"
        first, scale = 0, kept.rows_scale_inv
        for part, rows in hf_parts(name, kept.rows.shape, config):
            blocks = slice(first // 128, (first + rows) // 128)
            out[part] = kept.rows[first : first + rows], scale[blocks] if scale.dim() else scale
            first += rows
    return {name: found for name, found in out.items() if name.startswith("model.layers.")}


@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
@pytest.mark.parametrize(
    "keys",
    [
        dict(recipe="delayed", amax_history_len=2, margin=1),
        dict(recipe="delayed", bf16_modules=["lm_head", "model.layers.0", "*.1.*qkv", "*.1.*v_proj"]),
        dict(recipe="current", bf16_modules=[]),
        dict(recipe="current", power_2_scales=True, amax_epsilon=0.4),
        dict(recipe="block", amax_epsilon=0.1),
        dict(recipe="block", power_2_scales=False),
    ],
    ids=lambda keys: "-".join(str(v) for v in keys.values()),
)
def test_codes_and_scales_are_those_of_training(variant: str, keys: dict) -> None:
    if "bf16_modules" in keys:  # each pattern matches a module of one variant
        keys = keys | {
            "bf16_modules": [
                p for p in keys["bf16_modules"] if ("qkv" if variant == "te_linear" else "v_") not in p
            ]
        }
    config, precision, weights, state, copies = train(variant, **keys)
    trained = TrainedFP8(config, variant, precision)
    quantized = trained.quantize(weights, state)
    wanted = expected(config, copies)
    assert sorted(trained.names) == sorted(quantized) == sorted(wanted)
    for name, (codes, scale) in wanted.items():
        ours = quantized[name]
        assert torch.equal(ours.codes.view(torch.uint8), codes.view(torch.uint8)), name
        assert ours.scale.dtype == torch.float32
        assert torch.equal(ours.scale, scale.repeat(len(codes), 1) if scale.dim() == 0 else scale), name
        assert ours.by_row == (precision.recipe != "block")
        assert ours.codes.float().abs().max() > 16, "the test's weights use the range"
    if "bf16_modules" in keys and keys["bf16_modules"]:
        assert len(wanted) == (6 if variant == "te_linear" else 4)
    name = trained.names[-1]
    codes = quantized[name].codes.view(torch.uint8).clone()
    codes[-1, -1] ^= 1
    altered = quantized | {name: Quantized(codes.view(torch.float8_e4m3fn), quantized[name].scale)}
    assert differences(quantized, quantized) == [] and differences(altered, quantized) == [name]


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_modules_at_other_levels_have_codes_where_the_folder_can_hold_them(recipe: str) -> None:
    """A scale a row or blocks: what the recipe has. The others stay in bf16."""
    names = [
        f"model.layers.{layer}.mlp.{name}"
        for layer in (0, 1)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    levels = dict(zip(names, ["current", "block", "bf16_backward", "bf16"], strict=False))
    config, precision, weights, state, copies = train("te_linear", levels=levels, recipe=recipe)
    trained = TrainedFP8(config, "te_linear", precision, levels)
    quantized = trained.quantize(weights, state)
    absent = names[3:4] if recipe == "block" else names[1:4]
    assert {f"{name}.weight" for name in absent} == weights.keys() - trained.names - _without_fp8(weights)
    for name, ours in quantized.items():
        kept = copies[f"{name.removesuffix('.weight')}.0"]
        assert torch.equal(ours.codes.view(torch.uint8), kept.rows.view(torch.uint8))
        assert torch.equal(ours.scale, kept.rows_scale_inv.expand_as(ours.scale))
    assert trained.recipes == (["delayed", "current"] if recipe == "delayed" else [recipe])


def _without_fp8(weights: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in weights if "_proj." not in name}


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_codes_and_scales_are_those_of_transformer_engine(variant: str, recipe: str) -> None:
    """As the test above; what Transformer Engine keeps on a GPU, its block scales without their padding."""

    def of(kept: Any) -> SimpleNamespace:
        if recipe != "block":
            rows, scale = kept._data, kept._scale_inv.reshape(())
        else:
            rows = kept._rowwise_data
            scale = kept._rowwise_scale_inv[: rows.shape[0] // 128, : rows.shape[1] // 128]
        return SimpleNamespace(rows=rows.cpu().view(torch.float8_e4m3fn), rows_scale_inv=scale.cpu())

    config, precision, weights, state, copies = train(variant, recipe=recipe)
    quantized = TrainedFP8(config, variant, precision).quantize(weights, state)
    copies = {name: of(kept) for name, kept in copies.items() if not name.startswith("lm_head")}
    wanted = expected(config, copies)
    assert sorted(quantized) == sorted(wanted) and len(wanted) == 14
    for name, (codes, scale) in wanted.items():
        assert torch.equal(quantized[name].codes.view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(quantized[name].scale, scale.expand_as(quantized[name].scale)), name


@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_blocks_that_do_not_divide_are_refused(variant: str) -> None:
    config, layer = small_config(), "model.layers.0"  # two key/value heads of 32
    with refused(PrecisionError, code="block_dimensions", key=f"{layer}.self_attn.k_proj.weight") as error:
        TrainedFP8(config, variant, PrecisionConfig(recipe="block"))
    assert "(64, 128)" in str(error.value)
    TrainedFP8(config, variant, PrecisionConfig(recipe="current"))
    if variant == "te_linear":  # columns, too
        config = small_config(num_key_value_heads=4, intermediate_size=192)
        kept = ["lm_head", "*gate_proj", "*up_proj"]
        with refused(PrecisionError, code="block_dimensions", key=f"{layer}.mlp.down_proj.weight"):
            TrainedFP8(config, "te_linear", PrecisionConfig(recipe="block", bf16_modules=kept))


def test_a_model_without_fp8_gets_a_scale_a_row() -> None:
    config = small_config()
    with torch.device("meta"):
        hf = MistralForCausalLM(config)
    names = untrained_fp8(hf, PrecisionConfig(compute="bf16", bf16_modules=["model.layers.0"]))
    assert len(names) == 14 and not any("lm_head" in name or "norm" in name for name in names)
    torchao = PrecisionConfig(recipe="rowwise", bf16_modules=["lm_head", "*.0.mlp", "*.k_proj"])
    assert len(untrained_fp8(hf, torchao)) == 14 - 3 - 2
    weight = torch.randn(48, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    (row,) = by_row({"a": weight}, ["a"]).values()
    assert row.by_row and row.scale[3] == 1
    error = (row.dequantize(torch.float32) - weight.float()).abs()
    assert (error <= weight.float().abs() / 16 + row.scale * 2**-10).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(4, 16)
    weight[1, 1] = value
    with refused(PrecisionError, code="not_finite", key="up"):
        by_row({"up": weight}, ["up"])
    config, precision, weights, state, _ = train("te_linear", steps=0, recipe="current")
    weights[name := "model.layers.1.mlp.up_proj.weight"][0, 0] = value
    with refused(PrecisionError, code="not_finite", key=name):
        TrainedFP8(config, "te_linear", precision).quantize(weights, state)
