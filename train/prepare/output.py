"""The writing side of the data format: token shards, and folders that are committed or known to be unfinished."""

import contextlib
import fcntl
import filecmp
import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from train.data.encoder import TextEncoder
from train.data.format import (
    INDEX_DTYPE,
    MANIFEST_NAME,
    SCHEMA,
    SPLITS,
    TOKENIZER_FOLDER,
    DataError,
    Manifest,
    Shard,
    read_manifest,
    token_dtype,
    write_manifest,
)
from train.files import sha256_file, sync_folder

# It stands in the folder from before the first shard until after the manifest, and is locked while its writer lives.
MARKER_NAME = "prepare_data.unfinished"
WORK_NAME = "prepare_data.work"  # what an unfinished preparation has done so far
SHARD_NAME = re.compile(r"(train|eval)(_\d{5}){1,2}\.ds(\.index)?")


def unigram_loss(train_counts: np.ndarray, eval_counts: np.ndarray) -> float | None:
    """Cross entropy in nats per token of the eval counts [V] under the add-one-smoothed train counts [V], which is what
    a model that only knows how frequent tokens are would score; None when either is empty."""
    if not train_counts.sum() or not eval_counts.sum():
        return None
    log_p = np.log(train_counts + 1.0) - math.log(float(train_counts.sum()) + len(train_counts))
    return float(-(eval_counts * log_p).sum() / eval_counts.sum())


class ShardWriter:
    """Writes one split's documents into shards of at most `shard_tokens` tokens (a longer document has its own).

    prefix: stands in the shards' names behind the split. shuffle: permutes the documents of each shard, which is then
    held in memory until it is full.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        shard_tokens: int,
        prefix: str = "",
        shuffle: np.random.Generator | None = None,
    ) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.prefix, self.shuffle = prefix, shuffle
        self.shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._tokens = 0
        self._ends: list[int] = []
        self._held: list[np.ndarray] = []

    def write(self, tokens: np.ndarray) -> None:
        """Append one document: tokens [n] of the shards' type."""
        if self._file is not None and self._tokens + len(tokens) > self.shard_tokens:
            self.close()
        if self._file is None:
            self._name = f"{self.split}_{self.prefix}{len(self.shards):05d}.ds"
            self._file = open(self.folder / self._name, "wb")  # open across calls
            self._hash = hashlib.sha256()
        self._tokens += len(tokens)
        if self.shuffle is None:
            self._append(self._file, tokens)
        else:
            self._held.append(tokens)

    def _append(self, file: BinaryIO, tokens: np.ndarray) -> None:
        data = tokens.tobytes()
        file.write(data)
        self._hash.update(data)
        self._ends.append(file.tell() // tokens.itemsize)

    def close(self) -> None:
        """Finish the shard being written, if any, and flush it to the disk."""
        if self._file is None:
            return
        if self.shuffle is not None:
            for index in self.shuffle.permutation(len(self._held)):
                self._append(self._file, self._held[index])
            self._held = []
        size = self._file.tell()
        _flush_and_close(self._file)
        index = np.array(self._ends, dtype=INDEX_DTYPE).tobytes()
        index_file = open(self.folder / (self._name + ".index"), "wb")
        index_file.write(index)
        _flush_and_close(index_file)
        self.shards.append(
            Shard(
                name=self._name,
                split=self.split,
                tokens=self._tokens,
                documents=len(self._ends),
                bytes=size,
                sha256=self._hash.hexdigest(),
                index_sha256=hashlib.sha256(index).hexdigest(),
            )
        )
        self._file, self._tokens, self._ends = None, 0, []


class SplitWriter:
    """Writes documents into the shards of their splits, and counts their tokens: `counts[split]` int64 [V].

    prefix, shuffle_seed: of the shards; see ShardWriter. The seed is a list of numbers that no other writer has.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eval_fraction: float,
        shard_tokens: int,
        prefix: str = "",
        shuffle_seed: list[int] | None = None,
    ) -> None:
        self.counts = {split: np.zeros(vocab_size, dtype=np.int64) for split in SPLITS}
        self._writers, self._eval_below = {}, eval_fraction * 2**64
        for number, split in enumerate(SPLITS):
            shuffle = None if shuffle_seed is None else np.random.default_rng([*shuffle_seed, number])
            self._writers[split] = ShardWriter(folder, split, shard_tokens, prefix, shuffle)

    def write(self, documents: list[np.ndarray], contents: Iterable[Any]) -> None:
        """Append documents, tokens [n] each of the shards' type, to the splits that hashes of `contents` choose: bytes,
        or a buffer of them, a document."""
        written: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for document, content in zip(documents, contents, strict=True):
            digest = hashlib.blake2b(content, digest_size=8).digest()
            split = "eval" if int.from_bytes(digest, "little") < self._eval_below else "train"
            self._writers[split].write(document)
            written[split].append(document)
        for split, some in written.items():
            if some:
                self.counts[split] += np.bincount(np.concatenate(some), minlength=len(self.counts[split]))

    def close(self) -> list[Shard]:
        """Finish the last shards; returns all, by split."""
        for writer in self._writers.values():
            writer.close()
        return [shard for writer in self._writers.values() for shard in writer.shards]


def _flush_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


class OutputFolder:
    """Context of one preparation: takes the folder, clears what an earlier unfinished run left, commits at the end.

    Only files that a run of this program wrote are ever deleted: shards listed by the manifest that is overwritten,
    and shards beside a marker. When the context ends without `commit` by an ordinary exception, its own shards go
    too; after a kill they stay, and the marker tells the next run.

    A `resumable` preparation goes on where it ended: without `overwrite` nothing of an unfinished run is cleared, and
    what it did stays when the context ends without `commit`. What it notes about itself goes into the folder `work`.

    Raises:
        DataError: the folder holds prepared data and `overwrite` is not set, holds shards of unknown origin, or
            another process is writing to it.
    """

    def __init__(self, folder: str | Path, overwrite: bool, resumable: bool = False) -> None:
        self.folder, self.overwrite, self.resumable = Path(folder), overwrite, resumable
        self.work = self.folder / WORK_NAME
        self._marker = self.folder / MARKER_NAME

    def __enter__(self) -> "OutputFolder":
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._marker.exists()
        has_manifest = (self.folder / MANIFEST_NAME).exists()
        if has_manifest and not unfinished and not self.overwrite:
            raise DataError(
                f"{self.folder} already holds prepared data; choose another --output, or --overwrite it"
            )
        if not has_manifest and not unfinished and (stray := self._shard_files()):
            raise DataError(
                f"{self.folder} holds {stray[0].name} but neither a manifest nor the mark of an unfinished run: it may "
                "belong to something else; move it or choose another --output"
            )
        self._lock = open(self._marker, "a")  # the lock lives as long as the file is open
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DataError(f"another process is preparing data in {self.folder}; wait for it") from error
        sync_folder(self.folder)
        self._own_files = self._own_tokenizer_files(has_manifest)
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
        if not self.resumable or self.overwrite or not self.work.is_dir():
            self._clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        committed = (self.folder / MANIFEST_NAME).exists()
        if not committed and self.resumable and self.work.is_dir():
            self._lock.close()
            return
        if not committed:
            self._clear()
        self._marker.unlink(missing_ok=True)  # before `work`: half of that would not be worth going on from
        shutil.rmtree(self.work, ignore_errors=True)
        self._lock.close()

    def commit(
        self, encoder: TextEncoder, shards: list[Shard], counts: dict[str, np.ndarray], **source: Any
    ) -> Manifest:
        """Copy the tokenizer and write the manifest: from here on the folder holds data.

        counts: of tokens, by split, [V] each. source: the manifest's fields about what was prepared, and how.
        """
        manifest = Manifest(
            schema=SCHEMA,
            dtype=token_dtype(encoder.vocab_size).name,
            vocab_size=encoder.vocab_size,
            bos_id=encoder.bos_id,
            eos_id=encoder.eos_id,
            tokenizer_sha256=sha256_file(encoder.folder / encoder.files[0]),
            tokenizer_files=encoder.files,
            unigram_loss=unigram_loss(counts["train"], counts["eval"]),
            shards=shards,
            **source,
        )
        self._copy_tokenizer(encoder.folder, encoder.files)
        sync_folder(self.folder)
        write_manifest(self.folder, manifest)
        return manifest

    def _copy_tokenizer(self, source: Path, names: list[str]) -> None:
        """Copy the tokenizer's files into the folder (where it already lies there, it stays)."""
        target = self.folder / TOKENIZER_FOLDER
        target.mkdir(exist_ok=True)
        if target.resolve() == source.resolve():
            return
        for name in set(names) - self._own_files:
            if (target / name).exists() and not filecmp.cmp(target / name, source / name, False):
                raise DataError(f"{target / name} is another tokenizer's; move it or choose another --output")
        self._lock.write("\n".join([*names, ""]))  # after a kill, the next run knows that these are ours
        self._lock.flush()
        for name in names:
            shutil.copyfile(source / name, target / name)
        for name in self._own_files - set(names):
            (target / name).unlink(missing_ok=True)

    def _own_tokenizer_files(self, has_manifest: bool) -> set[str]:
        """The files in the tokenizer folder that an earlier run of this program put there."""
        names = set(self._marker.read_text().split())
        if has_manifest:
            # a corrupt manifest is a reason to overwrite, not an obstacle
            with contextlib.suppress(DataError):
                names |= set(read_manifest(self.folder).tokenizer_files)
        return {os.path.basename(name) for name in names}

    def _shard_files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if SHARD_NAME.fullmatch(path.name))

    def _clear(self) -> None:
        for path in [*self._shard_files(), self.folder / (MANIFEST_NAME + ".tmp")]:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
