"""Run train/evaluate.py: open the model and the data, compute the losses, and build the report."""

from __future__ import annotations

import argparse
import io
import logging
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from model.fp8.machine import describe, headline
from model.fp8.recipes import fp8_multiple
from train import launchers
from train.evaluation import scores
from train.evaluation.models import Plan, find_model, plan_model
from train.evaluation.texts import Documents, Packed, is_prepared

logger = logging.getLogger(__name__)

PROGRESS_S = 30.0  # time between two progress messages if stderr is not a terminal


class LogLines(io.TextIOBase):
    """File of a progress bar that logs each state of the bar as a line."""

    def write(self, text: str) -> int:
        if text.strip():
            logger.info(text.strip())
        return len(text)


def join_ranks() -> tuple[int, int]:
    """Initialize the process group if there are several ranks. Return the rank and the number of ranks."""
    launchers.export_torch_variables()
    if launchers.world_size() == 1:
        return 0, 1
    from train.engine.distributed import init_distributed  # imports deepspeed

    init_distributed()
    return dist.get_rank(), dist.get_world_size()


def plan_evaluation(args: argparse.Namespace) -> Plan:
    """Plan the evaluation from the parsed command line of evaluate.py.

    Raises:
        ValueError, UserError: If there is no model, or the options are incompatible with the model.
    """
    plan = plan_model(find_model(args.model), args.precision)
    plan.max_seq_length = args.max_seq_length or plan.max_seq_length
    plan.batch_size = args.batch_size or plan.batch_size
    plan.document_mask = plan.document_mask and args.by == "packed"
    # A long document is split into overlapping rows. The stride is the distance between their starts, in tokens.
    args.stride = (
        min(args.stride or plan.max_seq_length, plan.max_seq_length) if args.by == "document" else None
    )
    if plan.max_seq_length > (most := plan.config.max_position_embeddings):
        raise ValueError(
            f"--max_seq_length {plan.max_seq_length} exceeds {most}, the model's max_position_embeddings; lower "
            "--max_seq_length"
        )
    rows = plan.batch_size * plan.max_seq_length
    multiple = fp8_multiple(plan.precision.recipe)
    if plan.precision.compute == "fp8" and args.by == "packed" and rows % multiple:
        raise ValueError(
            f"--batch_size {plan.batch_size} x --max_seq_length {plan.max_seq_length} is {rows}, but FP8 needs a "
            f"multiple of {multiple}; change --batch_size or --max_seq_length"
        )
    return plan


def open_data(args: argparse.Namespace, plan: Plan) -> list[Packed | Documents]:
    """Open the evaluation data.

    Args:
        args: the parsed command line of evaluate.py.

    Returns:
        A `Packed` object for all prepared folders (only with --by packed) and a `Documents` object for all other data.

    Raises:
        DataError, ValueError, UserError: If the data cannot be read, or were prepared with a different tokenizer.
    """
    folders = {name: name for name in args.data} or plan.sources()
    if not folders:
        raise ValueError(f"{plan.path} does not list its training data; pass evaluation data as DATA")
    prepared = {name: folder for name, folder in folders.items() if not args.data or is_prepared(folder)}
    plan.check_data(prepared.values(), args.tokenizer)
    length, size = plan.max_seq_length, plan.batch_size
    multiple = fp8_multiple(plan.precision.recipe)
    documents = Documents(length, size, args.stride, args.max_samples, plan.document_mask, multiple)
    for name, folder in folders.items():
        if name not in prepared:
            encoder = plan.encoder(args.tokenizer)
            documents.add_text(name, encoder, args.text_key, args.split_on, args.max_dropped)
        elif args.by == "document":
            documents.add_prepared(name, folder)
    found: list[Packed | Documents] = [documents] if documents.sources else []
    if prepared and args.by == "packed":
        found.insert(0, Packed(prepared, length, size, args.max_samples, plan.document_mask))
    return found


def evaluate(args: argparse.Namespace, rank: int, world: int) -> dict[str, Any]:
    """Run the evaluation and return the report, which is complete only on rank 0.

    Collective: all ranks must call this function.

    Args:
        args: the parsed command line of evaluate.py.
        rank: rank of this process.
        world: number of ranks.

    Raises:
        ValueError, OSError, UserError: If the model or the data cannot be read, or are incompatible.
    """
    plan = plan_evaluation(args)
    logger.info(plan.describe())
    data = open_data(args, plan)
    model, precision = plan.build()
    machine, versions = describe()
    logger.info(f"{world} x {headline(machine, versions)}")
    begin = time.perf_counter()
    sums, gemms = [], list[str]()
    tokens = sum(part.tokens for part in data) // world
    output: dict[str, Any] = {} if sys.stderr.isatty() else {"file": LogLines(), "mininterval": PROGRESS_S}
    with tqdm(total=tokens, unit=" tokens", unit_scale=True, disable=rank > 0, **output) as progress:
        for part in data:
            batches = part.batches(rank, world)
            of_part, gemms = scores.score(model, precision, batches, part.sources, progress.update)
            sums.append(of_part)
    total = torch.cat(sums).to(precision.device)
    if world > 1:
        dist.all_reduce(total)
        dist.destroy_process_group()
    sources = [source for part in data for source in part.sources]
    by_source, everything = scores.compute_results(total.cpu(), sources)
    if precision.fp8:
        logger.info("\n".join(gemms))
    if rank == 0:
        print("\n".join(scores.table(by_source, everything)), flush=True)
    notes = [note for part in data for note in part.notes]
    if missing := [source.name for source in sources if source.name not in by_source]:
        notes.append(f"no result for {', '.join(missing)}: the selected data contains no tokens to predict")
    for note in notes:
        logger.info(f"note: {note}")
    return {
        "model": plan.describe(),
        "precision": plan.precision.compute,
        "recipe": plan.precision.recipe if precision.fp8 else None,
        "variant": plan.variant,
        "fp8": gemms[0] if precision.fp8 else None,
        "by": args.by,
        "max_seq_length": plan.max_seq_length,
        "batch_size": plan.batch_size,
        "stride": args.stride,
        "max_samples": args.max_samples,
        "notes": notes,
        "ranks": world,
        "machine": machine,
        "versions": versions,
        "seconds": time.perf_counter() - begin,
        "sources": by_source,
        "all": everything,
    }
