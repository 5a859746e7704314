#!/usr/bin/env python3
"""Real text for compare_convergence.py, the same for everybody: pinned packages -> texts -> tokenizer -> prepared data.

    python test_fp8/convergence_data.py --work_dir DIR [--packages FILE] [--workers 2] [--output FILE.json]

pip downloads the wheels of test_fp8/convergence/packages.txt, each by its sha256, and runs nothing of them. Their
source code and their documents are taken apart (DIR/texts, counted), a tokenizer is trained on both, and
train/prepare_data.py filters them (documents by --quality gopher_repetition), removes near duplicates (--dedup
minhash) and makes tokens of them: DIR/tokenizer, DIR/code and DIR/documents, the two sources of
train_config_evidence.json. Wheels, tokenizer and prepared folders that are there are not made again: choose another
DIR for other options."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.keys import between
from test_fp8.common import report
from test_fp8.common.launch import Program, run
from test_fp8.common.options import ROOT, Options, positive
from test_fp8.common.report import Result
from test_fp8.convergence.packages import KINDS, download, extract
from train.data.encoder import TOKENIZER_FILES
from train.data.format import SPLITS, read_manifest

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--packages", ROOT / "test_fp8/convergence/packages.txt", "pinned wheels", type=Path)
OPTIONS.add("--work_dir", None, "where all of it is written", type=Path, required=True, metavar="DIR")
OPTIONS.add("--vocab_size", 32_000, "of the tokenizer", type=between(260))
OPTIONS.add("--tokenizer_bytes", 40_000_000, "of text that it is trained on", type=positive)
OPTIONS.add("--eval_fraction", 0.005, "of the documents", type=float)
OPTIONS.add("--workers", 1, "processes of prepare_data.py", type=positive)
OPTIONS.add_output("JSON")

# These rules are made for prose.
QUALITY = {"code": [], "documents": ["--quality", "gopher_repetition"]}
COLUMNS: report.Columns = {
    "source": ("source", "<"),
    "wheels' texts": ("texts", ",d"),
    "MB": (lambda r: r["text_bytes"] / 1e6, ",.1f"),
    "removed": (lambda r: sum(r["removed"].values()), ",d"),
    "left": ("documents", ",d"),
    "left, MB": (lambda r: r["prepared_bytes"] / 1e6, ",.1f"),
    "tokens to train on": ("train_tokens", ",d"),
    "to evaluate": ("eval_tokens", ",d"),
}


def result_of(kind: str, counts: Counter[str], folder: Path) -> Result:
    """What became of the texts of one kind."""
    manifest, skipped = read_manifest(folder), f"left out: {kind}"
    return {
        "source": kind,
        "texts": counts[kind],
        "text_bytes": counts[f"{kind} bytes"],
        "left_out": {k.removeprefix("left out: "): n for k, n in counts.items() if k.startswith(skipped)},
        "removed": manifest.documents["removed"],
        "documents": manifest.documents["out"],
        "prepared_bytes": manifest.text_bytes,
        **{f"{split}_tokens": manifest.split_tokens(split) for split in SPLITS},
    }


def measure(options: argparse.Namespace) -> report.Outcome:
    work, counts = options.work_dir, Counter[str]()
    wheels = download(options.packages, work / "packages")
    for name, wheel in wheels.items():
        counts += extract(wheel, name, work / "texts")
    tokenizer = work / "tokenizer"
    if not any((tokenizer / name).exists() for name in TOKENIZER_FILES):
        words = [
            "--vocab_size",
            options.vocab_size,
            "--max_bytes",
            options.tokenizer_bytes,
            "--output",
            tokenizer,
        ]
        inputs = [work / "texts" / kind for kind in KINDS]
        run(Program("train/train_tokenizer.py", ["--input", *inputs, *words], work / "tokenizer.log"))
    for kind in KINDS:
        if not (work / kind / "manifest.json").exists():
            words = ["--input", work / "texts" / kind, "--tokenizer", tokenizer, "--output", work / kind]
            words += ["--eval_fraction", options.eval_fraction, "--workers", options.workers]
            words += ["--dedup", "minhash", *QUALITY[kind]]
            run(Program("train/prepare_data.py", words, work / f"{kind}.log"))
    results = [result_of(kind, counts, work / kind) for kind in KINDS]
    unread = {reason: n for reason, n in counts.items() if "not UTF-8" in reason}
    return report.Outcome(results, {"packages": len(wheels), "not_read": unread})


def main(argv: list[str]) -> int:
    return report.run(OPTIONS, argv, measure, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
