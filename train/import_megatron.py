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
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train.data.format import SCHEMA, SPLITS, DataError, Manifest, token_dtype
from train.files import sha256_file
from train.prepare.counts import unigram_loss
from train.prepare.encoder import TextEncoder
from train.prepare.megatron_documents import Counts, add_edges, likely_eod, token_ids, write_block
from train.prepare.megatron_index import IndexedDataset, open_dataset, read_blocks
from train.prepare.output import WORK_NAME, OutputFolder, ShardWriter

PROGRESS_S = 5.0


def import_datasets(args: argparse.Namespace) -> tuple[Manifest, str]:
    """Import `args.input` into `args.output`; see the command's --help for the fields. Returns what was committed
    and a warning, or "".

    Raises:
        DataError: bad datasets, tokenizer or output folder, or no document for the train split.
        OSError: a file cannot be read or written.
    """
    encoder = TextEncoder(args.tokenizer)
    eod_id = encoder.eos_id if args.eod_id is None else args.eod_id
    datasets = open_all(args.input)
    if (Path(args.output) / WORK_NAME).is_dir() and not args.overwrite:
        raise DataError(f"{args.output} holds an unfinished preparation of prepare_data.py, which would be lost; "
                        "choose another --output, or --overwrite it")  # fmt: skip
    zeros = np.zeros(encoder.vocab_size, dtype=np.int64)
    counts = Counts({split: zeros.copy() for split in SPLITS}, zeros.copy())
    progress = Progress(datasets)
    with OutputFolder(args.output, args.overwrite) as output:
        dtype = token_dtype(encoder.vocab_size)
        writers = {split: ShardWriter(output.folder, split, dtype, args.shard_tokens) for split in SPLITS}
        for dataset in datasets:
            for block in read_blocks(dataset):
                ids, replaced = token_ids(block, dataset, encoder, eod_id)
                counts.eod_replaced += replaced
                framed = add_edges(ids, block.ends, encoder.bos_id, encoder.eos_id)
                write_block(framed, writers, counts, args.eval_fraction)
                progress.add(len(block.ends), len(block.tokens))
        for writer in writers.values():
            writer.close()
        progress.show()
        if not writers["train"].shards:
            raise DataError(
                "no document for the train split: give more datasets or a smaller --eval_fraction"
            )
        manifest = Manifest(
            schema=SCHEMA,
            dtype=dtype.name,
            vocab_size=encoder.vocab_size,
            bos_id=encoder.bos_id,
            eos_id=encoder.eos_id,
            tokenizer_sha256=sha256_file(encoder.folder / encoder.files[0]),
            tokenizer_files=encoder.files,
            inputs=list(args.input),
            text_key=None,
            eval_fraction=args.eval_fraction,
            documents=counts.documents(encoder),
            text_bytes=None,
            unigram_loss=unigram_loss(counts.tokens["train"], counts.tokens["eval"]),
            shards=[shard for split in SPLITS for shard in writers[split].shards],
        )
        output.copy_tokenizer(encoder.folder, encoder.files)
        output.commit(manifest)
    return manifest, "" if args.eod_id is not None else likely_eod(counts)


def open_all(prefixes: list[str]) -> list[IndexedDataset]:
    """Check all datasets before anything is written.

    Raises:
        DataError: one of them is no good, or is given twice.
    """
    datasets: list[IndexedDataset] = []
    seen: set[str] = set()
    for prefix in prefixes:
        dataset = open_dataset(prefix)
        if (real := os.path.realpath(dataset.bin)) in seen:
            raise DataError(f"{dataset.bin} is given twice (by itself or a link); name each dataset once")
        seen.add(real)
        print(f"{prefix}: {dataset.documents:,} documents, {dataset.sequences:,} sequences, {dataset.tokens:,} tokens "
              f"of {dataset.dtype.name}", file=sys.stderr, flush=True)  # fmt: skip
        datasets.append(dataset)
    return datasets


class Progress:
    """A line with the rate every few seconds on stderr."""

    def __init__(self, datasets: list[IndexedDataset]) -> None:
        self.total = sum(dataset.tokens for dataset in datasets)
        self.documents = self.tokens = 0
        self.start_s = self.last_s = time.monotonic()

    def add(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens
        if time.monotonic() - self.last_s >= PROGRESS_S:
            self.show()

    def show(self) -> None:
        self.last_s = time.monotonic()
        took = self.last_s - self.start_s
        print(f"{self.documents:,} documents, {self.tokens:,} of {self.total:,} tokens in {took:.0f} s "
              f"({self.tokens / max(took, 1e-9) / 1e6:.2f} M tokens/s)", file=sys.stderr, flush=True)  # fmt: skip


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; numbers outside their range are errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PREFIX", help="datasets: PREFIX.bin and PREFIX.idx")
    add("--tokenizer", required=True, help="a folder with the tokenizer.model or tokenizer.json of the ids")
    add("--output", required=True, help="the folder to write")
    add("--eod_id", type=int, help="the id that ends documents in the datasets (the tokenizer's EOS)")
    add("--eval_fraction", type=float, default=0.01, help="held-out share of documents (0.01)")
    add("--shard_tokens", type=int, default=1 << 28, help="tokens a shard holds at most (2^28)")
    add("--overwrite", action="store_true", help="replace the prepared data in --output")
    args = parser.parse_args(argv)
    for name, low, high in (("eval_fraction", 0, 0.5), ("shard_tokens", 1, None), ("eod_id", 0, None)):
        value = getattr(args, name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            parser.error(f"--{name} {value}: allowed is {low} to {'any' if high is None else high}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the data was committed, else 1 with the reason on stderr."""
    args = parse_arguments(argv)
    try:
        manifest, warning = import_datasets(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summarize(manifest)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def summarize(manifest: Manifest) -> None:
    """What was committed, on stdout."""
    counts = manifest.documents
    dropped = sum(counts["dropped"].values())
    print(f"documents: {counts['in']:,} in, {counts['out']:,} out, {dropped:,} dropped, for they are empty")
    for name in ("bos", "eos"):
        added, inside = counts[f"{name}_added"], counts[f"{name}_inside"]
        print(f"{name.upper()}: added to {added:,} documents, {inside:,} inside documents")
    if counts["eod_replaced"]:
        print(f"EOS in place of --eod_id: {counts['eod_replaced']:,}")
    print("\n".join(manifest.split_lines()))


if __name__ == "__main__":
    sys.exit(main())
