#!/usr/bin/env python3
"""Import Megatron datasets: `python train/import_megatron.py --input PREFIX... --tokenizer DIR --output DIR`.

--input takes the common PREFIX of PREFIX.bin and PREFIX.idx, which are only read. --tokenizer is the tokenizer that
produced the token ids.

A document is everything between two document indices, which can be several sequences. It is stored as BOS + its tokens
+ EOS. BOS and EOS are added only where they are missing: Megatron-LM's preprocess_data.py writes an end id with
--append-eod, and never a BOS. If the end-of-document id of the dataset is not the tokenizer's EOS, pass it as
--eod_id, and it is replaced by EOS. BOS and EOS inside documents are kept and counted. Documents without tokens are
skipped and counted.

A hash of the tokens assigns each document to the train or the eval split, so identical documents are always in the
same split. The same datasets and options give the same bytes.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("importing data", "pydantic", "numpy", "sentencepiece", "transformers")

from model.keys import between, given_path, unicode
from train.command import command
from train.prepare.corpus import eval_fraction


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        type=unicode,
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="path prefix of each dataset: PREFIX.bin and PREFIX.idx",
    )
    add(
        "--tokenizer",
        type=given_path,
        required=True,
        help="folder with the tokenizer.model or tokenizer.json that produced the ids",
    )
    add("--output", type=given_path, required=True, help="the folder to write")
    add(
        "--eod_id",
        type=between(0),
        help="end-of-document id of the datasets (default: the tokenizer's EOS)",
    )
    add(
        "--eval_fraction",
        type=eval_fraction,
        default=0.01,
        help="share of the documents in the eval split; 1: import data for evaluation only (default: 0.01)",
    )
    add(
        "--shard_tokens",
        type=between(1),
        default=1 << 28,
        help="maximum number of tokens per shard (default: 2^28)",
    )
    add("--overwrite", action="store_true", help="replace the prepared data in --output")
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    from train.prepare.megatron import import_datasets  # the import takes seconds

    manifest = import_datasets(args)
    counts = manifest.documents
    for name in ("bos", "eos"):
        added, inside = counts[f"{name}_added"], counts[f"{name}_inside"]
        print(f"{name.upper()}: added to {added:,} documents, {inside:,} inside documents")
    print(f"ids replaced by EOS (--eod_id): {counts['eod_replaced']:,}")
    print(f"wrote {args.output}\n{manifest.summary()}")


if __name__ == "__main__":
    sys.exit(main())
