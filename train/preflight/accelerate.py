"""Compare the configuration of `accelerate launch` with the configuration of the training run.

Training uses only the configuration of the run, so a different setting in accelerate would be ignored silently.

accelerate 1.15 passes its settings to the processes that it starts as environment variables
(accelerate/utils/launch.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from model.variants import VARIANTS
from train.config.arguments import ConfigurationError, TrainingArguments

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
EXAMPLE = "train_args/accelerate_fp8.yaml is an example for train_config_fp8.json"


def contradictions(args: TrainingArguments, environment: Mapping[str, str] = os.environ) -> list[Exception]:
    """Return an error for each setting that differs between accelerate and the training arguments.

    Args:
        args: The training arguments.
        environment: The environment variables. The result is [] if `accelerate launch` did not start the process.
    """
    mixed_precision = environment.get("ACCELERATE_MIXED_PRECISION")
    if mixed_precision is None:
        return []
    precision, te = args.precision, VARIANTS[args.model.variant].te
    expected: dict[str, tuple[str, object]] = {
        "MIXED_PRECISION": ("precision.compute", MIXED_PRECISION[precision.compute]),
        "GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "GRADIENT_CLIPPING": ("max_grad_norm", args.max_grad_norm),
    }
    if not args.model.compile:
        expected["DYNAMO_BACKEND"] = ("model.compile", "no")
    if mixed_precision.lower() == precision.compute == "fp8":
        expected["FP8_BACKEND"] = ("model.variant", "te" if te else "ao")
        if te:
            expected["FP8_FORMAT"] = ("precision.fp8_format", precision.fp8_format)
        if precision.recipe == "delayed":  # accelerate sets these variables for every recipe
            for name in ("margin", "amax_history_len", "amax_compute_algo"):
                expected[f"FP8_{name.upper()}"] = (f"precision.{name}", getattr(precision, name))
            expected["FP8_INTERVAL"] = ("precision.recipe", 1)
    found: list[Exception] = []
    for name, (key, value) in expected.items():
        given = environment.get(f"ACCELERATE_{name}", "").lower()
        # accelerate may write the number 1 as 1.0.
        if given.removesuffix(".0") not in ("", "auto", "none", str(value).lower().removesuffix(".0")):
            text = (
                f"accelerate's ACCELERATE_{name} is {given}, but {key} asks for {value}. Make the two settings equal. "
                f"{EXAMPLE}"
            )
            found.append(ConfigurationError(text, key=key))
    for name in NOT_SUPPORTED:
        if environment.get(name, "").lower() in ("true", "1"):
            text = (
                f"accelerate's {name} is not supported. Remove this setting, and set distributed_type to MULTI_GPU. "
                f"{EXAMPLE}"
            )
            found.append(ConfigurationError(text, key=name))
    return found
