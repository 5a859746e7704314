"""The FP8 recipes, and the section "precision" of the training configuration. Without torch: arguments are checked with
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

# What an FP8 GEMM accepts: input and output features in multiples of 16, rows (batch x sequence) in multiples of 8.
# In training of 16: the weight gradient contracts over the rows, which become the leading dimension of its operands.
FP8_FEATURE_MULTIPLE = 16
FP8_ROW_MULTIPLE = 8
FP8_TRAIN_ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Recipe:
    """library: whose it is, "te" (Transformer Engine, and its reference) or "torchao". has_state: scales come from
    earlier steps, which checkpoints keep. knobs: the keys of PrecisionConfig that it reads, besides those that all
    read."""

    name: str
    library: str
    has_state: bool = False
    knobs: tuple[str, ...] = ()


_HISTORY = ("margin", "amax_history_len", "amax_compute_algo", "calibration_passes", "reduce_amax")
_EPSILON = ("power_2_scales", "amax_epsilon")
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("delayed", "te", True, ("fp8_format", *_HISTORY, "fast_accumulation_wgrad")),
        Recipe("current", "te", knobs=("fp8_format", *_EPSILON, "fast_accumulation_wgrad")),
        Recipe("block", "te", knobs=("fp8_format", *_EPSILON)),
        Recipe("tensorwise", "torchao"),
        Recipe("rowwise", "torchao"),
    )
}


def _option(default: Any, help: str) -> Any:
    make = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(metadata={"help": help}, **make)


@dataclass
class PrecisionConfig:
    """The "precision" section. Knobs that the chosen recipe does not have must keep their default."""

    compute: str = _option("fp8", "arithmetic of the matrix products: fp8 | bf16 | fp16 | fp32")
    recipe: str = _option(
        "delayed", "FP8 scaling recipe: delayed | current | block; variant torchao: tensorwise | rowwise"
    )
    backend: str = _option(
        "auto", "auto | transformer_engine | reference; auto takes the reference only without CUDA"
    )
    fp8_format: str = _option(
        "e4m3", "e4m3 | hybrid: gradients in e5m2, of more range and half the precision"
    )
    margin: int = _option(0, "delayed: the scale is divided by 2^margin")
    amax_history_len: int = _option(1024, "delayed: steps of amax history")
    amax_compute_algo: str = _option("max", "delayed: amax of the history: max | most_recent")
    reduce_amax: bool = _option(True, "delayed: share amax over all ranks")
    calibration_passes: int = _option(
        4,
        "delayed: passes over the first micro-batch that set the scales before the first step; 0: scales begin at 1",
    )
    power_2_scales: bool | None = _option(
        None, "current, block: powers of two as scales; null: block yes, current no"
    )
    amax_epsilon: float = _option(0.0, "current, block: smallest amax assumed")
    fast_accumulation_wgrad: bool = _option(
        False, "delayed, current: weight gradients with the tensor cores' fast accumulation (less exact)"
    )
    bf16_modules: list[str] = _option(
        ["lm_head"], "module name patterns (* and ?) that stay in bf16, with all that they contain"
    )
    auto: bool | str = _option(
        False,
        "te_linear, te_layer with compute fp8: true measures at start, at most a minute, and chooses FP8 or "
        "bf16, CUDA graphs and attention backend; a path: such a choice saved by an earlier run (autotune.json)",
    )

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "compute": ("fp8", "bf16", "fp16", "fp32"),
        "recipe": tuple(RECIPES),
        "backend": ("auto", "transformer_engine", "reference"),
        "fp8_format": ("e4m3", "hybrid"),
        "amax_compute_algo": ("max", "most_recent"),
    }

    @property
    def emulated(self) -> bool:
        """Whether what would need a GPU is computed without one."""
        import torch

        return self.backend == "reference" or (self.backend == "auto" and not torch.cuda.is_available())

    def validate(self) -> list[str]:
        """All problems of this section, as sentences; empty when there is none."""
        problems = [
            f"precision.{key}: {getattr(self, key)!r} is not one of {', '.join(allowed)}"
            for key, allowed in self.CHOICES.items()
            if getattr(self, key) not in allowed
        ]
        if self.amax_history_len < 1:
            problems.append(f"precision.amax_history_len: {self.amax_history_len} must be at least 1")
        if self.calibration_passes < 0:
            problems.append(f"precision.calibration_passes: {self.calibration_passes} must not be negative")
        if self.margin < 0:
            problems.append(f"precision.margin: {self.margin} must not be negative")
        if self.amax_epsilon < 0:
            problems.append(f"precision.amax_epsilon: {self.amax_epsilon} must not be negative")
        if self.auto == "":
            problems.append("precision.auto: an empty path; give true, false or the path of a saved choice")
        recipe = RECIPES.get(self.recipe)
        torchao = recipe is not None and recipe.library == "torchao"
        if self.auto and (self.compute != "fp8" or torchao):
            theirs = " or ".join(r.name for r in RECIPES.values() if r.library == "te")
            problems.append(
                "precision.auto: it finds out whether FP8 pays, in te_linear and te_layer with precision.compute fp8 "
                f"and recipe {theirs}; compute {self.compute} with recipe {self.recipe} is given. Change "
                "these or remove it"
            )
        if self.compute == "fp8" and recipe is not None:
            defaults = PrecisionConfig()
            for knob in dict.fromkeys(knob for r in RECIPES.values() for knob in r.knobs):
                if knob not in recipe.knobs and getattr(self, knob) != getattr(defaults, knob):
                    readers = " and ".join(r.name for r in RECIPES.values() if knob in r.knobs)
                    problems.append(
                        f"precision.{knob}: only the recipe {readers} reads it, and the recipe is {self.recipe}; "
                        "remove it"
                    )
            if torchao and self.backend == "transformer_engine":
                problems.append(
                    f"precision.backend: Transformer Engine has no recipe {self.recipe}, it is torchao's; remove it"
                )
        return problems
