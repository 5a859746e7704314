#!/usr/bin/env python3
"""Text -> token shards with a manifest: `python train/prepare_data.py --input PATH... --tokenizer DIR --output DIR`.

A document becomes BOS + its tokens + EOS; text never yields special ids, so a literal "</s>" in it stays text. A
document goes to the eval split by a hash of its text: equal texts stay on one side. A single text file, such as an
input.txt, is cut instead: its end is the eval split (--eval_by); or --split_on makes many documents of it.

First, the tokenizer is tried on a sample of the texts. One that gives other ids in transformers is refused; text
that it loses and unknown tokens are logged, and in manifest.json under steps.tokenizer_check.

Documents that cannot be read are counted by reason. Files of which a part cannot be read are counted apart, with the
rows that they lost. More documents than --max_dropped, or more files than --max_damaged_files, end the run with
status 2 and no manifest.

The work is split into tasks, which datatrove runs on this machine, as Slurm jobs or on a Ray cluster (--executor). The
same inputs and options give the same bytes, whatever runs them; the same command again goes on after a crash.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need
from model.errors import UserError

need("preparing data", "sentencepiece", "transformers")
need("preparing data", "datatrove", requirements="requirements-prep.txt")

from model.keys import between, given_path, unicode
from train.files import reason
from train.prepare.corpus import ALLOWED, SPLIT_ON, eval_fraction, separator
from train.prepare.steps import add_arguments
from train.record.log import configure_logging


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; numbers outside their range are errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", type=unicode, nargs="+", required=True, help=f"files and folders of {ALLOWED}")
    add(
        "--tokenizer",
        type=given_path,
        required=True,
        help="a folder with tokenizer.model or tokenizer.json, or ORG/NAME on the Hugging Face Hub",
    )
    add("--output", type=given_path, required=True, help="the folder to write")
    add("--text_key", type=unicode, default="text", help="key or column of the text (default: text)")
    add("--split_on", type=separator, metavar="SEPARATOR", help=SPLIT_ON)
    text = "held-out share of documents, or of each document; 1: all, for evaluation alone (0.01)"
    add("--eval_fraction", type=eval_fraction, default=0.01, help=text)
    text = "which they are: whole documents by a hash, or the end of each document (hash; of a single text: position)"
    add("--eval_by", choices=("hash", "position"), help=text)
    add("--max_dropped", type=between(0), default=0, help="unreadable documents to tolerate (0)")
    add("--max_damaged_files", type=between(0), default=0, help="damaged files to tolerate (0)")
    text = "stop before the text exceeds this many bytes, an equal share in each task"
    add("--max_bytes", type=between(1), help=text)
    add("--shard_tokens", type=between(1), default=1 << 28, help="tokens a shard holds at most (2^28)")
    text = "shuffle the documents of each shard, by a seed for each task; default: no"
    add("--shuffle_seed", type=between(0), help=text)
    text = "replace the prepared data in --output, or an unfinished preparation of another kind there"
    add("--overwrite", action="store_true", help=text)
    add = parser.add_argument_group("how it is run").add_argument
    add("--executor", choices=("local", "slurm", "ray"), default="local", help="where the tasks run (local)")
    text = "parts of the work, as many as you like (default: one for 16 MiB of input, up to 1000)"
    add("--tasks", type=between(1), help=text)
    add("--workers", type=between(1), help="tasks at a time (local: one a core, at most 16; clusters: all)")
    add("--slurm_partition", default="", help="of the jobs; required for slurm")
    add("--slurm_time", default="24:00:00", help="limit of a task (24:00:00)")
    more: dict = {"nargs": "*", "type": _key_value, "default": [], "metavar": "KEY=VALUE"}
    add("--slurm_args", help="more options of sbatch", **more)
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.executor == "slurm" and not args.slurm_partition:
        parser.error("--executor slurm needs --slurm_partition (sinfo lists them)")
    return args


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: KEY=VALUE is expected, such as account=team")
    return key, value


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the data was committed (slurm: submitted), else, with the reason on stderr,
    2 for what has to be changed first, 1 for what the system did; 130 after Ctrl-C."""
    args = parse_arguments(argv)
    configure_logging(console="stderr")
    try:
        from train.prepare.preparation import prepare  # which takes seconds

        manifest = prepare(args)
    except (UserError, ValueError, RuntimeError, OSError) as error:
        from train.prepare.corpus import WORK_NAME
        from train.prepare.output import IDENTITY_NAME

        kept = isinstance(error, OSError) and (Path(args.output) / WORK_NAME / IDENTITY_NAME).exists()
        goes_on = f"; what is done in {args.output} is kept, and the same command goes on" * kept
        print(f"error: {reason(error)}{goes_on}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("stopped; what is done is kept, and the same command goes on", file=sys.stderr)
        return 130
    if manifest is not None:
        print(f"wrote {args.output}\n{manifest.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
