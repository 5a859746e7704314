"""What all ranks check together before the first step; each finding names host and rank. That they were started with
one configuration is checked in each run, the rest with the key "preflight"."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from model.config import GIB, load_config, numbers_of
from model.fp8.precision import Precision
from train.checkpoint.files import RunState
from train.config.arguments import TrainingArguments
from train.config.differences import leaves
from train.data.order import next_position
from train.data.stream import MicroBatches, SampleStream
from train.engine import launchers
from train.engine.step import MicroStep
from train.planning.plan import Prediction
from train.preflight.as_before import as_before
from train.preflight.check import PreflightError
from train.preflight.gradients import compare_gradients, extra_gib
from train.preflight.machine import out_of_memory
from train.preflight.ranks import check_ranks, unequal
from train.preflight.sizes import shortened, what_takes_less
from train.record.provenance import NOT_HASHED

Say = Callable[..., None]
# Than planned. Of one GPU plans have met every measured peak within 4 %; of several they are assumptions.
MORE_MEMORY = 1.1


def is_on(args: TrainingArguments) -> bool:
    """By the key, or where ranks are on several nodes."""
    return launchers.several_nodes() if args.preflight is None else args.preflight


def check_configured_alike(args: TrainingArguments) -> None:
    """Resolved arguments, of all ranks: those of nodes that are started by hand are read from each one's own command
    and file, and a rank with another learning rate would train its share of the weights by it, without a word. Where
    folders lie may differ, and what rank 0 alone goes by. Every rank calls it. Raises PreflightError, on all ranks."""
    values = {key: value for key, value in args.to_dict().items() if key not in NOT_HASHED}
    values["data"] |= {key: [*(values["data"][key] or {})] for key in ("sources", "eval_sources")}
    values["model"] |= {"config": numbers_of(load_config(args.model.config)), "init_from": None}
    mine = {key: json.dumps(value) for key, value in leaves(values).items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), mine))
    where = [f"rank {rank} ({host})" for rank, (host, _) in enumerate(every)]
    if found := unequal([its for _, its in every], where):
        told = (
            "the ranks were started with different configurations; start all with the same command and file:"
        )
        raise PreflightError("\n  ".join([told, *found]))


def check_alike(args: TrainingArguments, say: Say) -> None:
    """Before anything is built; every rank calls it. Raises PreflightError, on all ranks."""
    found = check_ranks(args)
    say(
        *(f"preflight: {line}" for line in found.lines), *(f"warning: preflight: {w}" for w in found.warnings)
    )
    if found.problems:
        count = f"{len(found.problems)} problems" if len(found.problems) > 1 else "a problem"
        raise PreflightError("\n  ".join([f"preflight: the ranks have {count}:", *found.problems]))


def hosts_of_ranks() -> list[str]:
    """Each rank in words; every rank calls it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, socket.gethostname())
    return [f"rank {rank} ({host})" for rank, host in enumerate(found)]


def check_gradients(
    args: TrainingArguments,
    engine: Any,
    micro_step: MicroStep,
    precision: Precision,
    stream: SampleStream,
    state: RunState,
    planned: Prediction | None,
    say: Say,
) -> None:
    """One step of the run that is about to begin, on the data of its first, after which all is as it was: its
    gradients, and its memory beside what was `planned` (on rank 0). Every rank calls it.

    Raises PreflightError: the gradients that the optimizer was given are not those of the micro-batches, or memory ran
    out meanwhile, on this rank alone; ChangedError."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps or 1
    first = next_position(state.consumed_samples, size * accumulation * world, state.skipped_samples)
    reader = MicroBatches(stream, size, rank, world)
    batches = [reader.get(first, index) for index in range(accumulation)]
    reader.close()
    engine.train()
    try:
        with as_before(engine, precision):
            found = compare_gradients(engine, micro_step, precision, batches, args.max_grad_norm)
    except Exception as error:
        if line := out_of_memory(error):
            raise PreflightError(no_memory(line, args, extra_gib(engine, micro_step))) from error
        raise
    if found is None:
        return say(
            "warning: preflight: the gradients of the first step are not finite, so that they are not compared; the "
            "run is going to skip that step"
        )
    mine, peak_bytes = found
    every: list[Any] = [None] * world
    dist.all_gather_object(every, (mine, peak_bytes))
    where, stage = hosts_of_ranks(), engine.zero_optimization_stage()
    what = f"{accumulation} micro-batches x {world} ranks at ZeRO {stage}"
    for kind, of_ranks in enumerate(zip(*(comparisons for comparisons, _ in every), strict=True)):
        how = ", with speed.main_grad and speed.cuda_graphs" if kind else ""
        wrong = [f"{where[rank]}: {text}" for rank, its in enumerate(of_ranks) for text in its.problems]
        if wrong:
            lines = "\n  ".join(
                [f"preflight: DeepSpeed reduces the gradients of {what}{how} incorrectly:", *wrong]
            )
            raise PreflightError(f"{lines}\n{advice(stage, bool(kind))}")
        largest = max(its.error for its in of_ranks)
        say(
            f"preflight: gradients of {what}{how} match a plain all-reduce within {largest:.1e} "
            f"(allowed {of_ranks[0].allowed:.1e})"
        )
    if torch.cuda.is_available():
        tell_memory([peak for _, peak in every], where, planned, say)


def no_memory(line: str, args: TrainingArguments, more_gib: float) -> str:
    """`line`: what ran out; more_gib: what the check keeps beside a step."""
    return (
        f"preflight: memory ran out on rank {dist.get_rank()} ({socket.gethostname()}) while the gradients of a step "
        f"were checked: {shortened(line)}\n"
        f"The check keeps up to {more_gib:.2f} GiB more than the steps of the run, which may fit without it: "
        f"--preflight false leaves it out, with all other checks of the ranks. {what_takes_less(args)}"
    )


def advice(stage: int, fused: bool) -> str:
    if fused:
        return "Set speed.main_grad and speed.cuda_graphs to false; without them the gradients are right. And report it"
    return (
        f"Do not train so. Another stage (deepspeed: ds_config_zero{0 if stage else 1}.json), "
        "gradient_accumulation_steps 1 or another version of DeepSpeed may be right; look at settings of communication "
        "in the key deepspeed first"
    )


def tell_memory(peaks: list[int], where: list[str], planned: Prediction | None, say: Say) -> None:
    most = max(peaks)
    at = where[peaks.index(most)]
    say(f"preflight: memory of a step: {most / GIB:,.2f} GiB at the peak, the most on {at}")
    if planned is None:
        return
    say(f"preflight: {planned.compare(most / GIB, None)}")
    expected = planned.memory.measured_as_gib
    if most > MORE_MEMORY * expected * GIB:
        assumed = ", which is an assumption for several GPUs" if len(where) > 1 else ""
        say(
            f"warning: preflight: a step takes {most / GIB:,.1f} GiB on {at}, and {expected:,.1f} are planned{assumed}"
            ": should memory run out, take a smaller per_device_train_batch_size; and report it, with the plan's line"
        )
