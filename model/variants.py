"""The values of `model.variant`, `model.attention_backend` and the section "speed", and their combinations.

Does not import torch: commands check their arguments with it.
"""

from __future__ import annotations

import dataclasses

from pydantic.dataclasses import dataclass

from model.fp8.recipes import RECIPES, PrecisionConfig
from model.keys import STRICT, option


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model variant.

    Attributes:
        te: whether the modules are Transformer Engine's; otherwise they are transformers'.
        recipes: supported FP8 recipes.
        documents: whether attention can be masked across documents.
        graphs: whether CUDA graphs are supported.
        compiles: whether torch.compile is supported.
    """

    name: str
    te: bool
    recipes: tuple[str, ...]
    documents: bool = False
    graphs: bool = False
    compiles: bool = False


_TE = tuple(r.name for r in RECIPES.values() if r.package == "te")
_TORCHAO = tuple(r.name for r in RECIPES.values() if r.package == "torchao")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("hf", te=False, recipes=(), compiles=True),
        Variant("te_linear", te=True, recipes=_TE, documents=True, graphs=True),
        Variant("te_layer", te=True, recipes=_TE, documents=True, graphs=True),
        Variant("torchao", te=False, recipes=_TORCHAO, compiles=True),
    )
}

# Transformer Engine's environment variables for each backend
ATTENTION_BACKENDS = {
    "auto": {},
    "fused": {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    "flash": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"},
    "unfused": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"},
}

# Sizes of attention heads at which FlashAttention-4 was faster than cuDNN on an H200, with and without deterministic
# kernels, in FP8 and bf16 models (docs/performance.md).
FLASH_HEAD_DIMS = (64, 128, 256)


# docs/performance.md lists the measured effect of each switch. With all of them off, a model equals te.TransformerLayer
# and torch bit for bit.
@dataclass(config=STRICT)
class SpeedConfig:
    """The "speed" section. Switches that need a GPU have no effect on a CPU."""

    fused_rope: bool = option(
        "te_layer: split q, k and v and rotate q and k in one kernel. te_linear: rotate q and k in one kernel "
        "each.",
        True,
    )
    fused_swiglu: bool = option(
        "te_layer with delayed scaling: compute SwiGLU and its gradient and cast them to FP8 in kernels of "
        "this project. te_linear: compute SwiGLU in one kernel and its gradients in another.",
        True,
    )
    fused_embedding: bool = option(
        "te_*: accumulate the embedding gradient in float32 in a kernel of this project, and round it once.",
        True,
    )
    fused_cross_entropy: bool = option(
        "te_*: compute the loss in one kernel that overwrites the bf16 logits with their gradient.", True
    )
    main_grad: bool = option(
        "te_*: weight-gradient GEMMs add into the float32 accumulation buffer. This needs ZeRO 1 with "
        "data_types.grad_accum_dtype fp32; otherwise it has no effect.",
        True,
    )
    cuda_graphs: bool = option(
        "te_*: capture forward and backward once and replay them (ZeRO 0 to 2).", False, resume="free"
    )

    @classmethod
    def off(cls) -> SpeedConfig:
        """Return the section with all switches off."""
        return cls(**{f.name: False for f in dataclasses.fields(cls)})


def variant_problems(variant: str, precision: PrecisionConfig, compile: bool | None) -> list[str]:
    """Return a sentence for each setting that `variant` (one of VARIANTS) does not support."""
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
            f"model.variant torchao needs FP8, and precision.compute is {precision.compute}; set precision.compute "
            "to fp8, or use model.variant hf (with model.compile true it is compiled like torchao)"
        )
    if compile and not VARIANTS[variant].compiles:
        problems.append(
            f"model.compile: torch.compile does not support {variant}, whose modules are Transformer Engine's; remove "
            f"it, or set model.variant to {' or '.join(v.name for v in VARIANTS.values() if v.compiles)}"
        )
    return problems


def compiles(variant: str, precision: PrecisionConfig, compile: bool | None) -> bool:
    """Return whether torch.compile compiles the layers of `variant`. compile: the configured value."""
    return (variant == "torchao" and not precision.emulated) if compile is None else compile


def why_no_graphs(
    variant: str, *, gradient_checkpointing: bool = False, zero_stage: int = 0, emulated: bool = False
) -> str | None:
    """Return why CUDA graphs are not possible and what to do instead, or None. emulated: see PrecisionConfig."""
    if not VARIANTS[variant].graphs:
        capable = " and ".join(v.name for v in VARIANTS.values() if v.graphs)
        return f"only {capable} support CUDA graphs; use one of them, or set speed.cuda_graphs to false"
    if gradient_checkpointing:
        return (
            "gradient_checkpointing reads the random generator's state, which CUDA graphs cannot capture; set "
            "gradient_checkpointing or speed.cuda_graphs to false"
        )
    if zero_stage == 3:
        return (
            "ZeRO 3 moves the weights, but CUDA graphs need them in place; use ZeRO stage 0, 1 or 2, or set "
            "speed.cuda_graphs to false"
        )
    return "a CUDA graph needs a GPU" if emulated else None
