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
from pathlib import Path
from types import FrameType

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("evaluation", "pydantic", "psutil", "torch", "transformers")

from train import launchers

INTERRUPTED, NOT_AS_IT_IS = 130, 2


def interrupted(number: int, frame: FrameType | None) -> None:
    if launchers.rank() == 0:
        os.write(2, b"Ctrl-C: the evaluation is ended; it leaves nothing\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which train/launch.py blocks in its ranks

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
        help="a run's output_dir, a checkpoint, a Hugging Face folder or ORG/NAME",
    )
    add(
        "data",
        metavar="DATA",
        nargs="*",
        type=unicode,
        help=f"prepared data, or files and folders of {ALLOWED}; default: what the checkpoint was trained on",
    )
    add(
        "--precision",
        choices=("fp8", "bf16", "fp16", "fp32"),
        help="default: the checkpoint's; of a folder, its dtype",
    )
    add(
        "--by",
        choices=("packed", "document"),
        default="packed",
        help="packed: documents one behind the other, as in training; document: each alone (packed)",
    )
    add(
        "--max_seq_length",
        type=between(1),
        help="tokens of a sample (the training's; of a Hugging Face folder too, or its positions, and at most 2048)",
    )
    add(
        "--stride",
        type=between(1),
        help="tokens between the starts of two rows of a longer document; fewer: more context, slower (max_seq_length)",
    )
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
        parser.error("--stride needs --by document")
    if args.output and (args.output.suffix != ".json" or not args.output.absolute().parent.is_dir()):
        parser.error(f"--output {args.output}: must end in .json and be in a folder that exists")
    if args.output and (problem := why_no_file(args.output)):
        parser.error(f"--output {args.output} {problem}")
    if len({os.path.realpath(name) for name in args.data}) < len(args.data):
        parser.error("DATA: one is given twice")
    try:
        args.model = Path(local_folder(str(args.model)))
        args.tokenizer = args.tokenizer and Path(local_folder(str(args.tokenizer), weights=False))
    except HubError as error:
        parser.error(str(error))
    for name in (args.model, *args.data):
        if not (
            os.path.exists(name) or (name in args.data and name.startswith("hf:")) or name == "python-stdlib"
        ):
            parser.error(f"{name} does not exist; data sets of the Hugging Face Hub are hf:NAME")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parse_arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logging(console="stderr")
    import model.fp8.torchao_fp8  # noqa: F401  before transformers, for which it quiets torchao
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
            return fail(f"{line}; give a smaller --batch_size")
        if isinstance(error, (ValueError, OSError, UserError)):
            return fail(reason(error))
        raise
    leave_ranks(world)
    return 0


def fail(message: str) -> int:
    """Log the current error and end this rank; rank 0 logs first, and what all ranks find is shown once."""
    if rank := launchers.rank():
        time.sleep(2)
        message = f"rank {rank}: {message}"
    logger.error(message, exc_info=os.environ.get("FP8_TRACEBACK") == "1")
    if launchers.world_size() > 1:
        os._exit(NOT_AS_IT_IS)  # the others may wait in a collective
    return NOT_AS_IT_IS


if __name__ == "__main__":
    sys.exit(main())
