#!/usr/bin/env python3
"""Megatron .bin/.idx -> token shards: `python train/import_megatron.py --input PREFIX... --tokenizer DIR --output DIR`.

--input takes the PREFIX of PREFIX.bin and PREFIX.idx, which are only read; --tokenizer the tokenizer that made their
ids. A document is what lies between two document indices, whatever number of sequences that is. It becomes BOS + its
tokens + EOS, where each is added unless it is there already (Megatron-LM's preprocess_data.py writes an end with
--append-eod, and no beginning). Where the end-of-document id of the dataset is another one than the tokenizer's EOS,
--eod_id names it, and EOS takes its place. BOS and EOS inside documents stay and are counted.

A document goes to the eval split by a hash of its tokens: equal ones stay on one side. The same datasets and options
give the same bytes. Documents without tokens are left out and counted.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("importing data", "pydantic", "numpy", "sentencepiece", "transformers")

from model.keys import between, given_path, unicode
from train.files import reason
from train.prepare.corpus import eval_fraction
from train.record.log import configure_logging


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; numbers outside their range are errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    text = "datasets: PREFIX.bin and PREFIX.idx"
    add("--input", type=unicode, nargs="+", required=True, metavar="PREFIX", help=text)
    add(
        "--tokenizer",
        type=given_path,
        required=True,
        help="a folder with the tokenizer.model or tokenizer.json of the ids",
    )
    add("--output", type=given_path, required=True, help="the folder to write")
    add("--eod_id", type=between(0), help="the id that ends documents in the datasets (the tokenizer's EOS)")
    text = "held-out share of documents; 1: all, for evaluation alone (0.01)"
    add("--eval_fraction", type=eval_fraction, default=0.01, help=text)
    add("--shard_tokens", type=between(1), default=1 << 28, help="tokens a shard holds at most (2^28)")
    add("--overwrite", action="store_true", help="replace the prepared data in --output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the data was committed, else, with the reason on stderr, 2 for what
    has to be changed first, 1 for what the system did; 130 after Ctrl-C."""
    args = parse_arguments(argv)
    configure_logging(console="stderr")
    try:
        from train.prepare.megatron import import_datasets  # which takes seconds

        manifest = import_datasets(args)
    except (ValueError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        from train.prepare.output import is_being_exchanged

        how = "--output is as it was"
        if is_being_exchanged(Path(args.output)):
            how = "the new data were being put in the place of the old; run the same command again, which finishes that"
        print(f"stopped; {how}", file=sys.stderr)
        return 130
    counts = manifest.documents
    for name in ("bos", "eos"):
        added, inside = counts[f"{name}_added"], counts[f"{name}_inside"]
        print(f"{name.upper()}: added to {added:,} documents, {inside:,} inside documents")
    print(f"EOS in place of --eod_id: {counts['eod_replaced']:,}")
    print(f"wrote {args.output}\n{manifest.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
