"""Inspect prepared data: `python train/inspect_data.py DIR [--verify] [--samples N]`.

Print the manifest and random samples. As in training, a sample is a window of --seq_length tokens, which can contain
several documents. Each line of text begins with "| ". BOS and EOS are printed on separate lines. The sizes and indexes
of all shards are always checked. --verify also checks every hash and token id.

Exit status: 0 if no damage was found; 1 if a file is damaged; 2 if there is nothing to inspect.
"""

import argparse
import functools
import itertools
import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("inspecting data", "pydantic", "numpy")

import numpy as np

from model.keys import between
from model.terminal import escape_controls
from train.command import command
from train.data.encoder import TextEncoder
from train.data.format import (
    TOKENIZER_FOLDER,
    DataError,
    Manifest,
    Shard,
    check_sizes,
    check_tokenizer,
    count,
    read_index,
    read_manifest,
    verify_shard,
)
from train.data.source import TokenSource


def find_damage(folder: Path, manifest: Manifest, verify: bool, workers: int) -> list[Exception]:
    """Check all shards in a folder with prepared data. Return one error per damaged shard, in shard order.

    Args:
        verify: check hashes and token ids in addition to the sizes and indices.
        workers: number of threads.
    """

    def check(shard: Shard) -> Exception | None:
        try:
            check_sizes(folder, shard)
            read_index(folder, shard)
            if verify:
                verify_shard(folder, manifest, shard)
        except (DataError, OSError) as error:
            return error
        return None

    with ThreadPoolExecutor(workers) as pool:  # hashing, reading and numpy release the GIL
        return [error for error in pool.map(check, manifest.shards) if error]


def sample_text(source: TokenSource, encoder: TextEncoder, window: int) -> str:
    """Return one training sample as text, with a separator line before each document.

    Raises:
        DataError: if a token id is not in the vocabulary.
    """
    input_ids = np.empty(source.seq_length, dtype=np.int64)
    source.read(window, input_ids, np.empty_like(input_ids))
    lines = []
    for ids in np.split(input_ids, source.document_ends(window)):
        if len(ids):
            lines += ["-- document", *_text_lines(ids.tolist(), encoder)]
    return "\n".join(lines)


def _text_lines(ids: list[int], encoder: TextEncoder) -> list[str]:
    """Decode token ids to lines of text. Decoded lines begin with "| ". BOS and EOS are on separate lines."""
    special = {encoder.bos_id: "<BOS>", encoder.eos_id: "<EOS>"}
    lines: list[str] = []
    for is_special, run in itertools.groupby(ids, special.__contains__):
        if is_special:
            lines += [special[token_id] for token_id in run]
        else:
            text = encoder.decode(list(run))
            lines += [f"| {line}" for line in escape_controls(text).split("\n")]
    return lines


def print_samples(
    folder: Path, manifest: Manifest, split: str, number: int, seq_length: int, seed: int
) -> None:
    """Print random samples from a split as text.

    Args:
        number: maximum number of different samples to print.
        seq_length: tokens per sample. A shorter split is printed as a single sample.

    Raises:
        DataError: if the tokenizer in the folder is not the tokenizer that produced the data.
    """
    tokens = manifest.split_tokens(split)
    seq_length = min(seq_length, tokens - 1)  # the labels are one token ahead of the inputs
    if seq_length < 1:
        print(
            f"\nno samples: the {split} split has {tokens} tokens, but a sample needs at least 2; pass another --split"
        )
        return
    source = TokenSource("inspected", folder, split, seq_length)
    encoder = TextEncoder(folder / TOKENIZER_FOLDER)
    windows = random.Random(seed).sample(range(source.num_windows), min(number, source.num_windows))
    for number, window in enumerate(windows, start=1):
        start = window * seq_length
        print(
            f"\n== sample {number} of {len(windows)}: window {window:,} of {source.num_windows:,}, {split} tokens "
            f"{start:,} to {start + seq_length - 1:,}"
        )
        print(sample_text(source, encoder, window))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="folder with prepared or imported data")
    add(
        "--verify",
        action="store_true",
        help="check the hash of every file, and that every token id is in the vocabulary",
    )
    add("--samples", type=between(0), default=2, help="number of random samples to print (default: 2)")
    add(
        "--split",
        choices=("train", "eval"),
        default="train",
        help="split from which to print samples (default: train)",
    )
    add(
        "--seq_length",
        type=between(1),
        default=256,
        help="maximum number of tokens per sample (default: 256)",
    )
    add("--seed", type=int, default=0, help="random seed for choosing the samples (default: 0)")
    add(
        "--workers",
        type=between(1),
        default=min(os.cpu_count() or 1, 16),
        help="number of threads (default: one per core, at most 16)",
    )
    return parser.parse_args(argv)


@functools.partial(command, system_error=2)
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    folder, verify = Path(args.folder), args.verify
    manifest = read_manifest(folder)
    values = {name: value for name, value in asdict(manifest).items() if name != "shards"}
    print(f"{folder}\n{json.dumps(values, indent=2, ensure_ascii=False)}\n\n{manifest.summary()}", flush=True)
    problems = find_damage(folder, manifest, verify, args.workers)
    if verify:
        try:
            check_tokenizer(folder, manifest)
        except (DataError, OSError) as error:
            problems.append(error)
    if verify and not problems:
        print(f"\nverified the tokenizer and {count(len(manifest.shards), 'shard')}", flush=True)
    if args.samples and not problems:
        print_samples(folder, manifest, args.split, args.samples, args.seq_length, args.seed)
    for problem in problems:
        print(f"damaged: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
