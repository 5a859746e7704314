"""Quantize the weights of a trained model to FP8 for serving.

For a model trained in Transformer Engine's FP8, the exported codes and scales are those of the GEMMs in training. The
CPU reference implementation, which matches Transformer Engine bit for bit, computes them from checkpoint tensors.
Weights of other models are quantized with one scale per row.

transformers, vLLM and SGLang support these two formats for a matrix with R rows and C columns:

| quantization_config in config.json                 | tensors in model.safetensors for each FP8 matrix NAME [R, C]  |
|----------------------------------------------------|---------------------------------------------------------------|
| compressed-tensors, float-quantized, scale per row | NAME float8_e4m3fn, NAME_scale [R, 1]                         |
| fp8, weight_block_size [128, 128]                  | NAME float8_e4m3fn, NAME_scale_inv [ceil(R/128), ceil(C/128)] |

In both formats, a weight is code * scale, although one format names the scale "scale_inv". The inference server
quantizes activations with one scale per row or per 128 values in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from model.build import make_modules
from model.conversion import Parts, hf_parts, load_hf_state_dict
from model.fp8.modules import apply_precision, bf16_pattern, fp8_modules
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig, forward_recipe
from model.fp8.state import load_fp8_state
from model.hf_folder import BLOCK_SCALE, ROW_SCALE
from model.te_reference.quantize import BLOCK, Quantized, quantize_rows
from model.variants import SpeedConfig

if TYPE_CHECKING:
    from transformers import MistralConfig

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of an FP8 module, and the Hugging Face tensors that it stacks.

    Attributes:
        module: name of the FP8 module.
        gemm: index of the matrix among the module's GEMMs.
        columns: number of columns.
        parts: (name, rows) of each Hugging Face tensor, top to bottom. With per-tensor scaling, these tensors share a
            scale.
    """

    module: str
    gemm: int
    columns: int
    parts: Parts


class TrainedFP8:
    """Exporter for the weights that a te_linear or te_layer model multiplies in FP8 during training.

    lm_head is excluded, because inference servers do not run lm_head in FP8. With a per-tensor recipe, modules that
    fell back to block scaling are also excluded, because an exported folder can contain only one kind of scale.

    Args:
        fallbacks: fallback recipe of each module, keyed by module name (see `Precision`).

    Attributes:
        names: names of the exported Hugging Face tensors.
        blocks: whether each block has its own scale.
        recipes: FP8 recipes of the exported modules.

    Raises PrecisionError if no weight can be exported, or the sizes are not multiples of the 128 x 128 blocks.
    """

    def __init__(
        self,
        config: MistralConfig,
        variant: str,
        precision: PrecisionConfig,
        fallbacks: Mapping[str, str] | None = None,
    ):
        if precision.recipe == "mxfp8":
            raise PrecisionError(
                "weights trained with recipe mxfp8 cannot be exported in FP8, because none of the supported "
                "export formats can store MXFP8. Export with --format hf",
                code="no_stored_format",
                key="precision.recipe",
            )
        reference = dataclasses.replace(precision, backend="reference")
        self.precision = Precision(reference, torch.device("meta"), fallbacks)
        self.model: Any = make_modules(config, variant, self.precision, SpeedConfig.off())
        apply_precision(self.model, self.precision)
        self.blocks = precision.recipe == "block"
        self.matrices = [
            Matrix(name, gemm, weight.shape[1], hf_parts(f"{name}.{parameter}", weight.shape, config))
            for name in fp8_modules(self.model, self.precision).planned
            # a folder holds the scales of one recipe
            if name != "lm_head"
            and (recipe_name := self.precision.module_recipe(name)) != "bf16"
            and (forward_recipe(recipe_name) == "block") == self.blocks
            for gemm, (parameter, weight) in enumerate(_module_matrices(self.model.get_submodule(name)))
        ]
        self.names = [name for matrix in self.matrices for name, _ in matrix.parts]
        self.recipes = [
            *dict.fromkeys(forward_recipe(self.precision.module_recipe(m.module)) for m in self.matrices)
        ]
        if not self.names:
            raise PrecisionError(
                f"no layer of this checkpoint uses FP8 weights with recipe {precision.recipe}, because "
                "precision.bf16_modules and the fallbacks of precision.on_trouble exclude all layers. Export "
                "with --format hf",
                code="no_fp8_module",
            )
        if self.blocks:
            self._check_sizes()

    def _check_sizes(self) -> None:
        uneven = [
            f"{name} {(rows, matrix.columns)}"
            for matrix in self.matrices
            for name, rows in matrix.parts
            if rows % BLOCK or matrix.columns % BLOCK
        ]
        if uneven:
            more = f" and {len(uneven) - 3} more" if len(uneven) > 3 else ""
            raise PrecisionError(
                f"with block scaling, inference servers require weight dimensions divisible by {BLOCK}, but "
                f"this model has {', '.join(uneven[:3])}{more}. Export with --format hf, or train with "
                "precision.recipe current or delayed",
                code="block_dimensions",
                key=uneven[0].partition(" ")[0],
            )

    @torch.no_grad()
    def quantize(self, weights: Weights, fp8_state: dict[str, torch.Tensor]) -> dict[str, Quantized]:
        """Quantize the weights exactly as the next training step would.

        Runs the modules of the CPU reference implementation and returns the FP8 copies that a training step keeps for
        its micro-batches.

        Args:
            weights: tensors keyed by Hugging Face name, in the training dtype.
            fp8_state: scales and amax histories as returned by model/fp8/state.py. Empty for recipes without state.

        Raises PrecisionError if a weight is not finite.
        """
        for matrix in self.matrices:
            self.model.get_submodule(matrix.module).to_empty(device="cpu")
            for name, _ in matrix.parts:
                _check_finite(name, weights[name])
        load_hf_state_dict(self.model, weights)
        load_fp8_state(self.model, self.precision, fp8_state)
        quantized = {}
        for matrix in self.matrices:
            module = self.model.get_submodule(matrix.module)
            if matrix.gemm == 0:
                with self.precision.autocast():
                    inputs = torch.zeros(16, matrix.columns, dtype=self.precision.dtype)
                    module(inputs, is_first_microbatch=True)
            (codes, scales), first = module._fp8_workspaces[matrix.gemm].rows, 0
            for name, rows in matrix.parts:
                if self.blocks:
                    scale = scales[first // BLOCK : (first + rows) // BLOCK]
                else:
                    scale = scales.repeat(rows, 1)
                quantized[name] = Quantized(codes[first : first + rows].clone(), scale.clone())
                first += rows
        return quantized


def differences(
    written: Mapping[str, torch.Tensor | Quantized], quantized: Mapping[str, Quantized]
) -> list[str]:
    """Return the names of FP8 tensors whose codes or scales changed when they were written to disk.

    Args:
        written: tensors read back from disk.
        quantized: tensors before writing.
    """
    return [
        name
        for name, ours in quantized.items()
        if not (
            isinstance(theirs := written.get(name), Quantized)
            and torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
            and torch.equal(ours.scale.view(torch.int32), theirs.scale.view(torch.int32))
        )
    ]


def untrained_fp8(hf_model: nn.Module, precision: PrecisionConfig) -> list[str]:
    """Return the names of the weights to serve in FP8, for a model not trained in FP8 with Transformer Engine.

    These are the weights of all Linear modules except lm_head and the modules that a torchao run kept in bf16.
    """
    patterns = ["lm_head", *(precision.bf16_modules if precision.compute == "fp8" else [])]
    return [f"{name}.weight" for name in linear_names(hf_model) if not bf16_pattern(name, patterns)]


def linear_names(hf_model: nn.Module) -> list[str]:
    """Return the names of the torch.nn.Linear modules of a Hugging Face model."""
    return [name for name, module in hf_model.named_modules() if isinstance(module, nn.Linear)]


def quantize_by_row(weights: Weights, names: list[str]) -> dict[str, Quantized]:
    """Quantize the weights `names` to FP8 with one scale per row, and return only these weights, keyed by name.

    Raises PrecisionError if a weight is not finite.
    """
    for name in names:
        _check_finite(name, weights[name])
    return {name: quantize_rows(weights[name]) for name in names}


def _module_matrices(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a pair (name, weight) for each GEMM in a module, in execution order."""
    return [(name, p) for name, p in module.named_parameters(recurse=False) if p.dim() == 2]


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not tensor.isfinite().all():
        raise PrecisionError(
            f"{name} contains NaN or infinite values, so training diverged before this checkpoint was saved. "
            "Choose an earlier checkpoint",
            code="not_finite",
            key=name,
        )


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
