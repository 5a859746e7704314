#!/usr/bin/env python3
"""Import Megatron datasets: `python train/import_megatron.py --input PREFIX... --tokenizer DIR --output DIR`.

A dataset consists of two files, PREFIX.bin and PREFIX.idx, which are not modified. --tokenizer is the folder of the
tokenizer that produced the token ids.

A document can consist of several sequences of the dataset. It is stored as BOS + tokens + EOS. BOS and EOS are added
only where they are missing: Megatron-LM's preprocess_data.py never writes a BOS, and writes an end-of-document id only
with --append-eod. If the end-of-document id is not the tokenizer's EOS, pass it as --eod_id. It is then replaced by
EOS. BOS and EOS inside documents are kept and counted. Documents without tokens are skipped and counted.

A hash of its tokens assigns each document to the train or eval split, so identical documents are always in the same
split. The same datasets and options produce identical files.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("importing data", "pydantic", "numpy", "sentencepiece", "transformers")

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
        help="path prefixes of the Megatron datasets; each dataset consists of the files PREFIX.bin and PREFIX.idx",
    )
    add(
        "--tokenizer",
        type=given_path,
        required=True,
        help="folder with the tokenizer.model or tokenizer.json that was used to create the token ids",
    )
    add("--output", type=given_path, required=True, help="output folder for the prepared data")
    add(
        "--eod_id",
        type=between(0),
        help="token id that ends each document in the datasets (default: the EOS id of the tokenizer)",
    )
    add(
        "--eval_fraction",
        type=eval_fraction,
        default=0.01,
        help="fraction of the documents to put in the eval split; if 1, all data is used for evaluation "
        "(default: 0.01)",
    )
    add(
        "--shard_tokens",
        type=between(1),
        default=1 << 28,
        help="maximum number of tokens per shard (default: 2^28)",
    )
    add("--overwrite", action="store_true", help="replace existing prepared data in --output")
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    from train.prepare.megatron import import_datasets  # the import takes seconds

    manifest = import_datasets(args)
    counts = manifest.documents
    for name in ("bos", "eos"):
        added, inside = counts[f"{name}_added"], counts[f"{name}_inside"]
        print(f"{name.upper()}: added to {added:,} documents, found {inside:,} times inside documents")
    print(f"end-of-document ids (--eod_id) replaced by the EOS id: {counts['eod_replaced']:,}")
    print(f"wrote {args.output}\n{manifest.summary()}")


if __name__ == "__main__":
    sys.exit(main())
