"""Train a sentencepiece tokenizer: `python train/train_tokenizer.py --input PATH... --vocab_size N --output DIR`.

The tokenizer is BPE with byte fallback and Mistral's special ids (unk 0, bos 1, eos 2, no padding). It does not change
the text: it does not normalize, and it keeps repeated spaces, newlines and tabs. It only adds a leading space, as
Mistral's tokenizers do.

The output folder holds tokenizer.model and, for transformers, a tokenizer.json that gives the same ids. In both, a
literal "</s>" in the text stays text. The command verifies this on a sample of the corpus and on difficult strings
before it writes the folder.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("training a tokenizer", "sentencepiece", "transformers", "pydantic")

from model.keys import between, given_path
from train.command import command
from train.prepare.corpus import ALLOWED, SPLIT_ON, add_loss_limits, separator


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files, folders or datasets: {ALLOWED}")
    add(
        "--vocab_size",
        type=between(260),
        required=True,
        help="vocabulary size, including the special ids and the 256 bytes",
    )
    add("--output", type=given_path, required=True, help="the folder to write")
    add("--text_key", default="text", help="key or column that holds the text (default: text)")
    add("--split_on", type=separator, metavar="SEPARATOR", help=SPLIT_ON)
    add(
        "--max_bytes",
        type=between(1),
        default=250_000_000,
        help="size of the training sample, in bytes of text; documents are not cut, so the sample has at least one "
        "(default: 250,000,000, which needs about 3 GB of memory)",
    )
    add(
        "--character_coverage",
        type=between(0.98, 1, float),
        default=0.9995,
        help="share of the characters that get a piece of their own; others are encoded as bytes (default: 0.9995)",
    )
    add_loss_limits(parser)
    add("--overwrite", action="store_true", help="replace the tokenizer in --output")
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    from train.prepare.tokenizer import train_tokenizer  # the import takes seconds

    train_tokenizer(args)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
