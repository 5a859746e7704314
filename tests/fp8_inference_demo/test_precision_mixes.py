"""Every mix of FP8 and bf16 matrices in a layer, on each path of the engine, against transformers in float32."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from transformers import MistralForCausalLM

from fp8_inference_demo.forward import Cache, Forward
from fp8_inference_demo.weights import pack
from model.te_reference.quantize import Quantized, quantize_rows
from tests.conftest import small_config

# The matrices of a layer as the engine reads them, and what they are fused of.
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MIXES = [tuple(names) for names in product(*((name, "") for name in GROUPS))]


@pytest.fixture(scope="module")
def model() -> MistralForCausalLM:
    """Sizes that the kernels take, and weights with which attention and MLP each decide the logits."""
    torch.manual_seed(0)
    config = small_config(
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        initializer_range=0.06,
        max_position_embeddings=512,
    )
    return MistralForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [1, 17, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 128, 130))])
@pytest.mark.parametrize("in_fp8", MIXES, ids=lambda names: "+".join(filter(None, names)) or "none")
def test_logits_with_mixed_precisions(
    model: MistralForCausalLM, in_fp8: tuple[str, ...], rows: int, device: str
) -> None:
    """A prompt of so many tokens, and a step of so many rows behind one token each. Up to 16 rows keep activations in
    bf16, more round them to e4m3 (half a step: 3 %). An MLP whose output is 0 is off by 0.87 and more."""
    theirs = copy.deepcopy(model)
    quantized = [module for name in in_fp8 if name for module in GROUPS[name]]
    tensors: dict[str, torch.Tensor | Quantized] = {}
    for name, parameter in theirs.named_parameters():
        stored = quantize_rows(parameter) if name.split(".")[-2] in quantized else parameter.bfloat16()
        parameter.copy_(stored.dequantize(torch.float32) if isinstance(stored, Quantized) else stored)
        tensors[name] = (
            Quantized(stored.codes.to(device), stored.scale.to(device))
            if isinstance(stored, Quantized)
            else stored.to(device)
        )
    weights = pack(tensors, model.config, "fp8" if quantized else "bf16")
    assert {name for name in GROUPS if getattr(weights.layers[0], name).fp8} == set(in_fp8) - {""}

    ids = torch.randint(3, 500, (rows, 2), generator=torch.Generator().manual_seed(1))
    forward = Forward(weights, Cache(weights, rows, 2 * max(rows, 8)))
    found = {"prompt": forward.logits(forward.prefill(ids[None, :, 0].to(device))[0])}
    for position in range(2):
        positions = torch.full((rows,), position, device=device)
        found["step"] = forward.decode(ids[:, position].to(device), positions).float()
    expected = {"prompt": theirs(ids[None, :, 0]).logits[0], "step": theirs(ids).logits[:, 1]}
    for path, logits in found.items():
        error = (logits.cpu() - expected[path]).norm() / expected[path].norm()
        assert error < (0.03 if rows <= 16 or not quantized else 0.15), (path, error)
