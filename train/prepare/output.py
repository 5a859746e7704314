"""Write token shards to an output folder. Existing data are replaced only when the new data are complete."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from model.keys import folder_problem
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
    is_foreign_manifest,
    token_dtype,
    unigram_loss,
    write_manifest,
)
from train.files import sync_folder, try_lock, write_durably
from train.prepare.corpus import WORK_NAME
from train.prepare.tokenizer import copy_tokenizer

LOCK_NAME = "prepare_data.lock"  # locked while the writing process is alive
IDENTITY_NAME = "job.json"  # in the work folder: the inputs and options, which are needed to resume
SHARD_NAME = re.compile(r"(train|eval)(_\d{5}){1,2}\.ds(\.index)?")


class ShardWriter:
    """Writer that appends the documents of one split to shard files.

    Args:
        folder: the folder for the shards.
        split: "train" or "eval".
        shard_tokens: maximum number of tokens per shard. A longer document gets a shard of its own.
        prefix: the part of the shard names after the split.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, prefix: str = "") -> None:
        self.folder, self.split, self.shard_tokens, self.prefix = folder, split, shard_tokens, prefix
        self.shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._tokens = 0
        self._ends: list[int] = []

    def write(self, tokens: np.ndarray) -> None:
        """Append one document.

        Args:
            tokens: [number of tokens], with the data type of the shards.
        """
        if self._file is not None and self._tokens + len(tokens) > self.shard_tokens:
            self.close()
        if self._file is None:
            self._name = f"{self.split}_{self.prefix}{len(self.shards):05d}.ds"
            self._file = open(self.folder / self._name, "wb")  # stays open until `close`
            self._hash = hashlib.sha256()
        self._tokens += len(tokens)
        data = tokens.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._ends.append(self._tokens)

    def close(self) -> None:
        """Complete the current shard, if there is one, and flush its files to disk."""
        if self._file is None:
            return
        size = self._file.tell()
        index = np.array(self._ends, dtype=INDEX_DTYPE).tobytes()
        with self._file as file, open(self.folder / f"{self._name}.index", "wb") as index_file:
            index_file.write(index)
            for each in (file, index_file):
                each.flush()
                os.fsync(each.fileno())
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
    """Writer that assigns documents to the train split or the eval split, and writes the shards of both splits.

    The attribute `counts` contains for each split how often each token id was written, int64 [vocab_size].

    Args:
        eval_fraction: fraction of the documents that are assigned to the eval split by a hash of their content.
        shard_tokens, prefix: see ShardWriter.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eval_fraction: float, shard_tokens: int, prefix: str = ""
    ) -> None:
        self.counts = {split: np.zeros(vocab_size, dtype=np.int64) for split in SPLITS}
        self._writers = {split: ShardWriter(folder, split, shard_tokens, prefix) for split in SPLITS}
        self._eval_below = eval_fraction * 2**64

    def write(
        self, documents: list[np.ndarray], contents: Iterable[Any], splits: Sequence[str | None] | None = None
    ) -> None:
        """Append documents to their splits.

        Args:
            documents: the tokens of each document, [number of tokens], with the data type of the shards.
            contents: for each document, the bytes or buffer whose hash determines the split.
            splits: for each document, its split, or None to use the hash. By default, the hash is used for all
                documents.
        """
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
        """Write the last shards to disk, and return all shards, ordered by split."""
        for writer in self._writers.values():
            writer.close()
        return [shard for writer in self._writers.values() for shard in writer.shards]


class OutputFolder:
    """The output folder of a data preparation. Existing data stay unchanged until `commit` replaces them.

    Attributes:
        work: subfolder for all files of the unfinished preparation.
        new: subfolder of `work` for the new shards.
    """

    def __init__(self, folder: str | Path, encoder: TextEncoder, overwrite: bool) -> None:
        self.folder, self.encoder, self.overwrite = Path(folder), encoder, overwrite
        self.work = self.folder / WORK_NAME
        self.new = self.work / "new"

    @contextmanager
    def open(self, resumable: bool = False) -> Iterator[None]:
        """Lock the output folder and create the work folder for the duration of a `with` block.

        After the block, the work folder is deleted, unless it contains job.json. In that case, the same command can
        resume the preparation.

        Args:
            resumable: whether to resume unfinished work.

        Raises:
            DataError: if the folder contains prepared data and `overwrite` is not set, contains files of unknown
                origin, is not writable, or another process is writing to it.
        """
        folder = self.folder
        if problem := folder_problem(folder):
            raise DataError(f"--output {folder} {problem}", code="cannot_write", key=str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        lock_path = folder / LOCK_NAME
        with open(lock_path, "a") as lock:
            if not try_lock(lock):
                raise DataError(
                    f"another process is writing to {folder}; wait until it has finished, or choose another --output",
                    code="locked",
                    key=str(folder),
                )
            try:
                self._check(resumable)
                if not (resumable and self._is_begun()):
                    self.restart()
                try:
                    yield
                finally:
                    if not self._is_begun():
                        self._clear()
            finally:
                lock_path.unlink(missing_ok=True)

    def restart(self) -> None:
        """Replace the work folder with an empty one."""
        self._clear()
        self.new.mkdir(parents=True)

    def _is_begun(self) -> bool:
        return (self.work / IDENTITY_NAME).exists()

    def _clear(self) -> None:
        # Delete the identity first. Otherwise a partly deleted work folder could be resumed.
        (self.work / IDENTITY_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def _check(self, resumable: bool) -> None:
        """Raise a DataError if new data must not be written to the output folder."""
        manifest, remedy = self.folder / MANIFEST_NAME, "choose another --output, or pass --overwrite"
        if is_foreign_manifest(manifest):
            raise DataError(
                f"{manifest} does not describe prepared data, or was written by a newer version of this program; "
                "choose another --output",
                code="foreign_manifest",
                key=str(manifest),
            )
        if self._is_begun():
            if not (resumable or self.overwrite):
                raise DataError(
                    f"{self.folder} contains unfinished work of prepare_data.py or import_megatron.py, which this "
                    f"command would delete; {remedy}",
                    code="unfinished_preparation",
                    key=str(self.folder),
                )
        elif manifest.exists():
            if not self.overwrite:
                raise DataError(
                    f"{self.folder} already contains prepared data; {remedy}",
                    code="already_there",
                    key=str(self.folder),
                )
        elif foreign := self._foreign_files():
            raise DataError(
                f"{foreign[0]} would be overwritten, but no manifest lists it as prepared data; move the file, or "
                "choose another --output",
                code="foreign_file",
                key=str(foreign[0]),
            )

    def _foreign_files(self) -> list[Path]:
        """Return the shard and tokenizer files in an output folder without a manifest.

        If the tokenizer of this preparation is in the output folder, the tokenizer files are not included.
        """
        tokenizer = self.folder / TOKENIZER_FOLDER
        if tokenizer.resolve() == self.encoder.folder.resolve():
            return self._shard_files()
        return [
            *self._shard_files(),
            *(tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).exists()),
        ]

    def commit(self, shards: list[Shard], counts: dict[str, np.ndarray], **source: Any) -> Manifest:
        """Copy the tokenizer, move the new files to the output folder, and write the manifest.

        Args:
            counts: for each split, how often each token id occurs, [vocabulary size].
            source: the manifest fields that describe the inputs and options.

        Raises:
            DataError: if a split is empty. An empty train split is allowed if all data are for evaluation.
        """
        encoder, folder = self.encoder, self.new / TOKENIZER_FOLDER
        for split, remedy in (("train", "smaller"), ("eval", "larger")):
            if not counts[split].any() and not (split == "train" and source["eval_fraction"] == 1):
                advice = (
                    " (--split_on splits .txt files into documents), or with --eval_by position, which needs only one "
                    "document"
                )
                raise DataError(
                    f"the {split} split is empty, but training needs at least one document in each split. Run the "
                    f"command again with --overwrite and a {remedy} --eval_fraction, or with more documents"
                    f"{advice if source['text_key'] else ''}",
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
            tokenizer_sha256=encoder.sha256,
            tokenizer_files=[name for name in TOKENIZER_FILES if (folder / name).is_file()],
            unigram_loss=unigram_loss(counts["train"], counts["eval"]),
            shards=shards,
            **source,
        )
        self._exchange(manifest)
        write_manifest(self.folder, manifest)
        self._clear()
        return manifest

    def _exchange(self, manifest: Manifest) -> None:
        """Replace the old shards and tokenizer files in the output folder with the new ones.

        If the exchange is interrupted, the output folder has no manifest, and the remaining files stay in the work
        folder. A resumed preparation moves these files. An interrupted import must be repeated with `overwrite`.
        """
        if not self._is_begun():
            write_durably(self.work / IDENTITY_NAME, "{}\n")  # keeps the work folder
        names = {file for shard in manifest.shards for file in (shard.name, f"{shard.name}.index")}
        names |= {f"{TOKENIZER_FOLDER}/{name}" for name in manifest.tokenizer_files}
        old = {path.name for path in self._shard_files()}
        old |= {f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES}
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
        sync_folder(self.folder)
        (self.folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        for name in old - names:
            (self.folder / name).unlink(missing_ok=True)
        for name in names:
            # A file that exists only in the output folder was moved before an interruption.
            if (self.new / name).exists() or not (self.folder / name).exists():
                os.replace(self.new / name, self.folder / name)
        sync_folder(self.folder / TOKENIZER_FOLDER)
        sync_folder(self.folder)

    def _shard_files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if SHARD_NAME.fullmatch(path.name))
