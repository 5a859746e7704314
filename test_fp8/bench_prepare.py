#!/usr/bin/env python3
"""What preparing data costs beside the tokenizer itself: tokens per second and core of train/prepare_data.py against
`tokenizers` that encodes the same texts in batches and throws the ids away.

    python test_fp8/bench_prepare.py --tokenizer DIR [--input TEXT...] [--workers 1 2] [--output FILE.json]

TEXT as prepare_data.py takes it; unless given, the Python sources of this environment (its site-packages). The
tokenizer's tokenizer.json is used. Both are counted in CPU seconds, so that other work on the machine matters little;
prepare_data.py's hold everything: start, reading, checks, hashes, writing.

Exit status: 0; 1 when a preparation reaches less than 80 % of the tokenizer's rate; 2 for bad input.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tokenizers

from test_fp8.common import report
from test_fp8.common.options import ROOT, Options, positive
from test_fp8.common.report import Result
from train.data.format import SPLITS, DataError, read_manifest
from train.prepare.corpus import read_documents
from train.prepare.readers import Text

OPTIONS = Options(__file__, __doc__)
OPTIONS.add(
    "--tokenizer", None, "a folder with tokenizer.json and tokenizer_config.json", type=Path, required=True
)
OPTIONS.add("--input", [sysconfig.get_paths()["purelib"]], "texts", nargs="+")
OPTIONS.add("--workers", [1, 2], "of prepare_data.py, one after the other", type=positive, nargs="+")
OPTIONS.add_output("JSON")

LEAST_RATIO = 0.8
BATCH_TEXTS = 100


def plain(inputs: Sequence[str], tokenizer_file: Path) -> Result:
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
    return {"what": "tokenizers", "documents": len(texts), "text_bytes": sum(len(t.encode()) for t in texts),
            "tokens": tokens, "cpu_s": seconds, "tokens_per_core_second": tokens / seconds}  # fmt: skip


def prepare(inputs: Sequence[str], tokenizer: Path, output: Path, workers: int) -> Result:
    """Run prepare_data.py. Raises DataError: it failed."""
    options = ["--tokenizer", tokenizer, "--output", output, "--workers", workers, "--max_dropped", 10**9]
    command = [sys.executable, ROOT / "train/prepare_data.py", "--input", *inputs, *options]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise DataError(f"prepare_data.py ended with status {done.returncode}: {done.stderr[-2000:]}")
    manifest = read_manifest(output)
    tokens = sum(manifest.split_tokens(split) for split in SPLITS)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"what": "prepare_data.py", "workers": workers, "documents": manifest.documents["out"],
            "text_bytes": manifest.text_bytes, "tokens": tokens, "cpu_s": seconds, "wall_s": wall,
            "tokens_per_core_second": tokens / seconds}  # fmt: skip


def misses(results: Sequence[Result]) -> list[str]:
    """What is required and does not hold."""
    base = results[0]["tokens_per_core_second"]
    return [
        f"{r['workers']} workers: {r['tokens_per_core_second'] / base:.0%} of the tokenizer's rate; {LEAST_RATIO:.0%} "
        "are required"
        for r in results[1:]
        if r["tokens_per_core_second"] < LEAST_RATIO * base
    ]


def say(result: Result, base: float) -> None:
    rate = result["tokens_per_core_second"]
    who = result["what"] + (f", {result['workers']} workers" if "workers" in result else "")
    wall = f", {result['wall_s']:.1f} s" if "wall_s" in result else ""
    print(f"{who}: {result['text_bytes'] / 1e6:,.0f} MB, {result['tokens']:,} tokens in {result['cpu_s']:.1f} CPU s"
          f"{wall}: {rate / 1e6:.3f} M tokens/s and core, {rate / base:.0%}", flush=True)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as name:
            # without tokenizer.model beside them, prepare_data.py takes tokenizer.json, too
            only = Path(name) / "tokenizer"
            only.mkdir()
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (only / file).write_bytes((options.tokenizer / file).read_bytes())
            results = [plain(options.input, only / "tokenizer.json")]
            base = results[0]["tokens_per_core_second"]
            say(results[0], base)
            for workers in options.workers:
                results.append(prepare(options.input, only, Path(name) / f"{workers}", workers))
                say(results[-1], base)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = misses(results)
    if options.output:
        more = {"misses": found, "tokenizers": tokenizers.__version__}
        report.write_json(options.output, OPTIONS.command(options), results, **more)
    for line in found:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
