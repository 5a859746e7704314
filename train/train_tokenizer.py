"""Train a sentencepiece tokenizer: `python train/train_tokenizer.py --input PATH... --vocab_size N --output DIR`.

BPE with byte fallback and Mistral's special ids (unk 0, bos 1, eos 2, no padding). Text is kept as it is: identity
normalization, no collapsed spaces, newlines and tabs survive; only a leading space is added, as Mistral's tokenizers
do. The folder holds tokenizer.model and, for transformers, tokenizer.json with the same ids for every text: a
literal "</s>" in text is text there too, never the special token. The command checks that on text of the corpus and
on hard strings before it leaves the folder.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need
from model.errors import UserError

need("training a tokenizer", "sentencepiece", "transformers", "pydantic")

from model.keys import between, given_path
from train.files import reason
from train.prepare.corpus import ALLOWED, SPLIT_ON, separator
from train.record.log import configure_logging


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; numbers outside their range are errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files and folders of {ALLOWED}")
    add("--vocab_size", type=between(260), required=True, help="pieces, with special ids and the 256 bytes")
    add("--output", type=given_path, required=True, help="the folder to write")
    add("--text_key", default="text", help="key or column of the text (default: text)")
    add("--split_on", type=separator, metavar="SEPARATOR", help=SPLIT_ON)
    text = (
        "train on a sample of at most this many bytes of text, or of one document, as they stay whole (250,000,000, "
        "which take about 3 GB of memory)"
    )
    add("--max_bytes", type=between(1), default=250_000_000, help=text)
    text = "share of characters that get a piece; the rest is spelt in bytes (0.9995)"
    add("--character_coverage", type=between(0.98, 1, float), default=0.9995, help=text)
    add("--max_dropped", type=between(0), default=0, help="unreadable documents to tolerate (0)")
    add("--max_damaged_files", type=between(0), default=0, help="damaged files to tolerate (0)")
    add("--overwrite", action="store_true", help="replace the tokenizer in --output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the tokenizer was written, else, with the reason on stderr, 2 for what
    has to be changed first, 1 for what the system did; 130 after Ctrl-C."""
    args = parse_arguments(argv)
    configure_logging(console="stderr")
    try:
        from train.prepare.tokenizer import train_tokenizer  # which takes seconds

        train_tokenizer(args)
    except (UserError, ValueError, RuntimeError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("stopped; --output is as it was", file=sys.stderr)
        return 130
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
