#!/usr/bin/env python3
"""Evaluate a model on prepared data or text. Report loss, perplexity and bits per byte for each source and in total.

    python train/evaluate.py output/run                                    # on the eval split of the training data
    python train/evaluate.py output/run/checkpoints/step-00001000 data/wiki data/code --precision bf16
    python train/evaluate.py FOLDER story.txt reviews.jsonl --by document --output result.json
    python train/launch.py --nproc 8 train/evaluate.py output/run data/wiki            # 8 GPUs; also torchrun
    python train/evaluate.py output/run --tasks hellaswag,arc_easy                     # with the lm-eval harness

MODEL is the output_dir of a run, a checkpoint, or a Hugging Face folder with a Mistral, Llama or Qwen3 model, with or
without FP8 weights. For an output_dir, the newest undamaged checkpoint is evaluated, or hf/ if the run has no
checkpoint.

DATA is one or more folders written by prepare_data.py, or any input that prepare_data.py can read. Prepared folders
are evaluated on their whole eval split. To compute the same eval_loss as in the training log, pass the run's
max_eval_samples (default: 256) as --max_samples.

A checkpoint is evaluated in its own precision and model variant unless --precision is given. --precision fp8 uses
current scaling for a model that was not trained in FP8. The evaluation counts the FP8 GEMMs and fails if none run.

--tasks runs tasks of the lm-eval harness on the export of the checkpoint, with transformers, on one GPU. Each result is
added to the run's metrics.jsonl and trackers with the step of the checkpoint. This needs the packages in
requirements-serving.txt.

Exit status: 0 done; 2 invalid request or failed evaluation; 130 stopped by Ctrl-C.
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
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("evaluation", "pydantic", "psutil", "torch", "transformers")

from model.hf_folder import local_folder
from model.keys import between, json_file, unicode
from train import rank_env
from train.command import command
from train.files import write_durably
from train.preflight.machine import out_of_memory
from train.prepare.corpus import ALLOWED, add_text_options
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
        help="output_dir of a run, a checkpoint, a Hugging Face folder, or the name ORG/NAME of a model on the "
        "Hugging Face Hub",
    )
    add(
        "data",
        metavar="DATA",
        nargs="*",
        type=unicode,
        help=f"folders with prepared data, or input files, folders or datasets: {ALLOWED} (default: the "
        "training data of the checkpoint)",
    )
    add(
        "--precision",
        choices=("fp8", "bf16", "fp16", "fp32"),
        help="precision of the computation (default: the precision of the checkpoint, or the dtype of the Hugging "
        "Face weights)",
    )
    add(
        "--by",
        choices=("packed", "document"),
        default="packed",
        help="how to form samples: 'packed' concatenates documents, as in training, and 'document' evaluates each "
        "document separately (default: packed)",
    )
    add(
        "--max_seq_length",
        type=between(1),
        help="sample length in tokens (default: max_seq_length of the training run; for a Hugging Face folder, "
        "the sequence length recorded in config.json or max_position_embeddings, but at most 2048)",
    )
    add(
        "--max_samples",
        type=between(1),
        help="maximum number of samples, selected at even intervals from the prepared data, with at least one from "
        "each folder; for text inputs and with "
        "--by document, maximum number of documents from each DATA argument (default: all)",
    )
    add(
        "--batch_size",
        type=between(1),
        help="number of samples per batch on each rank (default: the evaluation batch size of the training run, "
        "or 8 for a Hugging Face folder)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder with the model's tokenizer; needed only if neither the model nor its data includes the "
        "tokenizer",
    )
    add_text_options(parser)
    add(
        "--max_dropped",
        type=between(0),
        default=0,
        help="maximum number of unreadable documents in text inputs; the evaluation fails if there are more "
        "(default: 0)",
    )
    add(
        "--tasks",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help="tasks of the lm-eval harness to run instead of computing the loss on DATA; --max_samples limits the "
        "number of documents per task",
    )
    add(
        "--task_path",
        type=Path,
        metavar="FOLDER",
        help="folder with additional tasks for --tasks, defined in YAML files of the lm-eval harness",
    )
    add("--output", type=json_file, metavar="FILE.json", help="write the results to this JSON file")
    args = parser.parse_intermixed_args(argv)  # DATA may follow options
    if args.tasks and (args.data or args.precision):
        parser.error(
            "--tasks evaluates the exported model, without DATA and --precision. Remove these arguments"
        )
    if args.tasks and rank_env.world_size() > 1:
        parser.error("--tasks runs in a single process. Start train/evaluate.py without a launcher")
    if len({os.path.realpath(name) for name in args.data}) < len(args.data):
        parser.error("DATA contains the same path more than once. Pass each path once")
    args.model = Path(local_folder(str(args.model)))
    args.tokenizer = args.tokenizer and Path(local_folder(str(args.tokenizer), weights=False))
    return args


@functools.partial(command, system_error=2)
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import model.fp8.torchao_fp8  # noqa: F401  imported before transformers, to silence torchao's warnings

    if args.tasks:
        require_packages("--tasks", "lm_eval", requirements="requirements-serving.txt")
        from train.evaluation.tasks import run_tasks

        write_report(args.output, run_tasks(args))
        return
    from train.evaluation.evaluation import evaluate, join_ranks

    rank, world = join_ranks()
    configure_logging(rank=rank, console="stderr")
    try:
        report = evaluate(args, rank, world)
    except Exception as error:
        time.sleep(2 * (rank > 0))  # rank 0 prints first, and the launcher then stops the other ranks
        if line := out_of_memory(error):
            raise ValueError(f"{line}. Pass a smaller --batch_size") from error
        raise
    if rank == 0:
        write_report(args.output, report)


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write `report` to the JSON file `path`. If `path` is None, do nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n")
        logger.info(f"wrote {path}")


if __name__ == "__main__":
    status = main()
    if status and rank_env.world_size() > 1:
        os._exit(status)  # the other ranks may wait in a collective
    sys.exit(status)
