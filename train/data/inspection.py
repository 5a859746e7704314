"""Print prepared data: the manifest, damaged files, document lengths, and samples as text."""

import argparse
import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

from model.terminal import escape_controls
from train.data.encoder import TextEncoder
from train.data.format import (
    COPY_AGAIN,
    SPLITS,
    TOKENIZER_FOLDER,
    DataError,
    Manifest,
    Shard,
    check_sizes,
    check_tokenizer,
    open_index,
    read_manifest,
    verify_shard,
)
from train.data.source import TokenSource

BAR_WIDTH = 40
BLOCK_DOCUMENTS = 1 << 18  # index entries read at a time; a whole index may not fit in memory
BINS = 64  # bin k counts lengths of 2^k to 2^(k+1) - 1 tokens


def count_lengths(lengths: np.ndarray) -> np.ndarray:
    """Return the number of documents and of their tokens in each bin, int64 [2, BINS].

    Args:
        lengths: [n], in tokens, each at least 1.
    """
    bins = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2), exact: float64 holds such integers
    counts = (np.bincount(bins, weights=weights, minlength=BINS) for weights in (None, lengths))
    return np.stack([count.astype(np.int64) for count in counts])


def read_lengths(folder: Path, shard: Shard) -> np.ndarray:
    """Return `count_lengths` of a shard's documents, with one pass over its index.

    Raises:
        DataError: the document ends do not increase, or the last one is not the end of the shard.
    """
    name = folder / f"{shard.name}.index"
    ends = open_index(folder, shard)
    total, before = np.zeros((2, BINS), dtype=np.int64), np.uint64(0)
    for start in range(0, len(ends), BLOCK_DOCUMENTS):
        block = np.concatenate([[before], ends[start : start + BLOCK_DOCUMENTS]])
        wrong = np.flatnonzero(block[1:] <= block[:-1])  # not by differences, which wrap around in uint64
        if len(wrong):
            raise DataError(
                f"{name} does not increase at document {start + int(wrong[0])}, so its content changed; {COPY_AGAIN}",
                code="index_not_increasing",
                key=str(name),
            )
        total += count_lengths(np.diff(block).astype(np.int64))
        before = block[-1]
    if int(before) != shard.tokens:
        raise DataError(
            f"{name} ends at token {before}, but {shard.name} has {shard.tokens} tokens; {COPY_AGAIN}",
            code="index_of_other_length",
            key=str(name),
        )
    return total


def describe(folder: Path, manifest: Manifest) -> str:
    """Return the manifest as text: its values, the document counts, and a table of the splits."""
    values = {name: value for name, value in asdict(manifest).items() if name != "shards"}
    lines = [str(folder), json.dumps(values, indent=2, ensure_ascii=False), "", manifest.documents_line()]
    lines.append(f"\n{'split':<6}{'shards':>8}{'documents':>16}{'tokens':>20}{'bytes':>22}")
    splits = {split: manifest.split_shards(split) for split in SPLITS}
    for name, shards in (splits | {"all": manifest.shards}).items():
        sums = [sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "bytes")]
        lines.append("{:<6}{:>8,}{:>16,}{:>20,}{:>22,}".format(name, len(shards), *sums))
    return "\n".join(lines)


def examine(
    folder: Path, manifest: Manifest, verify: bool, workers: int
) -> tuple[np.ndarray, list[Exception]]:
    """Check the size and index of every shard, and with `verify` also its hashes and token ids.

    Returns:
        The histogram of the document lengths in the undamaged shards, int64 [2, BINS], and the errors of the damaged
        shards, in the manifest's order.
    """

    def check(shard: Shard) -> np.ndarray | Exception:
        try:
            check_sizes(folder, shard)
            lengths = read_lengths(folder, shard)
            if verify:
                verify_shard(folder, manifest, shard)
        except (DataError, OSError) as error:
            return error
        return lengths

    total, problems = np.zeros((2, BINS), dtype=np.int64), list[Exception]()
    with ThreadPoolExecutor(workers) as pool:  # hashing, reading and numpy release the interpreter lock
        checked = pool.map(check, manifest.shards)
        for found in tqdm(checked, "checked", len(manifest.shards), unit="shard", disable=None):
            if isinstance(found, Exception):
                problems.append(found)
            else:
                total += found
    return total, problems


def histogram_table(lengths: np.ndarray) -> str:
    """Return the histogram [2, BINS] as text: documents per bin, their shares of documents and tokens, and a bar."""
    documents, tokens = lengths.sum(axis=1).tolist()
    if not documents:
        return "no documents"
    used = np.flatnonzero(lengths[0])
    rows = [("tokens long", "documents", "share", "of tokens", "")]
    for k in range(used[0], used[-1] + 1):
        count, in_bin = lengths[:, k].tolist()
        bar = "#" * -(
            -count * BAR_WIDTH // int(lengths[0].max())
        )  # rounded up, so that one document is visible
        label = f"{1 << k:,} to {(2 << k) - 1:,}" if k else "1"
        rows.append((label, f"{count:,}", f"{count / documents:.1%}", f"{in_bin / tokens:.1%}", bar))
    rows.append(("all", f"{documents:,}", f"{tokens / documents:,.1f} tokens on average", "", ""))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{a:>{width}}  {b:>13}  {c:>6}  {d:>9}  {e}".rstrip() for a, b, c, d, e in rows)


def sample_text(source: TokenSource, encoder: TextEncoder, window: int) -> str:
    """Return one sample as text, with a line before each document.

    Raises:
        DataError: a token id is beyond the vocabulary.
    """
    input_ids = np.empty(source.seq_length, dtype=np.int64)
    source.read(window, input_ids, np.empty_like(input_ids))
    lines = []
    for ids in np.split(input_ids, source.document_ends(window)):
        if len(ids):
            lines += ["-- document", *_text_lines(ids.tolist(), encoder)]
    return "\n".join(lines)


def _text_lines(ids: list[int], encoder: TextEncoder) -> list[str]:
    """Return ids as lines of text: decoded text after "| ", BOS and EOS on separate lines."""
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
    """Print up to `number` distinct random windows of a split. A split shorter than a window is printed as one.

    Raises:
        DataError: the tokenizer in the folder is not the tokenizer of the data.
    """
    tokens = manifest.split_tokens(split)
    seq_length = min(seq_length, tokens - 1)  # a window's labels are one token ahead
    if seq_length < 1:
        print(f"\nno samples: the {split} split has only {tokens} tokens (choose another --split)")
        return
    source = TokenSource("inspected", folder, split, seq_length)
    encoder = TextEncoder(folder / TOKENIZER_FOLDER)
    windows = random.Random(seed).sample(range(source.num_windows), min(number, source.num_windows))
    for count, window in enumerate(windows, start=1):
        start = window * seq_length
        print(
            f"\n== sample {count} of {len(windows)}: window {window:,} of {source.num_windows:,}, {split} tokens "
            f"{start:,} to {start + seq_length - 1:,}"
        )
        print(sample_text(source, encoder, window))


def inspect_folder(args: argparse.Namespace) -> list[Exception]:
    """Print the information about `args.folder`, and return an error for each damaged file.

    Args:
        args: the options of inspect_data.py.

    Raises:
        DataError: there is nothing to inspect, or the tokenizer is damaged.
        OSError: the folder cannot be read.
    """
    folder, verify = Path(args.folder), args.verify
    manifest = read_manifest(folder)
    print(describe(folder, manifest), flush=True)
    lengths, problems = examine(folder, manifest, verify, args.workers)
    skipped = f" (without {len(problems):,} damaged shards)" if problems else ""
    print(f"\ndocument lengths in all splits, BOS and EOS included{skipped}\n{histogram_table(lengths)}")
    if verify:
        try:
            check_tokenizer(folder, manifest)
        except (DataError, OSError) as error:
            problems.append(error)
    if verify and not problems:
        size = sum(shard.bytes for shard in manifest.shards)
        print(
            f"\nverified: {len(manifest.shards):,} shards, {size / 1e6:,.1f} MB, and the tokenizer",
            flush=True,
        )
    if args.samples and problems:
        print("\nno samples, because the data are damaged")
    elif args.samples:
        print_samples(folder, manifest, args.split, args.samples, args.seq_length, args.seed)
    return problems
