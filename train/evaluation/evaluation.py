"""Run train/evaluate.py: open the model and the data, compute the losses, and build the report."""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from model.checks.gemm_counts import count_gemms
from model.checks.startup import StartupCheckError
from model.fp8.machine import describe, headline
from model.fp8.precision import Precision
from model.fp8.recipes import fp8_multiple
from model.terminal import format_table
from train import rank_env
from train.data.encoder import TextEncoder
from train.data.stream import NO_LABEL
from train.evaluation.models import EvaluationError, Plan, find_model, plan_model
from train.evaluation.texts import Documents, Packed, Rows, Source, is_prepared

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0  # time between two progress messages
# Columns of the table of sums, which has one row per source: loss in nats; loss on text tokens (without BOS and EOS);
# number of predicted tokens; bytes of their text; number of documents.
LOSS, TEXT_LOSS, TOKENS, BYTES, DOCUMENTS = range(5)
# Columns of the printed table: title, key of the result, and format.
COLUMNS = {
    "documents": ("documents", ",d"),
    "tokens": ("tokens", ",d"),
    "loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits/byte": ("bits_per_byte", ".4f"),
}


@torch.no_grad()
def score(
    model: nn.Module,
    precision: Precision,
    batches: Iterator[Rows],
    sources: Sequence[Source],
    scored: Callable[[int], Any] = lambda tokens: None,
) -> tuple[torch.Tensor, list[str]]:
    """Compute the sums of a model's losses over all batches, separately for each data source.

    Args:
        model: The model to evaluate.
        precision: The precision of the model.
        batches: The batches to predict.
        sources: The data sources. Batches refer to sources by index.
        scored: Function that is called after each batch with the number of predicted tokens in the batch.

    Returns:
        The sums for each source, float64 [number of sources, 5], with the columns LOSS, TEXT_LOSS, TOKENS, BYTES and
        DOCUMENTS; and log lines about the GEMMs that ran.

    Raises:
        EvaluationError: If a loss is not finite, or a token id is not in the vocabulary.
        StartupCheckError: If a module did not run in the configured precision.
    """
    sums = np.zeros((len(sources), 5))
    vocabulary, passes = model.config.vocab_size, 0  # type: ignore[union-attr]
    with count_gemms(model, precision) as gemms:
        for batch, places, begun in batches:
            passes += 1
            if (largest := int(torch.maximum(batch.input_ids.max(), batch.labels.max()))) >= vocabulary:
                raise EvaluationError(
                    f"{_names(sources, places)}: the token id {largest} is outside the model's vocabulary of "
                    f"{vocabulary} ids. Pass data that was prepared with the model's tokenizer. If the data may be "
                    "damaged, copy it again",
                    code="unknown_token",
                    key=_names(sources, places),
                )
            input_ids, labels, documents = batch.to(precision.device)
            # Compute the loss row by row, because the float32 logits of a batch may not fit into memory.
            rows = [
                F.cross_entropy(row.float(), label, ignore_index=NO_LABEL, reduction="none")
                for row, label in zip(model(input_ids, documents=documents).logits, labels, strict=True)
            ]
            losses = torch.stack(rows).double().cpu().numpy()
            if not np.isfinite(losses).all():
                raise EvaluationError(
                    f"{_names(sources, places)}: the loss is NaN or infinite, because weights are not finite or "
                    "activations overflowed. Pass --precision bf16 or fp32, or evaluate an earlier checkpoint",
                    code="loss_not_finite",
                    key=_names(sources, places),
                )
            counted = batch.labels.numpy() != NO_LABEL
            for row, source in enumerate(places):
                inputs, predicted = (
                    ids[row].numpy()[counted[row]] for ids in (batch.input_ids, batch.labels)
                )
                of_row = losses[row][counted[row]]
                sums[source] += _row_sums(of_row, inputs, predicted, sources[source])
                sums[source, DOCUMENTS] += begun[row]
            scored(int(counted.sum()))
    if passes and (problem := gemms.problem(passes, backward=False)):
        raise StartupCheckError(problem)
    return torch.from_numpy(sums), gemms.lines()


def _names(sources: Sequence[Source], places: Sequence[int]) -> str:
    return ", ".join(sources[place].name for place in dict.fromkeys(places))


def _row_sums(losses: np.ndarray, inputs: np.ndarray, labels: np.ndarray, source: Source) -> np.ndarray:
    """Return the sums of `score` for one row of a batch, float64 [5]. The number of documents is 0.

    Args:
        losses: Loss of each predicted token in nats, [n].
        inputs: The token before each predicted token, [n].
        labels: The predicted tokens, [n].
        source: The data source of the row.
    """
    text = (labels != source.encoder.bos_id) & (labels != source.encoder.eos_id)
    size = source.encoder.text_bytes(inputs, labels) if source.text_bytes is None else 0
    return np.array([losses.sum(), losses[text].sum(), len(labels), size, 0])


def compute_results(sums: torch.Tensor, sources: Sequence[Source]) -> tuple[dict[str, dict], dict[str, Any]]:
    """Return {source name: result} and the total result, computed from the sums of `score`.

    A result has the keys loss (nats per predicted token), perplexity, bits_per_byte, tokens, documents and bytes. Bytes
    are counted in the input text if it is known, or else in the tokens. If there are no bytes, `bytes` and
    `bits_per_byte` are None. If --max_samples selects samples of prepared data, `documents` is None. Bits per byte
    exclude BOS and EOS. Sources without predicted tokens, which a small --max_samples can cause, are omitted.

    Raises:
        EvaluationError: If no source has predicted tokens.
    """
    table, by_source = sums.numpy().copy(), {}
    for row, source in zip(table, sources, strict=True):
        if source.text_bytes is not None:
            row[BYTES] = source.text_bytes
        if row[TOKENS]:
            by_source[source.name] = _result(row)
    if not by_source:
        names = ", ".join(source.name for source in sources)
        raise EvaluationError(
            f"DATA {names}: there are no tokens to predict; pass more data or a larger --max_samples",
            code="nothing_to_predict",
            key=names,
        )
    return by_source, _result(table.sum(axis=0))


def _result(row: np.ndarray) -> dict[str, Any]:
    loss = float(row[LOSS] / row[TOKENS])
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else None,  # exp overflows for larger values
        "bits_per_byte": float(row[TEXT_LOSS] / math.log(2) / row[BYTES]) if row[BYTES] else None,
        "tokens": int(row[TOKENS]),
        "documents": None if math.isnan(row[DOCUMENTS]) else int(row[DOCUMENTS]),
        "bytes": int(row[BYTES]) if row[BYTES] else None,
    }


def table(by_source: dict[str, dict], everything: dict[str, Any]) -> str:
    """Return the evaluation results as a text table."""
    rows = by_source if len(by_source) == 1 else by_source | {"all": everything}
    lines = [["source", *COLUMNS]]
    for name, row in rows.items():
        values = ("?" if row[key] is None else format(row[key], form) for key, form in COLUMNS.values())
        lines.append([name, *values])
    return format_table(lines, "<>>>>>")


def join_ranks() -> tuple[int, int]:
    """Initialize the process group if there are several ranks. Return the rank and the number of ranks."""
    rank_env.export_torch_variables()
    if rank_env.world_size() == 1:
        return 0, 1
    from train.engine.process_group import init_distributed  # imports deepspeed

    init_distributed()
    return dist.get_rank(), dist.get_world_size()


def plan_evaluation(args: argparse.Namespace) -> Plan:
    """Return the model, precision and batch shape for the parsed command line of evaluate.py.

    Raises:
        ValueError, UserError: If there is no model, or the options are incompatible with the model.
    """
    plan = plan_model(find_model(args.model), args.precision)
    plan.max_seq_length = args.max_seq_length or plan.max_seq_length
    plan.batch_size = args.batch_size or plan.batch_size
    plan.document_mask = plan.document_mask and args.by == "packed"
    if plan.max_seq_length > (most := plan.config.max_position_embeddings):
        raise ValueError(
            f"--max_seq_length {plan.max_seq_length} exceeds {most}, the model's max_position_embeddings; lower "
            "--max_seq_length"
        )
    rows = plan.batch_size * plan.max_seq_length
    multiple = fp8_multiple(plan.precision.recipe)
    if plan.precision.compute == "fp8" and args.by == "packed" and rows % multiple:
        raise ValueError(
            f"--batch_size {plan.batch_size} x --max_seq_length {plan.max_seq_length} is {rows} tokens, but FP8 needs "
            f"a multiple of {multiple} tokens; change --batch_size or --max_seq_length"
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
    documents = Documents(length, size, args.by == "document", args.max_samples, plan.document_mask, multiple)
    for name, folder in folders.items():
        if name not in prepared:
            encoder = TextEncoder(plan.tokenizer_folder(args.tokenizer))
            documents.add_text(name, encoder, args.text_key, args.split_on, args.max_dropped)
        elif args.by == "document":
            documents.add_prepared(name, folder)
    found: list[Packed | Documents] = [documents] if documents.sources else []
    if prepared and args.by == "packed":
        found.insert(0, Packed(prepared, length, size, args.max_samples, plan.document_mask))
    return found


def evaluate(args: argparse.Namespace, rank: int, world: int) -> dict[str, Any]:
    """Run the evaluation and return the report. Rank 0 also prints the results.

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
    with tqdm(
        total=tokens, unit=" tokens", unit_scale=True, mininterval=PROGRESS_S, disable=rank > 0
    ) as progress:
        for part in data:
            batches = part.batches(rank, world)
            of_part, gemms = score(model, precision, batches, part.sources, progress.update)
            sums.append(of_part)
    total = torch.cat(sums).to(precision.device)
    if world > 1:
        dist.all_reduce(total)
        dist.destroy_process_group()
    sources = [source for part in data for source in part.sources]
    by_source, everything = compute_results(total.cpu(), sources)
    if precision.fp8:
        logger.info("\n".join(gemms))
    if rank == 0:
        print(table(by_source, everything), flush=True)
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
        "max_samples": args.max_samples,
        "notes": notes,
        "ranks": world,
        "machine": machine,
        "versions": versions,
        "seconds": time.perf_counter() - begin,
        "sources": by_source,
        "all": everything,
    }
