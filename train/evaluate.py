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
import functools
import json
import logging
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("evaluation", "pydantic", "psutil", "torch", "transformers")

from model.hub import local_folder
from model.keys import between, json_file, unicode
from train import launchers
from train.command import command
from train.files import write_durably
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
    add("--output", type=json_file, metavar="FILE.json", help="write the results to this JSON file")
    args = parser.parse_intermixed_args(argv)  # DATA may follow options
    if args.stride and args.by != "document":
        parser.error("--stride needs --by document")
    if len({os.path.realpath(name) for name in args.data}) < len(args.data):
        parser.error("DATA: the same data are given twice; name each once")
    args.model = Path(local_folder(str(args.model)))
    args.tokenizer = args.tokenizer and Path(local_folder(str(args.tokenizer), weights=False))
    return args


@functools.partial(command, system_error=2)
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import model.fp8.torchao_fp8  # noqa: F401  imported before transformers, to silence torchao's warnings
    from train.evaluation.evaluation import evaluate, join_ranks

    rank, world = join_ranks()
    configure_logging(rank=rank, console="stderr")
    try:
        report = evaluate(args, rank, world)
    except Exception as error:
        time.sleep(2 * (rank > 0))  # rank 0 prints first, and the launcher then ends the others
        if line := out_of_memory(error):
            raise ValueError(f"{line}; pass a smaller --batch_size") from error
        raise
    if rank == 0 and args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_durably(args.output, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        logger.info(f"wrote {args.output}")


if __name__ == "__main__":
    status = main()
    if status and launchers.world_size() > 1:
        os._exit(status)  # the other ranks may wait in a collective
    sys.exit(status)
