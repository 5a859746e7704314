"""What a run needs of GPU memory and disk, as far as its configuration says so: lower bounds, by which nothing is
refused that would fit, and what it is likely to come to.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import Any

from model.config import GIB, num_parameters
from model.fp8.recipes import EIGHT_BITS
from model.variants import compiles
from train.checkpoint.files import MANIFEST, committed, name_of, step_folders
from train.config import msamp
from train.config.arguments import ConfigurationError, TrainingArguments, load_deepspeed
from train.config.schedule import escalates
from train.files import existing, size_text
from train.planning.memory import (
    checkpoint_bytes,
    largest_micro_batch,
    least_memory_gib,
    memory_of,
    weight_bytes,
)
from train.planning.setting import Setting
from train.preflight.machine import out_of_memory
from train.record.run_folder import RunFolder


def memory_findings(args: TrainingArguments, s: Setting, device_bytes: int) -> tuple[str, str]:
    """(why it cannot fit into a GPU of so many bytes, what to know if it can); "" where there is nothing to say.
    args: resolved, those of `s`."""
    there, least = device_bytes / GIB, least_memory_gib(s)
    ranks = f"{s.ranks} ranks" if s.ranks > 1 else "1 rank"
    of = f"{s.parameters / 1e6:,.0f} M parameters at ZeRO {s.zero_stage} on {ranks}"
    instead = f"{', '.join(smaller_states(args))} or a smaller model.config"
    if least > there:
        return (
            f"GPU memory: weights, gradients and optimizer of {of} need {least:,.1f} GiB a rank at least, and a GPU "
            f"here has {there:,.1f}; take {instead}"
        ), ""
    memory = memory_of(s)
    if memory.needed_gib(s.ranks) > there:
        largest = largest_micro_batch(s, there)
        smaller = [f"a per_device_train_batch_size of at most {largest}"] if largest else []
        return "", (
            f"warning: GPU memory: {of} are expected to take {memory.needed_gib(s.ranks):,.1f} of a GPU's {there:,.1f} "
            f"GiB, {memory.peak_gib:,.1f} of them tensors ({memory.described()}); should it run out, take "
            f"{', '.join([*smaller, *recomputation(args), instead])}"
        )
    return "", ""


def memory_ran_out(error: Exception, args: TrainingArguments) -> str | None:
    """What to tell, and what takes less, where memory ran out; else None."""
    if not (line := out_of_memory(error)):
        return None
    return f"error: memory ran out: {shortened(line)}\n{what_takes_less(args)}\n(FP8_TRACEBACK=1 shows where)"


def shortened(line: str) -> str:
    """What `out_of_memory` found, without torch's advice."""
    return ". ".join(line.split(". ")[:3])


def what_takes_less(args: TrainingArguments) -> str:
    size = args.per_device_train_batch_size
    smaller = f"a per_device_train_batch_size below {size} (the step stays that of train_batch_size_tokens)"
    less = [*[smaller] * (size > 1), *recomputation(args), *smaller_states(args), "a smaller model.config"]
    return f"What takes less: {'; '.join(less)}. docs/hardware.md has what models need"


def recomputation(args: TrainingArguments) -> list[str]:
    without = " with speed.cuda_graphs false" if args.speed.cuda_graphs else ""
    return [] if args.gradient_checkpointing else [f"gradient_checkpointing true{without}"]


def smaller_states(args: TrainingArguments) -> list[str]:
    """What makes weights, gradients and optimizer smaller on a GPU, of that which a run with these arguments has not
    yet and would take."""
    try:
        config = load_deepspeed(args.deepspeed)
    except (ConfigurationError, OSError):  # the file went while the run was going on
        config = {}
    precision = replace(args.precision)
    msamp.apply(config, precision)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    muon, in_halves = args.optim == "muon", precision.compute in ("fp8", "bf16")
    zero_1 = "deepspeed: ds_config_zero1.json"
    highest = 2 if compiles(args.model.variant, precision, args.model.compile) else 3
    found = ["more ranks"]
    if muon and in_halves and stage == 0:
        found.append(f"ZeRO 1 ({zero_1})")
    if not muon and in_halves and stage < 2 and precision.optimizer_states not in EIGHT_BITS:
        there = stage == 1 and config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        found.append(f"precision.optimizer_states (int8 takes least{'' if there else f'; {zero_1}'})")
    if stage < highest:
        needed = [
            text
            for text, is_needed in (
                ('optim "adamw"', muon),
                ("precision.optimizer_states fp32", precision.optimizer_states != "fp32"),
                ("speed.cuda_graphs false", highest == 3 and args.speed.cuda_graphs),
            )
            if is_needed
        ]
        higher = f"a higher ZeRO stage on several ranks (deepspeed: ds_config_zero{highest}.json"
        found.append(f"{higher}{', with ' if needed else ''}{' and '.join(needed)})")
    return found


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run adds to what is in its folder: one save, all of them at the worst moment, with hf/."""

    checkpoint: int
    at_once: int  # checkpoints
    export: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.at_once + self.export


def disk_need(args: TrainingArguments, sizes: Any, zero_stage: int) -> DiskNeed:
    """Of resolved arguments with checkpoints. A save is written before an old one goes, so that there are
    save_total_limit + 1 at times; by how many of them a run that goes on has more than now, is what it needs."""
    there = committed(RunFolder(args.output_dir).checkpoints)
    resumes = args.resume_from_checkpoint != "never"  # else they are moved aside, and stay
    saves = args.save_total_limit + 1
    if not (args.save_minutes or escalates(args.precision)):  # which save nobody knows how often
        by_steps = -(-args.max_steps // args.save_steps) if args.save_steps else 1
        saves = min(saves, by_steps + len(args.precision.schedule or [{}]) - 1)
    kept = min(len(there), args.save_total_limit) if resumes else 0
    exported = resumes and RunFolder(args.output_dir).hf.is_dir()
    compute = args.precision.compute
    return DiskNeed(
        checkpoint_bytes(sizes, zero_stage, compute, args.precision.optimizer_bytes, args.optim),
        max(1, saves - kept),
        0 if exported else num_parameters(sizes) * weight_bytes(compute),
    )


def disk_findings(args: TrainingArguments, sizes: Any, zero_stage: int) -> tuple[str, str]:
    """(why not even the first save has room, what to know of later ones); "" where there is nothing to say."""
    folder = RunFolder(args.output_dir)
    if args.save_strategy == "no" or is_done(args, folder):
        return "", ""
    need = disk_need(args, sizes, zero_stage)
    place = existing(folder.checkpoints)
    # what a save that was killed left goes before the next one, and so does what is beyond save_total_limit
    left = [p for p in step_folders(folder.checkpoints) if not (p / MANIFEST).is_file()]
    # else those of later steps are moved aside, and stay
    there = committed(folder.checkpoints) if args.resume_from_checkpoint == "auto" else []
    left += there[: -args.save_total_limit]
    free = shutil.disk_usage(place).free + sum(file.stat().st_size for p in left for file in p.iterdir())
    of = f"{size_text(free)} are free in {place}, and a checkpoint has about {size_text(need.checkpoint)}"
    if free < need.checkpoint:
        kept = min(len(there), args.save_total_limit)
        fewer = f"lower save_total_limit, by which {kept} checkpoints stay there, " if kept > 1 else ""
        return (
            f"output_dir {args.output_dir}: the disk has no room for the first save: {of}; make room there, {fewer}"
            "choose another output_dir, or, to only measure, save_strategy no"
        ), ""
    if free < need.total:
        return "", (
            f"warning: output_dir {args.output_dir}: the disk will not hold the last save: {of}, of which there are up "
            f"to {need.at_once} more at a time (save_total_limit {args.save_total_limit}), and hf/ "
            f"{size_text(need.export)}: {size_text(need.total)}. Make room before they are written, or lower "
            "save_total_limit"
        )
    return "", ""


def disk_plan(args: TrainingArguments, sizes: Any, zero_stage: int) -> str:
    """For people: what the run will write, and where."""
    folder = RunFolder(args.output_dir)
    if args.save_strategy == "no":
        return f"output: {folder.path.resolve()}; save_strategy is no: neither checkpoints nor hf/"
    need, free = disk_need(args, sizes, zero_stage), shutil.disk_usage(existing(folder.checkpoints)).free
    return (
        f"output: {folder.path.resolve()}; a checkpoint has about {size_text(need.checkpoint)}, of which there are up "
        f"to {need.at_once} more at a time, hf/ {size_text(need.export)}; {size_text(free)} are free"
    )


def is_done(args: TrainingArguments, folder: RunFolder) -> bool:
    """It has its last checkpoint already."""
    there = committed(folder.checkpoints)
    return args.resume_from_checkpoint == "auto" and bool(there) and there[-1].name >= name_of(args.max_steps)
