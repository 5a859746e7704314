"""Compare the GPU memory and disk space that a run needs with what the machine has.

A run is refused only if it cannot fit. A run that probably does not fit gets a warning.
"""

from __future__ import annotations

import shutil
from typing import Any

from model.config import GIB, num_parameters
from train.checkpoint.files import checkpoint_name, committed, step_folders
from train.config.arguments import ConfigurationError, TrainingArguments
from train.files import format_size, nearest_existing_path
from train.planning.memory import (
    checkpoint_bytes,
    largest_micro_batch,
    least_memory_gib,
    predict_memory,
    weight_bytes,
)
from train.planning.setting import Setting
from train.preflight.machine import out_of_memory
from train.record.run_folder import RunFolder


def check_memory(args: TrainingArguments, s: Setting, device_bytes: int) -> str:
    """Return a warning if the run is likely to exceed the memory of a GPU, or "".

    Args:
        args: the resolved arguments of `s`.
        device_bytes: memory of the GPU with the least memory, in bytes.

    Raises:
        ConfigurationError: The run cannot fit.
    """
    available, least = device_bytes / GIB, least_memory_gib(s)
    model = (
        f"GPU memory: {s.parameters / 1e6:,.0f} M parameters at ZeRO {s.zero_stage} on {s.ranks} "
        f"{'ranks' if s.ranks > 1 else 'rank'}"
    )
    if least > available:
        raise ConfigurationError(
            f"{model} need at least {least:,.1f} GiB per rank for weights, gradients and optimizer, but a GPU of this "
            f"machine has {available:,.1f} GiB. {memory_advice(args)}",
            code="gpu_memory",
            key="model.config",
        )
    memory = predict_memory(s) if s.is_planned else None
    if memory is None or memory.needed_gib(s.ranks) <= available:
        return ""
    return (
        f"warning: {model} are expected to need {memory.needed_gib(s.ranks):,.1f} GiB per GPU, but a GPU has "
        f"{available:,.1f} GiB ({memory.described()}). The largest per_device_train_batch_size that is expected to fit "
        f"is {largest_micro_batch(s, available)}. {memory_advice(args)}"
    )


def memory_ran_out(error: Exception, args: TrainingArguments) -> str | None:
    """Return a message if the error reports a lack of memory, or None."""
    if not (line := out_of_memory(error)):
        return None
    return f"error: memory ran out: {line}\n{memory_advice(args)}\n(set FP8_TRACEBACK=1 to see where)"


def memory_advice(args: TrainingArguments) -> str:
    """Return the settings that reduce GPU memory."""
    recompute = "" if args.gradient_checkpointing else "gradient_checkpointing true, "
    return (
        f"To reduce memory, use a smaller per_device_train_batch_size, {recompute}precision.optimizer_states int8 "
        "(ZeRO 1), more ranks with a higher ZeRO stage, or a smaller model.config. See docs/hardware.md"
    )


def disk_need(args: TrainingArguments, sizes: Any, zero_stage: int) -> tuple[int, int, str]:
    """Return the disk space of a run with resolved arguments.

    A save is complete before the oldest checkpoint is deleted, so during a save the disk holds one checkpoint
    more than save_total_limit.

    Returns:
        The bytes of a checkpoint, the bytes of everything the run adds to its folder, and a description of both.
    """
    compute, is_new = args.precision.compute, args.resume_from_checkpoint == "never"
    # "never" moves existing checkpoints aside and keeps them.
    there = [] if is_new else committed(RunFolder(args.output_dir).checkpoints)
    saves = -(-args.max_steps // args.save_steps) if args.save_steps and not args.save_minutes else 0
    most = min(args.save_total_limit + 1, saves or args.save_total_limit + 1)
    count = max(1, most - min(len(there), args.save_total_limit))
    checkpoint = checkpoint_bytes(sizes, zero_stage, compute, args.precision.optimizer_bytes, args.optim)
    export = num_parameters(sizes) * weight_bytes(compute)
    text = (
        f"a checkpoint takes about {format_size(checkpoint)}, up to {count} more are kept, and hf/ takes "
        f"{format_size(export)}"
    )
    return checkpoint, checkpoint * count + export, text


def check_disk(args: TrainingArguments, sizes: Any, zero_stage: int) -> str:
    """Return a warning if the disk cannot hold everything the run writes, or "".

    Raises:
        ConfigurationError: The first save does not fit.
    """
    folder = RunFolder(args.output_dir)
    if args.save_strategy == "no" or is_done(args, folder):
        return ""
    checkpoint, total, text = disk_need(args, sizes, zero_stage)
    # A save deletes the files of interrupted saves and the checkpoints beyond save_total_limit.
    kept = committed(folder.checkpoints)[
        -args.save_total_limit if args.resume_from_checkpoint == "auto" else 0 :
    ]
    removed = [path for path in step_folders(folder.checkpoints) if path not in kept]
    free = shutil.disk_usage(nearest_existing_path(folder.checkpoints)).free
    free += sum(file.stat().st_size for path in removed for file in path.iterdir())
    facts = f"output_dir {args.output_dir}: {format_size(free)} are free; {text}"
    if free < checkpoint:
        raise ConfigurationError(
            f"{facts}: the disk has no room for the first save. Free some space, lower save_total_limit, choose "
            "another output_dir, or set save_strategy to no",
            code="disk",
            key="output_dir",
        )
    warning = (
        f"warning: {facts}. The disk has no room for the last save: the run needs {format_size(total)} in total. Free "
        "some space, or lower save_total_limit"
    )
    return warning if free < total else ""


def disk_plan(args: TrainingArguments, sizes: Any, zero_stage: int) -> str:
    """Return a line for the log with the output folder and the disk space that the run needs."""
    folder = RunFolder(args.output_dir)
    _, _, text = disk_need(args, sizes, zero_stage)
    if args.save_strategy == "no":
        text = "save_strategy is no: no checkpoints and no hf/"
    free = shutil.disk_usage(nearest_existing_path(folder.checkpoints)).free
    return f"output: {folder.path.resolve()}; {text}; {format_size(free)} are free"


def is_done(args: TrainingArguments, folder: RunFolder) -> bool:
    """Return whether the run already has its last checkpoint, so that it has nothing to train."""
    there = committed(folder.checkpoints)
    return (
        args.resume_from_checkpoint == "auto"
        and bool(there)
        and there[-1].name >= checkpoint_name(args.max_steps)
    )
