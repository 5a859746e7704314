#!/usr/bin/env python3
"""Real text for compare_convergence.py, the same for everybody: pinned packages -> texts -> tokenizer -> prepared data.

    python test_fp8/convergence_data.py --work_dir DIR [--packages FILE] [--workers 2] [--output FILE.json]

pip downloads the wheels of test_fp8/convergence/packages.txt, each by its sha256, and runs nothing of them. Their
source code and their documents are taken apart (DIR/texts, counted), a tokenizer is trained on both, and
train/prepare_data.py filters them (documents by --quality gopher_repetition), removes near duplicates (--dedup minhash)
and makes tokens of them: DIR/tokenizer, DIR/code and DIR/documents, the two sources of train_config_evidence.json. What
is done is not done again.

Exit status: 0; 1 when a step failed; 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.keys import between
from test_fp8.common import report
from test_fp8.common.options import ROOT, Options, positive
from test_fp8.common.report import Result
from test_fp8.convergence.packages import KINDS, Package, download, extract, read_packages
from train.data.encoder import TOKENIZER_FILES
from train.data.format import SPLITS, read_manifest
from train.files import sha256_file, write_durably

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--packages", ROOT / "test_fp8/convergence/packages.txt", "pinned wheels", type=Path)
OPTIONS.add("--work_dir", None, "where all of it is written", type=Path, required=True, metavar="DIR")
OPTIONS.add("--vocab_size", 32_000, "of the tokenizer", type=between(260))
OPTIONS.add("--tokenizer_bytes", 40_000_000, "of text that it is trained on", type=positive)
OPTIONS.add("--eval_fraction", 0.005, "of the documents", type=float)
OPTIONS.add("--workers", 1, "processes of prepare_data.py", type=positive)
OPTIONS.add_output("JSON")

# Says what is left out of the wheels' texts: others would not be made again.
FILTERS = ROOT / "test_fp8/convergence/packages.py"
# Documents alone: these rules are made for prose, and cost ten times what tokens do.
STEPS = {"code": [], "documents": ["--quality", "gopher_repetition"]}
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


class StepError(RuntimeError):
    """A program that this one calls ended with another status than 0."""


def run(program: str, *options: object) -> None:
    """Run a program of train/, its output on this one's. Raises StepError: it failed."""
    command = [sys.executable, str(ROOT / "train" / program), *map(str, options)]
    if status := subprocess.run(command).returncode:
        raise StepError(f"{program} ended with status {status}; the same command goes on with what is done")


def begin(options: argparse.Namespace, packages: Sequence[Package]) -> None:
    """Note in --work_dir what is made there. Raises ValueError: something else is."""
    what = {key: getattr(options, key) for key in ("vocab_size", "tokenizer_bytes", "eval_fraction")}
    now = what | {"steps": STEPS, "packages": {package.requirement: package.sha256 for package in packages}}
    now["filters"] = sha256_file(FILTERS)
    file = options.work_dir / "begun.json"
    if not file.exists():
        options.work_dir.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps(now, indent=1) + "\n")
    elif (was := json.loads(file.read_text(encoding="utf-8"))) != now:
        changed = ", ".join(key for key in now if was.get(key) != now[key])
        raise ValueError(f"{options.work_dir} was begun with other {changed}; choose another --work_dir")


def make_texts(packages: Sequence[Package], work: Path) -> Counter[str]:
    """Download the wheels and take them apart; returns what was taken and left out, in sum."""
    counts: Counter[str] = Counter()
    for number, package in enumerate(packages, start=1):
        wheel = download(package, work / "packages")
        found = extract(package, wheel, work / "texts")
        counts.update(found)
        size = sum(found.get(f"{kind} bytes", 0) for kind in KINDS)
        print(f"{number}/{len(packages)} {package.requirement}: {size / 1e6:.1f} MB", flush=True)
    return counts


def prepare(options: argparse.Namespace, kind: str) -> None:
    """Tokens of one kind of texts; what was committed of the same texts and options stays."""
    work = options.work_dir
    inputs = ["--input", work / "texts" / kind, "--tokenizer", work / "tokenizer", "--output", work / kind]
    more = ["--eval_fraction", options.eval_fraction, "--workers", options.workers, "--dedup", "minhash"]
    run("prepare_data.py", *inputs, *more, *STEPS[kind])


def result_of(kind: str, counts: Counter[str], folder: Path) -> Result:
    """What became of the texts of one kind."""
    manifest = read_manifest(folder)
    tokens = {f"{split}_tokens": manifest.split_tokens(split) for split in SPLITS}
    left_out = {
        reason.removeprefix("left out: "): n
        for reason, n in counts.items()
        if reason.startswith(f"left out: {kind}")
    }
    return {
        "source": kind,
        "texts": counts[kind],
        "text_bytes": counts[f"{kind} bytes"],
        "left_out": left_out,
        "removed": manifest.documents["removed"],
        "documents": manifest.documents["out"],
        "prepared_bytes": manifest.text_bytes,
        **tokens,
    }


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    work = options.work_dir
    try:
        packages = read_packages(options.packages)
        begin(options, packages)
        counts = make_texts(packages, work)
        if not any((work / "tokenizer" / name).exists() for name in TOKENIZER_FILES):
            size = ["--vocab_size", options.vocab_size, "--max_bytes", options.tokenizer_bytes]
            texts = [work / "texts" / kind for kind in KINDS]
            run("train_tokenizer.py", "--input", *texts, *size, "--output", work / "tokenizer")
        for kind in KINDS:
            if not (work / kind / "manifest.json").exists():
                prepare(options, kind)
        results = [result_of(kind, counts, work / kind) for kind in KINDS]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.table(results, COLUMNS))
    if options.output:
        more = {"packages": len(packages), "not_read": {k: n for k, n in counts.items() if "not UTF-8" in k}}
        report.write_json(options.output, OPTIONS.command(options), results, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
