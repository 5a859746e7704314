"""precision.auto in a training run: rank 0 measures or reads a saved choice, and every rank applies it.

What is chosen is part of the resolved configuration, as if the user had written it, so that checkpoints are compared by
it. The measurement is kept in output_dir/autotune.json, and a run that is resumed reads it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from model.autotune.choice import Record
from model.autotune.measure import autotune
from model.autotune.task import Task
from model.config import GIB, load_config, num_parameters, state_memory_gib
from model.variants import why_no_graphs
from train.checkpoint.files import committed
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.differences import before_new_keys, differences, rule_of, unread_by_either
from train.config.ds_config import resolve_ds_config
from train.record.run_folder import RunFolder


def resolve_auto(
    args: TrainingArguments, world_size: int, say: Callable[[str], None]
) -> tuple[TrainingArguments, Record | None]:
    """(arguments with the choice in them and `precision.auto` false, the choice; None where there was none to make).
    Every rank calls it, with resolved arguments. Nothing is written.

    Raises ConfigurationError: a saved choice that cannot be read or was made for something else; ValueError: see
    `autotune`.
    """
    precision = args.precision
    if not precision.auto:
        return args, None
    if precision.auto is True and precision.emulated:
        say(
            "precision.auto: there is no GPU to measure on; precision, graphs and attention stay as configured"
        )
        return replace(args, precision=replace(precision, auto=False)), None
    ds_config = resolve_ds_config(args, world_size)
    task = task_of(args, ds_config, world_size)
    # a failure of rank 0 ends the others: see train.fail
    records = [obtain(args, task, say) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(records, src=0)
    record = records[0]
    assert record is not None
    precision, speed = record.choice.apply(precision, args.speed)
    if speed.cuda_graphs and not task.graphs_allowed:
        say("precision.auto: the saved choice has CUDA graphs, which this run cannot have; they stay off")
        speed = replace(speed, cuda_graphs=False)
    model = replace(args.model, attention_backend=record.choice.attention_backend)
    return replace(args, precision=precision, speed=speed, model=model), record


def task_of(args: TrainingArguments, ds_config: dict[str, Any], world_size: int) -> Task:
    """What to measure for a run."""
    config = load_config(args.model.config)
    stage = ds_config["zero_optimization"]["stage"]
    float32_buffers = stage == 1 and ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    main_grad = args.speed.main_grad and float32_buffers
    no_graphs = why_no_graphs(
        args.model.variant, gradient_checkpointing=args.gradient_checkpointing, zero_stage=stage
    )
    # the measurement itself holds weights and, with main_grad, float32 gradients
    held = num_parameters(config) * (2 + 4 * main_grad) / GIB
    return Task(
        config=config,
        variant=args.model.variant,
        precision=args.precision,
        batch_size=args.per_device_train_batch_size,
        seq_length=args.max_seq_length,
        speed=args.speed,
        attention_backend=args.model.attention_backend,
        gradient_checkpointing=args.gradient_checkpointing,
        # ZeRO 3 frees the weights, so that no FP8 copy is kept of them, and moves them
        accumulation=(args.gradient_accumulation_steps or 1) if stage < 3 else 1,
        main_grad=main_grad,
        graphs_allowed=no_graphs is None,
        document_mask=args.data.document_mask,
        other_memory_gib=max(
            0.0,
            state_memory_gib(
                config,
                stage,
                world_size,
                optimizer_bytes=args.precision.optimizer_bytes,
                optim=args.optim,
            )
            - held,
        ),
        ranks=world_size,
        zero_stage=stage,
    )


def obtain(args: TrainingArguments, task: Task, say: Callable[[str], None]) -> Record:
    """The choice named by `precision.auto`, the one of the run that is resumed, or a new one."""
    named = args.precision.auto if isinstance(args.precision.auto, str) else None
    resuming, folder = resumed_run(args)
    path = Path(named) if named else folder.autotune
    if named or path.is_file():
        advice = f"{'set precision.auto to true' if named else 'delete the file'} to measure anew"
        try:
            record = Record.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"precision.auto: the saved choice {path} cannot be read ({error}); {advice}"
            ) from error
        now = task.made_for()
        if isinstance(section := record.asked.get("precision"), dict):
            # an earlier version's lacks keys that are new; `auto` is no part of it
            known = {k: v for k, v in before_new_keys(section).items() if k in now["asked"]["precision"]}
            record.asked["precision"] = known | section
        asked, circumstances, versions = (
            differences(getattr(record, part), its) for part, its in now.items()
        )
        # what any run may change when it goes on, as looks and alarms, does not decide what is fastest
        unread = unread_by_either(record.asked, now["asked"])
        asked = [
            d
            for d in asked
            if d.key not in unread
            and not (d.key.startswith("precision.") and rule_of(d.key) in ("free", "calibration"))
        ]
        # a run that goes on keeps its choice, and who names a file answers for other versions
        against = (
            asked
            + ([] if resuming and not named else circumstances)
            + ([] if resuming or named else versions)
        )
        if not against:
            say(f"{record.summary()}; read from {path}, not measured again")
            if changed := circumstances + versions:
                say(f"precision.auto: since it was measured there changed: {'; '.join(map(str, changed))}")
            return record
        what = f"precision.auto: the choice in {path} was made for something else:\n  " + "\n  ".join(
            map(str, against)
        )
        if named:
            raise ConfigurationError(f"{what}\n{advice}, or restore these")
        say(what)
    return autotune(task, say)


def resumed_run(args: TrainingArguments) -> tuple[bool, RunFolder]:
    """(whether a checkpoint will be resumed, the folder of the run that wrote it; output_dir where there is none)."""
    own, setting = RunFolder(args.output_dir), args.resume_from_checkpoint
    if setting not in ("auto", "never"):
        return True, RunFolder(Path(setting).resolve().parent.parent)  # RUN/checkpoints/step-N
    return setting == "auto" and bool(committed(own.checkpoints)), own
