"""Check that the GPU memory, the host memory and the disk space are sufficient for a run.

A run that certainly does not fit is refused. A run that probably does not fit gets a warning.
"""

from __future__ import annotations

import math
import shutil
from typing import Any

from model.config import GIB, num_parameters
from train.checkpoint.files import checkpoint_name, committed, excess_checkpoints, identity, step_folders
from train.config.arguments import ConfigurationError, TrainingArguments
from train.data.format import count
from train.files import format_size, nearest_existing_path
from train.planning.memory import (
    checkpoint_bytes,
    largest_micro_batch,
    least_memory_gib,
    offload_host_gib,
    predict_memory,
    weight_bytes,
)
from train.planning.setting import Setting
from train.preflight.machine import free_host_memory, out_of_memory
from train.record.run_folder import RunFolder


def check_memory(args: TrainingArguments, s: Setting, device_bytes: int) -> str:
    """Return a warning if the run probably does not fit into GPU memory, or "".

    Args:
        args: The resolved training arguments.
        s: The setting created from these arguments.
        device_bytes: The memory of the smallest GPU, in bytes.

    Raises:
        ConfigurationError: The run certainly does not fit.
    """
    available, least = device_bytes / GIB, least_memory_gib(s)
    model = (
        f"GPU memory: {s.parameters / 1e6:,.0f} M parameters at ZeRO {s.zero_stage} on {s.ranks} "
        f"{'ranks' if s.ranks > 1 else 'rank'}"
    )
    if least > available:
        raise ConfigurationError(
            f"{model}: weights, gradients and optimizer states need at least {least:,.1f} GiB per rank, but the "
            f"smallest GPU on this node has only {available:,.1f} GiB. {memory_advice(args)}",
            code="gpu_memory",
            key="model.config",
        )
    memory = predict_memory(s) if s.is_planned else None
    if memory is None or memory.needed_gib(s.ranks) <= available:
        return ""
    return (
        f"warning: {model} are expected to need {memory.needed_gib(s.ranks):,.1f} GiB per GPU ({memory.describe()}), "
        f"but the smallest GPU on this node has {available:,.1f} GiB. Largest per_device_train_batch_size that is "
        f"expected to fit: {largest_micro_batch(s, available) or 'none'}. {memory_advice(args)}"
    )


def check_host_memory(s: Setting, local_ranks: int) -> None:
    """Check that the offloaded optimizer states of this node's ranks fit into host memory.

    Raises:
        ConfigurationError: The host has too little free memory.
    """
    if not s.offloads:
        return
    needed, free = offload_host_gib(s, local_ranks), free_host_memory() / GIB
    if needed > free:
        raise ConfigurationError(
            f"zero_optimization.offload_optimizer: {s.parameters / 1e6:,.0f} M parameters at ZeRO {s.zero_stage} need "
            f"{needed:,.1f} GiB of host memory for the {local_ranks} of {s.ranks} ranks on this node, but only "
            f"{free:,.1f} GiB are free. Set save_async or pin_memory to false, use more nodes, or remove "
            "offload_optimizer",
            code="host_memory",
            key="deepspeed",
        )


def memory_ran_out(error: Exception, args: TrainingArguments) -> str | None:
    """Return an error message with advice if an exception reports that memory ran out, or None for other exceptions."""
    if not (line := out_of_memory(error)):
        return None
    return f"error: memory ran out: {line}\n{memory_advice(args)}\nTo see the traceback, set FP8_TRACEBACK=1."


def memory_advice(args: TrainingArguments) -> str:
    """Return advice on settings that need less GPU memory, as text for an error message."""
    recompute = "" if args.gradient_checkpointing is True else "gradient_checkpointing true, "
    return (
        f"To reduce memory, use a smaller per_device_train_batch_size, {recompute}precision.optimizer_states int8 "
        "(ZeRO 1), more ranks with a higher ZeRO stage, offload_optimizer (ZeRO 2 or 3), or a smaller model.config. "
        "See docs/hardware.md"
    )


def disk_need(args: TrainingArguments, sizes: Any, zero_stage: int) -> tuple[int, int, str]:
    """Return the disk space that a run needs.

    The oldest checkpoint is deleted only after a save is complete. During a save, the disk therefore contains one more
    checkpoint than the run keeps.

    Returns:
        The size of a checkpoint in bytes; the size of all checkpoints and the exported model that the run adds to its
        folder, in bytes; and a description of both sizes.
    """
    compute, is_new = args.precision.compute, args.resume_from_checkpoint == "never"
    # "never" moves existing checkpoints aside and keeps them.
    there = [] if is_new else committed(RunFolder(args.output_dir).checkpoints)
    milestones = args.max_steps // args.keep_every_steps if args.keep_every_steps else 0
    kept = (args.save_total_limit or math.inf) + milestones
    saves = -(-args.max_steps // args.save_steps) if args.save_steps else 1
    # the number of saves by save_minutes is not known
    most = kept + 1 if args.save_minutes and args.save_total_limit else min(kept + 1, saves)
    added = int(max(1, most - min(len(there), kept)))
    checkpoint = checkpoint_bytes(sizes, zero_stage, compute, args.precision.optimizer_bytes, args.optim)
    export = num_parameters(sizes) * weight_bytes(compute)
    text = (
        f"a checkpoint takes about {format_size(checkpoint)}, the run adds "
        f"{'up to' if args.save_total_limit else 'at least'} {count(added, 'checkpoint')}, and "
        f"the exported model in hf/ takes {format_size(export)}"
    )
    return checkpoint, checkpoint * added + export, text


def check_disk(args: TrainingArguments, sizes: Any, zero_stage: int) -> str:
    """Return a warning if the disk has too little space for everything that the run writes, or "".

    Raises:
        ConfigurationError: The disk has too little space for the first save.
    """
    folder = RunFolder(args.output_dir)
    if args.save_strategy == "no" or is_done(args, folder):
        return ""
    checkpoint, total, text = disk_need(args, sizes, zero_stage)
    # A save deletes files left by interrupted saves, and checkpoints that the run does not keep.
    there, keeps_all = committed(folder.checkpoints), args.resume_from_checkpoint != "auto"
    excess = excess_checkpoints(there, 0 if keeps_all else args.save_total_limit, args.keep_every_steps)
    removed = [path for path in step_folders(folder.checkpoints) if path in excess or path not in there]
    free = shutil.disk_usage(nearest_existing_path(folder.checkpoints)).free
    free += sum(file.stat().st_size for path in removed for file in path.iterdir())
    facts = f"output_dir {args.output_dir}: {format_size(free)} are free; {text}"
    if free < checkpoint:
        raise ConfigurationError(
            f"{facts}. The disk has too little free space for the first checkpoint. Free some space, keep fewer "
            "checkpoints (save_total_limit), choose another output_dir, or set save_strategy to no",
            code="disk",
            key="output_dir",
        )
    warning = (
        f"warning: {facts}. The run needs {format_size(total)} in total, so the disk will be full before the run ends. "
        "Free some space, or keep fewer checkpoints (save_total_limit)"
    )
    return warning if free < total else ""


def disk_plan(args: TrainingArguments, sizes: Any, zero_stage: int) -> str:
    """Return a log line with the output folder and the disk space that the run needs."""
    folder = RunFolder(args.output_dir)
    _, _, text = disk_need(args, sizes, zero_stage)
    if args.save_strategy == "no":
        text = "save_strategy is no, so the run writes neither checkpoints nor hf/"
    free = shutil.disk_usage(nearest_existing_path(folder.checkpoints)).free
    return f"output: {folder.path.resolve()}; {text}; {format_size(free)} are free"


def completion(args: TrainingArguments) -> str:
    """Return a message if all steps of the run are done and its final model is exported, or ""."""
    folder = RunFolder(args.output_dir)
    if not is_done(args, folder) or folder.exported()[1] != identity(committed(folder.checkpoints)[-1]):
        return ""
    upload = (
        f". To upload the model: hf upload {args.hub_model_id} {folder.hf} --private"
        if args.push_to_hub
        else ""
    )
    return (
        f"the run in {folder.path} is complete: all {args.max_steps:,} steps are done; the model is in "
        f"{folder.hf}{upload}. To train the model further, pass a larger --max_steps and "
        "--allow_changes_on_resume max_steps. To train a new model, pass another --output_dir"
    )


def is_done(args: TrainingArguments, folder: RunFolder) -> bool:
    """Return whether the run already has the checkpoint of its last step, so no steps are left to train.

    The result is False if resume_from_checkpoint is not "auto".
    """
    there = committed(folder.checkpoints)
    return (
        args.resume_from_checkpoint == "auto"
        and bool(there)
        and there[-1].name >= checkpoint_name(args.max_steps)
    )
