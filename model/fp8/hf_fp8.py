"""FP8 weights in Hugging Face folders.

Two formats, which transformers, vLLM and SGLang read:

| config.json's quantization_config                  | in model.safetensors, for each FP8 matrix NAME [R, C]         |
|----------------------------------------------------|---------------------------------------------------------------|
| compressed-tensors, float-quantized, a scale a row | NAME float8_e4m3fn, NAME_scale [R, 1]                         |
| fp8, weight_block_size [128, 128]                  | NAME float8_e4m3fn, NAME_scale_inv [ceil(R/128), ceil(C/128)] |

Scales are those of dequantization in both, whatever they are called: a value is code * scale. Activations are quantized
by whoever multiplies, a row (or a row's 128 values) at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model.config import why_not_read
from model.te_reference.quantize import BLOCK, dequantize, quantize_blocks, values_of

ROW_SCALE, BLOCK_SCALE = "_scale", "_scale_inv"
"""What the two formats append to the name of a matrix to name its scales."""


@dataclass(frozen=True)
class Quantized:
    """An FP8 matrix [R, C] whose values are codes * scale.

    codes: float8_e4m3fn [R, C]. scale: float32, [R, 1] (one a row) or [ceil(R/128), ceil(C/128)] (one a block).
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def by_row(self) -> bool:
        return self.scale.shape == (self.codes.shape[0], 1)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, [R, C], multiplied in float32 and rounded once to `dtype`."""
        if self.by_row:
            return (values_of(self.codes) * self.scale).to(dtype)
        return dequantize(self.codes, self.scale, dtype)


def quantize_rows(weight: torch.Tensor) -> Quantized:
    """[R, C] with a scale a row: its largest magnitude / 448; of a row of zeros 1. float64 is taken as float32."""
    weight = weight.float() if weight.dtype == torch.float64 else weight
    codes, scale = quantize_blocks(weight, (1, weight.shape[1]), torch.float8_e4m3fn, power_2_scale=False)
    return Quantized(codes, scale)


def read_quantized(
    folder: str | Path, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor | Quantized]:
    """The weights of a Hugging Face folder by name, on `device`: FP8 ones as codes and scales, all others as they are.
    A folder without FP8 weights has only others.

    Raises ValueError: no weights in safetensors, files missing or damaged; a quantization that is none of the two
    above; codes without scales, scales without codes, or scales of another shape.
    """
    folder = Path(folder)
    suffix = _scale_suffix(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        try:
            tensors |= load_file(file, device=str(device))
        except (SafetensorError, OSError) as error:
            raise ValueError(why_not_read(file) or f"{file} cannot be read ({error})") from error
    if suffix is None:
        return dict(tensors)
    weights: dict[str, torch.Tensor | Quantized] = {}
    problems = []
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors.get(name + suffix)
            if scale is None:
                problems.append(f"{name} is FP8 and has no {name}{suffix}")
                continue
            rows, columns = tensor.shape
            expected = (rows, 1) if suffix == ROW_SCALE else (-(-rows // BLOCK), -(-columns // BLOCK))
            if scale.shape != expected:
                problems.append(f"{name}{suffix} has shape {tuple(scale.shape)}, {name} needs {expected}")
                continue
            weights[name] = Quantized(tensor, scale.float())
        elif not name.endswith(suffix):
            weights[name] = tensor
        elif (codes := tensors.get(name.removesuffix(suffix))) is None or codes.dtype != torch.float8_e4m3fn:
            problems.append(f"{name} belongs to no FP8 weights")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{folder}: " + "; ".join(problems[:5]) + more)
    return weights


def check_files(folder: Path) -> None:
    """Raises ValueError: `folder` has no weights in safetensors, or some that cannot be read; each is named."""
    if problems := [why for file in _weight_files(folder) if (why := why_not_read(file))]:
        raise ValueError("\n".join(problems))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights. Raises ValueError: there are none."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no model.safetensors and no {index.name}: give a Hugging Face folder in that format"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} cannot be read: {error!r}") from error
    return [folder / name for name in sorted(names)]


def quantization_of(folder: str | Path) -> dict[str, Any]:
    """The quantization_config of a Hugging Face folder, {} where its weights are not quantized.

    Raises ValueError: config.json cannot be read.
    """
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _scale_suffix(folder: Path) -> str | None:
    """What names the scales in `folder`; None: it has no FP8 weights. Raises ValueError: another quantization."""
    config = quantization_of(folder)
    if not config:
        return None
    method = config.get("quant_method")
    if method == "fp8":
        given = {key: config.get(key) for key in ("weight_block_size", "activation_scheme")}
        given["scale_fmt"] = config.get("scale_fmt") or "float"
        if given == {
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
            "scale_fmt": "float",
        }:
            return BLOCK_SCALE
    else:
        weights = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
        kinds = [tuple(w.get(key) for key in ("type", "num_bits", "strategy", "symmetric")) for w in weights]
        given = {"quant_method": method, "format": config.get("format"), "weights": kinds}
        if (method, given["format"]) == ("compressed-tensors", "float-quantized") and set(kinds) == {
            ("float", 8, "channel", True)
        }:
            return ROW_SCALE
    raise ValueError(
        f"{folder}: its weights are quantized as {given}, which is not read here; compressed-tensors in FP8 with a "
        f"scale a channel and quant_method fp8 with blocks of {BLOCK} x {BLOCK} are, as train/export.py --format "
        "hf-fp8 writes them"
    )


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
