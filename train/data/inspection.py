"""Prepared data for people: what the manifest says, what is damaged, the lengths of documents, samples as text."""

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
    SPLITS,
    TOKENIZER_FOLDER,
    DataError,
    Manifest,
    Shard,
    check_sizes,
    check_tokenizer,
    read_manifest,
    verify_shard,
)
from train.data.index import Lengths, read_lengths
from train.data.source import TokenSource

BAR_WIDTH = 40


def describe(folder: Path, manifest: Manifest) -> str:
    """The manifest as text: its values, the documents, and what the splits hold."""
    values = {name: value for name, value in asdict(manifest).items() if name != "shards"}
    lines = [str(folder), json.dumps(values, indent=2, ensure_ascii=False), "", manifest.documents_line()]
    lines.append(f"\n{'split':<6}{'shards':>8}{'documents':>16}{'tokens':>20}{'bytes':>22}")
    splits = {split: manifest.split_shards(split) for split in SPLITS}
    for name, shards in (splits | {"all": manifest.shards}).items():
        sums = [sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "bytes")]
        lines.append("{:<6}{:>8,}{:>16,}{:>20,}{:>22,}".format(name, len(shards), *sums))
    return "\n".join(lines)


def examine(folder: Path, manifest: Manifest, verify: bool, workers: int) -> tuple[Lengths, list[Exception]]:
    """Check every shard: its size and its index, with `verify` also hashes and token ids. Returns the lengths of the
    documents in the whole ones, and what is wrong with each of the others, in the manifest's order.
    """

    def check(shard: Shard) -> Lengths | Exception:
        try:
            check_sizes(folder, shard)
            lengths = read_lengths(folder, shard)
            if verify:
                verify_shard(folder, manifest, shard)
        except (DataError, OSError) as error:
            return error
        return lengths

    total, problems = Lengths.of(np.empty(0, dtype=np.int64)), list[Exception]()
    with ThreadPoolExecutor(workers) as pool:  # hashing, reading and numpy leave Python's lock free
        checked = pool.map(check, manifest.shards)
        for found in tqdm(checked, "checked", len(manifest.shards), unit="shard", disable=None):
            if isinstance(found, Exception):
                problems.append(found)
            else:
                total += found
    return total, problems


def histogram_table(lengths: Lengths) -> str:
    """The histogram as text: a line a bin with its documents, their share, their share of the tokens, and a bar."""
    documents, tokens = int(lengths.documents.sum()), int(lengths.tokens.sum())
    if not documents:
        return "no documents"
    rows = lengths.rows()
    largest = max(count for _, count, _ in rows)
    width = max(len(rows[-1][0]), len("tokens long"))
    lines = [f"{'tokens long':>{width}}  {'documents':>13}  {'share':>6}  {'of tokens':>9}"]
    for label, count, bin_tokens in rows:
        bar = "#" * -(-count * BAR_WIDTH // largest)  # rounded up: one document is visible
        line = (
            f"{label:>{width}}  {count:>13,}  {count / documents:>6.1%}  {bin_tokens / tokens:>9.1%}  {bar}"
        )
        lines.append(line.rstrip())
    lines.append(
        f"{'all':>{width}}  {documents:>13,}  {tokens / documents:,.1f} tokens on average, "
        f"{lengths.shortest:,} to {lengths.longest:,}"
    )
    return "\n".join(lines)


def sample_text(source: TokenSource, encoder: TextEncoder, window: int) -> str:
    """One sample of a source, decoded, with a line before what it has of each document.

    Raises:
        DataError: it has a token id beyond the vocabulary.
    """
    input_ids = np.empty(source.seq_length, dtype=np.int64)
    source.read(window, input_ids, np.empty_like(input_ids))
    lines = []
    for ids in np.split(input_ids, source.document_ends(window)):
        if len(ids):
            lines += ["-- document", *_text_lines(ids.tolist(), encoder)]
    return "\n".join(lines)


def _text_lines(ids: list[int], encoder: TextEncoder) -> list[str]:
    """Ids as lines: text behind "| ", BOS and EOS on lines of their own, wherever they stand."""
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
    """Print `number` different windows of a split, chosen by `seed`; all of them where there are no more.

    Data without a fault may be small, or for evaluation alone: in place of an empty split it is the other one, and of a
    short one a shorter window, with a line that says so.

    Raises:
        DataError: the tokenizer in the folder is not that of the data.
    """
    # the one that was asked for comes first
    tokens = {name: manifest.split_tokens(name) for name in (split, *SPLITS)}
    held = next((name for name, count in tokens.items() if count > 1), None)
    if held is None:
        print("\nno samples: no split has two tokens")
        return
    if held != split:
        print(f"\nthe {split} split has {tokens[split]} tokens: samples of the {held} split")
    split, most = held, tokens[held] - 1  # a window's labels are one token ahead
    if seq_length > most:
        print(
            f"\nthe {split} split has {most + 1:,} tokens: a sample of {most:,}, not of {seq_length:,} (--seq_length)"
        )
        seq_length = most
    source = TokenSource("inspected", folder, split, seq_length)
    encoder = TextEncoder(folder / TOKENIZER_FOLDER)
    windows = random.Random(seed).sample(range(source.num_windows), min(number, source.num_windows))
    for count, window in enumerate(windows, start=1):
        start = window * seq_length
        print(f"\n== sample {count} of {len(windows)}: window {window:,} of {source.num_windows:,}, {split} tokens "
              f"{start:,} to {start + seq_length - 1:,}")  # fmt: skip
        print(sample_text(source, encoder, window))


def inspect_folder(args: argparse.Namespace) -> list[Exception]:
    """Print everything about `args.folder`; the fields are inspect_data.py's. Returns what is damaged.

    Raises:
        DataError: there is nothing to inspect, or samples were asked for that there cannot be.
        OSError: the folder cannot be read.
    """
    folder, verify = Path(args.folder), args.verify
    manifest = read_manifest(folder)
    print(describe(folder, manifest), flush=True)
    lengths, problems = examine(folder, manifest, verify, args.workers)
    left_out = f" (without {len(problems):,} damaged shards)" if problems else ""
    print(f"\ndocument lengths in all splits, BOS and EOS included{left_out}\n{histogram_table(lengths)}")
    if verify:
        try:
            check_tokenizer(folder, manifest)
        except (DataError, OSError) as error:
            problems.append(error)
    if verify and not problems:
        size = sum(shard.bytes for shard in manifest.shards)
        print(f"\nverified: {len(manifest.shards):,} shards, {size / 1e6:,.1f} MB: sizes, hashes, indexes, token ids "
              "and tokenizer are those of the manifest", flush=True)  # fmt: skip
    if args.samples and problems:
        print("\nno samples of damaged data")
    elif args.samples:
        print_samples(folder, manifest, args.split, args.samples, args.seq_length, args.seed)
    return problems
