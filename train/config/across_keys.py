"""What the keys of a training ask of each other."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from model.fp8.recipes import BF16_MOMENTS_MOST_BETA2, FP8_TRAIN_ROW_MULTIPLE
from model.variants import VARIANTS, variant_problems, why_no_graphs
from train.config.schedule import precisions_of, stage_problems
from train.config.schema import unchangeable
from train.data.mixture import weight_problems
from train.files import blocking, shown

if TYPE_CHECKING:
    from train.config.arguments import TrainingArguments


def problems_across_keys(args: TrainingArguments, bad: set[str]) -> list[str]:
    """Values that do not go together. Checks of a key in `bad`, which got no usable value, are left out."""
    problems: list[str] = []

    def check(keys: str, allowed: object, message: str) -> None:
        if not allowed and bad.isdisjoint(keys.split()):
            values = ((key, attrgetter(key)(args)) for key in keys.split())
            problems.append(f"{', '.join(f'{key} {shown(value)}' for key, value in values)}: {message}")

    decays = args.lr_scheduler_type == "warmup_stable_decay"
    check("warmup_steps max_steps", args.warmup_steps <= args.max_steps, "warmup is longer than the run")
    check(
        "lr_scheduler_type decay_steps",
        (args.decay_steps is not None) == decays,
        "decay_steps belongs to warmup_stable_decay: give it there, remove it elsewhere",
    )
    check(
        "warmup_steps decay_steps max_steps",
        not decays or args.warmup_steps + (args.decay_steps or 0) <= args.max_steps,
        "warmup and decay together are longer than the run",
    )
    check(
        "optim muon_momentum",
        args.optim == "muon" or args.muon_momentum == type(args).muon_momentum,
        "muon_momentum belongs to muon: give it there, remove it elsewhere",
    )
    rollback = args.on_spike == "rollback"
    check(
        "on_spike save_strategy",
        not rollback or args.save_strategy != "no",
        "a rollback needs checkpoints; set save_strategy to steps, or on_spike to warn",
    )
    check(
        "on_spike spike_threshold",
        not rollback or args.spike_threshold > 0,
        "with a threshold of 0 nothing is a spike; set one, or on_spike to warn",
    )
    if isinstance(args.allow_changes_on_resume, list):
        problems += unchangeable(type(args), args.allow_changes_on_resume)
    if "output_dir" not in bad and args.output_dir and (blocked := blocking(Path(args.output_dir))):
        problems.append(
            f"output_dir {shown(args.output_dir)}: {blocked} is there and is not a folder; choose another "
            "folder"
        )
    if args.data.weights is not None and bad.isdisjoint(("data.sources", "data.weights")):
        problems += weight_problems(args.data.weights, list(args.data.sources))
    if bad.isdisjoint(("precision.compute", "precision.recipe")):
        problems += args.precision.problems()
        if bad.isdisjoint(("model.variant", "model.compile")):
            problems += variant_problems(args.model.variant, args.precision, args.model.compile)
            if "precision.schedule" not in bad:
                problems += stage_problems(args)
    check(
        "precision.optimizer_states precision.optimizer_moments adam_beta2",
        args.precision.optimizer_states != "bf16_remainder"
        or args.precision.optimizer_moments == "fp32"
        or args.adam_beta2 <= BF16_MOMENTS_MOST_BETA2,
        f"second moments in bf16 would stand still with an adam_beta2 above {BF16_MOMENTS_MOST_BETA2}, as their "
        "changes are rounded away; set optimizer_moments to fp32",
    )
    variant = VARIANTS[args.model.variant]
    check(
        "data.document_mask model.variant",
        variant.documents or not args.data.document_mask,
        "transformers' attention here has no documents; set it to false, or choose te_linear or te_layer",
    )
    no_graphs = why_no_graphs(args.model.variant, gradient_checkpointing=args.gradient_checkpointing)
    check(
        "speed.cuda_graphs gradient_checkpointing model.variant",
        no_graphs is None or not args.speed.cuda_graphs,
        no_graphs or "",
    )
    fp8 = any(own.compute == "fp8" for own in precisions_of(args.precision))
    for key in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        rows = (getattr(args, key) or 0) * args.max_seq_length
        check(
            f"{key} max_seq_length precision.compute",
            not fp8 or rows % FP8_TRAIN_ROW_MULTIPLE == 0,
            f"FP8 needs batch size x sequence length divisible by {FP8_TRAIN_ROW_MULTIPLE}",
        )
    return problems
