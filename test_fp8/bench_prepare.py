#!/usr/bin/env python3
"""What preparing data costs beside the tokenizer: tokens per second and core of train/prepare_data.py against
`tokenizers` encoding the same texts in batches.

    python test_fp8/bench_prepare.py --tokenizer DIR [--input TEXT...] [--workers 1 2] [--output FILE.json]

TEXT as prepare_data.py takes it; default: the Python sources of this environment. The tokenizer's tokenizer.json is
used. Both are counted in CPU seconds, so that other work on the machine matters little; prepare_data.py's include
start, reading, checks, hashes and writing.

Exit status: 1 if a preparation reaches less than 80 % of the tokenizer's rate.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tokenizers

from test_fp8.common import report
from test_fp8.common.launch import Program, run
from test_fp8.common.options import Options, positive
from test_fp8.common.report import Result
from train.data.format import SPLITS, read_manifest
from train.prepare.corpus import read_documents
from train.prepare.readers import Text

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--tokenizer", None, "with tokenizer.json and tokenizer_config.json", type=Path, required=True)
OPTIONS.add("--input", [sysconfig.get_paths()["purelib"]], "texts", nargs="+")
OPTIONS.add("--workers", [1, 2], "of prepare_data.py, one after the other", type=positive, nargs="+")
OPTIONS.add_output("JSON")

COLUMNS: report.Columns = {
    "what": ("what", "<"),
    "workers": ("workers", "d"),
    "MB": (lambda r: r["text_bytes"] / 1e6, ",.0f"),
    "tokens": ("tokens", ",d"),
    "CPU s": ("cpu_s", ".1f"),
    "s": ("wall_s", ".1f"),
    "tokens/s and core": ("tokens_per_core_second", ",.0f"),
}
LEAST_RATIO = 0.8
BATCH_TEXTS = 100


def encode(inputs: Sequence[str], tokenizer_file: Path) -> Result:
    """Encode all texts, which are in memory, in one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.encode_special_tokens = True
    texts = [item.text for item in read_documents(inputs) if isinstance(item, Text)]
    tokens, start = 0, time.process_time()
    for first in range(0, len(texts), BATCH_TEXTS):
        batch = texts[first : first + BATCH_TEXTS]
        tokens += sum(len(e.ids) for e in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
    seconds = time.process_time() - start
    return {
        "what": "tokenizers",
        "documents": len(texts),
        "text_bytes": sum(len(t.encode()) for t in texts),
        "tokens": tokens,
        "cpu_s": seconds,
        "tokens_per_core_second": tokens / seconds,
    }


def prepare(inputs: Sequence[str], tokenizer: Path, output: Path, workers: int) -> Result:
    """Run prepare_data.py."""
    options = ["--input", *inputs, "--tokenizer", tokenizer, "--output", output, "--workers", workers]
    log = output.with_suffix(".log")
    program = Program("train/prepare_data.py", [*options, "--max_dropped", 10**9], log)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run(program)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    manifest = read_manifest(output)
    tokens = sum(manifest.split_tokens(split) for split in SPLITS)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "what": "prepare_data.py",
        "workers": workers,
        "documents": manifest.documents["out"],
        "text_bytes": manifest.text_bytes,
        "tokens": tokens,
        "cpu_s": seconds,
        "wall_s": wall_s,
        "tokens_per_core_second": tokens / seconds,
    }


def misses(results: Sequence[Result]) -> list[str]:
    """The preparations that are too slow."""
    ratios = {
        r["workers"]: r["tokens_per_core_second"] / results[0]["tokens_per_core_second"] for r in results[1:]
    }
    return [
        f"{workers} workers: {ratio:.0%} of the tokenizer's rate, least {LEAST_RATIO:.0%}"
        for workers, ratio in ratios.items()
        if ratio < LEAST_RATIO
    ]


def measure(options: argparse.Namespace) -> report.Outcome:
    with tempfile.TemporaryDirectory() as name:
        # without the tokenizer.model beside them, prepare_data.py takes tokenizer.json, too
        tokenizer = Path(name) / "tokenizer"
        tokenizer.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tokenizer / file).write_bytes((options.tokenizer / file).read_bytes())
        results = [encode(options.input, tokenizer / "tokenizer.json")]
        for workers in options.workers:
            results.append(prepare(options.input, tokenizer, Path(name) / f"{workers}", workers))
    found = misses(results)
    return report.Outcome(results, {"misses": found, "tokenizers": tokenizers.__version__}, failures=found)


def main(argv: list[str]) -> int:
    return report.run(OPTIONS, argv, measure, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
