"""Table of the FP8 recipes that each GPU architecture supports.

During training, Transformer Engine reports which recipes the GPU supports (te_backend.recipe_problem). This table
contains the results for Transformer Engine 2.20.2. It is used where no GPU or no torch is available: in the
documentation, in plan.py and in the preflight check. The table also lists the recipes that this project has measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Capability = tuple[int, int]
FP8_CAPABILITY: Capability = (8, 9)  # the first GPUs with FP8 tensor cores


@dataclass(frozen=True)
class Architecture:
    """GPU architecture and the features it supports.

    Attributes:
        gpus: examples of GPUs with this architecture.
        recipes: Transformer Engine recipes that the architecture supports.
        measured: recipes that this project has measured on the architecture.
        disabled: configuration keys that are on by default but disabled on the architecture.
        unreliable: {recipe: URL of a report} for supported recipes with which training reportedly does not converge.
    """

    name: str
    gpus: str
    recipes: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    unreliable: dict[str, str] = field(default_factory=dict)


HOPPER_RECIPES = ("delayed", "current", "block")
BLACKWELL_RECIPES = (*HOPPER_RECIPES, "mxfp8")
# Keyed by the lowest compute capability of the architecture.
ARCHITECTURES: dict[Capability, Architecture] = {
    (8, 0): Architecture("Ampere", "A100, RTX 3090"),
    (8, 9): Architecture(
        "Ada", "L4, L40S, RTX 4090", ("delayed", "current"), disabled=("precision.fp8_head_gradients",)
    ),
    (9, 0): Architecture("Hopper", "H100, H200, H800, GH200", HOPPER_RECIPES, HOPPER_RECIPES),
    (10, 0): Architecture(
        "Blackwell", "B200, GB200", BLACKWELL_RECIPES, disabled=("speed.fused_swiglu (te_layer)",)
    ),
    (10, 3): Architecture(
        "Blackwell Ultra", "B300, GB300", BLACKWELL_RECIPES, disabled=("speed.fused_swiglu (te_layer)",)
    ),
    (12, 0): Architecture(
        "Blackwell",
        "RTX 5090, RTX PRO 6000",
        HOPPER_RECIPES,
        disabled=("precision.fp8_head_gradients",),
        unreliable={"block": "https://github.com/NVIDIA/TransformerEngine/issues/2382"},
    ),
}


def architecture(capability: Capability) -> Architecture:
    """Return the architecture of a GPU with this compute capability. GPUs older than Ampere are treated as Ampere."""
    return ARCHITECTURES[max((c for c in ARCHITECTURES if c <= capability), default=min(ARCHITECTURES))]


def emulates_block_scaling(capability: Capability) -> bool:
    """Return whether Transformer Engine emulates block-scaled GEMMs with MXFP8 on GPUs with this compute capability.

    The emulation uses only the exponents of the scales, so scales must be powers of two.
    """
    return capability >= (10, 0)


def uses_head_gradients(capability: Capability) -> bool:
    """Return whether lm_head computes its gradients in FP8 by default. This requires reliable block scaling."""
    found = architecture(capability)
    return "block" in found.recipes and "block" not in found.unreliable


def recipe_warning(capability: Capability, recipe: str) -> str:
    """Return a warning if training with `recipe` reportedly does not converge on a GPU, or "" if there is no report."""
    report = architecture(capability).unreliable.get(recipe)
    if report is None:
        return ""
    return (
        f"precision.recipe {recipe}: training reportedly does not converge on GPUs of compute capability "
        f"{capability[0]}.{capability[1]} ({report}). Set precision.recipe to delayed"
    )


def fp8_gpu_problem(gpu: str, capability: Capability, recipe: str | None = None) -> str:
    """Return an error message if a GPU does not support FP8 or the given recipe, or "" if the GPU supports both.

    Args:
        gpu: name of the GPU for the message.
        recipe: Transformer Engine recipe that the GPU must also support.
    """
    found = architecture(capability)
    if capability < FP8_CAPABILITY:
        return (
            f"FP8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell), but {gpu} has "
            f"{capability[0]}.{capability[1]}; set precision.compute to bf16 (fp8_inference.py: --precision bf16)"
        )
    if recipe in BLACKWELL_RECIPES and recipe not in found.recipes:
        return (
            f"precision.recipe {recipe} does not run on {gpu} (compute capability {capability[0]}.{capability[1]}); "
            f"choose {' or '.join(found.recipes)}, or set precision.compute to bf16"
        )
    return ""
