"""FP8 weights in Hugging Face folders; model/hf_folder.py reads them.

transformers, vLLM and SGLang read these two formats:

| config.json's quantization_config                  | in model.safetensors, for each FP8 matrix NAME [R, C]         |
|----------------------------------------------------|---------------------------------------------------------------|
| compressed-tensors, float-quantized, a scale a row | NAME float8_e4m3fn, NAME_scale [R, 1]                         |
| fp8, weight_block_size [128, 128]                  | NAME float8_e4m3fn, NAME_scale_inv [ceil(R/128), ceil(C/128)] |

In both formats a value is code * scale, whatever the scale is called. The server quantizes activations, by row or by
128 values of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from model.hf_folder import BLOCK_SCALE, ROW_SCALE
from model.te_reference.quantize import BLOCK, Quantized, quantize_blocks


def quantize_rows(weight: torch.Tensor) -> Quantized:
    """Quantize [R, C] with one scale per row: its largest magnitude / 448, or 1 for a row of zeros.

    float64 is converted to float32 first.
    """
    weight = weight.float() if weight.dtype == torch.float64 else weight
    codes, scale = quantize_blocks(weight, (1, weight.shape[1]), torch.float8_e4m3fn, power_2_scale=False)
    return Quantized(codes, scale)


def quantization_config(blocks: bool, unquantized: list[str]) -> dict[str, Any]:
    """Return the quantization_config of config.json for FP8 weights with a scale per row, or per block with `blocks`.

    unquantized: names of the Linears that are not quantized.
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
    """Return the tensors to store for `weights` by name. All FP8 weights must have the same format."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, Quantized):
            suffix = ROW_SCALE if weight.by_row else BLOCK_SCALE
            tensors |= {name: weight.codes, name + suffix: weight.scale}
        else:
            tensors[name] = weight
    return tensors
