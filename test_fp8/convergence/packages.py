"""Wheels of Python packages -> texts: source code and documents, each package's in a .jsonl of each kind.

packages.txt pins each wheel by its sha256, so that everybody has the same bytes. A record is {"text", "path"}, with the
path in the wheel. What is skipped is counted by reason.
"""

from __future__ import annotations

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

KINDS = ("code", "documents")
SUFFIXES = {
    **dict.fromkeys(".py .pyi .pyx .pxd .c .h .cc .cpp .hpp .cu .cuh .js .ts .go .rs .java .sql .sh".split(), "code"),
    **dict.fromkeys(".md .rst .txt .tex".split(), "documents"),
}  # fmt: skip
# Filters of source code: StarCoder's (Li et al. 2023, arXiv:2305.06161, section 3.1), CodeParrot's before it.
MAX_LINE, MAX_MEAN_LINE, LEAST_ALPHANUMERIC, HEAD_LINES = 1000, 100, 0.25, 10
GENERATED = re.compile(
    r"(auto|code|file|was|is)[ -]?(automatically )?generated|do not (edit|modify)", re.IGNORECASE
)
MAX_BYTES, LEAST_BYTES = 1_000_000, 200
# Of UTF-8; what is not ASCII counts as a letter.
ALPHANUMERIC = bytes(byte for byte in range(256) if byte > 127 or chr(byte).isalnum())
PLATFORMS = ("any", *(f"manylinux{version}_x86_64" for version in ("_2_28", "_2_17", "2014")))
PIP_OPTIONS = [
    *("--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"),
    *(f"--platform={platform}" for platform in PLATFORMS),
    *("--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"),
]


def download(packages: Path, folder: Path) -> dict[str, Path]:
    """Download the wheels of packages.txt with pip, which checks their hashes and runs nothing of them; return name ->
    wheel. Raises ValueError: pip failed."""
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
        raise ValueError(f"{packages} was not downloaded: {done.stderr.strip()[-500:]}")
    names = re.findall(r"^([\w.-]+)==", packages.read_text(encoding="utf-8"), re.MULTILINE)
    normalized = {re.sub(r"[-_.]+", "_", name).lower(): name for name in names}
    wheels = {normalized.get(path.name.partition("-")[0].lower()): path for path in folder.glob("*.whl")}
    return {name: wheels[name] for name in names}


def why_skipped(text: str, kind: str) -> str | None:
    """Why a text is not source code or a document that somebody wrote, or None."""
    data = text.encode()
    if len(data) < LEAST_BYTES:
        return f"under {LEAST_BYTES} bytes"
    if len(data) > MAX_BYTES:
        return f"over {MAX_BYTES:,} bytes"
    if len(data.translate(None, ALPHANUMERIC)) > (1 - LEAST_ALPHANUMERIC) * len(data):
        return f"under {LEAST_ALPHANUMERIC:.0%} letters and digits"
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


def texts_of(wheel: Path, skipped: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """(kind, path, text) of each text of a wheel in the order of its paths; the others are counted in `skipped`."""
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
                skipped["not UTF-8, nor what it says"] += 1
                continue
            if is_metadata:  # the README of the package
                found = email.message_from_string(text)
                text = str(found.get_payload() or found.get("Description") or "")
            text = text.replace("\r\n", "\n")
            if reason := why_skipped(text, kind):
                skipped[f"{kind}: {reason}"] += 1
            else:
                yield kind, entry.filename, text


def extract(wheel: Path, name: str, folder: Path) -> Counter[str]:
    """Write the texts of a wheel to `folder`/KIND/NAME.jsonl; return the counts."""
    skipped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, path, text in texts_of(wheel, skipped):
        lines[kind].append(json.dumps({"text": text, "path": path}, ensure_ascii=False) + "\n")
        counts.update({kind: 1, f"{kind} bytes": len(text.encode())})
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        if lines[kind]:
            (folder / kind / f"{name}.jsonl").write_text("".join(lines[kind]), encoding="utf-8")
    return counts + Counter({f"left out: {reason}": n for reason, n in skipped.items()})
