"""Train a sentencepiece tokenizer: `python train/train_tokenizer.py --input PATH... --vocab_size N --output DIR`.

The tokenizer uses BPE with byte fallback and Mistral's special ids (unk 0, bos 1, eos 2, no padding). It does not
normalize the text, and keeps repeated spaces, newlines and tabs. As in Mistral's tokenizers, a leading space is added.

The output folder contains tokenizer.model, and tokenizer.json for transformers. Both produce the same token ids and
encode a literal "</s>" in the text as text. The command verifies this on a sample of the corpus and on difficult
strings before it writes the folder.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("training a tokenizer", "sentencepiece", "transformers", "pydantic")

from model.keys import between, given_path
from train.command import command
from train.prepare.corpus import ALLOWED, add_loss_limits, add_text_options


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"input files, folders or datasets: {ALLOWED}")
    add(
        "--vocab_size",
        type=between(260),
        required=True,
        help="vocabulary size, including the special tokens and the 256 byte tokens",
    )
    add("--output", type=given_path, required=True, help="output folder for the tokenizer")
    add_text_options(parser)
    add(
        "--max_bytes",
        type=between(1),
        default=250_000_000,
        help="maximum size of the training sample in bytes of text; documents are not split, and the sample "
        "contains at least one document (default: 250,000,000, which needs about 3 GB of memory)",
    )
    add(
        "--character_coverage",
        type=between(0.98, 1, float),
        default=0.9995,
        help="fraction of the characters in the training sample that the vocabulary must cover; other characters "
        "are encoded as bytes (default: 0.9995)",
    )
    add_loss_limits(parser)
    add("--overwrite", action="store_true", help="replace an existing tokenizer in --output")
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    from train.prepare.tokenizer import train_tokenizer  # the import takes seconds

    train_tokenizer(args)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
