#!/usr/bin/env python3
"""Prepare reproducible training data from real text for compare_convergence.py.

    python test_fp8/convergence_data.py --work_dir DIR [--packages FILE] [--workers 2] [--output FILE.json]

pip downloads the wheels that test_fp8/packages.txt pins by sha256, without running their code. This script extracts
source code and documents from the wheels to DIR/texts, and trains a tokenizer on both. train/prepare_data.py removes
near duplicates (--dedup minhash) and tokenizes the texts. For documents, it also filters repetitive text (--quality
gopher_repetition).

The results are DIR/tokenizer and the two data sources for train_config_evidence.json, DIR/code and DIR/documents.
Existing wheels, tokenizers and prepared folders are reused, so choose another DIR for other options."""

from __future__ import annotations

import argparse
import email
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.keys import between
from test_fp8.common import report
from test_fp8.common.launch import Program, run
from test_fp8.common.options import ROOT, option, positive
from test_fp8.common.report import Result
from train.data.encoder import TOKENIZER_FILES
from train.data.format import SPLITS, read_manifest

KINDS = ("code", "documents")
SUFFIXES = {
    **dict.fromkeys(".py .pyi .pyx .pxd .c .h .cc .cpp .hpp .cu .cuh .js .ts .go .rs .java .sql .sh".split(), "code"),
    **dict.fromkeys(".md .rst .txt .tex".split(), "documents"),
}  # fmt: skip
# Filters for source code from StarCoder (Li et al. 2023, arXiv:2305.06161, section 3.1), which adopted them from
# CodeParrot.
MAX_LINE, MAX_MEAN_LINE, MIN_ALPHANUMERIC, HEAD_LINES = 1000, 100, 0.25, 10
GENERATED = re.compile(
    r"(auto|code|file|was|is)[ -]?(automatically )?generated|do not (edit|modify)", re.IGNORECASE
)
MAX_BYTES, MIN_BYTES = 1_000_000, 200
# Bytes in UTF-8 text that count as letters or digits. All characters outside ASCII count as letters.
ALPHANUMERIC = bytes(byte for byte in range(256) if byte > 127 or chr(byte).isalnum())
PLATFORMS = ("any", *(f"manylinux{version}_x86_64" for version in ("_2_28", "_2_17", "2014")))
PIP_OPTIONS = [
    *("--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"),
    *(f"--platform={platform}" for platform in PLATFORMS),
    *("--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"),
]

OPTIONS = [
    option(
        "--packages",
        ROOT / "test_fp8/packages.txt",
        "Requirements file that lists the wheels to download, with versions and hashes.",
        type=Path,
    ),
    option("--work_dir", None, "Folder for all output files.", type=Path, required=True, metavar="DIR"),
    option("--vocab_size", 32_000, "Vocabulary size of the tokenizer.", type=between(260)),
    option(
        "--tokenizer_bytes",
        40_000_000,
        "Amount of text used to train the tokenizer, in bytes.",
        type=positive,
    ),
    option("--eval_fraction", 0.005, "Fraction of the documents for the eval split.", type=float),
    option("--workers", 1, "Number of processes for prepare_data.py.", type=positive),
]
# The quality filter is designed for prose, not for code.
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


def download(packages: Path, folder: Path) -> dict[str, Path]:
    """Download the wheels listed in the requirements file `packages` with pip.

    pip checks the hashes of the wheels and runs no code from them. Returns a dictionary from package names to wheels.
    Raises ValueError if pip fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        *PIP_OPTIONS,
        "-d",
        str(folder),
        "-r",
        str(packages),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{packages} could not be downloaded: {done.stderr.strip()[-500:]}")
    names = re.findall(r"^([\w.-]+)==", packages.read_text(encoding="utf-8"), re.MULTILINE)
    normalized = {re.sub(r"[-_.]+", "_", name).lower(): name for name in names}
    wheels = {normalized.get(path.name.partition("-")[0].lower()): path for path in folder.glob("*.whl")}
    return {name: wheels[name] for name in names}


def skip_reason(text: str, kind: str) -> str | None:
    """Return why a text is excluded from training (for example, generated code), or None if it is used."""
    data = text.encode()
    if len(data) < MIN_BYTES:
        return f"under {MIN_BYTES} bytes"
    if len(data) > MAX_BYTES:
        return f"over {MAX_BYTES:,} bytes"
    if len(data.translate(None, ALPHANUMERIC)) > (1 - MIN_ALPHANUMERIC) * len(data):
        return f"under {MIN_ALPHANUMERIC:.0%} letters and digits"
    if kind == "documents":
        return None
    lines = text.splitlines()
    if GENERATED.search("\n".join(lines[:HEAD_LINES])):
        return "generated, as its head says"
    if len(text) > MAX_MEAN_LINE * len(lines):
        return f"lines over {MAX_MEAN_LINE} characters on average"
    if max(map(len, lines)) > MAX_LINE:
        return f"a line over {MAX_LINE:,} characters"
    return None


def read_texts(wheel: Path, skipped: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, path, text) for each text file in a wheel, ordered by path.

    The dictionary `skipped` counts the excluded files by reason.
    """
    with zipfile.ZipFile(wheel) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
            path = PurePosixPath(entry.filename)
            is_metadata = path.parent.suffix == ".dist-info" and path.name == "METADATA"
            kind = "documents" if is_metadata else SUFFIXES.get(path.suffix.lower())
            if entry.is_dir() or kind is None or (".dist-info/" in entry.filename and not is_metadata):
                continue
            data = archive.read(entry)
            try:
                text = importlib.util.decode_source(data) if path.suffix == ".py" else data.decode("utf-8")
            except (UnicodeDecodeError, SyntaxError):
                skipped["not in UTF-8 or the declared encoding"] += 1
                continue
            if is_metadata:  # METADATA contains the README of the package
                found = email.message_from_string(text)
                text = str(found.get_payload() or found.get("Description") or "")
            text = text.replace("\r\n", "\n")
            if reason := skip_reason(text, kind):
                skipped[f"{kind}: {reason}"] += 1
            else:
                yield kind, entry.filename, text


def extract(wheel: Path, name: str, folder: Path) -> Counter[str]:
    """Write the texts in a wheel to `folder`/KIND/NAME.jsonl, and return counts of texts, bytes and skipped files."""
    skipped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, path, text in read_texts(wheel, skipped):
        lines[kind].append(json.dumps({"text": text, "path": path}, ensure_ascii=False) + "\n")
        counts.update({kind: 1, f"{kind} bytes": len(text.encode())})
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        if lines[kind]:
            (folder / kind / f"{name}.jsonl").write_text("".join(lines[kind]), encoding="utf-8")
    return counts + Counter({f"left out: {reason}": n for reason, n in skipped.items()})


def make_result(kind: str, counts: Counter[str], folder: Path) -> Result:
    """Return the report entry for one kind of text, "code" or "documents"."""
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
    results = [make_result(kind, counts, work / kind) for kind in KINDS]
    more = {"packages": len(wheels), "not_utf8": counts["left out: not in UTF-8 or the declared encoding"]}
    return report.Outcome(results, more)


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
