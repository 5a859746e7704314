"""model/fp8/hf_fp8.py: FP8 weights of Hugging Face folders, read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from model.fp8.hf_fp8 import Quantized, quantize_rows, read_quantized

ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}}
    },
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CODES = (torch.arange(200 * 136).reshape(200, 136) % 251 - 125).float().to(torch.float8_e4m3fn)


def write(folder: Path, quantization: dict | None, tensors: dict[str, torch.Tensor], shard: int = 0) -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    if shard:
        save_torch_state_dict(tensors, folder, max_shard_size=shard)
        assert len(list(folder.glob("*.safetensors"))) > 1
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shard", [0, 5000])
def test_a_scale_a_row(tmp_path: Path, shard: int) -> None:
    scale = torch.arange(1.0, 201.0)[:, None]
    norm = torch.ones(3, dtype=torch.bfloat16)
    tensors = {"norm.weight": norm, "up.weight": CODES, "up.weight_scale": scale.bfloat16()}
    weights = read_quantized(write(tmp_path, ROWS, tensors, shard))
    assert sorted(weights) == ["norm.weight", "up.weight"]
    up = weights["up.weight"]
    assert isinstance(up, Quantized) and up.by_row and up.scale.dtype == torch.float32
    assert torch.equal(up.codes.view(torch.uint8), CODES.view(torch.uint8))
    assert torch.equal(up.dequantize(torch.float32), CODES.float() * scale)
    assert weights["norm.weight"].dtype == torch.bfloat16


def test_a_scale_a_block(tmp_path: Path) -> None:
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    up = read_quantized(write(tmp_path, BLOCKS, {"up.weight": CODES, "up.weight_scale_inv": scale}))[
        "up.weight"
    ]
    assert isinstance(up, Quantized) and not up.by_row
    expected = CODES.float()
    expected[:128, 128:] *= 2
    expected[128:, :128] *= 4
    expected[128:, 128:] *= 8
    assert torch.equal(up.dequantize(torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_type_get_the_codes_of_float32(dtype: torch.dtype) -> None:
    weight = torch.cat(
        (torch.randn(7, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 32))
    ).to(dtype)
    found, expected = quantize_rows(weight), quantize_rows(weight.float())
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale) and found.scale.dtype == torch.float32


def test_a_folder_without_fp8_has_plain_tensors(tmp_path: Path) -> None:
    tensors = {"up.weight": torch.ones(2, 2), "a_scale": torch.ones(1), "a": torch.ones(1)}
    weights = read_quantized(write(tmp_path, None, tensors))
    assert sorted(weights) == ["a", "a_scale", "up.weight"]


@pytest.mark.parametrize(
    ("quantization", "tensors", "problem"),
    [
        (ROWS, {"up.weight": CODES}, "up.weight is FP8 and has no up.weight_scale"),
        (
            ROWS,
            {"up.weight": CODES, "up.weight_scale": torch.ones(1)},
            r"shape \(1,\), up.weight needs \(200, 1\)",
        ),
        (
            BLOCKS,
            {"up.weight": CODES, "up.weight_scale_inv": torch.ones(2, 4)},
            r"\(2, 4\), .* needs \(2, 2\)",
        ),
        (
            ROWS,
            {"up.weight": CODES.float(), "up.weight_scale": torch.ones(200, 1)},
            "up.weight_scale belongs to no FP8 weights",
        ),
        (ROWS, {"up.weight_scale": torch.ones(200, 1)}, "up.weight_scale belongs to no FP8 weights"),
        (BLOCKS | {"weight_block_size": [64, 64]}, {}, "weight_block_size': .64, 64.*is not read here"),
        (BLOCKS | {"activation_scheme": "static"}, {}, "is not read here"),
        (BLOCKS | {"scale_fmt": "ue8m0"}, {}, "is not read here"),
        (ROWS | {"format": "pack-quantized"}, {}, "pack-quantized.*is not read here"),
        ({"quant_method": "awq", "bits": 4}, {}, "'quant_method': 'awq'.*is not read here"),
        (ROWS | {"config_groups": {}}, {}, "is not read here"),
    ],
)
def test_what_is_not_as_it_should_be_is_named(
    tmp_path: Path, quantization: dict, tensors: dict, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        read_quantized(write(tmp_path, quantization, tensors or {"up.weight": torch.ones(2, 2)}))
    assert " more" not in str(error.value)


def test_of_many_problems_five_are_named(tmp_path: Path) -> None:
    for count, ends in ((5, "has no 4_scale"), (6, "has no 4_scale and 1 more")):
        with pytest.raises(ValueError, match=f": 0 is FP8 .*; 4 is FP8 and {ends}$"):
            read_quantized(write(tmp_path, ROWS, {str(i): CODES.clone() for i in range(count)}))


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_quantized(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no model.safetensors and no model.safetensors.index.json"):
        read_quantized(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ValueError, match="model-1.safetensors cannot be read"):
        read_quantized(tmp_path)
    index.write_text("[]")
    with pytest.raises(ValueError, match="index.json cannot be read"):
        read_quantized(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match="model.safetensors is no safetensors file, or one"):
        read_quantized(tmp_path)
