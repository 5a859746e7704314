"""The writing side of the data format: an output folder that is either committed or known to be unfinished."""

import contextlib
import fcntl
import filecmp
import hashlib
import os
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from train.data.format import (
    INDEX_DTYPE,
    MANIFEST_NAME,
    TOKENIZER_FOLDER,
    DataError,
    Manifest,
    Shard,
    read_manifest,
    write_manifest,
)
from train.files import sync_folder

# It stands in the folder from before the first shard until after the manifest, and is locked while its writer lives.
MARKER_NAME = "prepare_data.unfinished"
WORK_NAME = "prepare_data.work"  # what an unfinished preparation has done so far
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
        dtype: np.dtype,
        shard_tokens: int,
        prefix: str = "",
        shuffle: np.random.Generator | None = None,
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.prefix, self.shuffle = prefix, shuffle
        self.shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._tokens = 0
        self._ends: list[int] = []
        self._held: list[np.ndarray] = []

    def write(self, tokens: np.ndarray) -> None:
        """Append one document: tokens [n] of the writer's dtype."""
        if self._file is not None and self._tokens + len(tokens) > self.shard_tokens:
            self.close()
        if self._file is None:
            self._name = f"{self.split}_{self.prefix}{len(self.shards):05d}.ds"
            self._file = open(self.folder / self._name, "wb")  # open across calls
            self._hash = hashlib.sha256()
        self._tokens += len(tokens)
        if self.shuffle is None:
            self._append(tokens, self._tokens)
        else:
            self._held.append(tokens.copy())  # not a view of the batch that it came in

    def _append(self, tokens: np.ndarray, end: int) -> None:
        assert self._file is not None
        data = tokens.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._ends.append(end)

    def close(self) -> None:
        """Finish the shard being written, if any, and flush it to the disk."""
        if self._file is None:
            return
        if self.shuffle is not None:
            end = 0
            for index in self.shuffle.permutation(len(self._held)):
                end += len(self._held[index])
                self._append(self._held[index], end)
            self._held = []
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
                bytes=self._tokens * self.dtype.itemsize,
                sha256=self._hash.hexdigest(),
                index_sha256=hashlib.sha256(index).hexdigest(),
            )
        )
        self._file, self._tokens, self._ends = None, 0, []


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

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on the folder holds data."""
        sync_folder(self.folder)
        write_manifest(self.folder, manifest)

    def copy_tokenizer(self, source: Path, names: list[str]) -> None:
        """Copy the tokenizer's files into the folder (where it already lies there, it stays)."""
        target = self.folder / TOKENIZER_FOLDER
        target.mkdir(exist_ok=True)
        if target.resolve() == source.resolve():
            return
        for name in names:
            existing = target / name
            if (
                existing.exists()
                and name not in self._own_files
                and not filecmp.cmp(existing, source / name, False)
            ):
                raise DataError(f"{existing} is another tokenizer's; move it or choose another --output")
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
            with contextlib.suppress(
                DataError
            ):  # a corrupt manifest is a reason to overwrite, not an obstacle
                names |= set(read_manifest(self.folder).tokenizer_files)
        return {os.path.basename(name) for name in names}

    def _shard_files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if SHARD_NAME.fullmatch(path.name))

    def _clear(self) -> None:
        for path in [*self._shard_files(), self.folder / (MANIFEST_NAME + ".tmp")]:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
