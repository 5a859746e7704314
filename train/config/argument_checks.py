"""Which values of the training configuration are allowed; what they are is in train/config/arguments.py."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE
from model.variants import ATTENTION_BACKENDS, VARIANTS, variant_problems
from train.config.strict_json import get
from train.data.mixture import weight_problems

SMALLEST_WINDOW = 16  # steps: the median of fewer says little
MAX_SEED = 2**32 - 1  # what numpy's generator takes
SCHEDULES = ("cosine", "linear", "constant", "warmup_stable_decay")
SAVE_STRATEGIES = ("steps", "no")
ON_SAVE_FAILURE = ("stop", "continue")


def blocking(folder: Path) -> Path | None:
    """What keeps `folder` from being made: itself, or the parent of it, that is there and is not a folder."""
    for place in (folder, *folder.parents):
        if os.path.isdir(place):
            return None
        if os.path.lexists(place):  # a link to nothing as well
            return place
    return None


def value_problems(a: Any, bad: set[str]) -> list[str]:
    """Values of the right type that are not allowed. Checks that need a key in `bad` are left out."""
    problems: list[str] = []
    # Conditions are callables: one whose key has no usable value must not run.

    def check(keys: str, allowed: Callable[[], bool], message: str) -> None:
        if bad.isdisjoint(keys.split()) and not allowed():
            given = ", ".join(f"{key} {json.dumps(get(a, key))}" for key in keys.split())
            problems.append(f"{given}: {message}")

    def numbers(keys: str, allowed: Callable[[Any], bool], message: str) -> None:
        for key in keys.split():
            value = get(a, key)
            check(key, partial(lambda v: v is None or (math.isfinite(v) and allowed(v)), value), message)

    numbers(
        "max_steps max_seq_length per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps train_batch_size_tokens learning_rate adam_epsilon logging_steps "
        "max_eval_samples save_total_limit decay_steps max_skipped_steps",
        lambda v: v > 0,
        "must be positive",
    )
    numbers(
        "warmup_steps weight_decay max_grad_norm eval_steps save_steps spike_threshold replica_check_steps "
        "hang_timeout_s",
        lambda v: v >= 0,
        "must not be negative",
    )
    numbers("seed", lambda v: 0 <= v <= MAX_SEED, f"must be between 0 and {MAX_SEED}")
    numbers("spike_window", lambda v: v >= SMALLEST_WINDOW, f"must be at least {SMALLEST_WINDOW}")
    numbers("min_lr_ratio", lambda v: 0 <= v <= 1, "must be between 0 and 1")
    numbers("adam_beta1 adam_beta2", lambda v: 0 <= v < 1, "must be at least 0 and below 1")
    for key, choices in (
        ("lr_scheduler_type", SCHEDULES),
        ("report_to", ("none", "wandb")),
        ("save_strategy", SAVE_STRATEGIES),
        ("on_save_failure", ON_SAVE_FAILURE),
        ("on_spike", ("warn", "rollback")),
        ("model.variant", VARIANTS),
        ("model.attention_backend", ATTENTION_BACKENDS),
    ):
        check(key, partial(lambda k, c: get(a, k) in c, key, choices), f"must be one of {', '.join(choices)}")

    wsd = a.lr_scheduler_type == "warmup_stable_decay"
    check("warmup_steps max_steps", lambda: a.warmup_steps <= a.max_steps, "warmup is longer than the run")
    check(
        "lr_scheduler_type decay_steps",
        lambda: (a.decay_steps is not None) == wsd,
        "decay_steps belongs to warmup_stable_decay: give it there, remove it elsewhere",
    )
    check(
        "warmup_steps decay_steps max_steps",
        lambda: not (wsd and a.decay_steps) or a.warmup_steps + a.decay_steps <= a.max_steps,
        "warmup and decay together are longer than the run",
    )
    check(
        "on_spike save_strategy",
        lambda: a.on_spike != "rollback" or a.save_strategy != "no",
        "a rollback needs checkpoints; set save_strategy to steps, or on_spike to warn",
    )
    check(
        "on_spike spike_threshold",
        lambda: a.on_spike != "rollback" or a.spike_threshold > 0,
        "with a threshold of 0 nothing is a spike; set one, or on_spike to warn",
    )
    if "output_dir" not in bad and a.output_dir and (blocked := blocking(Path(a.output_dir))):
        problems.append(
            f"output_dir {json.dumps(a.output_dir)}: {blocked} is there and is not a folder; choose another folder"
        )
    sources, weights = a.data.sources, a.data.weights
    check("data.sources", lambda: bool(sources), 'name at least one: {"name": "folder"}')
    if weights is not None and bad.isdisjoint(("data.sources", "data.weights")):
        problems += weight_problems(weights, list(sources))
    if not any(key.startswith("precision.") for key in bad):
        problems += a.precision.validate()
        if bad.isdisjoint(("model.variant", "model.compile")) and a.model.variant in VARIANTS:
            problems += variant_problems(a.model.variant, a.precision, a.model.compile)
    check(
        "data.document_mask model.variant",
        lambda: (
            not a.data.document_mask or a.model.variant not in VARIANTS or VARIANTS[a.model.variant].documents
        ),
        "transformers' attention here has no documents; set it to false, or choose te_linear or te_layer",
    )
    fp8 = a.precision.compute == "fp8"
    check(
        "speed.cuda_graphs gradient_checkpointing",
        lambda: not (a.speed.cuda_graphs and a.gradient_checkpointing),
        "recomputation reads the random generator's state, which cannot be captured; turn one of them off",
    )
    check(
        "speed.cuda_graphs model.variant",
        lambda: (
            not a.speed.cuda_graphs or a.model.variant not in VARIANTS or VARIANTS[a.model.variant].graphs
        ),
        "CUDA graphs are for te_linear and te_layer; set it to false, or take one of these",
    )
    for batch in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        check(
            f"{batch} max_seq_length precision.compute",
            partial(
                lambda k: not fp8 or (get(a, k) or 0) * a.max_seq_length % FP8_TRAIN_ROW_MULTIPLE == 0, batch
            ),
            f"FP8 needs batch size x sequence length divisible by {FP8_TRAIN_ROW_MULTIPLE}",
        )
    return problems
