"""Write FP8 weights to Hugging Face folders. model/hf_folder.py reads them.

transformers, vLLM and SGLang support these two formats for a matrix with R rows and C columns:

| quantization_config in config.json                 | tensors in model.safetensors for each FP8 matrix NAME [R, C]  |
|----------------------------------------------------|---------------------------------------------------------------|
| compressed-tensors, float-quantized, a scale a row | NAME float8_e4m3fn, NAME_scale [R, 1]                         |
| fp8, weight_block_size [128, 128]                  | NAME float8_e4m3fn, NAME_scale_inv [ceil(R/128), ceil(C/128)] |

In both formats, a weight is code * scale, although one format names the scale "scale_inv". The inference server
quantizes activations with one scale per row or per 128 values in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from model.hf_folder import BLOCK_SCALE, ROW_SCALE
from model.te_reference.quantize import BLOCK, Quantized, quantize_blocks


def quantize_rows(weight: torch.Tensor) -> Quantized:
    """Quantize a matrix [R, C] (R rows, C columns) to FP8 with one scale per row.

    The scale is the largest magnitude in the row divided by 448 (the e4m3 maximum), or 1 for a row of zeros. float64
    input is converted to float32 first.
    """
    weight = weight.float() if weight.dtype == torch.float64 else weight
    codes, scale = quantize_blocks(weight, (1, weight.shape[1]), torch.float8_e4m3fn, power_2_scale=False)
    return Quantized(codes, scale)


def quantization_config(blocks: bool, unquantized: list[str]) -> dict[str, Any]:
    """Return the quantization_config entry of config.json for FP8 weights.

    Args:
        blocks: whether each 128 x 128 block has a scale; otherwise each row has a scale.
        unquantized: names of the Linear modules that are not quantized.
    """
    if blocks:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": unquantized,
        }
    fp8 = {"type": "float", "num_bits": 8, "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**fp8, "strategy": "channel", "dynamic": False},
        "input_activations": {**fp8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": unquantized,
    }


def to_stored_tensors(weights: Mapping[str, torch.Tensor | Quantized]) -> dict[str, torch.Tensor]:
    """Return the tensors to store for `weights`, keyed by name. All FP8 weights must have the same format."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, Quantized):
            suffix = ROW_SCALE if weight.by_row else BLOCK_SCALE
            tensors |= {name: weight.codes, name + suffix: weight.scale}
        else:
            tensors[name] = weight
    return tensors
