"""Files that are whole or absent, also after a power cut, and their hashes: for prepared data and for checkpoints."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write `text` beside `path`, flush it to the disk and rename it there: `path` is whole or absent."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: str | Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
