"""Select the GEMM modules of a model that run FP8, and explain why the other modules do not."""

from __future__ import annotations

import fnmatch
import json
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from model.fp8 import te_backend, torchao_fp8
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import fits_fp8, fp8_multiple
from model.variants import VARIANTS

# Descriptions of the fallbacks for the log.
RECIPE_WORDS = {
    "current": "current scaling",
    "block": "block scaling",
    "bf16_backward": "block scaling, gradients computed in bf16",
    "bf16": "bf16",
}
MOVED_TO_BF16 = "moved to bf16 by precision.on_trouble"


@dataclass
class FP8Report:
    """The GEMM modules planned to run FP8, and the reasons why the other GEMM modules do not run FP8.

    model/checks/gemm_counts.py counts the modules that actually run FP8.

    Attributes:
        planned: names of the modules planned to run FP8.
        kept: {module name: reason} for the modules that do not run FP8.
        fallbacks: {module name: fallback} for the modules in `planned` that use a fallback.
    """

    planned: list[str]
    kept: dict[str, str]
    fallbacks: dict[str, str]

    def lines(self, recipe: str | None, ran: int) -> list[str]:
        """Return log lines with the number of FP8 modules, the fallbacks, and why other modules do not run FP8.

        recipe: name of the FP8 recipe, or None without FP8. ran: number of modules that ran FP8.
        """
        total = len(self.planned) + len(self.kept)
        how = f" ({recipe} scaling)" if recipe else ""
        out = [f"FP8: {ran} of {total} GEMM modules ran FP8{how}"]
        if len(reasons := group_by_value(self.kept)) == 1 and not self.planned:
            return [f"{out[0]}: {next(iter(reasons))}"]
        for recipe_name, names in group_by_value(self.fallbacks).items():
            out.append(
                f"  {RECIPE_WORDS[recipe_name]} as a fallback (precision.on_trouble): {format_names(names)}"
            )
        for reason, names in reasons.items():
            out.append(f"  not FP8: {format_names(names)}: {reason}")
        return out


def group_by_value(items: dict[str, str]) -> dict[str, list[str]]:
    """Return a dictionary from each value in `items` to the list of keys with this value."""
    found: dict[str, list[str]] = {}
    for key, value in items.items():
        found.setdefault(value, []).append(key)
    return found


def format_names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")


def run_with_recipe(module: nn.Module, te: Any, recipe: Any) -> None:
    """Make `module` and all its submodules run in a separate autocast context with `recipe`.

    If `recipe` is None, FP8 is disabled.
    """
    stack: list[Any] = []

    def enter(*_: Any) -> None:
        contexts = ExitStack()
        contexts.enter_context(te.autocast(enabled=recipe is not None, recipe=recipe))
        if getattr(recipe, "backward_override", None) is not None:
            contexts.enter_context(te_backend.single_forward(te))
        stack.append(contexts)

    def leave(*_: Any) -> None:
        stack.pop().close()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def uses_transformer_engine(model: nn.Module) -> bool:
    """Return whether a model or module is built from Transformer Engine modules or their CPU reference
    implementation.
    """
    variant = getattr(model, "variant", None)
    return variant is None or VARIANTS[variant].te


def gemm_modules(model: nn.Module, precision: Precision) -> dict[str, nn.Module]:
    """Return the modules of `model` that run GEMMs, keyed by name.

    These are Transformer Engine's modules with weights, or the Linear modules of a transformers or torchao model.
    """
    kinds: tuple[type, ...] = (nn.Linear,)
    if uses_transformer_engine(model):
        kinds = (precision.te.Linear, precision.te.LayerNormLinear, precision.te.LayerNormMLP)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the weight matrices of a module that are used in GEMMs, each with shape [outputs, inputs].

    With ZeRO 3, the returned parameters are still partitioned. Gather them before reading their values.
    """
    names = ("weight", "fc1_weight", "fc2_weight")
    return [p for name, p in module.named_parameters(recurse=False) if name in names]


def use_main_grads(model: nn.Module, precision: Precision) -> None:
    """Make weight-gradient GEMMs add to a new float32 buffer `main_grad` of each weight matrix instead of `grad`."""
    for module in gemm_modules(model, precision).values():
        for weight in matrices(module):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the sum of `grad` and `main_grad` for each parameter that has at least one of them, keyed by name."""
    return {
        name: sum(found[1:], found[0])
        for name, p in model.named_parameters()
        if (found := [g for g in (p.grad, getattr(p, "main_grad", None)) if g is not None])
    }


def bf16_pattern(name: str, patterns: list[str]) -> str | None:
    """Return the first pattern (from precision.bf16_modules) that matches the module `name` or a parent module, or
    None.
    """
    parents = [name[:i] for i, c in enumerate(name) if c == "."] + [name]
    return next((pattern for pattern in patterns if fnmatch.filter(parents, pattern)), None)


def fp8_modules(model: nn.Module, precision: Precision) -> FP8Report:
    """Return which GEMM modules of `model` are planned to run FP8, and why the other GEMM modules are not."""
    report = FP8Report([], {}, {})
    for name, module in gemm_modules(model, precision).items():
        reason = None
        if not precision.fp8:
            reason = f"precision.compute is {precision.config.compute}"
        else:
            pattern = bf16_pattern(name, precision.config.bf16_modules)
            reason = pattern and f"excluded by {pattern!r} in precision.bf16_modules"
            if reason is None and precision.module_recipe(name) == "bf16":
                reason = MOVED_TO_BF16
            if name == "lm_head" and precision.config.head_gradients:
                how = "run FP8" if getattr(module, "fp8_gradients", False) else "do not run FP8"
                reason = f"{reason}; the two gradient GEMMs of lm_head {how}"
        if reason is None:
            report.planned.append(name)
            if (recipe_name := precision.module_recipe(name)) != precision.config.recipe:
                report.fallbacks[name] = recipe_name
        else:
            report.kept[name] = reason
    return report


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Configure the modules of `model` to run in `precision`.

    Modules that match `bf16_modules` stay in bf16. Each module with a fallback runs in a separate autocast context.
    With torchao, FP8 modules replace the planned Linear modules.

    Raises PrecisionError for the same reasons as `check_precision`.
    """
    if not precision.fp8:
        return
    planned = check_precision(model, precision)
    if precision.torchao:
        torchao_fp8.convert(model, planned, precision.recipe)
        return
    names = [name for name, _ in model.named_modules() if name]
    for pattern in precision.config.bf16_modules:
        for name in fnmatch.filter(names, pattern):
            run_with_recipe(model.get_submodule(name), precision.te, None)
    for name, module in gemm_modules(model, precision).items():
        if bf16_pattern(name, precision.config.bf16_modules):
            continue
        recipe_name, recipe = (
            precision.module_recipe(name),
            precision.make_recipe(precision.module_recipe(name)),
        )
        own_scales = name == "lm_head" and _rounds_scales_of_gradients(recipe)
        if own_scales:  # te_reference/gemm.py explains why
            recipe.fp8_quant_bwd_grad = replace(recipe.fp8_quant_bwd_grad, power_2_scale=False)
        if own_scales or recipe_name != precision.config.recipe:
            run_with_recipe(module, precision.te, recipe)


def check_precision(model: nn.Module, precision: Precision) -> list[str]:
    """Return the names of the modules that would run FP8, without changing `model`.

    Raises PrecisionError if a pattern in `bf16_modules` matches no module, the sizes of a GEMM are not multiples of 16
    (32 for mxfp8), or `bf16_modules` excludes every module.
    """
    patterns = precision.config.bf16_modules
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            examples = ", ".join(names[:3] + names[-1:])
            raise PrecisionError(
                f"precision.bf16_modules: no module name matches {pattern!r}. Correct or remove the pattern. Examples "
                f"of module names: {examples}",
                code="no_such_module",
                key="precision.bf16_modules",
            )
    report = fp8_modules(model, precision)
    if not report.planned and MOVED_TO_BF16 not in report.kept.values():
        raise PrecisionError(
            f"precision.bf16_modules {patterns} excludes every module from FP8; remove some patterns, or set "
            "precision.compute to bf16",
            code="no_fp8_module",
            key="precision.bf16_modules",
        )
    _check_features(model, report.planned, fp8_multiple(precision.config.recipe))
    return report.planned


def _check_features(model: nn.Module, planned: list[str], multiple: int) -> None:
    """Raise PrecisionError if FP8 does not support the sizes of a planned module.

    The message lists all affected modules. A module that occurs in every layer is listed once, as a name pattern.
    """
    patterns, weights = dict[str, None](), dict[str, None]()
    for name in planned:
        for parameter_name, p in model.get_submodule(name).named_parameters(recurse=False):
            if p.dim() == 2 and not fits_fp8(*p.shape, multiple=multiple):
                pattern = re.sub(r"\.\d+\.", ".*.", name)
                patterns[pattern] = weights[f"{pattern}.{parameter_name} {tuple(p.shape)}"] = None
    if patterns:
        raise PrecisionError(
            f"{', '.join(weights)}: an FP8 GEMM needs dimensions divisible by {multiple}; change the "
            f"dimensions of the model, or add {', '.join(map(json.dumps, patterns))} to precision.bf16_modules",
            code="fp8_dimensions",
            key=next(iter(patterns)),
        )


def _rounds_scales_of_gradients(recipe: Any) -> bool:
    """Return whether an FP8 recipe rounds the scales of gradients to powers of two."""
    parameters = getattr(recipe, "fp8_quant_bwd_grad", None)
    return parameters is not None and parameters.power_2_scale
