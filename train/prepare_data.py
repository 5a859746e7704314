#!/usr/bin/env python3
"""Tokenize text into training shards: `python train/prepare_data.py --input PATH... --tokenizer DIR --output DIR`.

Each document is stored as BOS + its tokens + EOS. Text never produces special ids: a literal "</s>" stays text. A hash
of the text assigns each document to the train or the eval split, so identical texts are always in the same split. A
single text file, such as input.txt, is cut instead: its end becomes the eval split (--eval_by). To divide it into
several documents, use --split_on.

The tokenizer is first checked on a sample of the texts. It is refused if transformers computes different ids. Text
that it loses and unknown tokens are logged and recorded in manifest.json under steps.tokenizer_check.

Unreadable documents are counted by reason. Partly unreadable files are counted separately, with the number of rows
lost. If more than --max_dropped documents or --max_damaged_files files are lost, the command writes no manifest and
exits with status 2.

The work is divided into tasks, which run on this machine, as Slurm jobs or on a Ray cluster (--executor). The same
inputs and options give the same bytes with every executor. Completed tasks are kept: to resume after a stop, an error
or a crash, run the same command again. On Slurm the last repetition writes the manifest.

Exit status: 0 done, or with slurm submitted; 1 an error of the system or a failed task; 2 the user must change the
command or the inputs; 130 Ctrl-C.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("preparing data", "sentencepiece", "transformers")
need("preparing data", "datatrove", requirements="requirements-prep.txt")

from model.keys import between, given_path, unicode
from train.command import command
from train.prepare.corpus import ALLOWED, SPLIT_ON, add_loss_limits, eval_fraction, separator
from train.prepare.steps import add_arguments


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", type=unicode, nargs="+", required=True, help=f"files, folders or datasets: {ALLOWED}")
    add(
        "--tokenizer",
        type=given_path,
        required=True,
        help="a folder with tokenizer.model or tokenizer.json, or ORG/NAME on the Hugging Face Hub",
    )
    add("--output", type=given_path, required=True, help="the folder to write")
    add("--text_key", type=unicode, default="text", help="key or column that holds the text (default: text)")
    add("--split_on", type=separator, metavar="SEPARATOR", help=SPLIT_ON)
    add(
        "--eval_fraction",
        type=eval_fraction,
        default=0.01,
        help="share of the documents, or of each document, in the eval split; 1: prepare data for evaluation only "
        "(default: 0.01)",
    )
    add(
        "--eval_by",
        choices=("hash", "position"),
        help="how to choose the eval split: whole documents by a hash of their text, or the end of each document by "
        "position (default: hash; position for a single text file)",
    )
    add_loss_limits(parser)
    add(
        "--shard_tokens",
        type=between(1),
        default=1 << 28,
        help="maximum number of tokens per shard (default: 2^28)",
    )
    add(
        "--shuffle_seed",
        type=between(0),
        help="shuffle the documents within each shard; each task derives its own seed (default: no shuffling)",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace the prepared data in --output, or an unfinished preparation with other inputs or options",
    )
    add = parser.add_argument_group("execution").add_argument
    add(
        "--executor",
        choices=("local", "slurm", "ray"),
        default="local",
        help="where the tasks run (default: local)",
    )
    add("--tasks", type=between(1), help="number of tasks (default: one per 16 MiB of input, at most 1000)")
    add(
        "--workers",
        type=between(1),
        help="number of tasks to run at a time (default: local: one per core, at most 16; slurm and ray: all)",
    )
    add("--slurm_partition", default="", help="partition of the jobs; required for slurm")
    add("--slurm_time", default="24:00:00", help="time limit per task (default: 24:00:00)")
    add(
        "--slurm_args",
        nargs="*",
        type=_key_value,
        default=[],
        metavar="KEY=VALUE",
        help="additional sbatch options, such as account=team",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.executor == "slurm" and not args.slurm_partition:
        parser.error("--executor slurm needs --slurm_partition (sinfo lists them)")
    if args.language_model and not args.languages:
        parser.error("--language_model has no effect without --languages")
    return args


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE, such as account=team")
    return key, value


@command
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    from train.prepare.preparation import prepare  # the import takes seconds

    if manifest := prepare(args):
        print(f"wrote {args.output}\n{manifest.summary()}")


if __name__ == "__main__":
    sys.exit(main())
