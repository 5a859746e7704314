"""The FP8 recipes and the "precision" section of the training configuration.

Does not import torch: commands check their arguments with it.
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


def fits_fp8(*features: int) -> bool:
    """Return whether FP8 GEMMs accept matrices of these sizes."""
    return not any(size % FP8_FEATURE_MULTIPLE for size in features)


def fp8_gpu_problem(gpu: str, capability: tuple[int, int]) -> str:
    """Return the reason FP8 is refused on a GPU of this name and compute capability, or ""."""
    if capability[0] == 9:
        return ""
    return (
        f"FP8 needs a GPU of compute capability 9.x (H100, H200, H800, GH200), and {gpu} has "
        f"{capability[0]}.{capability[1]}; set precision.compute to bf16 (fp8_inference.py: --precision bf16)"
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An FP8 recipe.

    Attributes:
        package: "te" (Transformer Engine and its CPU reference) or "torchao".
        has_state: whether scales depend on earlier steps, so that checkpoints must save them.
        knobs: the keys of PrecisionConfig that this recipe reads. Keys that every recipe reads are not listed.
    """

    name: str
    package: str
    has_state: bool = False
    knobs: tuple[str, ...] = ()


_HISTORY = ("margin", "amax_history_len", "amax_compute_algo", "calibration_passes", "reduce_amax")
_EPSILON = ("power_2_scales", "amax_epsilon")
_ALL = ("fp8_format", "health_steps", "on_trouble", "fp8_head_gradients")
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("delayed", "te", True, (*_ALL, *_HISTORY, "fast_accumulation_wgrad")),
        Recipe("current", "te", knobs=(*_ALL, *_EPSILON, "fast_accumulation_wgrad")),
        Recipe("block", "te", knobs=(*_ALL, *_EPSILON)),
        Recipe("tensorwise", "torchao"),
        Recipe("rowwise", "torchao"),
    )
}

# Runs of earlier versions have these values. Recipes that do not read the key accept them in addition to the default.
FORMER_DEFAULTS = {"health_steps": 0, "fp8_head_gradients": False, "amax_history_len": 1024}

# The fallbacks of a module in order (precision.on_trouble). bf16_backward: block scaling in the forward pass and bf16
# gradients. bf16: no FP8.
FALLBACK_ORDER = ("delayed", "current", "block", "bf16_backward", "bf16")


def unused_recipe_keys(precision: dict[str, Any]) -> set[str]:
    """Return the recipe keys of a "precision" section that none of its recipes reads, in any phase or fallback."""
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
    """Return the recipe of the forward pass at a fallback of FALLBACK_ORDER, which must not be "bf16"."""
    return "block" if recipe_name == "bf16_backward" else recipe_name


Compute = Literal["fp8", "bf16", "fp16", "fp32"]
# Bytes per parameter. FULL_STATES: a float32 weight and two float32 moments of AdamW. SPLIT_WEIGHT: the 16 bits that a
# bf16 weight lacks to be float32.
FULL_STATES, SPLIT_WEIGHT = 4 + 2 * 4, 2
STATE_BLOCK = 256  # elements of 8-bit moments that share a float32 scale
# Elements of packed states that a step decodes at a time: 64 MiB in float32. The step needs about six such tensors.
STATE_CHUNK = 2**24
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / STATE_BLOCK, "fp8": 1 + 4 / STATE_BLOCK}


def optimizer_state_bytes(states: str, moments: str) -> float:
    """Return the bytes per parameter of the optimizer's states.

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
    """The keys of the "precision" section that a phase of its schedule may change."""

    compute: Compute = option("Precision of the matrix products.", "fp8")
    recipe: Literal[tuple(RECIPES)] = option(  # type: ignore[valid-type]
        "FP8 scaling recipe. tensorwise and rowwise are for the variant torchao, the others for te_*.",
        "delayed",
    )
    fp8_format: Literal["e4m3", "hybrid"] = option(
        "hybrid stores gradients in e5m2, which has more range and half the precision.", "e4m3"
    )
    margin: int = option("delayed: divide each scale by 2^margin.", 0, ge=0)
    amax_history_len: int = option(
        "delayed: length of the amax history, in micro-batches (for weights: in FP8 copies of the weight).",
        16,
        ge=1,
    )
    amax_compute_algo: Literal["max", "most_recent"] = option(
        "delayed: compute the scale from the largest or the most recent amax of the history.", "max"
    )
    reduce_amax: bool = option("delayed: share amax between ranks.", True)
    calibration_passes: int = option(
        "delayed: passes over the first micro-batch that set the initial scales. 0: all scales start at 1.",
        4,
        ge=0,
    )
    power_2_scales: bool | None = option(
        "current and block: round scales to powers of two. null: true for block, false for current.", None
    )
    amax_epsilon: float = option("current and block: lower bound of amax.", 0.0, ge=0)
    fast_accumulation_wgrad: bool = option(
        "delayed and current: compute weight gradients with the tensor cores' fast accumulation, which is "
        "less exact.",
        False,
    )
    bf16_modules: list[str] = option(
        "Name patterns (* and ?) of modules that stay in bf16, with everything in them.",
        ["lm_head"],
    )
    fp8_head_gradients: bool = option(
        "te_*: compute both gradient GEMMs of a bf16 lm_head in FP8 with block scaling.",
        True,
        before=False,
    )
    health_steps: int = option(
        "te_*: steps between FP8 health checks, which record statistics of GEMM operands. 0: no checks.",
        100,
        ge=0,
        resume="free",
    )
    on_trouble: Literal["warn", "escalate"] = option(
        "escalate: a module that fails two of four health checks falls back permanently to a safer recipe "
        "(current, block, block with bf16 gradients, bf16).",
        "warn",
        resume="free",
    )


# The end of a phase. The next phase starts there. The last phase lasts until the end of the run.
PHASE_ENDS = {
    "until_step": Annotated[int, Field(gt=0, description="steps of the run after which the phase ends")],
    "until_tokens": Annotated[int, Field(gt=0, description="tokens of the run after which the phase ends")],
    "until_share": Annotated[
        float, Field(gt=0, lt=1, description="share of max_steps after which the phase ends")
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


def phase_end_step(phase: PrecisionPhase, max_steps: int) -> int:
    """Return the step after which a phase ends in a run of `max_steps`. The phase must not have until_tokens."""
    return phase.get("until_step", round(phase.get("until_share", 1.0) * max_steps))


def is_phase_over(phase: PrecisionPhase, max_steps: int, step: int, tokens: int) -> bool:
    """Return whether a phase has ended after `step` steps and `tokens` tokens. It must not be the last phase."""
    if "until_tokens" in phase:
        return tokens >= phase["until_tokens"]
    return step >= phase_end_step(phase, max_steps)


def find_phase(phases: list[PrecisionPhase], max_steps: int, step: int, tokens: int) -> int:
    """Return the index of the phase of the next step, after `step` steps and `tokens` tokens."""
    last = len(phases) - 1
    return next((n for n in range(last) if not is_phase_over(phases[n], max_steps, step, tokens)), last)


@dataclass(config=STRICT)
class PrecisionConfig(PrecisionSettings):
    """The "precision" section. Keys that the chosen recipe does not read must keep their default."""

    backend: Literal["auto", "transformer_engine", "reference"] = option(
        "FP8 implementation. auto: the reference only without CUDA.", "auto"
    )
    optimizer_states: Literal["fp32", "bf16_remainder", "int8", "fp8"] = option(
        "Storage of AdamW's states. fp32: float32 weight and moments. The others store the weight as its bf16 "
        "copy plus 16 bits, and moments in optimizer_moments (bf16_remainder) or in torchao's 8 bits (int8, "
        "fp8). They need ZeRO 1 with data_types.grad_accum_dtype fp32.",
        "fp32",
    )
    optimizer_moments: Literal["bf16", "fp32"] = option(
        "bf16_remainder: type of AdamW's two moments.", "bf16"
    )
    gradient_communication: Literal["fp32", "bf16"] | None = option(
        "Type in which ranks reduce gradients. null: the type of the weights, even with float32 accumulation.",
        None,
    )
    schedule: list[PrecisionPhase] | None = option(
        "List of phases. A phase has the keys of this section that it changes and, except the last, its end: "
        "until_step, until_tokens or until_share.",
        None,
        min_length=1,
        example=[{"until_step": 500, "compute": "bf16"}, {"until_share": 0.9}, {"compute": "bf16"}],
    )
    # Free on resume, because the resume compares the measured choice instead.
    auto: bool = option(
        "te_* with compute fp8: at startup, measure FP8 and bf16, CUDA graphs and attention backends for "
        "about a minute, and use the fastest. A resumed run keeps the choice.",
        False,
        resume="free",
    )

    @property
    def emulated(self) -> bool:
        """Return whether the CPU reference emulates FP8."""
        import torch

        return self.backend == "reference" or (self.backend == "auto" and not torch.cuda.is_available())

    @property
    def head_gradients(self) -> bool:
        """Return whether the gradients of a bf16 lm_head are computed with FP8 GEMMs if its sizes allow it."""
        asked = self.compute == "fp8" and RECIPES[self.recipe].package == "te" and self.fp8_head_gradients
        return asked and any(fnmatchcase("lm_head", pattern) for pattern in self.bf16_modules)

    @property
    def moment_type(self) -> str:
        """Return the type of AdamW's moments, a key of MOMENT_BYTES."""
        states = self.optimizer_states
        return self.optimizer_moments if states == "bf16_remainder" else states

    @property
    def optimizer_bytes(self) -> float:
        """Return the bytes per parameter of optimizer states, excluding the weight that the model computes with."""
        if self.compute == "fp32":
            return 2 * MOMENT_BYTES["fp32"]
        return optimizer_state_bytes(self.optimizer_states, self.moment_type)

    def with_recipe(self, recipe: str) -> PrecisionConfig:
        """Return a copy with another recipe. Keys that only the old recipe reads get their default."""
        defaults = PrecisionConfig()
        left_out = set(RECIPES[self.recipe].knobs) - set(RECIPES[recipe].knobs)
        return dataclasses.replace(
            self, recipe=recipe, **{knob: getattr(defaults, knob) for knob in left_out}
        )

    def problems(self) -> list[str]:
        """Return a message for each contradiction in this section."""
        problems: list[str] = []
        recipe = RECIPES[self.recipe]
        torchao = recipe.package == "torchao"
        if self.auto and (self.compute != "fp8" or torchao):
            theirs = " or ".join(r.name for r in RECIPES.values() if r.package == "te")
            problems.append(
                f"precision.auto needs precision.compute fp8 and recipe {theirs}, but compute is {self.compute} and "
                f"the recipe is {self.recipe}; change compute or recipe, or set auto to false"
            )
        if self.compute == "fp8":
            defaults = PrecisionConfig()
            for knob in dict.fromkeys(knob for r in RECIPES.values() for knob in r.knobs):
                value, default = getattr(self, knob), getattr(defaults, knob)
                if knob not in recipe.knobs and value not in (default, FORMER_DEFAULTS.get(knob, default)):
                    readers = " and ".join(r.name for r in RECIPES.values() if knob in r.knobs)
                    problems.append(
                        f"precision.{knob} is for recipe {readers} only, but the recipe is {self.recipe}; remove it"
                    )
            if self.on_trouble == "escalate" and not (self.health_steps or torchao):
                problems.append(
                    "precision.on_trouble escalate needs FP8 health checks, but precision.health_steps is 0; set it, "
                    "for example to 100, or set on_trouble to warn"
                )
            if torchao and self.backend == "transformer_engine":
                problems.append(
                    f"precision.backend transformer_engine does not support recipe {self.recipe} of torchao; remove "
                    "backend"
                )
        if self.compute in ("fp16", "fp32"):
            if self.optimizer_states != "fp32":
                problems.append(
                    f"precision.optimizer_states {self.optimizer_states} needs bf16 weights, but precision.compute is "
                    f"{self.compute}; set optimizer_states to fp32"
                )
            if self.gradient_communication == "bf16":
                problems.append(
                    f"precision.gradient_communication bf16 would round the gradients of precision.compute "
                    f"{self.compute}; remove it, or set it to fp32"
                )
        if self.optimizer_states != "bf16_remainder" and self.optimizer_moments != "bf16":
            problems.append(
                "precision.optimizer_moments is for optimizer_states bf16_remainder only, but optimizer_states is "
                f"{self.optimizer_states}; remove optimizer_moments"
            )
        return problems
