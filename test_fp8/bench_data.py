#!/usr/bin/env python3
"""How fast training reads prepared data, on one process: tokens/s from the page cache, without and with document
boundaries, and what 600 billion tokens cost: opening them, their order of samples, and its memory.

    python test_fp8/bench_data.py [--tokens 134217728] [--batch_size 1 8 32] [--rounds 3] [--output FILE.json]

The data is made in a temporary folder: random ids in documents of random length (log-normal, 700 tokens on average),
read in the shuffled order of training, and for the large corpus sparse shards, which take no place on the disk.

Exit status: 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.folders import make_folder, make_sparse_folder
from test_fp8.common.options import Options, positive
from test_fp8.common.report import Result

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--tokens", 1 << 27, "of the data that is read, 2 bytes each", type=positive)
OPTIONS.add_shared(seq_length=2048, rounds=3, work_dir=None)
OPTIONS.add("--batch_size", [1, 8, 32], "samples of a batch", type=positive, nargs="+")
OPTIONS.add_output("JSON")

COLUMNS: report.Columns = {
    "what": (lambda r: r.get("corpus", "with boundaries" if r.get("boundaries") else "without"), "<"),
    "batch": ("batch_size", "d"),
    "shards": ("shards", ",d"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "open s": ("open_s", ".2f"),
    "ms for 1,000 sample ids": ("ms_per_1000_ids", ".2f"),
    "worst": ("worst_ms_per_1000_ids", ".2f"),
    "memory of ids": ("memory_of_ids_bytes", ",d"),
}
VOCABULARY = 32_000
SHARD_TOKENS = 1 << 28  # what prepare_data.py writes by default
CORPORA = {"6 B": 6 * 10**9, "600 B": 600 * 10**9}
PLACES = 50  # at which the order of samples is computed, far apart
# Requirements: tokens/s with boundaries in batches of 8 or more; milliseconds for 1,000 sample ids; and how much more
# memory the ids of the large corpus may take (a block of the plan has 94 kB of ids, and one more may be held).
LEAST_TOKENS_PER_SECOND = 100e6
MOST_MS = 10.0
MOST_MORE_BYTES = 200_000


def measure_reading(folder: Path, options: argparse.Namespace) -> list[Result]:
    """Read random ids in two shards, which are in the page cache because they were just written."""
    from train.data.stream import open_stream

    random = np.random.default_rng(0)
    lengths = np.maximum(random.lognormal(np.log(700) - 0.5, 1.0, options.tokens // 300), 1).astype(np.int64)
    parts = [random.integers(3, VOCABULARY, options.tokens // 2, dtype=np.uint16) for _ in range(2)]
    make_folder(folder, {"train": parts}, VOCABULARY, lengths)
    results = []
    for mask, size in product((False, True), options.batch_size):
        stream = open_stream({"text": folder}, None, options.seq_length, seed=1, document_mask=mask)
        rates = []
        for _ in range(options.rounds + 1):
            start = time.perf_counter()
            for index in range(stream.num_samples // size):
                stream.batch(index * size, size)
            tokens = stream.num_samples // size * size * stream.seq_length
            rates.append(tokens / (time.perf_counter() - start))
        rate = statistics.median(rates[1:])  # the first epoch opens the shards
        case = {"what": "read", "boundaries": mask, "batch_size": size}
        results.append({**case, "tokens_per_second": rate, "rounds": rates[1:]})
    return results


def measure_corpus(folder: Path, name: str, tokens: int, seq_length: int) -> Result:
    """Open a corpus of two sources, and compute its order of samples at PLACES places."""
    from train.data.stream import open_stream

    sources = {"web": folder / "web", "code": folder / "code"}
    for source, share in zip(sources.values(), (0.9, 0.1), strict=True):
        make_sparse_folder(source, max(1, round(share * tokens / SHARD_TOKENS)), SHARD_TOKENS, VOCABULARY)
    start = time.perf_counter()
    stream = open_stream(sources, {"web": 0.7, "code": 0.3}, seq_length, seed=1)
    open_s = time.perf_counter() - start

    def ids_ms(place: int) -> float:
        start = time.perf_counter()
        stream.sample_ids(place * (stream.num_samples // PLACES), 1000)
        return (time.perf_counter() - start) * 1e3

    times = [ids_ms(place) for place in range(PLACES)]
    stream = open_stream(sources, {"web": 0.7, "code": 0.3}, seq_length, seed=1)
    tracemalloc.start()
    for place in range(PLACES):
        ids_ms(place)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "what": "corpus",
        "corpus": name,
        "tokens": stream.num_tokens,
        "shards": sum(len(source.shards) for source in stream.sources),
        "open_s": open_s,
        "ms_per_1000_ids": statistics.median(times),
        "worst_ms_per_1000_ids": max(times),
        "memory_of_ids_bytes": peak_bytes,
    }


def misses(results: Sequence[Result]) -> list[str]:
    """The requirements that are missed."""
    small, large = (r for r in results if r["what"] == "corpus")
    slowest = min(r["tokens_per_second"] for r in results if r.get("boundaries") and r["batch_size"] >= 8)
    more = large["memory_of_ids_bytes"] - small["memory_of_ids_bytes"]
    requirements = {
        f"{slowest:,.0f} tokens/s with boundaries, least {LEAST_TOKENS_PER_SECOND:,.0f}": slowest
        >= LEAST_TOKENS_PER_SECOND,
        f"{large['ms_per_1000_ids']:.1f} ms for 1,000 ids, limit {MOST_MS}": large["ms_per_1000_ids"]
        <= MOST_MS,
        f"ids of the large corpus take {more:,} more bytes, limit {MOST_MORE_BYTES:,}": more
        <= MOST_MORE_BYTES,
    }
    return [text for text, holds in requirements.items() if not holds]


def measure(options: argparse.Namespace) -> report.Outcome:
    with tempfile.TemporaryDirectory(dir=options.work_dir) as name:
        results = measure_reading(Path(name) / "text", options)
        results += [
            measure_corpus(Path(name) / n, n, tokens, options.seq_length) for n, tokens in CORPORA.items()
        ]
    found = misses(results)
    return report.Outcome(results, {"numpy": np.__version__, "misses": found}, failures=found)


def main(argv: list[str]) -> int:
    return report.run(OPTIONS, argv, measure, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
