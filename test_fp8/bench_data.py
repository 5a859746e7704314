#!/usr/bin/env python3
"""How fast training reads prepared data, on one process: tokens/s from the page cache, without and with document
boundaries, and what 600 billion tokens cost: opening them, their order of samples, and its memory.

    python test_fp8/bench_data.py [--tokens 134217728] [--batch_size 1 8 32] [--rounds 3] [--output FILE.json]

The data is made in a temporary folder: random ids in documents of random length (log-normal, 700 tokens on average),
read in the shuffled order of training, and for the large corpus shards without content, which take no place.

Exit status: 0; 1 when a figure misses what is required of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.machine import describe
from test_fp8.common import report
from test_fp8.common.folders import make_folder, make_sparse_folder
from test_fp8.common.options import Options, positive
from test_fp8.common.report import Result
from train.data.format import DataError

if TYPE_CHECKING:
    from train.data.stream import SampleStream

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--tokens", 1 << 27, "of the data that is read, 2 bytes each", type=positive)
OPTIONS.add("--seq_length", 2048, "tokens of a sample", type=positive)
OPTIONS.add("--batch_size", [1, 8, 32], "samples of a batch", type=positive, nargs="+")
OPTIONS.add("--rounds", 3, "epochs that are timed; the median counts", type=positive)
OPTIONS.add("--work_dir", None, "where the temporary folder is made, unless in the system's place", type=Path)
OPTIONS.add_output("JSON")

say = partial(print, flush=True)
VOCABULARY = 32_000
SHARD_TOKENS = 1 << 28  # what prepare_data.py writes by default
CORPORA = {"6 B": 6 * 10**9, "600 B": 600 * 10**9}
PLACES = 50  # at which the order of samples is asked for, far apart
READ_SAMPLES = 4096  # of the large corpus, in shards that are mostly not open

# What is required: tokens/s with boundaries at batches of 8; milliseconds for 1,000 sample ids; and memory that is the
# same for the large corpus and the small one, up to this many bytes.
LEAST_TOKENS_PER_SECOND = 100e6
MOST_MS = 10.0
MOST_MORE_BYTES = 200_000  # a block of the plan has 94 kB of ids, and one more or less may be held


def read_rates(stream: SampleStream, batch_size: int, rounds: int) -> list[float]:
    """Tokens/s of each round, which reads every sample of an epoch once."""
    batches, rates = stream.num_samples // batch_size, []
    for _ in range(rounds):
        start = time.perf_counter()
        for index in range(batches):
            stream.batch(index * batch_size, batch_size)
        rates.append(batches * batch_size * stream.seq_length / (time.perf_counter() - start))
    return rates


def measure_reading(folder: Path, options: argparse.Namespace) -> list[Result]:
    """Random ids in two shards; written just now, they are in the page cache."""
    from train.data.stream import open_stream

    random = np.random.default_rng(0)
    lengths = np.maximum(random.lognormal(np.log(700) - 0.5, 1.0, options.tokens // 300), 1).astype(np.int64)
    parts = [random.integers(3, VOCABULARY, options.tokens // 2, dtype=np.uint16) for _ in range(2)]
    make_folder(folder, {"train": parts}, VOCABULARY, lengths)
    results = []
    for mask in (False, True):
        stream = open_stream({"text": folder}, None, options.seq_length, seed=1, document_mask=mask)
        read_rates(stream, max(options.batch_size), 1)  # opens the shards
        for size in options.batch_size:
            rates = read_rates(stream, size, options.rounds)
            row = {"what": "read", "boundaries": mask, "batch_size": size}
            results.append({**row, "tokens_per_second": statistics.median(rates), "rounds": rates})
            say(f"read, {'with' if mask else 'without'} boundaries, batches of {size}: "
                f"{statistics.median(rates) / 1e6:,.0f} M tokens/s")  # fmt: skip
    return results


def measure_corpus(folder: Path, name: str, tokens: int, seq_length: int) -> Result:
    """Opening a corpus of two sources, its order at PLACES places and the memory for that, and reading from it."""
    from train.data.stream import open_stream

    sources = {"web": folder / "web", "code": folder / "code"}
    for source, share in zip(sources.values(), (0.9, 0.1), strict=True):
        make_sparse_folder(source, max(1, round(share * tokens / SHARD_TOKENS)), SHARD_TOKENS, VOCABULARY)

    def opened() -> SampleStream:
        return open_stream(sources, {"web": 0.7, "code": 0.3}, seq_length, seed=1)

    start = time.perf_counter()
    stream = opened()
    open_s = time.perf_counter() - start
    stride = stream.num_samples // PLACES
    times = []
    for place in range(PLACES):
        start = time.perf_counter()
        stream.sample_ids(place * stride, 1000)
        times.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()
    for place in range(0, READ_SAMPLES, 8):
        stream.batch(place, 8)
    rate = READ_SAMPLES * seq_length / (time.perf_counter() - start)
    stream = opened()
    tracemalloc.start()
    for place in range(PLACES):
        stream.sample_ids(place * stride, 1000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    result = {
        "what": "corpus",
        "corpus": name,
        "tokens": stream.num_tokens,
        "shards": sum(len(source.shards) for source in stream.sources),
        "open_s": open_s,
        "ms_per_1000_ids": statistics.median(times),
        "worst_ms_per_1000_ids": max(times),
        "memory_of_ids_bytes": peak_bytes,
        "tokens_per_second": rate,
    }
    say(f"{name} tokens in {result['shards']:,} shards: open {open_s:.2f} s; 1,000 sample ids "
        f"{result['ms_per_1000_ids']:.2f} ms (worst {max(times):.2f}), {peak_bytes / 1e3:,.0f} kB; "
        f"read {rate / 1e6:,.0f} M tokens/s, opening shards")  # fmt: skip
    return result


def misses(results: Sequence[Result]) -> list[str]:
    """What is required and does not hold."""
    found = []
    for r in results:
        if r["what"] == "corpus":
            if (ms := r["ms_per_1000_ids"]) > MOST_MS:
                found.append(f"{ms:.1f} ms for 1,000 ids of {r['corpus']} tokens; {MOST_MS:.0f} are allowed")
        elif r["boundaries"] and r["batch_size"] >= 8 and r["tokens_per_second"] < LEAST_TOKENS_PER_SECOND:
            found.append(
                f"{r['tokens_per_second'] / 1e6:,.0f} M tokens/s with boundaries in batches of {r['batch_size']}; "
                f"{LEAST_TOKENS_PER_SECOND / 1e6:,.0f} M are required"
            )
    small, large = [r["memory_of_ids_bytes"] for r in results if r["what"] == "corpus"]
    if large > small + MOST_MORE_BYTES:
        found.append(f"ids take {large:,} bytes of the large corpus and {small:,} of the small one")
    return found


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    machine, versions = describe()
    say(f"{machine['cpu']}, one process, numpy {np.__version__}, torch {versions['torch']}; "
        f"samples of {options.seq_length} tokens")  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(dir=options.work_dir) as name:
            folder = Path(name)
            results = measure_reading(folder / "text", options)
            for corpus, tokens in CORPORA.items():
                results.append(measure_corpus(folder / corpus, corpus, tokens, options.seq_length))
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = misses(results)
    if options.output:
        more = {"numpy": np.__version__, "misses": found}
        report.write_json(options.output, OPTIONS.command(options), results, **more)
    for line in found or ["everything required holds"]:
        say(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
