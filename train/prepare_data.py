#!/usr/bin/env python3
"""Tokenize text into training shards: `python train/prepare_data.py --input PATH... --tokenizer DIR --output DIR`.

Each document is stored as BOS + tokens + EOS. Text never produces special ids: a literal "</s>" is encoded as text.
Each document is assigned to the train or eval split by a hash of its text, so identical texts are always in the same
split. If the only input is one text file, such as input.txt, the end of the file becomes the eval split instead
(--eval_by). Use --split_on to divide a text file into several documents.

Before the preparation, the tokenizer is checked on a sample of the texts. The command fails if transformers computes
different token ids. Text that the tokenizer loses and unknown tokens are logged and recorded in manifest.json under
steps.tokenizer_check.

Unreadable documents are counted by reason. Partly unreadable files are counted separately, with the number of rows
lost. If more than --max_dropped documents or --max_damaged_files files are lost, the command writes no manifest and
exits with status 2.

The work is divided into tasks, which run on this host or on the nodes of a Slurm job (--executor). The same inputs and
options produce identical files with both executors. Completed tasks are kept. To resume after a stop, an error or a
crash, run the same command again.

Exit status: 0 done; 1 system error or failed task; 2 invalid command or inputs; 130 stopped by Ctrl-C.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("preparing data", "sentencepiece", "transformers")
require_packages("preparing data", "datatrove", requirements="requirements-prep.txt")

from model.keys import between, given_path, unicode
from train.command import command
from train.prepare.corpus import ALLOWED, add_loss_limits, add_text_options, eval_fraction


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input", type=unicode, nargs="+", required=True, help=f"input files, folders or datasets: {ALLOWED}"
    )
    add(
        "--tokenizer",
        type=given_path,
        required=True,
        help="folder with tokenizer.model or tokenizer.json, or the name ORG/NAME of a repository on the Hugging "
        "Face Hub",
    )
    add("--output", type=given_path, required=True, help="output folder for the prepared data")
    add_text_options(parser)
    add(
        "--eval_fraction",
        type=eval_fraction,
        default=0.01,
        help="fraction of the documents to put in the eval split, or fraction of each document with --eval_by "
        "position; if 1, all data is used for evaluation (default: 0.01)",
    )
    add(
        "--eval_by",
        choices=("hash", "position"),
        help="how to choose the eval split: 'hash' selects whole documents by a hash of their text, and 'position' "
        "takes the end of each document (default: hash; position for a single text file)",
    )
    add_loss_limits(parser)
    add(
        "--shard_tokens",
        type=between(1),
        default=1 << 28,
        help="maximum number of tokens per shard (default: 2^28)",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace existing data in --output: prepared data, or an unfinished preparation that used other "
        "inputs or options",
    )
    add = parser.add_argument_group("execution").add_argument
    add(
        "--executor",
        choices=("local", "slurm"),
        default="local",
        help="where to run the preparation tasks: in processes of this host, or with srun on the nodes of a Slurm job "
        "(default: local)",
    )
    add(
        "--tasks",
        type=between(1),
        help="number of preparation tasks (default: one per 16 MiB of input, at most 1000)",
    )
    add(
        "--workers",
        type=between(1),
        help="maximum number of tasks to run at the same time (default for local: one per core, at most 16; default "
        "for slurm: the number of tasks of the job, from sbatch's --ntasks)",
    )
    add = parser.add_argument_group("optional steps").add_argument
    texts: dict[str, Any] = {"type": unicode, "nargs": "+", "default": []}
    add(
        "--languages",
        metavar="CODE",
        help="keep only documents in these languages, such as en de. A document is kept if its fastText score for "
        "one of these languages is above 0.65 (default: keep all languages)",
        **texts,
    )
    add(
        "--language_model",
        type=unicode,
        metavar="FILE",
        help="path of a fastText model such as lid.176.bin (default: download lid.176.bin once)",
    )
    add(
        "--quality",
        choices=("gopher_quality", "gopher_repetition", "c4", "fineweb"),
        help="quality filters to run, in the given order, with datatrove's default settings. 'c4' also removes "
        "individual lines, and documents that contain a curly bracket in a sentence (default: none)",
        **texts,
    )
    add(
        "--quality_language",
        default="en",
        metavar="CODE",
        help="language whose rules --quality uses to split text into words and sentences (default: en). With en, "
        "gopher_quality also requires English stop words",
    )
    add(
        "--decontaminate",
        metavar="FILE",
        help="remove documents that share an n-gram of words with a text in these files, in any format accepted by "
        "--input. Each line of a .txt file and each record in other formats is one text (default: none)",
        **texts,
    )
    add(
        "--decontaminate_key",
        type=unicode,
        default="text",
        metavar="KEY",
        help="key that contains the text in the records of the --decontaminate files (default: text)",
    )
    add(
        "--decontaminate_ngram",
        type=between(1, 100),
        default=13,
        help="length of the n-grams for --decontaminate, in words (default: 13). Texts with fewer words are ignored",
    )
    add(
        "--dedup",
        choices=("exact", "minhash"),
        help="remove duplicate documents, and keep the first of each set of duplicates. 'exact' removes identical "
        "documents. 'minhash' removes documents that share about 70%% or more of their word 5-grams, and treats all "
        "numbers as equal (default: keep duplicates)",
    )
    args = parser.parse_args(argv)
    if args.language_model and not args.languages:
        parser.error(
            "--language_model has no effect without --languages. Add --languages, or remove --language_model"
        )
    return args


@command
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    from train.prepare.preparation import prepare  # the import takes seconds

    manifest = prepare(args)
    print(f"wrote {args.output}\n{manifest.summary()}")


if __name__ == "__main__":
    sys.exit(main())
