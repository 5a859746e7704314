"""What a configuration of the precision means on this machine.

`Precision` resolves the section "precision" of the training JSON (`recipes.PrecisionConfig`) against the hardware: it
holds the Transformer Engine (TE) namespace, the recipe object, the parameter dtype and the autocast. FP8 that is asked
for and not to be had is a `PrecisionError`, never a silent bf16 run. The recipes tensorwise and rowwise are torchao's.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from model.errors import UserError
from model.fp8 import te_backend, torchao_fp8
from model.fp8.modules import TAKEN_OUT, bf16_pattern, fp8_modules, gemm_modules, run_under
from model.fp8.recipes import (
    FP8_FEATURE_MULTIPLE,
    LEVELS,
    RECIPES,
    PrecisionConfig,
    fits_fp8,
    recipe_of,
    why_no_fp8,
)

DTYPES = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Where modules of a checkpoint are at a level that this machine has not.
GO_ON = (
    "modules of this checkpoint are there by precision.on_trouble: go on where it is available, or start anew with "
    "--resume_from_checkpoint never; evaluate.py has --precision bf16"
)


class PrecisionError(UserError, ValueError):
    """The precision asked for cannot be had; the message says what is missing and what to do."""

    code = "precision"


def check_fp8_gpu() -> None:
    """Raises PrecisionError: the current GPU, if there is one, is not allowed to run FP8."""
    if torch.cuda.is_available() and (
        why := why_no_fp8(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    ):
        raise PrecisionError(why, code="gpu_without_fp8")


def first_key(problem: str) -> str:
    """Return the configuration key that one of the `problems` of a section begins with."""
    return problem.split()[0].rstrip(":")


class Precision:
    """A `PrecisionConfig` resolved on this machine.

    Attributes: `te` (namespace of TE modules), `recipe` (TE recipe object or torchao's Float8LinearConfig, None unless
    compute is fp8), `dtype` (parameters and activations), `device` (the GPU where there is one, unless it is given),
    `emulated` (see PrecisionConfig), `levels` (module -> one of LEVELS, to which precision.on_trouble has taken it).

    Raises PrecisionError: invalid section, or FP8 that this machine cannot run.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        device: torch.device | None = None,
        levels: Mapping[str, str] | None = None,
    ):
        problems = config.problems()
        if problems:
            raise PrecisionError("; ".join(problems), code="combination", key=first_key(problems[0]))
        if config.auto:
            raise PrecisionError(
                "precision.auto: only a training run measures; set it to false, or take the precision section of a "
                "run's train_config.json, which has the choice in it",
                key="precision.auto",
            )
        self.config = config
        self.dtype = DTYPES[config.compute]
        if device is None:
            device = torch.device("cpu")
            if torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.emulated = config.emulated
        self.levels = dict(levels or {})
        self.recipe = None
        if self.fp8:
            if not self.emulated:
                check_fp8_gpu()
            self.require(config.recipe)
            for level in dict.fromkeys(map(self.level, self.levels)):
                if level != config.recipe:
                    self.require(level, GO_ON)
            self.recipe = self.make_recipe(config.recipe)

    @property
    def fp8(self) -> bool:
        return self.config.compute == "fp8"

    @property
    def has_state(self) -> bool:
        """Whether scales come from earlier passes: there is FP8 state to keep."""
        return self.fp8 and RECIPES[self.config.recipe].has_state

    @property
    def torchao(self) -> bool:
        """FP8 by torchao, not by TE."""
        return self.fp8 and RECIPES[self.config.recipe].package == "torchao"

    @property
    def health_steps(self) -> int:
        """Steps between looks at the operands of GEMMs; 0: none, or there are no such operands."""
        return self.config.health_steps if self.fp8 and not self.torchao else 0

    @cached_property
    def te(self) -> SimpleNamespace:
        """The namespace of TE modules, loaded when it is first asked for: transformers' own model and torchao do
        without. Raises PrecisionError: this machine does not have it."""
        try:
            return te_backend.load(self.config.backend)
        except te_backend.BackendError as error:
            raise self._error(error) from error

    def require(self, level: str, *instead: str) -> None:
        """Raises PrecisionError unless this machine has `level`, or the recipe of that name. instead: see
        te_backend.require_fp8."""
        try:
            if self.torchao:
                torchao_fp8.require()
            elif level != "bf16":
                te_backend.require_fp8(self.te, recipe_of(level), *instead)
        except te_backend.BackendError as error:
            raise self._error(error) from error

    def _error(self, error: te_backend.BackendError) -> PrecisionError:
        """Return the error of a backend as one of the configuration."""
        message = f"precision.backend {self.config.backend!r}: {error}"
        return PrecisionError(message, code=error.code, key=error.key or "precision.backend")

    def level(self, name: str) -> str:
        """That of the FP8 module `name`: the recipe, or where it is above that, the one of `levels`."""
        base = self.config.recipe
        return max(base, self.levels[name], key=LEVELS.index) if name in self.levels else base

    @property
    def head_gradients(self) -> bool:
        """Whether the gradients of an lm_head that is in bf16 are FP8 products, where its sizes allow it."""
        return self.config.head_gradients and self.level("lm_head") not in ("bf16_backward", "bf16")

    def one_up(self, name: str, module: nn.Module) -> tuple[str, str]:
        """(level, next level) of `name`, which is `module` and runs FP8."""
        if getattr(module, "fp8_gradients", False):
            return "block", "bf16"
        levels = list(LEVELS)
        if isinstance(module, self.te.LayerNormMLP):  # of which Transformer Engine has no such backward
            levels.remove("bf16_backward")
        level = self.level(name)
        return level, levels[levels.index(level) + 1]

    def make_recipe(self, level: str) -> Any:
        """None for bf16."""
        if self.torchao:
            return torchao_fp8.linear_config(level, self.emulated)
        if level == "bf16":
            return None
        c, recipes = self.config.with_recipe(recipe_of(level)), self.te.recipe
        fp8_format = {"hybrid": recipes.Format.HYBRID, "e4m3": recipes.Format.E4M3}[c.fp8_format]
        if c.recipe == "delayed":
            recipe = recipes.DelayedScaling(
                margin=c.margin,
                fp8_format=fp8_format,
                amax_history_len=c.amax_history_len,
                amax_compute_algo=c.amax_compute_algo,
                reduce_amax=c.reduce_amax,
            )
        else:
            cls = recipes.Float8CurrentScaling if c.recipe == "current" else recipes.Float8BlockScaling
            recipe = cls(fp8_format=fp8_format)
            power_2 = c.power_2_scales if c.power_2_scales is not None else c.recipe == "block"
            # Set on the object: TE's constructor arguments for these have no effect (class attributes
            # computed at import), and unknown ones are swallowed.
            for tensor in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                setattr(recipe, tensor, recipes.QParams(power_2_scale=power_2, amax_epsilon=c.amax_epsilon))
        if c.fast_accumulation_wgrad:
            # in TE's MMParams "split accumulator" means: no fast accumulation
            recipe.fp8_gemm_wgrad = recipes.MMParams(use_split_accumulator=False)
        if level == "bf16_backward":
            recipe.backward_override = "high_precision"
        return recipe

    def autocast(self) -> Any:
        """The context a model's forward (never its backward) runs in."""
        if not self.fp8 or self.torchao:
            return nullcontext()
        return self.te.autocast(enabled=True, recipe=self.recipe)

    def apply(self, model: nn.Module) -> None:
        """Keep the modules that match `bf16_modules` out of FP8, and give those of `levels` their own autocast; with
        torchao, swap the others for FP8 ones. Raises PrecisionError: as `check`."""
        if not self.fp8:
            return
        planned = self.check(model)
        if self.torchao:
            torchao_fp8.convert(model, planned, self.recipe)
            return
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self.config.bf16_modules:
            for name in fnmatch.filter(names, pattern):
                run_under(model.get_submodule(name), self.te, None)
        for name, module in gemm_modules(model, self).items():
            if bf16_pattern(name, self.config.bf16_modules):
                continue
            level, recipe = self.level(name), self.make_recipe(self.level(name))
            own_scales = name == "lm_head" and _rounds_scales_of_gradients(recipe)
            if own_scales:  # why: te_reference/gemm.py
                recipe.fp8_quant_bwd_grad = replace(recipe.fp8_quant_bwd_grad, power_2_scale=False)
            if own_scales or level != self.config.recipe:
                run_under(module, self.te, recipe)

    def check(self, model: nn.Module) -> list[str]:
        """The names of the modules of `model` that would run FP8. Nothing is changed.

        Raises PrecisionError: a pattern of `bf16_modules` that matches no module; a GEMM whose features are no multiple
        of 16; no module left to run FP8.
        """
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self.config.bf16_modules:
            if not fnmatch.filter(names, pattern):
                examples = ", ".join(names[:3] + names[-1:])
                raise PrecisionError(
                    f"precision.bf16_modules: {pattern!r} matches no module; names are like {examples}",
                    code="no_such_module",
                    key="precision.bf16_modules",
                )
        report = fp8_modules(model, self)
        if not report.planned and TAKEN_OUT not in report.kept.values():
            raise PrecisionError(
                f"precision.bf16_modules {self.config.bf16_modules} leaves no module to run FP8; "
                'remove patterns or set precision.compute to "bf16"',
                code="no_fp8_module",
                key="precision.bf16_modules",
            )
        self._check_features(model, report.planned)
        return report.planned

    def _check_features(self, model: nn.Module, planned: list[str]) -> None:
        """Raises PrecisionError: it names all that do not fit, as patterns, of which one is of all layers."""
        patterns, weights = dict[str, None](), dict[str, None]()
        for name in planned:
            for parameter_name, p in model.get_submodule(name).named_parameters(recurse=False):
                if p.dim() == 2 and not fits_fp8(*p.shape):
                    pattern = re.sub(r"\.\d+\.", ".*.", name)
                    patterns[pattern] = weights[f"{pattern}.{parameter_name} {tuple(p.shape)}"] = None
        if patterns:
            raise PrecisionError(
                f"{', '.join(weights)}: an FP8 GEMM needs dimensions divisible by {FP8_FEATURE_MULTIPLE}; change the "
                f"model's sizes or add {', '.join(map(json.dumps, patterns))} to precision.bf16_modules",
                code="fp8_dimensions",
                key=next(iter(patterns)),
            )


def _rounds_scales_of_gradients(recipe: Any) -> bool:
    """Whether scales of gradients are powers of two."""
    parameters = getattr(recipe, "fp8_quant_bwd_grad", None)
    return parameters is not None and parameters.power_2_scale
