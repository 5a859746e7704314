"""Wheels of Python packages -> texts: source code and documents, each package's in a .jsonl of each kind.

packages.txt pins each wheel by its sha256, so that everybody has the same bytes. A record is {"text", "path"}, where
the path is that in the wheel. What is left out is counted by reason.
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from train.files import sha256_file, write_durably

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


@dataclass(frozen=True)
class Package:
    """A wheel: `requirement` is name==version."""

    requirement: str
    sha256: str

    @property
    def name(self) -> str:
        return self.requirement.partition("==")[0]


def read_packages(path: Path) -> list[Package]:
    """The lines of packages.txt, as pip takes them: name==version --hash=sha256:HEX.

    Raises ValueError: a line that is not so, or a name that comes twice.
    """
    packages: dict[str, Package] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = re.fullmatch(r"([\w.-]+==[\w.!+]+) --hash=sha256:([0-9a-f]{64})", line.strip())
        if not found:
            raise ValueError(f"{path}:{number}: {line!r}; a line is NAME==VERSION --hash=sha256:HEX")
        package = Package(*found.groups())
        if package.name in packages:
            raise ValueError(f"{path}:{number}: {package.name} comes twice; name each package once")
        packages[package.name] = package
    if not packages:
        raise ValueError(f"{path} names no package; a line is NAME==VERSION --hash=sha256:HEX")
    return list(packages.values())


def download(package: Package, folder: Path) -> Path:
    """The wheel in `folder`/NAME, by pip, unless it is there. Nothing of it is run.

    Raises ValueError: pip did not find it, or it is another one than the pinned.
    """
    own = folder / package.name
    own.mkdir(parents=True, exist_ok=True)
    for wheel in own.glob("*.whl"):
        if sha256_file(wheel) == package.sha256:
            return wheel
        wheel.unlink()
    pinned = own / "requirement.txt"
    pinned.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"]
    options += [option for platform in PLATFORMS for option in ("--platform", platform)]
    options += ["--python-version", "3.12", "--implementation", "cp"]
    options += [option for abi in ("cp312", "abi3", "none") for option in ("--abi", abi)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        *options,
        "-d",
        str(own),
        "-r",
        str(pinned),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(own.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ValueError(f"{package.requirement} was not downloaded: {done.stderr.strip()[-500:]}")
    return wheels[0]


def why_left_out(text: str, kind: str) -> str | None:
    """Why a text is no source code or document that somebody wrote; None if it is one."""
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


def texts_of(wheel: Path, left_out: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """(kind, path, text) of each text of a wheel in the order of its paths; the others are counted."""
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
                left_out["not UTF-8, nor what it says"] += 1
                continue
            if is_metadata:  # the README of the package
                found = email.message_from_string(text)
                text = str(found.get_payload() or found.get("Description") or "")
            text = text.replace("\r\n", "\n")
            if reason := why_left_out(text, kind):
                left_out[f"{kind}: {reason}"] += 1
            else:
                yield kind, entry.filename, text


def extract(package: Package, wheel: Path, folder: Path) -> dict[str, int]:
    """Write the texts of a wheel to `folder`/KIND/NAME.jsonl; returns the counts, which are written last, to
    `folder`/counts/NAME.json: what is there of the same wheel is not made again."""
    record = folder / "counts" / f"{package.name}.json"
    if (
        record.exists()
        and (was := json.loads(record.read_text(encoding="utf-8")))["sha256"] == package.sha256
    ):
        return was["counts"]
    left_out: Counter[str] = Counter()
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS}
    counts: Counter[str] = Counter()
    for kind, path, text in texts_of(wheel, left_out):
        lines[kind].append(json.dumps({"text": text, "path": path}, ensure_ascii=False))
        counts[kind] += 1
        counts[f"{kind} bytes"] += len(text.encode())
    for kind in KINDS:
        file = folder / kind / f"{package.name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if lines[kind]:
            file.write_text("\n".join(lines[kind]) + "\n", encoding="utf-8")
    result = dict(counts) | {f"left out: {reason}": n for reason, n in sorted(left_out.items())}
    record.parent.mkdir(parents=True, exist_ok=True)
    write_durably(record, json.dumps({"sha256": package.sha256, "counts": result}, indent=1) + "\n")
    return result
