"""The precision of a model on the current hardware.

`Precision` resolves the "precision" section of the training configuration (`recipes.PrecisionConfig`) for the current
hardware. It provides the Transformer Engine (TE) namespace, the recipe object, the parameter dtype and the autocast
context. If FP8 is configured but unavailable, it raises `PrecisionError`; training never falls back to bf16 silently.
torchao implements the recipes tensorwise and rowwise, Transformer Engine the others.
"""

from __future__ import annotations

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
from model.fp8.hardware import fp8_gpu_problem, uses_head_gradients
from model.fp8.recipes import (
    FALLBACK_ORDER,
    RECIPES,
    PrecisionConfig,
    forward_recipe,
)

DTYPES = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Advice for the case that this machine lacks the recipe of a module's fallback.
FALLBACK_ADVICE = (
    "modules of this checkpoint fell back to this recipe (precision.on_trouble). Resume on a GPU that supports the "
    "recipe, or start over with --resume_from_checkpoint never. To evaluate the checkpoint, run evaluate.py with "
    "--precision bf16"
)
HEAD_GRADIENTS_ADVICE = "set precision.fp8_head_gradients to null or false"


class PrecisionError(UserError, ValueError):
    """An error raised when the configured precision is contradictory or unavailable on this hardware."""

    code = "precision"


def check_fp8_gpu() -> None:
    """Raise PrecisionError if the current GPU does not support FP8. Do nothing without a GPU."""
    if torch.cuda.is_available() and (
        problem := fp8_gpu_problem(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    ):
        raise PrecisionError(problem, code="gpu_without_fp8")


def first_key(problem: str) -> str:
    """Return the configuration key at the start of an error message from `PrecisionConfig.problems`."""
    return problem.split()[0].rstrip(":")


def resolve_head_gradients(config: PrecisionConfig) -> PrecisionConfig:
    """Return `config`, with a null fp8_head_gradients replaced by the default for this GPU.

    The model variant must be te_linear or te_layer.

    Raises PrecisionError if the backend cannot be loaded.
    """
    if config.fp8_head_gradients is not None:
        return config
    te = Precision(PrecisionConfig(compute="bf16", backend=config.backend)).te
    is_used = te.name == "reference" or (
        uses_head_gradients(torch.cuda.get_device_capability()) and not te_backend.recipe_problem("block")
    )
    return replace(config, fp8_head_gradients=is_used)


class Precision:
    """A `PrecisionConfig` resolved for the current hardware.

    Attributes:
        te: namespace with Transformer Engine's modules or their CPU reference implementation.
        recipe: TE's recipe object or torchao's Float8LinearConfig. None unless compute is fp8.
        dtype: dtype of parameters and activations.
        device: the given device; by default the GPU, or the CPU if there is none.
        emulated: whether FP8 is emulated on the CPU (see PrecisionConfig).
        fallbacks: fallback of each module (precision.on_trouble), keyed by module name. The values are in
            FALLBACK_ORDER.

    Raises PrecisionError if the configuration is invalid, or the hardware does not support a configured FP8 recipe.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        device: torch.device | None = None,
        fallbacks: Mapping[str, str] | None = None,
    ):
        problems = config.problems()
        if problems:
            raise PrecisionError("; ".join(problems), code="combination", key=first_key(problems[0]))
        if config.auto:
            raise PrecisionError(
                "precision.auto is true, but only a training run can measure which precision is fastest. Set "
                "precision.auto to false, or use the precision section from a run's train_config.json, which "
                "contains the measured choice",
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
        self.fallbacks = dict(fallbacks or {})
        self.recipe = None
        if self.fp8:
            if not self.emulated:
                check_fp8_gpu()
            self.require(config.recipe)
            if not self.torchao:
                self.config = resolve_head_gradients(config)
            for recipe_name in dict.fromkeys(map(self.module_recipe, self.fallbacks)):
                if recipe_name != config.recipe:
                    self.require(recipe_name, FALLBACK_ADVICE)
            self.recipe = self.make_recipe(config.recipe)

    @property
    def fp8(self) -> bool:
        return self.config.compute == "fp8"

    @property
    def has_state(self) -> bool:
        """Return whether scales depend on earlier passes. If so, checkpoints must contain the FP8 state."""
        return self.fp8 and RECIPES[self.config.recipe].has_state

    @property
    def torchao(self) -> bool:
        """Return whether torchao runs FP8 instead of Transformer Engine."""
        return self.fp8 and RECIPES[self.config.recipe].package == "torchao"

    @cached_property
    def te(self) -> SimpleNamespace:
        """Return the namespace with Transformer Engine's modules or their CPU reference implementation.

        The backend is loaded on first use, because transformers' own model and torchao do not need it.

        Raises PrecisionError if the backend cannot be loaded.
        """
        try:
            return te_backend.load(self.config.backend)
        except te_backend.BackendError as error:
            raise self._error(error) from error

    def require(self, recipe_name: str, *instead: str) -> None:
        """Raise PrecisionError unless the current hardware supports the recipe or fallback `recipe_name`.

        Args:
            instead: advice for the error message (see te_backend.require_fp8).
        """
        try:
            if self.torchao:
                torchao_fp8.require()
            elif recipe_name != "bf16":
                te_backend.require_fp8(self.te, forward_recipe(recipe_name), *instead)
        except te_backend.BackendError as error:
            raise self._error(error) from error

    def _error(self, error: te_backend.BackendError) -> PrecisionError:
        """Convert a backend error to a PrecisionError about precision.backend."""
        message = f"precision.backend {self.config.backend!r}: {error}"
        return PrecisionError(message, code=error.code, key=error.key or "precision.backend")

    def module_recipe(self, name: str) -> str:
        """Return the configured recipe, or the fallback of the FP8 module `name` if the fallback is safer."""
        base = self.config.recipe
        order = ("mxfp8", *FALLBACK_ORDER)  # mxfp8 has no health checks that would choose a fallback
        return max(base, self.fallbacks[name], key=order.index) if name in self.fallbacks else base

    @property
    def head_gradients(self) -> bool:
        """Return whether a bf16 lm_head computes its gradients with FP8 GEMMs, if `fits_fp8` allows the sizes."""
        return self.config.head_gradients and self.module_recipe("lm_head") not in ("bf16_backward", "bf16")

    def next_fallback(self, name: str, module: nn.Module) -> tuple[str, str]:
        """Return the current recipe or fallback of the FP8 module `name`, and the next safer fallback."""
        if getattr(module, "fp8_gradients", False):
            return "block", "bf16"
        fallbacks = list(FALLBACK_ORDER)
        if isinstance(module, self.te.LayerNormMLP):  # Transformer Engine does not support it there
            fallbacks.remove("bf16_backward")
        recipe_name = self.module_recipe(name)
        return recipe_name, fallbacks[fallbacks.index(recipe_name) + 1]

    def make_recipe(self, recipe_name: str) -> Any:
        """Create the recipe object for a recipe or fallback. Returns None for bf16."""
        if self.torchao:
            return torchao_fp8.linear_config(recipe_name, self.emulated)
        if recipe_name == "bf16":
            return None
        c, recipes = self.config.with_recipe(forward_recipe(recipe_name)), self.te.recipe
        fp8_format = {"hybrid": recipes.Format.HYBRID, "e4m3": recipes.Format.E4M3}[c.fp8_format]
        if c.recipe == "delayed":
            recipe = recipes.DelayedScaling(
                margin=c.margin,
                fp8_format=fp8_format,
                amax_history_len=c.amax_history_len,
                amax_compute_algo=c.amax_compute_algo,
                reduce_amax=False,  # see model/fp8/state.py
            )
        elif c.recipe == "mxfp8":
            recipe = recipes.MXFP8BlockScaling(fp8_format=fp8_format)
        else:
            cls = recipes.Float8CurrentScaling if c.recipe == "current" else recipes.Float8BlockScaling
            recipe = cls(fp8_format=fp8_format)
            power_2 = c.power_2_scales if c.power_2_scales is not None else c.recipe == "block"
            # Set attributes of the object: TE's constructor arguments for these have no effect (they are class
            # attributes computed at import), and TE ignores unknown arguments.
            for tensor in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                setattr(recipe, tensor, recipes.QParams(power_2_scale=power_2, amax_epsilon=c.amax_epsilon))
        if c.fast_accumulation_wgrad:
            # a split accumulator in TE's MMParams means no fast accumulation
            recipe.fp8_gemm_wgrad = recipes.MMParams(use_split_accumulator=False)
        if recipe_name == "bf16_backward":
            recipe.backward_override = "high_precision"
        return recipe

    def autocast(self) -> Any:
        """Return the context manager for a model's forward pass. Do not run the backward pass inside the context."""
        if not self.fp8 or self.torchao:
            return nullcontext()
        return self.te.autocast(enabled=True, recipe=self.recipe)
