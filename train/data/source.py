"""Read the token shards in a folder with prepared data as windows, the training samples of a fixed length."""

import io
import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from train.data.format import COPY_ADVICE, DataError, check_sizes, check_tokenizer, open_index, read_manifest

# Token frequencies are counted in about COUNTED_TOKENS tokens, in pieces spread evenly over the split.
COUNTED_TOKENS, PIECE_TOKENS = 2**22, 2**16
# Maximum number of open shards, and of open indexes, per source. A login shell often allows 1024 open files.
OPEN_SHARDS = 256


class _ShardFile(io.FileIO):
    """A file for random reads, which is closed when the object is deleted.

    Samples are read with pread instead of a memory map for two reasons. A page fault in a memory map triggers
    read-ahead, which reads megabytes for a sample of a few kilobytes. If a mapped file is truncated, the process is
    killed.
    """

    __del__ = io.FileIO.close


class TokenSource:
    """One split of a folder with prepared data, read as windows of a fixed length.

    Attributes:
        folder: the folder with prepared data.
        manifest: the manifest of the folder.
        num_tokens: number of tokens in the split.
        num_windows: number of windows in the split.

    Raises:
        DataError: if the folder or its manifest is missing or corrupt, a shard is missing or truncated, the tokenizer
            was replaced, or the split has too few tokens for one window.
    """

    def __init__(self, name: str, folder: str | Path, split: str, seq_length: int) -> None:
        self.name, self.folder, self.split, self.seq_length = name, Path(folder), split, seq_length
        self.manifest = read_manifest(self.folder, f"data source {name!r}: the folder")
        self.shards = self.manifest.split_shards(split)
        for shard in self.shards:
            check_sizes(self.folder, shard)
        check_tokenizer(self.folder, self.manifest)
        self.num_tokens = sum(shard.tokens for shard in self.shards)
        self.num_windows = max(0, (self.num_tokens - 1) // seq_length)
        if self.num_windows == 0:
            remedy = "a larger --eval_fraction" if split == "eval" else "more text"
            raise DataError(
                f"{self.folder}: the {split} split has {self.num_tokens} tokens, but one sample needs "
                f"{seq_length + 1}. Prepare the data with {remedy}, or lower max_seq_length",
                code="too_few_tokens",
                key=str(self.folder),
            )
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._starts = list(itertools.accumulate((shard.tokens for shard in self.shards), initial=0))
        self._file = lru_cache(OPEN_SHARDS)(lambda index: _ShardFile(self.folder / self.shards[index].name))
        self._ends = lru_cache(OPEN_SHARDS)(lambda index: open_index(self.folder, self.shards[index]))

    def _tokens(self, index: int, offset: int, count: int) -> np.ndarray:
        """Read `count` tokens from a shard, starting at token `offset`, or fewer if the shard ends earlier.

        Raises:
            DataError: if the file was truncated after it was opened, or a token id is not in the vocabulary.
        """
        size = self._dtype.itemsize
        expected = min(count, self.shards[index].tokens - offset) * size
        file = self._file(index)
        data = os.pread(file.fileno(), expected, offset * size)
        if len(data) != expected:
            raise DataError(
                f"{file.name} ends before token {offset + count}, because the file was truncated during the run; "
                f"{COPY_ADVICE}",
                code="wrong_size",
                key=str(file.name),
            )
        ids = np.frombuffer(data, self._dtype)
        if ids.max() >= self.manifest.vocab_size:
            first = int(np.argmax(ids >= self.manifest.vocab_size))
            raise DataError(
                f"{file.name}: token {offset + first} has the id {ids[first]}, but the vocabulary has "
                f"{self.manifest.vocab_size} ids; {COPY_ADVICE}",
                code="token_beyond_vocabulary",
                key=str(file.name),
            )
        return ids

    def read(self, window: int, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """Read one window as two arrays of `seq_length` tokens: the inputs and the labels.

        The labels are the inputs shifted by one token.

        Raises:
            DataError: if a shard is truncated, or a token id is not in the vocabulary.
        """
        tokens = self._span(window * self.seq_length, self.seq_length + 1)
        input_ids[:] = tokens[:-1]
        labels[:] = tokens[1:]

    def token_counts(self) -> np.ndarray:
        """Count how often each token id occurs in a sample of about COUNTED_TOKENS tokens from the split.

        Returns:
            int64 [vocab_size].

        Raises:
            DataError: if a shard is truncated, or a token id is not in the vocabulary.
        """
        counts = np.zeros(self.manifest.vocab_size, dtype=np.int64)
        stride = PIECE_TOKENS * math.ceil(self.num_tokens / COUNTED_TOKENS)
        for start in range(0, self.num_tokens, stride):
            tokens = self._span(start, min(PIECE_TOKENS, self.num_tokens - start))
            counts += np.bincount(tokens, minlength=len(counts))
        return counts

    def _span(self, start: int, count: int) -> np.ndarray:
        """Read tokens start..start+count-1 of the split, from one or more shards.

        Raises:
            DataError: if a shard is truncated, or a token id is not in the vocabulary.
        """
        shard = bisect_right(self._starts, start) - 1
        parts = [self._tokens(shard, start - self._starts[shard], count)]
        while missing := count - sum(map(len, parts)):
            shard += 1
            parts.append(self._tokens(shard, 0, missing))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document_ends(self, window: int) -> np.ndarray:
        """Return the positions in a window at which documents end.

        The function takes two binary searches in the memory-mapped index of each shard in the window.

        Returns:
            The position after each document end, from 1 to `seq_length`, increasing, int64.

        Raises:
            DataError: if the document end offsets in the index do not increase.
        """
        start, found = window * self.seq_length, []
        stop = start + self.seq_length
        shard = bisect_right(self._starts, start) - 1
        while shard < len(self.shards) and self._starts[shard] < stop:
            begin = self._starts[shard]
            ends = self._ends(shard)
            # Search with uint64 values. With a signed value, numpy would convert the whole index to float64.
            bounds = np.array([max(start - begin, 0), stop - begin], dtype=np.uint64)
            first, last = ends.searchsorted(bounds, side="right").tolist()
            found.append(ends[first:last].astype(np.int64) + (begin - start))
            shard += 1
        relative = np.concatenate(found)
        if (np.diff(relative, prepend=0, append=self.seq_length + 1) < 1).any():
            raise DataError(
                f"{self.folder}: an index file is damaged: the document end offsets in window {window} of the "
                f"{self.split} split do not increase; {COPY_ADVICE}",
                code="index_not_increasing",
                key=str(self.folder),
            )
        return relative


def open_sources(folders: Mapping[str, str | Path], split: str, seq_length: int) -> list[TokenSource]:
    """Open one split of several folders with prepared data.

    Args:
        folders: {name of the source: folder}.

    Returns:
        The sources, sorted by name.

    Raises:
        DataError: if a folder cannot be opened (see TokenSource), or the folders were prepared with different
            tokenizers or, for the train split, with different eval fractions.
    """
    sources = [TokenSource(name, folders[name], split, seq_length) for name in sorted(folders)]
    for source in sources[1:]:
        check_same_tokenizer(sources[0], source)
    if split == "train":
        check_no_leak(sources, sources)
    return sources


def open_held_out(
    train: list[TokenSource],
    folders: Mapping[str, str | Path],
    sets: Mapping[str, str | Path],
    seq_length: int,
) -> dict[str, list[TokenSource]]:
    """Open the evaluation data of a training run.

    Args:
        train: the training data.
        folders: {name: folder} of the training data. The loss on the eval splits of these folders is named "eval_loss".
        sets: {name: folder} of additional evaluation sets. The loss on the eval split of a set is named
            "eval_loss/NAME".

    Returns:
        {name of the loss: sources on which the loss is computed}.

    Raises:
        DataError: if a folder cannot be opened, or an evaluation set was prepared with a different tokenizer than the
            training data, or with a larger eval fraction than the training data.
    """
    groups = {"eval_loss": folders} | {f"eval_loss/{name}": {name: folder} for name, folder in sets.items()}
    opened = {loss: open_sources(group, "eval", seq_length) for loss, group in groups.items()}
    for sources in opened.values():
        check_same_tokenizer(train[0], sources[0])
        check_no_leak(train, sources)
    return opened


def check_no_leak(train: list[TokenSource], held_out: list[TokenSource]) -> None:
    """Check that no document used for evaluation can have a copy in the training data.

    A document is in the eval split if its hash is below the eval fraction of the folder. If two folders have different
    fractions, copies of a document can be in the train split of one folder and in the eval split of the other. Folders
    are not checked if they are only for evaluation (fraction 1) or if each document was cut (eval_by position).

    Raises:
        DataError: if a folder in `held_out` has a larger eval fraction than a folder in `train`.
    """
    for one, other in itertools.product(train, held_out):
        fractions = one.manifest.eval_fraction, other.manifest.eval_fraction
        by_hash = all(
            0 < manifest.eval_fraction < 1 and manifest.steps.get("eval_by", "hash") == "hash"
            for manifest in (one.manifest, other.manifest)
        )
        if by_hash and fractions[0] < fractions[1]:
            raise DataError(
                f"data sources {one.name!r} and {other.name!r} were prepared with different values of "
                f"--eval_fraction, {fractions[0]} ({one.folder}) and {fractions[1]} ({other.folder}). A document that "
                "occurs in both sources could be used for training and for evaluation. Prepare both with the same "
                "--eval_fraction",
                code="different_eval_fractions",
            )


def check_same_tokenizer(one: TokenSource, other: TokenSource) -> None:
    """Check that two data sources were prepared with the same tokenizer.

    Raises:
        DataError: if the tokenizers differ.
    """
    ids = [(m.tokenizer_sha256, m.bos_id, m.eos_id) for m in (one.manifest, other.manifest)]
    if ids[0] != ids[1]:
        raise DataError(
            f"data sources {one.name!r} ({one.folder}) and {other.name!r} ({other.folder}) were prepared with "
            "different tokenizers, or with different BOS or EOS tokens; prepare both with the same tokenizer",
            code="different_tokenizers",
        )


def check_fit(sources: list[TokenSource], vocab_size: int, max_positions: int) -> None:
    """Check that a model's vocabulary and maximum sequence length are large enough for the data.

    Raises:
        DataError: if the vocabulary or the maximum sequence length is too small.
    """
    first = sources[0]
    if first.manifest.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer does not fit the model: {first.folder} has {first.manifest.vocab_size} token ids, but the "
            f"model's vocab_size is {vocab_size}. Increase vocab_size in the model's JSON file (model.config), or "
            "prepare the data with the model's tokenizer",
            code="vocabulary_too_large",
            key="model.config",
        )
    if first.seq_length > max_positions:
        raise DataError(
            f"max_seq_length {first.seq_length} exceeds the model's max_position_embeddings {max_positions}; lower "
            "max_seq_length or raise max_position_embeddings",
            code="sequence_too_long",
            key="max_seq_length",
        )
