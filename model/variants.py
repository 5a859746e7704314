"""Model variants, attention backends and the "speed" section of the training configuration.

This module does not import torch, so commands can check their arguments quickly.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic.dataclasses import dataclass

from model.fp8.recipes import RECIPES, PrecisionConfig
from model.keys import STRICT, option


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model variant and the features it supports.

    Attributes:
        te: whether the modules come from Transformer Engine instead of transformers. Only Transformer Engine variants
            support document masks and CUDA graphs. Only the other variants support torch.compile.
        recipes: supported FP8 recipes.
    """

    name: str
    te: bool
    recipes: tuple[str, ...]


_TE = tuple(r.name for r in RECIPES.values() if r.package == "te")
_TORCHAO = tuple(r.name for r in RECIPES.values() if r.package == "torchao")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("hf", te=False, recipes=()),
        Variant("te_linear", te=True, recipes=_TE),
        Variant("te_layer", te=True, recipes=_TE),
        Variant("torchao", te=False, recipes=_TORCHAO),
    )
}

# How the weights of a new model are drawn (model/initialization.py).
Initialization = Literal["scaled", "normal"]

# Values of gradient_checkpointing: keep all activations, all but those of SwiGLU, or only the inputs of the layers.
GradientCheckpointing = bool | Literal["mlp"]

# Environment variables that select an attention backend of Transformer Engine.
ATTENTION_BACKENDS = {
    "auto": {},
    "fused": {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    "flash": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"},
    "unfused": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"},
}

# Head dimensions at which FlashAttention-4 is faster than cuDNN on an H200, in FP8 and in bf16, with and without
# deterministic kernels.
FLASH_HEAD_DIMS = (64, 128, 256)


# docs/performance.md lists the measured effect of each switch. With all switches off, a model runs only kernels of
# Transformer Engine and torch.
@dataclass(config=STRICT)
class SpeedConfig:
    """The "speed" section of the training configuration. Switches that need a GPU have no effect on a CPU."""

    fused_rope: bool = option(
        "Apply rotary embeddings in fused kernels (te_linear and te_layer only). In te_layer, these kernels also apply "
        "the norms of q and k (Qwen3).",
        True,
    )
    fused_swiglu: bool = option(
        "Compute SwiGLU and its gradient in fused kernels (te_linear, and te_layer with delayed scaling).",
        True,
    )
    fused_embedding: bool = option(
        "Accumulate the embedding gradient in float32 and round it only once (te_linear and te_layer only).",
        True,
    )
    fused_cross_entropy: bool = option(
        "Compute the loss in one kernel that overwrites the bf16 logits with their gradient (te_linear and te_layer "
        "only).",
        True,
    )
    main_grad: bool = option(
        "Let weight-gradient GEMMs add their results directly to the float32 accumulation buffer (te_linear and "
        "te_layer at ZeRO 1 with data_types.grad_accum_dtype fp32).",
        True,
    )
    cuda_graphs: bool = option(
        "Capture the forward and backward pass as CUDA graphs and replay them (te_linear and te_layer with ZeRO 0 to "
        "2).",
        False,
        resume="free",
    )

    @classmethod
    def off(cls) -> SpeedConfig:
        """Return a SpeedConfig with all switches off."""
        return cls(**{f.name: False for f in dataclasses.fields(cls)})


def supports_mlp(variant: str, speed: SpeedConfig, recipe: str) -> bool:
    """Return whether a model variant supports gradient_checkpointing "mlp" in FP8 with `recipe`."""
    return variant == "te_layer" and speed.fused_swiglu and recipe == "delayed"


def variant_problems(variant: str, precision: PrecisionConfig, compile: bool | None) -> list[str]:
    """Return an error message for each setting that a model variant does not support.

    Args:
        variant: a key of VARIANTS.
        compile: the value of model.compile.
    """
    problems: list[str] = []
    recipes = VARIANTS[variant].recipes
    if precision.compute == "fp8":
        if not recipes:
            problems.append(
                f"model.variant {variant} does not support FP8; choose te_linear, te_layer or torchao, or set "
                "precision.compute to bf16"
            )
        elif precision.recipe not in recipes:
            problems.append(
                f"model.variant {variant} does not support recipe {precision.recipe}; set precision.recipe to "
                f"{' or '.join(recipes)}"
            )
    elif variant == "torchao":
        problems.append(
            f"model.variant torchao needs FP8, but precision.compute is {precision.compute}; set precision.compute "
            "to fp8, or use model.variant hf with model.compile true"
        )
    if compile and VARIANTS[variant].te:
        problems.append(
            "model.compile is true, but torch.compile does not support the Transformer Engine modules of "
            f"model.variant {variant}; remove model.compile, or set model.variant to "
            f"{' or '.join(v.name for v in VARIANTS.values() if not v.te)}"
        )
    return problems


def compiles(variant: str, precision: PrecisionConfig, compile: bool | None) -> bool:
    """Return whether torch.compile compiles the decoder layers of a model variant.

    Args:
        compile: the value of model.compile. None means that only the torchao variant on a GPU is compiled.
    """
    return (variant == "torchao" and not precision.emulated) if compile is None else compile


def cuda_graphs_problem(
    variant: str, *, recomputes: bool = False, zero_stage: int = 0, emulated: bool = False
) -> str | None:
    """Return why CUDA graphs are not supported and what to do instead, or None if they are supported.

    Args:
        recomputes: whether gradient_checkpointing is true.
        emulated: the value of PrecisionConfig.emulated.
    """
    if not VARIANTS[variant].te:
        capable = " or ".join(v.name for v in VARIANTS.values() if v.te)
        return (
            f"model.variant {variant} does not support CUDA graphs; set model.variant to {capable}, or set "
            "speed.cuda_graphs to false"
        )
    if recomputes:
        return (
            "gradient_checkpointing true reads the state of the random generator, which CUDA graphs cannot capture; "
            "set gradient_checkpointing to mlp or false, or speed.cuda_graphs to false"
        )
    if zero_stage == 3:
        return (
            "ZeRO 3 moves the weights in memory, but CUDA graphs need fixed addresses; use ZeRO stage 0, 1 or 2, or "
            "set speed.cuda_graphs to false"
        )
    return "CUDA graphs need a GPU; set speed.cuda_graphs to false" if emulated else None
