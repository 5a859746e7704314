"""The writing side of the data format: token shards, and the folder that has the old data until the new is whole."""

import filecmp
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from model.keys import why_not_written
from train.data.encoder import TOKENIZER_FILES, TextEncoder
from train.data.format import (
    INDEX_DTYPE,
    MANIFEST_NAME,
    SCHEMA,
    SPLITS,
    TOKENIZER_FOLDER,
    DataError,
    Manifest,
    Shard,
    foreign_manifest,
    read_manifest,
    token_dtype,
    unigram_loss,
    write_manifest,
)
from train.files import locks, sync_folder
from train.prepare.corpus import WORK_NAME
from train.prepare.tokenizer import copy_tokenizer

LOCK_NAME = "prepare_data.lock"  # locked while its writer lives
IDENTITY_NAME = "job.json"  # in the work folder: what is prepared; without it there is nothing to go on from
SHARD_NAME = re.compile(r"(train|eval)(_\d{5}){1,2}\.ds(\.index)?")


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

    def write(
        self, documents: list[np.ndarray], contents: Iterable[Any], splits: Sequence[str | None] | None = None
    ) -> None:
        """Append documents, tokens [n] each of the shards' type, to `splits`, or where that has None, to those that
        hashes of `contents` choose: bytes, or a buffer of them, a document."""
        written: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for document, content, given in zip(
            documents, contents, splits or repeat(None, len(documents)), strict=True
        ):
            digest = hashlib.blake2b(content, digest_size=8).digest()
            split = given or ("eval" if int.from_bytes(digest, "little") < self._eval_below else "train")
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


def take_lock(path: Path) -> TextIO:
    """Lock the file `path` in a folder, which is made, as long as what is returned is open.

    Raises:
        DataError: another process has it, or the folder is a file or somebody else's.
    """
    if why := why_not_written(path.parent):
        raise DataError(f"--output {path.parent} {why}", code="cannot_write", key=str(path.parent))
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(path, "a")
    try:
        # another file by now: its process has just ended
        is_ours = locks(lock) and os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
    except FileNotFoundError:
        is_ours = False
    if not is_ours:
        lock.close()
        raise DataError(
            f"another process is writing to {path.parent}; wait for it", code="locked", key=str(path.parent)
        )
    return lock


def is_being_exchanged(folder: Path) -> bool:
    """Whether a run was interrupted while it put new data in the place of what `folder` had: the next one goes on."""
    return (folder / WORK_NAME / "new" / MANIFEST_NAME).exists()


class OutputFolder:
    """Context of one preparation: takes the folder, and puts new data in the place of what it has at `commit`.

    Until then everything new is in `work`, beside data that the folder may have: the shards in `new`, and what a
    preparation notes about itself. When the context ends without `commit`, `work` goes, and stays where it is
    `resumable`: then the next run of that may go on in it.

    Raises:
        DataError: the folder holds prepared data and `overwrite` is not set, is something else that has a manifest, has
            shards or another tokenizer of unknown origin, or another process is writing to it.
    """

    def __init__(
        self, folder: str | Path, encoder: TextEncoder, overwrite: bool, resumable: bool = False
    ) -> None:
        self.folder, self.encoder = Path(folder), encoder
        self.overwrite, self.resumable = overwrite, resumable
        self.work = self.folder / WORK_NAME
        self.new = self.work / "new"
        self._keep = resumable

    def __enter__(self) -> "OutputFolder":
        self._lock = take_lock(self.folder / LOCK_NAME)
        if is_being_exchanged(self.folder):
            self._exchange()
        is_begun = (self.work / IDENTITY_NAME).exists()
        if problem := self._problem(is_begun):
            self._keep = is_begun
            self.__exit__()
            raise problem
        if not (self.resumable and is_begun):
            self.begin_anew()
        return self

    def begin_anew(self) -> None:
        """Remove what is unfinished."""
        self._clear()
        self.new.mkdir(parents=True)

    def _problem(self, is_begun: bool) -> DataError | None:
        """Return why there cannot be new data in the folder."""
        remedy = "choose another --output, or --overwrite it"
        if is_begun and not (self.resumable or self.overwrite):
            return DataError(
                f"{self.folder} holds an unfinished preparation of prepare_data.py, which would be lost; {remedy}",
                code="unfinished_preparation",
                key=str(self.folder),
            )
        if (manifest := self.folder / MANIFEST_NAME).exists():
            if other := foreign_manifest(manifest):
                return DataError(
                    f"{other}; choose another --output", code="foreign_manifest", key=str(manifest)
                )
            if is_begun or self.overwrite:
                return None
            return DataError(
                f"{self.folder} already holds prepared data; {remedy}",
                code="already_there",
                key=str(self.folder),
            )
        foreign = [(path, "there is no manifest that lists it") for path in self._shard_files()]
        for name in TOKENIZER_FILES:
            path, ours = self.folder / TOKENIZER_FOLDER / name, self.encoder.folder / name
            if path.exists() and not (ours.exists() and filecmp.cmp(path, ours, shallow=False)):
                foreign.append((path, "it is not that of --tokenizer"))
        for path, why in foreign:
            return DataError(
                f"{path} may belong to something else: {why}; move it or choose another --output",
                code="foreign_file",
                key=str(path),
            )
        return None

    def __exit__(self, *exception: object) -> None:
        if not self._keep:
            self._clear()
            os.unlink(self._lock.name)
        self._lock.close()

    def _clear(self) -> None:
        # first: half of the rest is not worth going on from
        (self.work / IDENTITY_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def commit(self, shards: list[Shard], counts: dict[str, np.ndarray], **source: Any) -> Manifest:
        """Copy the tokenizer, write the manifest, and put all that is new in its place.

        counts: of tokens, by split, [V] each. source: the manifest's fields about what was prepared, and how.

        Raises:
            DataError: a split is empty, with which training would refuse the data, unless all is for evaluation.
        """
        encoder, folder = self.encoder, self.new / TOKENIZER_FOLDER
        for split, remedy in (("train", "smaller"), ("eval", "larger")):
            if not counts[split].any() and not (split == "train" and source["eval_fraction"] == 1):
                raise DataError(
                    f"no document for the {split} split, which training needs: prepare again with --overwrite and a "
                    f"{remedy} --eval_fraction, with more documents (--split_on makes many of a .txt), or with "
                    "--eval_by position, for which one is enough",
                    code="empty_split",
                    key=split,
                )
        copy_tokenizer(encoder, folder)
        manifest = Manifest(
            schema=SCHEMA,
            dtype=token_dtype(encoder.vocab_size).name,
            vocab_size=encoder.vocab_size,
            bos_id=encoder.bos_id,
            eos_id=encoder.eos_id,
            tokenizer_sha256=encoder.sha256(),
            tokenizer_files=[name for name in TOKENIZER_FILES if (folder / name).is_file()],
            unigram_loss=unigram_loss(counts["train"], counts["eval"]),
            shards=shards,
            **source,
        )
        write_manifest(self.new, manifest)
        self._keep = (
            True  # what is new is whole: an exchange that is interrupted is for the next run to finish
        )
        self._exchange()
        self._keep = False
        return manifest

    def _exchange(self) -> None:
        """Put what is new in the place of what the folder has. The manifest comes last: when this is interrupted, the
        folder has none, and the next run does the rest.
        """
        manifest = read_manifest(self.new)
        names = {file for shard in manifest.shards for file in (shard.name, f"{shard.name}.index")}
        names |= {f"{TOKENIZER_FOLDER}/{name}" for name in manifest.tokenizer_files}
        old = {path.name for path in self._shard_files()} | {
            f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES
        }
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
        sync_folder(self.folder)
        (self.folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        for name in old - names:
            (self.folder / name).unlink(missing_ok=True)
        for name in names:
            if (self.new / name).exists() or not (
                self.folder / name
            ).exists():  # moved before an interruption
                os.replace(self.new / name, self.folder / name)
        for folder in (self.folder / TOKENIZER_FOLDER, self.folder):
            sync_folder(folder)
        os.replace(self.new / MANIFEST_NAME, self.folder / MANIFEST_NAME)
        sync_folder(self.folder)

    def _shard_files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if SHARD_NAME.fullmatch(path.name))
