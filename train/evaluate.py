#!/usr/bin/env python3
"""How good is a model? Its loss, perplexity and bits per byte on prepared data or text, by source and in all.

    python train/evaluate.py output/run                                    # on the eval split that it was trained with
    python train/evaluate.py output/run/checkpoints/step-00001000 data/wiki data/code --precision bf16
    python train/evaluate.py FOLDER story.txt reviews.jsonl --by document --output result.json
    python train/launch.py --nproc 8 train/evaluate.py output/run data/wiki            # 8 GPUs; also torchrun

MODEL is a run's output_dir (its newest good checkpoint, else its hf/), a checkpoint, or a Hugging Face folder of a
Mistral, also one with FP8 weights. DATA are folders that prepare_data.py wrote, whose eval splits are read, or whatever
it reads. Packed, prepared data give the eval_loss that training logs. A checkpoint is evaluated in its own precision
and variant unless --precision says otherwise; a model that was not trained in FP8 runs it with current scaling. That
FP8 really runs is counted; else there is no result.

Ends with status 2 when that cannot be done, and with 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("evaluation", "pydantic", "psutil", "torch", "transformers")

from train.engine import launchers

INTERRUPTED, NOT_AS_IT_IS = 130, 2


def interrupted(*_: Any) -> None:
    if launchers.rank() == 0:
        os.write(2, b"Ctrl-C: the evaluation is ended; it leaves nothing\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which train/launch.py blocks in its ranks

from model.errors import UserError
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE
from model.hub import HubError, local_folder
from model.keys import between, unicode, why_no_file
from train.files import reason, write_durably
from train.preflight.machine import out_of_memory
from train.prepare.corpus import ALLOWED, SPLIT_ON, separator
from train.record.log import configure_logging

logger = logging.getLogger(__name__)
T = TypeVar("T")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; numbers outside their range are errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        type=Path,
        help="a run's output_dir, a checkpoint, a Hugging Face folder or ORG/NAME",
    )
    text = f"prepared data, or files and folders of {ALLOWED}; default: what the checkpoint was trained on"
    add("data", metavar="DATA", nargs="*", type=unicode, help=text)
    add(
        "--precision",
        choices=("fp8", "bf16", "fp16", "fp32"),
        help="default: the checkpoint's; of a folder, its dtype",
    )
    text = "packed: documents one behind the other, as in training; document: each alone (packed)"
    add("--by", choices=("packed", "document"), default="packed", help=text)
    text = "tokens of a sample (the training's; of a Hugging Face folder too, or its positions, and at most 2048)"
    add("--max_seq_length", type=between(1), help=text)
    text = "of longer documents: tokens from one row of max_seq_length to the next; fewer: more context, slower (all)"
    add("--stride", type=between(1), help=text)
    add(
        "--max_samples",
        type=between(1),
        help="samples at most, at even distances; by document: documents of each DATA; of text: the first ones",
    )
    add("--batch_size", type=between(1), help="samples of a rank at a time (as in training; 8)")
    add(
        "--tokenizer", type=Path, metavar="DIR", help="the model's tokenizer, if it is not where it should be"
    )
    add("--text_key", type=unicode, default="text", help="of text: key or column (text)")
    add("--split_on", type=separator, metavar="SEPARATOR", help=f"of text: {SPLIT_ON}")
    add("--max_dropped", type=between(0), default=0, help="of text: unreadable documents to tolerate (0)")
    add("--output", type=Path, metavar="FILE.json", help="the results as JSON, too")
    args = parser.parse_intermixed_args(argv)  # DATA may follow options
    if args.stride and args.by != "document":
        parser.error("--stride: is of --by document; packed samples follow each other")
    if args.output and (args.output.suffix != ".json" or not args.output.absolute().parent.is_dir()):
        parser.error(
            f"--output {args.output}: allowed is a file that ends in .json, in a folder that is there"
        )
    if args.output and (why := why_no_file(args.output)):
        parser.error(f"--output {args.output} {why}")
    if len({os.path.realpath(name) for name in args.data}) < len(args.data):
        parser.error("DATA: one is given twice; name each once")
    try:
        args.model = Path(local_folder(str(args.model)))
        args.tokenizer = args.tokenizer and Path(local_folder(str(args.tokenizer), weights=False))
    except HubError as error:
        parser.error(str(error))
    for name in (args.model, *args.data):
        if not (
            os.path.exists(name) or (name in args.data and name.startswith("hf:")) or name == "python-stdlib"
        ):
            parser.error(
                f"{name} does not exist; give files and folders that are here (from the hub: as hf:NAME)"
            )
    return args


class Told(Exception):
    """Rank 0 tells why there is no result; another rank has nothing to add."""


class Ranks:
    """This process and the others that evaluate with it; each has its share of the samples."""

    def __init__(self) -> None:
        launchers.adopt()
        self.world, self.rank = 1, 0
        if launchers.world_size() > 1:
            import torch.distributed as dist

            from train.engine.distributed import init_distributed

            init_distributed()
            # who is there, whatever the environment says: each sample has to be somebody's
            self.world, self.rank = dist.get_world_size(), dist.get_rank()

    def tell(self, *lines: str) -> None:
        """For people: what is no result."""
        if self.rank == 0 and lines:
            logger.info("\n".join(lines))

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns here. Raises what it raised on any rank: on rank 0, and Told on the others."""
        made, problem = None, None
        try:
            made = make()
        except (ValueError, OSError, UserError) as error:
            problem = error
        if self.world > 1:
            import torch.distributed as dist

            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, None if problem is None else str(problem))
            problem = next((UserError(text) for text in every if text is not None), None)
        if problem is not None:
            raise Told if self.rank else problem
        return made  # type: ignore[return-value]

    def of_rank_0(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0."""
        made = [self.together(lambda: make() if self.rank == 0 else None)]
        if self.world > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(made, src=0)
        return made[0]  # type: ignore[return-value]

    def sum(self, sums: Any) -> Any:
        if self.world > 1:
            import torch
            import torch.distributed as dist

            total = sums.cuda() if torch.cuda.is_available() else sums
            dist.all_reduce(total)
            return total.cpu()
        return sums


def texts(args: argparse.Namespace, plan: Any, ranks: Ranks) -> list[Any]:
    """The DATA as what has batches: prepared folders that are read packed in one, all else in another.

    Raises DataError, ValueError: data that cannot be read, or were made by another tokenizer than the model's."""
    from train.data.format import read_manifest
    from train.evaluation.texts import Documents, Packed, is_prepared

    length, size = plan.max_seq_length, plan.batch_size
    folders = {name: name for name in args.data} or plan.sources()
    if not folders:
        raise ValueError(f"{plan.path} does not say what it was trained on: name DATA")
    if not args.data and (gone := [folder for folder in folders.values() if not Path(folder).exists()]):
        here = f"start this where the training was started, not in {Path.cwd()}, or "
        remedy = "name DATA" if all(map(os.path.isabs, gone)) else f"{here}name DATA"
        raise ValueError(f"the data that the model was trained on are not there: {', '.join(gone)}; {remedy}")
    prepared = {name: folder for name, folder in folders.items() if not args.data or is_prepared(folder)}
    of_model = plan.tokenizers(args.tokenizer)
    for folder in prepared.values():
        manifest = read_manifest(folder)
        if of_model and manifest.tokenizer_sha256 not in of_model:
            raise ValueError(
                f"{folder} was prepared with another tokenizer than the model's, so that its ids mean other text; "
                "prepare it with the model's. If it is the same in another file: --tokenizer "
                f"{Path(folder) / 'tokenizer'}"
            )
        if manifest.vocab_size > plan.config.vocab_size:
            raise ValueError(
                f"{folder} has a vocabulary of {manifest.vocab_size}, the model one of {plan.config.vocab_size}; "
                "prepare it with the model's tokenizer"
            )
        if not of_model:
            ranks.tell(
                f"note: {plan.path} has no tokenizer; that {folder} was made by the same is not checked"
            )
    found: list[Any] = []
    documents = Documents(
        length, size, stride_of(args, length), args.max_samples, document_mask=plan.document_mask
    )
    if prepared and args.by == "packed":
        found.append(Packed(prepared, length, size, args.max_samples, plan.document_mask))
    else:
        for name, folder in prepared.items():
            documents.add_prepared(name, folder)
    if text := [name for name in folders if name not in prepared]:
        encoder = plan.encoder(args.tokenizer)
        for name in text:
            documents.add_text(name, encoder, args.text_key, args.split_on, args.max_dropped, ranks.tell)
    found += [documents] if documents.sources else []
    if anew := plan.prepared_anew(prepared.values()):
        found[0].notes.insert(
            0,
            f"{' and '.join(anew)}: prepared anew since the model was trained on it, so that the eval split is "
            "another, and may have what the model was trained on",
        )
    return found


def stride_of(args: argparse.Namespace, length: int) -> int | None:
    """Tokens from one row of a longer document to the next; None: packed."""
    return min(args.stride or length, length) if args.by == "document" else None


def planned(args: argparse.Namespace, path: Path) -> Any:
    """What is evaluated, with the options in it. Raises ValueError: a length that the model, or FP8, has not."""
    from train.evaluation.models import plan as plan_of

    plan = plan_of(path, args.precision)
    plan.max_seq_length = args.max_seq_length or plan.max_seq_length
    plan.batch_size = args.batch_size or plan.batch_size
    if plan.max_seq_length > (most := plan.config.max_position_embeddings):
        raise ValueError(
            f"--max_seq_length {plan.max_seq_length}: the model has {most} positions (max_position_embeddings)"
        )
    rows = plan.batch_size * plan.max_seq_length
    if plan.precision.compute == "fp8" and args.by == "packed" and rows % FP8_TRAIN_ROW_MULTIPLE:
        raise ValueError(
            f"--batch_size {plan.batch_size} x --max_seq_length {plan.max_seq_length} is {rows}, and FP8 needs a "
            f"multiple of {FP8_TRAIN_ROW_MULTIPLE}"
        )
    plan.document_mask = plan.document_mask and args.by == "packed"
    return plan


def evaluate(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any] | None:
    """The report, on rank 0; None on the others. Raises ValueError, OSError, UserError: there is none."""
    import torch
    from tqdm import tqdm

    from model.fp8.machine import describe, headline
    from train.evaluation import scores
    from train.evaluation.models import find

    path = ranks.of_rank_0(lambda: find(args.model))
    plan = ranks.together(lambda: planned(args, path))
    ranks.tell(plan.describe())
    if plan.precision.compute == "fp16" and not torch.cuda.is_available():
        ranks.tell("note: float16 can take several times as long on a CPU as --precision fp32")
    found = ranks.together(lambda: texts(args, plan, ranks))
    ranks.tell(*(f"note: {note}" for text in found for note in text.notes))
    model, precision = ranks.together(plan.build)
    machine, versions = describe()
    ranks.tell(f"{ranks.world} x {headline(machine, versions)}")
    if ranks.world < machine.get("gpus", 1):
        ranks.tell(f"note: {ranks.world} of {machine['gpus']} GPUs; for all: python train/launch.py --nproc "
                   f"{machine['gpus']} train/evaluate.py ...")  # fmt: skip
    begin, sources = time.perf_counter(), [source for text in found for source in text.sources]
    sums, lines = [], []
    # of rank 0, whose share is as large as any; a log file gets a line now and then
    pause = 0 if sys.stderr.isatty() else 10
    with tqdm(
        total=sum(text.tokens for text in found) // ranks.world,
        unit=" tokens",
        unit_scale=True,
        mininterval=max(pause, 0.2),
        delay=pause,
        disable=ranks.rank != 0,
        leave=pause > 0,  # a line that is wiped away leaves its blanks in a file
    ) as bar:
        for text in found:
            batches = text.batches(ranks.rank, ranks.world)
            of_text, lines = scores.score(model, precision, batches, text.sources, bar.update)
            sums.append(of_text)
    by_source, everything = scores.results(ranks.sum(torch.cat(sums)), sources)
    ranks.tell(*(lines if precision.fp8 else []))
    if ranks.rank != 0:
        return None
    print("\n".join(scores.table(by_source, everything)), flush=True)
    if any(row["bits_per_byte"] is None for row in by_source.values()):
        ranks.tell("note: bits/byte ?: the tokens of that source do not say how many bytes of text they are")
    options = {"by": args.by, "max_seq_length": plan.max_seq_length, "batch_size": plan.batch_size}
    return {
        "model": plan.describe(),
        "precision": plan.precision.compute,
        "recipe": plan.precision.recipe if precision.fp8 else None,
        "variant": plan.variant,
        "fp8": lines[0] if precision.fp8 else None,
        **options,
        "stride": stride_of(args, plan.max_seq_length),
        "max_samples": args.max_samples,
        "notes": [note for text in found for note in text.notes],
        "ranks": ranks.world,
        "machine": machine,
        "versions": versions,
        "seconds": time.perf_counter() - begin,
        "sources": by_source,
        "all": everything,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command; the status as the module says."""
    args = parse_arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import model.fp8.torchao_fp8  # noqa: F401  before transformers, for which it quiets torchao

    configure_logging(console="stderr")
    try:
        ranks = Ranks()
        configure_logging(rank=ranks.rank, console="stderr")
        report = evaluate(args, ranks)
        if report is not None and args.output:
            write_durably(args.output, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
            ranks.tell(f"wrote {args.output}")
    except Told:
        os._exit(NOT_AS_IT_IS)  # without waiting for ranks that have ended
    except (ValueError, OSError, MemoryError, RuntimeError, UserError) as error:
        if os.environ.get("FP8_TRACEBACK") == "1":
            traceback.print_exc()
        what = reason(error)
        if line := out_of_memory(error):
            what = f"{line}; give a smaller --batch_size"
        elif isinstance(error, RuntimeError) and not isinstance(error, UserError):
            raise
        return fail(what)
    if ranks.world > 1:
        import torch.distributed as dist

        dist.destroy_process_group()
    return 0


def fail(what: str) -> int:
    """Tell what this rank found; rank 0 speaks first."""
    rank = launchers.rank()
    if rank:
        time.sleep(2)
    logger.error(f"rank {rank}: {what}" if rank else what)
    if launchers.world_size() > 1:
        os._exit(NOT_AS_IT_IS)
    return NOT_AS_IT_IS


if __name__ == "__main__":
    sys.exit(main())
