"""What `accelerate launch` was told and the configuration has otherwise: train/train.py reads the latter alone, so that
a difference would be a setting that does nothing. By the variables that accelerate 1.15 sets for the programs it
starts (accelerate/utils/launch.py); nothing of it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from model.variants import VARIANTS
from train.config.arguments import TrainingArguments

MIXED_PRECISION = {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "no"}
# Of accelerate, what it says in its file, and what does the same here.
NOT_READ = {
    "ACCELERATE_USE_DEEPSPEED": ("distributed_type DEEPSPEED", 'the key "deepspeed" has what DeepSpeed is given'),
    "ACCELERATE_USE_FSDP": ("distributed_type FSDP", 'DeepSpeed shards ("deepspeed": ds_config_zero3.json)'),
    "ACCELERATE_USE_MEGATRON_LM": ("distributed_type MEGATRON_LM", "each rank has the whole model, or ZeRO's part"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("parallelism_config", "ranks are data parallel"),
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": (
        "fp8_config.use_mxfp8_block_scaling",
        "precision.recipe has block scaling for Hopper",
    ),
    "ACCELERATE_FP8_OVERRIDE_FPROP": ("fp8_config.override_linear_precision", "precision.bf16_modules keeps modules"),
    "ACCELERATE_FP8_OVERRIDE_DGRAD": ("fp8_config.override_linear_precision", "precision.bf16_modules keeps modules"),
    "ACCELERATE_FP8_OVERRIDE_WGRAD": ("fp8_config.override_linear_precision", "precision.bf16_modules keeps modules"),
}  # fmt: skip
FILE = "train_args/accelerate_fp8.yaml has what train_args/train_config_fp8.json has"


def contradictions(args: TrainingArguments, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Each as a message with both values, [] if another launcher started this process. `args`: resolved, if they could
    be."""
    mixed_precision = environment.get("ACCELERATE_MIXED_PRECISION")
    if mixed_precision is None:
        return []
    precision = args.precision
    ours = MIXED_PRECISION[precision.compute]
    rows: list[tuple[str, str, str, object]] = [
        ("ACCELERATE_MIXED_PRECISION", "mixed_precision", "precision.compute", ours),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", "gradient_accumulation_steps",
         args.gradient_accumulation_steps),
        ("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", "max_grad_norm", args.max_grad_norm),
    ]  # fmt: skip
    if not args.model.compile:
        rows.append(("ACCELERATE_DYNAMO_BACKEND", "dynamo_backend", "model.compile", "no"))
    if mixed_precision.lower() == ours == "fp8":
        of_te = VARIANTS[args.model.variant].te
        rows.append(
            ("ACCELERATE_FP8_BACKEND", "fp8_config.backend", "model.variant", "te" if of_te else "ao")
        )
        if of_te:
            rows.append(
                (
                    "ACCELERATE_FP8_FORMAT",
                    "fp8_config.fp8_format",
                    "precision.fp8_format",
                    precision.fp8_format,
                )
            )
        if precision.recipe == "delayed":  # the only one that accelerate has, whose knobs it always sets
            rows += [
                (f"ACCELERATE_FP8_{knob.upper()}", f"fp8_config.{knob}", f"precision.{knob}", getattr(precision, knob))
                for knob in ("margin", "amax_history_len", "amax_compute_algo")
            ]  # fmt: skip
            rows.append(
                ("ACCELERATE_FP8_INTERVAL", "fp8_config.interval", "the interval of delayed scaling", 1)
            )
    found = []
    for variable, theirs, key, value in rows:
        told = environment.get(variable, "").lower()
        if told not in ("", "auto", "none") and not _same(told, value):
            found.append(
                f"accelerate's {theirs} is {told} ({variable}), and {_ours(key, value, args)}, which would "
                f"run; make them equal, in accelerate's file or the configuration; {FILE}"
            )
    for variable, (theirs, instead) in NOT_READ.items():
        if environment.get(variable, "").lower() in ("true", "1"):
            found.append(
                f"accelerate's {theirs} ({variable}={environment[variable]}) is not read here: {instead}; remove it. "
                f"distributed_type is MULTI_GPU; {FILE}"
            )
    return found


def _same(told: str, value: object) -> bool:
    try:
        return float(told) == float(str(value))
    except ValueError:
        return told == str(value).lower()


def _ours(key: str, value: object, args: TrainingArguments) -> str:
    if key == "precision.compute":
        value = args.precision.compute
    elif key == "model.variant":
        value = args.model.variant
    elif key == "model.compile":
        value = args.model.compile
    return f"{key} is {value}"
