"""Compare what `accelerate launch` was configured with to this project's configuration, which alone counts.

A difference would be a setting that silently does nothing. The variables are those that accelerate 1.15 sets for the
programs it starts (accelerate/utils/launch.py); nothing of it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from model.variants import VARIANTS
from train.config.arguments import TrainingArguments

MIXED_PRECISION = {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "no"}
NOT_SUPPORTED = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
    "ACCELERATE_FP8_OVERRIDE_FPROP",
    "ACCELERATE_FP8_OVERRIDE_DGRAD",
    "ACCELERATE_FP8_OVERRIDE_WGRAD",
)
EXAMPLE = "train_args/accelerate_fp8.yaml shows a file that matches train_config_fp8.json"


def contradictions(args: TrainingArguments, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a message per difference; [] if another launcher started this process.

    Args:
        args: resolved arguments, or unresolved ones if they could not be resolved.
    """
    mixed_precision = environment.get("ACCELERATE_MIXED_PRECISION")
    if mixed_precision is None:
        return []
    precision, te = args.precision, VARIANTS[args.model.variant].te
    ours: dict[str, tuple[str, object]] = {
        "MIXED_PRECISION": ("precision.compute", MIXED_PRECISION[precision.compute]),
        "GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "GRADIENT_CLIPPING": ("max_grad_norm", args.max_grad_norm),
    }
    if not args.model.compile:
        ours["DYNAMO_BACKEND"] = ("model.compile", "no")
    if mixed_precision.lower() == precision.compute == "fp8":
        ours["FP8_BACKEND"] = ("model.variant", "te" if te else "ao")
        if te:
            ours["FP8_FORMAT"] = ("precision.fp8_format", precision.fp8_format)
        if precision.recipe == "delayed":  # accelerate always sets its options
            for name in ("margin", "amax_history_len", "amax_compute_algo"):
                ours[f"FP8_{name.upper()}"] = (f"precision.{name}", getattr(precision, name))
            ours["FP8_INTERVAL"] = ("the interval of delayed scaling", 1)
    found = [
        f"accelerate's ACCELERATE_{name} is {theirs}, but {key} asks for {value}. Make them equal; {EXAMPLE}"
        for name, (key, value) in ours.items()
        if (theirs := environment.get(f"ACCELERATE_{name}", "").lower()) not in ("", "auto", "none")
        and not _same(theirs, value)
    ]
    return found + [
        f"accelerate's {name} is {environment[name]}, which is not supported. Remove it, and set distributed_type "
        f"MULTI_GPU; {EXAMPLE}"
        for name in NOT_SUPPORTED
        if environment.get(name, "").lower() in ("true", "1")
    ]


def _same(theirs: str, value: object) -> bool:
    try:
        return float(theirs) == float(str(value))
    except ValueError:
        return theirs == str(value).lower()
