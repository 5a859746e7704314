"""What `model.variant` may be, and what goes with each."""

from __future__ import annotations

from model.fp8.precision import RECIPES, TORCHAO_RECIPES, TRANSFORMERS_VARIANTS, PrecisionConfig

# variant -> the FP8 recipes that it has
VARIANTS: dict[str, tuple[str, ...]] = {
    "hf": (),
    "te_linear": RECIPES,
    "te_layer": RECIPES,
    "torchao": TORCHAO_RECIPES,
}


def variant_problems(variant: str, precision: PrecisionConfig, compile: bool | None) -> list[str]:
    """What cannot go with `variant` (one of VARIANTS), as sentences; empty when everything can. Values that no variant
    takes are for `PrecisionConfig.validate` to name."""
    problems: list[str] = []
    recipes = VARIANTS[variant]
    if any(getattr(precision, key) not in precision.CHOICES[key] for key in ("compute", "recipe")):
        return problems
    if precision.compute == "fp8":
        if not recipes:
            problems.append(
                f"model.variant {variant} runs no FP8; choose te_linear, te_layer or torchao, or set "
                "precision.compute to bf16"
            )
        elif precision.recipe not in recipes:
            problems.append(
                f"model.variant {variant} has no recipe {precision.recipe}; set precision.recipe to "
                f"{' or '.join(recipes)}"
            )
    elif variant == "torchao":
        problems.append(
            f"model.variant torchao is for FP8, and precision.compute is {precision.compute}; without FP8 it is "
            "model.variant hf (with model.compile true, compiled as torchao is)"
        )
    if compile and variant not in TRANSFORMERS_VARIANTS:
        problems.append(
            f"model.compile: the modules of {variant} are Transformer Engine's, which are not compiled; remove it, "
            f"or set model.variant to {' or '.join(TRANSFORMERS_VARIANTS)}"
        )
    return problems


def compiles(variant: str, precision: PrecisionConfig, compile: bool | None) -> bool:
    """Whether torch.compile compiles the layers of `variant`, where `compile` is what the user said."""
    return (variant == "torchao" and not precision.emulated) if compile is None else compile
