#!/usr/bin/env python3
"""Evaluate a model: report loss, perplexity and bits per byte on prepared data or text, by source and in total.

    python train/evaluate.py output/run                                    # on the eval split of its training data
    python train/evaluate.py output/run/checkpoints/step-00001000 data/wiki data/code --precision bf16
    python train/evaluate.py FOLDER story.txt reviews.jsonl --by document --output result.json
    python train/launch.py --nproc 8 train/evaluate.py output/run data/wiki            # 8 GPUs; also torchrun

MODEL is the output_dir of a run, a checkpoint, or the Hugging Face folder of a Mistral model, with or without FP8
weights. For an output_dir, the newest undamaged checkpoint is used, or hf/ if there is none.

DATA are folders written by prepare_data.py, whose eval splits are read, or any input that prepare_data.py reads. With
--by packed, prepared data give the same eval_loss as in the training log.

A checkpoint is evaluated in its own precision and variant unless --precision is given. --precision fp8 uses current
scaling for a model that was not trained in FP8. The evaluation counts the FP8 GEMMs and fails if FP8 does not run.

Exit status: 0 done; 2 the evaluation is not possible as requested; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("evaluation", "pydantic", "psutil", "torch", "transformers")

from train import launchers

INTERRUPTED, NOT_AS_IT_IS = 130, 2


def interrupted(number: int, frame: FrameType | None) -> None:
    if launchers.rank() == 0:
        os.write(2, b"Ctrl-C: evaluation stopped; no results were written\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # train/launch.py blocks it in its ranks

from model.errors import UserError
from model.hub import HubError, local_folder
from model.keys import between, unicode, why_no_file
from train.files import reason, write_durably
from train.preflight.machine import out_of_memory
from train.prepare.corpus import ALLOWED, SPLIT_ON, separator
from train.record.log import configure_logging

logger = logging.getLogger(__name__)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        type=Path,
        help="output_dir of a run, checkpoint, Hugging Face folder, or ORG/NAME on the Hub",
    )
    add(
        "data",
        metavar="DATA",
        nargs="*",
        type=unicode,
        help=f"prepared data, or files and folders of {ALLOWED}; default: the training data of the checkpoint",
    )
    add(
        "--precision",
        choices=("fp8", "bf16", "fp16", "fp32"),
        help="compute precision; default: the precision of the checkpoint, or the dtype of a Hugging Face folder",
    )
    add(
        "--by",
        choices=("packed", "document"),
        default="packed",
        help="packed: concatenate documents, as in training; document: evaluate each separately (default: packed)",
    )
    add(
        "--max_seq_length",
        type=between(1),
        help="sample length in tokens; default: the length used in training, or for a Hugging Face folder the trained "
        "length or number of positions, at most 2048",
    )
    add(
        "--stride",
        type=between(1),
        help="tokens between the starts of two rows of a long document; a smaller value gives more context and is "
        "slower (default: max_seq_length)",
    )
    add(
        "--max_samples",
        type=between(1),
        help="maximum number of evenly spaced samples; with --by document, documents per DATA; for text, the first "
        "ones (default: all)",
    )
    add(
        "--batch_size",
        type=between(1),
        help="samples per rank and batch; default: as in training, or 8 for a Hugging Face folder",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="tokenizer of the model, if it cannot be found with the model or its data",
    )
    add("--text_key", type=unicode, default="text", help="key or column of the text (default: text)")
    add("--split_on", type=separator, metavar="SEPARATOR", help=f"for text: {SPLIT_ON}")
    add(
        "--max_dropped",
        type=between(0),
        default=0,
        help="for text: maximum number of unreadable documents (default: 0)",
    )
    add("--output", type=Path, metavar="FILE.json", help="write the results to this JSON file")
    args = parser.parse_intermixed_args(argv)  # DATA may follow options
    if args.stride and args.by != "document":
        parser.error("--stride needs --by document")
    if args.output and (args.output.suffix != ".json" or not args.output.absolute().parent.is_dir()):
        parser.error(f"--output {args.output}: the file must end in .json and its folder must exist")
    if args.output and (problem := why_no_file(args.output)):
        parser.error(f"--output {args.output} {problem}")
    if len({os.path.realpath(name) for name in args.data}) < len(args.data):
        parser.error("DATA: the same data are given twice; name each once")
    try:
        args.model = Path(local_folder(str(args.model)))
        args.tokenizer = args.tokenizer and Path(local_folder(str(args.tokenizer), weights=False))
    except HubError as error:
        parser.error(str(error))
    for name in (args.model, *args.data):
        if not (
            os.path.exists(name) or (name in args.data and name.startswith("hf:")) or name == "python-stdlib"
        ):
            parser.error(f"{name} does not exist; for a data set on the Hugging Face Hub pass hf:NAME")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parse_arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logging(console="stderr")
    import model.fp8.torchao_fp8  # noqa: F401  imported before transformers, to silence torchao's warnings
    from train.evaluation.evaluation import evaluate, join_ranks, leave_ranks

    try:
        rank, world = join_ranks()
        configure_logging(rank=rank, console="stderr")
        report = evaluate(args, rank, world)
        if rank == 0 and args.output:
            write_durably(args.output, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
            logger.info(f"wrote {args.output}")
    except Exception as error:
        if line := out_of_memory(error):
            return fail(f"{line}; pass a smaller --batch_size")
        if isinstance(error, (ValueError, OSError, UserError)):
            return fail(reason(error))
        raise
    leave_ranks(world)
    return 0


def fail(message: str) -> int:
    """Log the current error and end this rank. Rank 0 logs first, so that an error of all ranks is shown once."""
    if rank := launchers.rank():
        time.sleep(2)
        message = f"rank {rank}: {message}"
    logger.error(message, exc_info=os.environ.get("FP8_TRACEBACK") == "1")
    if launchers.world_size() > 1:
        os._exit(NOT_AS_IT_IS)  # the others may wait in a collective
    return NOT_AS_IT_IS


if __name__ == "__main__":
    sys.exit(main())
