"""precision.auto in a training run: rank 0 measures or reads a saved choice, and every rank applies it.

What is chosen is part of the resolved configuration, as if the user had written it, so that checkpoints are compared by
it. The measurement is kept in output_dir/autotune.json, and a run that is resumed reads it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from model.autotune.measure import autotune
from model.autotune.record import Record, asked_of, circumstances_of, versions_of
from model.autotune.task import Task
from model.config import GIB, load_config, num_parameters, state_memory_gib
from model.fp8.recipes import RECIPES
from model.variants import why_no_graphs
from train.checkpoint.files import committed
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.differences import Difference, differences
from train.config.ds_config import resolve_ds_config
from train.files import write_durably

FILE = "autotune.json"


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
        return with_sections(args, precision=dataclasses.replace(precision, auto=False)), None
    ds_config, _ = resolve_ds_config(args, world_size)
    task = task_of(args, ds_config, world_size)
    # a failure of rank 0 ends the others: see train.fail
    records = [obtain(args, task, say) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(records, src=0)
    record = records[0]
    assert record is not None
    chosen_precision, chosen_speed = record.choice.apply(precision, args.speed)
    if chosen_speed.cuda_graphs and not task.graphs_allowed:
        say("precision.auto: the saved choice has CUDA graphs, which this run cannot have; they stay off")
        chosen_speed = dataclasses.replace(chosen_speed, cuda_graphs=False)
    model = dataclasses.replace(args.model, attention_backend=record.choice.attention_backend)
    return with_sections(args, precision=chosen_precision, speed=chosen_speed, model=model), record


def with_sections(args: TrainingArguments, **sections: Any) -> TrainingArguments:
    return dataclasses.replace(args, **sections)


def task_of(args: TrainingArguments, ds_config: dict[str, Any], world_size: int) -> Task:
    """What to measure for a run."""
    config = load_config(args.model.config)
    stage = ds_config["zero_optimization"]["stage"]
    float32_buffers = stage == 1 and ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    main_grad = args.speed.main_grad and float32_buffers
    shares_amax = RECIPES[args.precision.recipe].has_state and args.precision.reduce_amax
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
        # nor, unless the user turned it on, what nobody has run: a graph with delayed scaling's reduction over ranks
        graphs_allowed=no_graphs is None and (args.speed.cuda_graphs or world_size == 1 or not shares_amax),
        document_mask=args.data.document_mask,
        other_memory_gib=max(0.0, state_memory_gib(config, stage, world_size) - held),
    )


def obtain(args: TrainingArguments, task: Task, say: Callable[[str], None]) -> Record:
    """The choice named by `precision.auto`, the one of the run that is resumed, or a new one."""
    asked, circumstances, versions = asked_of(task), circumstances_of(task), versions_of(task)
    if isinstance(args.precision.auto, str):
        path = Path(args.precision.auto)
        record = read(path, "set precision.auto to true to measure anew")
        others = differences(record.asked, asked) + differences(record.circumstances, circumstances)
        if others:
            raise ConfigurationError(
                f"precision.auto: the choice in {path} was made for something else:\n  "
                + "\n  ".join(map(str, others))
                + "\nset precision.auto to true to measure anew, or restore these"
            )
        return reused(record, path, differences(record.versions, versions), say)

    resuming, folder = resumed_run(args)
    path = folder / FILE
    if path.is_file():
        record = read(path, "delete the file to measure anew")
        others = differences(record.circumstances, circumstances) + differences(record.versions, versions)
        other_wishes = differences(record.asked, asked)
        if not other_wishes and (resuming or not others):
            return reused(record, path, others, say)
        say(
            f"precision.auto: {path} was made for something else: "
            + "; ".join(map(str, other_wishes + others))
        )
    return autotune(task, say)


def reused(record: Record, path: Path, changed: list[Difference], say: Callable[[str], None]) -> Record:
    say(f"{record.summary()}; read from {path}, not measured again")
    if changed:
        say(f"precision.auto: since it was measured there changed: {'; '.join(map(str, changed))}")
    return record


def resumed_run(args: TrainingArguments) -> tuple[bool, Path]:
    """(whether a checkpoint will be resumed, the folder of the run that wrote it; output_dir where there is none)."""
    output_dir, setting = Path(args.output_dir or "output"), args.resume_from_checkpoint
    if setting not in ("auto", "never"):
        return True, Path(setting).resolve().parent.parent  # RUN/checkpoints/step-N
    return setting == "auto" and bool(committed(output_dir / "checkpoints")), output_dir


def read(path: Path, advice: str) -> Record:
    """Raises ConfigurationError: no file, or not a saved choice."""
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"precision.auto: the saved choice {path} cannot be read ({error}); {advice}"
        ) from error


def save(record: Record, output_dir: Path) -> None:
    """Keep the choice with the run; the run may write from now on."""
    write_durably(output_dir / FILE, record.to_json())
