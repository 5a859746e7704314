"""FP8 weights in Hugging Face folders, which model/hf_folder.py reads.

Two formats, which transformers, vLLM and SGLang read:

| config.json's quantization_config                  | in model.safetensors, for each FP8 matrix NAME [R, C]         |
|----------------------------------------------------|---------------------------------------------------------------|
| compressed-tensors, float-quantized, a scale a row | NAME float8_e4m3fn, NAME_scale [R, 1]                         |
| fp8, weight_block_size [128, 128]                  | NAME float8_e4m3fn, NAME_scale_inv [ceil(R/128), ceil(C/128)] |

Scales are those of dequantization in both, whatever they are called: a value is code * scale. Activations are quantized
by whoever multiplies, a row (or a row's 128 values) at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from model.hf_folder import BLOCK_SCALE, ROW_SCALE
from model.te_reference.quantize import BLOCK, Quantized, quantize_blocks


def quantize_rows(weight: torch.Tensor) -> Quantized:
    """[R, C] with a scale a row: its largest magnitude / 448; of a row of zeros 1. float64 is taken as float32."""
    weight = weight.float() if weight.dtype == torch.float64 else weight
    codes, scale = quantize_blocks(weight, (1, weight.shape[1]), torch.float8_e4m3fn, power_2_scale=False)
    return Quantized(codes, scale)


def quantization_config(blocks: bool, unquantized: list[str]) -> dict[str, Any]:
    """What config.json says of FP8 weights with a scale a row, or with `blocks` a block. unquantized: the Linears that
    have none."""
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


def flat(weights: Mapping[str, torch.Tensor | Quantized]) -> dict[str, torch.Tensor]:
    """The tensors of a folder that holds `weights`, all of one format, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, Quantized):
            suffix = ROW_SCALE if weight.by_row else BLOCK_SCALE
            tensors |= {name: weight.codes, name + suffix: weight.scale}
        else:
            tensors[name] = weight
    return tensors
