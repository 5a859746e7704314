"""Datasets in Megatron-LM's format, written from its definition, and what was imported from them."""

import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from train.data.format import read_manifest

BOS, EOS, VOCABULARY = 1, 2, 400  # of the fixture's tokenizer
CODES = {
    "B": 1,
    "b": 2,
    "h": 3,
    "i": 4,
    "q": 5,
    "d": 6,
    "f": 7,
    "H": 8,
}  # struct's letter -> the format's number

Documents = list[list[list[int]]]  # documents of sequences of ids


def index_bytes(
    lengths: list[int],
    documents: list[int],
    itemsize: int,
    code: int,
    modes: Iterable[int] | None = None,
    **header: bytes | int,
) -> bytes:
    """An .idx: sequence lengths, the sequences before each document and the total, the type's size and number."""
    pointers = [sum(lengths[:place]) * itemsize for place in range(len(lengths))]
    parts = [
        header.get("magic", b"MMIDIDX\x00\x00"),
        struct.pack("<Q", header.get("version", 1)),
        struct.pack("<B", code),
        struct.pack("<Q", len(lengths)),
        struct.pack("<Q", len(documents)),
        struct.pack(f"<{len(lengths)}i", *lengths),
        struct.pack(f"<{len(pointers)}q", *pointers),
        struct.pack(f"<{len(documents)}q", *documents),
    ]
    if modes is not None:
        parts.append(struct.pack(f"<{len(lengths)}b", *modes))
    return b"".join(parts)  # type: ignore[arg-type]


def write_dataset(prefix: Path, documents: Documents, letter: str = "i", modes: bool = False) -> Path:
    """PREFIX.bin and PREFIX.idx; `letter` is struct's for the type of the ids."""
    sequences = [sequence for document in documents for sequence in document]
    bounds = [0, *itertools.accumulate(map(len, documents))]
    ids = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    index = index_bytes(
        [len(sequence) for sequence in sequences],
        bounds,
        struct.calcsize(f"<{letter}"),
        CODES[letter],
        [0] * len(sequences) if modes else None,
    )
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def random_documents(count: int, seed: int = 0, longest: int = 60) -> Documents:
    """Documents of one to four sequences, without special ids."""
    rng = np.random.default_rng(seed)

    def sequence() -> list[int]:
        return rng.integers(3, VOCABULARY, rng.integers(1, longest)).tolist()

    return [[sequence() for _ in range(rng.integers(1, 5))] for _ in range(count)]


def whole(documents: Documents) -> list[list[int]]:
    return [[token for sequence in document for token in sequence] for document in documents]


def framed(documents: Documents) -> list[list[int]]:
    return [[BOS, *tokens, EOS] for tokens in whole(documents)]


def imported(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document, read in the plainest way."""
    manifest = read_manifest(folder)
    letter, documents = {"uint16": "H", "uint32": "I"}[manifest.dtype], []
    for shard in manifest.split_shards(split):
        content, index = (folder / shard.name).read_bytes(), (folder / f"{shard.name}.index").read_bytes()
        tokens = struct.unpack(f"<{shard.tokens}{letter}", content)
        ends = struct.unpack(f"<{shard.documents}Q", index)
        documents += [list(tokens[a:b]) for a, b in zip((0, *ends), ends, strict=False)]
    return documents


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextmanager
def interrupted_move(out: Path, moves: int) -> Iterator[None]:
    """Let only `moves` files be moved to the output folder, then raise OSError."""
    replace, left = os.replace, [moves]

    def failing(source: Path, target: Path) -> None:
        if Path(target).parent in (out, out / "tokenizer"):
            if not left[0]:
                raise OSError("pulled plug")
            left[0] -= 1
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", failing)
        yield
