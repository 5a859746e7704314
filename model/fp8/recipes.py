"""FP8 recipes and the "precision" section of the training configuration.

This module does not import torch, so commands can check their arguments quickly.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from model.keys import STRICT, option

# FP8 GEMMs accept input and output features in multiples of 16 and rows (batch x sequence) in multiples of 8. Training
# needs rows in multiples of 16, because the weight gradient contracts over them.
FP8_FEATURE_MULTIPLE = 16
FP8_TRAIN_ROW_MULTIPLE = 16


def fp8_multiple(recipe: str) -> int:
    """Return the number that must divide the feature and row counts of every FP8 GEMM in training.

    The recipe mxfp8 requires complete blocks of 32 values.
    """
    return 32 if recipe == "mxfp8" else FP8_FEATURE_MULTIPLE


def fits_fp8(*features: int, multiple: int = FP8_FEATURE_MULTIPLE) -> bool:
    """Return whether FP8 GEMMs support matrices with these numbers of features: all must be divisible by `multiple`."""
    return not any(size % multiple for size in features)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An FP8 scaling recipe and the configuration keys it uses.

    Attributes:
        package: "te" (Transformer Engine and its CPU reference implementation) or "torchao".
        has_state: whether scales depend on earlier steps. If so, checkpoints must contain the scales.
        knobs: the keys of PrecisionConfig that this recipe reads and at least one other recipe does not.
    """

    name: str
    package: str
    has_state: bool = False
    knobs: tuple[str, ...] = ()


_HISTORY = ("margin", "amax_history_len", "amax_compute_algo", "calibration_passes", "reduce_amax")
_EPSILON = ("power_2_scales", "amax_epsilon")
_PER_TENSOR = ("fast_accumulation_wgrad", "fp8_weight_gather")
_ALL = ("fp8_format", "health_steps", "on_trouble", "fp8_head_gradients")
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("delayed", "te", True, (*_ALL, *_HISTORY, *_PER_TENSOR)),
        Recipe("current", "te", knobs=(*_ALL, *_EPSILON, *_PER_TENSOR)),
        Recipe("block", "te", knobs=(*_ALL, *_EPSILON)),
        Recipe("mxfp8", "te", knobs=("fp8_format", "fp8_head_gradients")),
        Recipe("tensorwise", "torchao"),
        Recipe("rowwise", "torchao"),
    )
}

# An FP8 health check measures these statistics of each operand of a GEMM (model/checks/health.py).
OPERANDS = ("input", "weight", "gradient")
STATISTICS = ("underflow", "saturated", "range", "error", "kurtosis")

# Runs of earlier versions have these values. Recipes that do not read the key accept them in addition to the default.
FORMER_DEFAULTS = {"health_steps": (0,), "fp8_head_gradients": (False, True), "amax_history_len": (1024,)}

# The fallbacks of a module in order (precision.on_trouble). bf16_backward: block scaling in the forward pass and bf16
# gradients. bf16: no FP8.
FALLBACK_ORDER = ("delayed", "current", "block", "bf16_backward", "bf16")


def unused_recipe_keys(precision: dict[str, Any]) -> set[str]:
    """Return the recipe options that a "precision" section does not use.

    An option is used if the recipe of any phase, or a fallback that on_trouble escalate allows, reads the option.
    """
    read: set[str] = set()
    for phase in precision.get("schedule") or [{}]:
        own = {**precision, **phase}
        recipes = [own.get("recipe")]
        if own.get("on_trouble") == "escalate" and recipes[0] in FALLBACK_ORDER:
            recipes += FALLBACK_ORDER[FALLBACK_ORDER.index(recipes[0]) :]
        if own.get("compute") == "fp8":
            read |= {knob for recipe in recipes if recipe in RECIPES for knob in RECIPES[recipe].knobs}
    return {knob for recipe in RECIPES.values() for knob in recipe.knobs} - read


def forward_recipe(recipe_name: str) -> str:
    """Return the FP8 recipe of the forward pass for a recipe or fallback.

    The fallback "bf16_backward" runs its forward pass with "block". All other names are returned unchanged.
    """
    return "block" if recipe_name == "bf16_backward" else recipe_name


Compute = Literal["fp8", "bf16", "fp16", "fp32"]
# Bytes per parameter. FULL_STATES: a float32 weight and two float32 moments of AdamW. SPLIT_WEIGHT: the 16 bits that a
# bf16 weight lacks to be float32.
FULL_STATES, SPLIT_WEIGHT = 4 + 2 * 4, 2
STATE_BLOCK = 256  # elements of 8-bit moments that share a float32 scale
# Elements of packed states that a step decodes at a time: 64 MiB in float32. The step needs about six such tensors.
STATE_CHUNK = 2**24
# Number of tokens for which lm_head computes its FP8 gradients at a time. Tiles have 128 rows.
HEAD_ROWS = 8192
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / STATE_BLOCK, "fp8": 1 + 4 / STATE_BLOCK}


def optimizer_state_bytes(states: str, moments: str) -> float:
    """Return the bytes of optimizer state per parameter.

    Args:
        states: a value of PrecisionConfig.optimizer_states.
        moments: a key of MOMENT_BYTES.
    """
    return FULL_STATES if states == "fp32" else SPLIT_WEIGHT + 2 * MOMENT_BYTES[moments]


# The largest adam_beta2 for bf16 moments. A second moment shrinks by at most 1 - adam_beta2 per step, and bf16 cannot
# represent relative changes below 1/256.
BF16_MOMENTS_MAX_BETA2 = 0.98


@dataclass(config=STRICT)
class PrecisionSettings:
    """The keys of the "precision" section that a phase of the precision schedule may change."""

    compute: Compute = option("Precision of matrix multiplications.", "fp8")
    recipe: Literal[tuple(RECIPES)] = option(  # type: ignore[valid-type]
        "FP8 scaling recipe. model.variant torchao supports tensorwise and rowwise. te_linear and te_layer "
        "support all other recipes.",
        "delayed",
    )
    fp8_format: Literal["e4m3", "hybrid"] = option(
        'FP8 number format. "hybrid" uses e5m2 for gradients and e4m3 for all other tensors.',
        "e4m3",
    )
    margin: int = option(
        "Safety margin of the scales: each scale is divided by 2^margin (recipe delayed only).", 0, ge=0
    )
    amax_history_len: int = option(
        "Number of recent amax values (largest absolute values) from which each scale is computed (recipe "
        "delayed only).",
        16,
        ge=1,
    )
    amax_compute_algo: Literal["max", "most_recent"] = option(
        "Value in the amax history that determines the scale: the largest (max) or the most recent one (most_recent). "
        "Recipe delayed only.",
        "max",
    )
    reduce_amax: bool = option(
        "Whether to replace each amax (largest absolute value) with its maximum over all ranks after each step "
        "(recipe delayed only).",
        True,
    )
    calibration_passes: int = option(
        "Number of calibration passes over the first micro-batch, which set the initial scales (recipe delayed "
        "only). If 0, all scales start at 1.",
        4,
        ge=0,
    )
    power_2_scales: bool | None = option(
        "Whether to round scales down to powers of two (recipes current and block only). If null, this is "
        "true for block and false for current.",
        None,
    )
    amax_epsilon: float = option(
        "Lower bound on amax, the largest absolute value (recipes current and block only).",
        0.0,
        ge=0,
    )
    fast_accumulation_wgrad: bool = option(
        "Whether to use the faster but less precise FP8 accumulation for weight gradients, whose error grows "
        "with the number of tokens in a micro-batch (recipes delayed and current only).",
        False,
    )
    bf16_modules: list[str] = option(
        "Name patterns of modules that stay in bf16, including their submodules. The wildcards * and ? are "
        "allowed.",
        ["lm_head"],
    )
    fp8_head_gradients: bool | None = option(
        "Whether to compute both gradient GEMMs of a bf16 lm_head in FP8 with block scaling (te_linear and te_layer "
        "only). If null, FP8 is used on GPUs that support block scaling, except on GPUs of compute capability 12.",
        None,
        before=False,
    )
    health_steps: int = option(
        "Number of steps between FP8 health checks, which measure how many values FP8 clamps or rounds to 0 (te_linear "
        "and te_layer only). If 0, the checks are disabled.",
        100,
        ge=0,
        resume="free",
    )
    on_trouble: Literal["warn", "escalate"] = option(
        'Action if FP8 health checks find a problem. "warn" only logs a warning. "escalate" permanently '
        "switches a module that fails two of four consecutive checks to a safer recipe.",
        "warn",
        resume="free",
    )


# The end of a phase. The next phase starts there. The last phase lasts until the end of the run.
PHASE_ENDS = {
    "until_step": Annotated[int, Field(gt=0, description="Training step after which the phase ends.")],
    "until_tokens": Annotated[
        int, Field(gt=0, description="Number of training tokens after which the phase ends.")
    ],
    "until_share": Annotated[
        float, Field(gt=0, lt=1, description="Fraction of max_steps after which the phase ends.")
    ],
}
if TYPE_CHECKING:
    PrecisionPhase = dict[str, Any]
else:
    PrecisionPhase = TypedDict(
        "PrecisionPhase",
        PHASE_ENDS
        | {
            name: Annotated[(field.annotation, *field.metadata, Field(description=field.description))]
            for name, field in PrecisionSettings.__pydantic_fields__.items()
        },
        total=False,
    )
    PrecisionPhase.__pydantic_config__ = STRICT


@dataclass(config=STRICT)
class PrecisionConfig(PrecisionSettings):
    """The "precision" section of the training configuration. Keys that the recipe does not read must keep their
    default.
    """

    backend: Literal["auto", "transformer_engine", "reference"] = option(
        'FP8 implementation. "auto" uses Transformer Engine if a GPU is available, and the CPU reference '
        "implementation otherwise.",
        "auto",
    )
    optimizer_states: Literal["fp32", "bf16_remainder", "int8", "fp8"] = option(
        'Storage format of the AdamW states. "fp32" stores float32 master weights and moments. The other '
        "formats need less memory but require ZeRO 1 with data_types.grad_accum_dtype fp32.",
        "fp32",
    )
    optimizer_moments: Literal["bf16", "fp32"] = option(
        "Data type of the two AdamW moments (optimizer_states bf16_remainder only).", "bf16"
    )
    gradient_communication: Literal["fp32", "bf16"] | None = option(
        "Data type in which gradients are reduced across ranks. If null, the data type of the weights is "
        "used.",
        None,
    )
    fp8_weight_gather: bool = option(
        "Whether ZeRO 3 gathers the weights of FP8 modules in 8 bits instead of 16 (recipes delayed and current "
        "only). If true, weights are quantized once per step.",
        False,
    )
    schedule: list[PrecisionPhase] | None = option(
        "Precision schedule: a list of phases. Each phase contains the keys of this section that it changes. "
        "Each phase except the last also sets its end with until_step, until_tokens or until_share.",
        None,
        min_length=1,
        example=[{"until_step": 500, "compute": "bf16"}, {"until_share": 0.9}, {"compute": "bf16"}],
    )
    # Free on resume, because the resume compares the measured choice instead.
    auto: bool = option(
        "Whether to time FP8, bf16, CUDA graphs and attention backends at startup and use the fastest combination "
        "(te_linear and te_layer with compute fp8 only). This takes about a minute. A resumed run keeps the choice.",
        False,
        resume="free",
    )

    @property
    def emulated(self) -> bool:
        """Return whether the CPU reference implementation emulates FP8."""
        import torch

        return self.backend == "reference" or (self.backend == "auto" and not torch.cuda.is_available())

    @property
    def head_gradients(self) -> bool:
        """Return whether a bf16 lm_head computes its gradients with FP8 GEMMs, if `fits_fp8` allows the sizes."""
        is_te = self.compute == "fp8" and RECIPES[self.recipe].package == "te"
        return (
            is_te
            and self.fp8_head_gradients is not False
            and any(fnmatchcase("lm_head", pattern) for pattern in self.bf16_modules)
        )

    @property
    def moment_type(self) -> str:
        """Return the storage type of AdamW's moments, a key of MOMENT_BYTES."""
        states = self.optimizer_states
        return self.optimizer_moments if states == "bf16_remainder" else states

    @property
    def optimizer_bytes(self) -> float:
        """Return the bytes of optimizer state per parameter, excluding the weights of the model itself."""
        if self.compute == "fp32":
            return 2 * MOMENT_BYTES["fp32"]
        return optimizer_state_bytes(self.optimizer_states, self.moment_type)

    def with_recipe(self, recipe: str) -> PrecisionConfig:
        """Return a copy with a different recipe. Keys that the new recipe does not read are reset to their defaults."""
        defaults = PrecisionConfig()
        unused = set(RECIPES[self.recipe].knobs) - set(RECIPES[recipe].knobs)
        return dataclasses.replace(self, recipe=recipe, **{knob: getattr(defaults, knob) for knob in unused})

    def problems(self) -> list[str]:
        """Return an error message for each contradiction between keys of this section."""
        problems: list[str] = []
        recipe = RECIPES[self.recipe]
        torchao = recipe.package == "torchao"
        if self.auto and (self.compute != "fp8" or torchao):
            theirs = " or ".join(r.name for r in RECIPES.values() if r.package == "te")
            problems.append(
                f"precision.auto needs precision.compute fp8 and recipe {theirs}, but compute is "
                f"{self.compute} and recipe is {self.recipe}; change compute or recipe, or set auto to false"
            )
        if self.compute == "fp8":
            defaults = PrecisionConfig()
            for knob in dict.fromkeys(knob for r in RECIPES.values() for knob in r.knobs):
                value, default = getattr(self, knob), getattr(defaults, knob)
                if knob not in recipe.knobs and value not in (default, *FORMER_DEFAULTS.get(knob, ())):
                    readers = " and ".join(r.name for r in RECIPES.values() if knob in r.knobs)
                    problems.append(
                        f"precision.{knob} applies only to the recipes {readers}, but precision.recipe is "
                        f"{self.recipe}; remove {knob}"
                    )
            if self.on_trouble == "escalate" and not (self.health_steps or torchao):
                problems.append(
                    "precision.on_trouble escalate needs FP8 health checks, but precision.health_steps is 0; "
                    "set health_steps to a positive number such as 100, or set on_trouble to warn"
                )
            if self.fp8_weight_gather and not self.reduce_amax:
                problems.append(
                    "precision.fp8_weight_gather needs the same scales on all ranks, but precision.reduce_amax is "
                    "false; remove one of the two keys"
                )
            if torchao and self.backend == "transformer_engine":
                problems.append(
                    f"precision.backend transformer_engine does not support torchao's recipe {self.recipe}; "
                    "remove precision.backend"
                )
        if self.compute in ("fp16", "fp32"):
            if self.optimizer_states != "fp32":
                problems.append(
                    f"precision.optimizer_states {self.optimizer_states} needs bf16 weights, but precision.compute is "
                    f"{self.compute}; set optimizer_states to fp32"
                )
            if self.gradient_communication == "bf16":
                problems.append(
                    f"precision.gradient_communication is bf16, but the gradients are {self.compute} because "
                    "of precision.compute; remove gradient_communication, or set it to fp32"
                )
        if self.optimizer_states != "bf16_remainder" and self.optimizer_moments != "bf16":
            problems.append(
                "precision.optimizer_moments applies only to optimizer_states bf16_remainder, but "
                f"optimizer_states is {self.optimizer_states}; remove optimizer_moments"
            )
        return problems
