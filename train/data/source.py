"""The token shards of one prepared folder as windows of training: `TokenSource`."""

import io
import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from train.data.format import MANIFEST_NAME, DataError, check_sizes, check_tokenizer, read_manifest
from train.data.index import open_index

# What the frequencies of a source's tokens are counted in, spread evenly over its split, and in pieces of how many.
COUNTED_TOKENS, PIECE_TOKENS = 2**22, 2**16
# File descriptors of a source, and as many more for its indexes; a login shell often allows 1024.
OPEN_SHARDS = 256


class _ShardFile(io.FileIO):
    """A file that is open for reading as long as something refers to it.

    Samples are read by pread. A memory map would do for what is in the page cache, but beyond it a fault reads as much
    of the file as the device reads ahead, megabytes for the kilobytes of a sample; and a file that is cut off under a
    map kills the process without a word.
    """

    __del__ = io.FileIO.close


class TokenSource:
    """The windows of one split of one prepared folder.

    Attributes: `manifest`, `num_tokens` in the split, `num_windows`, `folder`.

    Raises:
        DataError: no such prepared folder, a corrupt manifest, a missing or truncated shard, another tokenizer than
            the one that made the ids, or less than one window.
    """

    def __init__(self, name: str, folder: str | Path, split: str, seq_length: int) -> None:
        self.name, self.folder, self.split, self.seq_length = name, Path(folder), split, seq_length
        self._manifest_stat = self._stat_manifest()
        self.manifest = read_manifest(self.folder)
        self.shards = self.manifest.split_shards(split)
        for shard in self.shards:
            check_sizes(self.folder, shard)
        check_tokenizer(self.folder, self.manifest)
        self.num_tokens = sum(shard.tokens for shard in self.shards)
        self.num_windows = max(0, (self.num_tokens - 1) // seq_length)
        if self.num_windows == 0:
            remedy = "a larger --eval_fraction" if split == "eval" else "more text"
            raise DataError(
                f"{self.folder}: the {split} split has {self.num_tokens} tokens, one sample needs {seq_length + 1}; "
                f"prepare it with {remedy}, or lower the sequence length",
                code="too_few_tokens",
                key=str(self.folder),
            )
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._starts = list(itertools.accumulate((shard.tokens for shard in self.shards), initial=0))
        self._file = lru_cache(OPEN_SHARDS)(self._open_shard)
        self._ends = lru_cache(OPEN_SHARDS)(self._open_index)

    def _open_shard(self, index: int) -> _ShardFile:
        file = _ShardFile(self.folder / self.shards[index].name)
        self._check_not_replaced()
        return file

    def _open_index(self, index: int) -> np.ndarray:
        ends = open_index(self.folder, self.shards[index])
        self._check_not_replaced()
        return ends

    def _stat_manifest(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self.folder / MANIFEST_NAME)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _check_not_replaced(self) -> None:
        """Raise DataError when the folder has got other data meanwhile, whose shards may have the same names."""
        if (now := self._stat_manifest()) != self._manifest_stat:
            if read_manifest(self.folder) != self.manifest:
                raise DataError(
                    f"{self.folder} has got other data since it was opened: it was prepared again while it was read; "
                    "prepare into a folder of its own what a run shall not read",
                    code="data_replaced",
                    key=str(self.folder),
                )
            self._manifest_stat = now

    def _tokens(self, index: int, offset: int, count: int) -> np.ndarray:
        """`count` tokens of a shard from `offset` on, or what there is of them until its end."""
        size = self._dtype.itemsize
        expected = min(count, self.shards[index].tokens - offset) * size
        file = self._file(index)
        data = os.pread(file.fileno(), expected, offset * size)
        if len(data) != expected:
            now, was = os.fstat(file.fileno()).st_size, self.shards[index].bytes
            raise DataError(
                f"{file.name} has {now} bytes, the manifest says {was}: it was cut off since it was opened; prepare or "
                "copy the data again",
                code="wrong_size",
                key=str(file.name),
            )
        return np.frombuffer(data, self._dtype)

    def read(self, window: int, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """Fill one sample: input_ids [T] and labels [T], labels one token ahead.

        Raises:
            DataError: a token id beyond the vocabulary, which an embedding would answer with an error of its own; a
                shard that has been cut off since it was opened.
        """
        tokens = self._span(window * self.seq_length, self.seq_length + 1)
        input_ids[:] = tokens[:-1]
        labels[:] = tokens[1:]

    def token_counts(self) -> np.ndarray:
        """Count each token in about COUNTED_TOKENS of the split. Returns int64 [V]. Raises DataError as `read`."""
        counts = np.zeros(self.manifest.vocab_size, dtype=np.int64)
        stride = PIECE_TOKENS * math.ceil(self.num_tokens / COUNTED_TOKENS)
        for start in range(0, self.num_tokens, stride):
            tokens = self._span(start, min(PIECE_TOKENS, self.num_tokens - start))
            counts += np.bincount(tokens, minlength=len(counts))
        return counts

    def _span(self, start: int, count: int) -> np.ndarray:
        """Tokens start..start+count-1 of the split, which may lie in several shards. Raises DataError: see `read`."""
        shard = bisect_right(self._starts, start) - 1
        parts = [self._tokens(shard, start - self._starts[shard], count)]
        while missing := count - sum(map(len, parts)):
            shard += 1
            parts.append(self._tokens(shard, 0, missing))
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if tokens.max() >= self.manifest.vocab_size:
            raise self._bad_token(start, tokens)
        return tokens

    def document_ends(self, window: int) -> np.ndarray:
        """How many of the window's first T tokens there are up to the end of each document that ends in them: int64,
        increasing, each 1 to T. Costs two bisections of a memory-mapped index, however many documents there are.
        """
        start, found = window * self.seq_length, []
        stop = start + self.seq_length
        shard = bisect_right(self._starts, start) - 1
        while shard < len(self.shards) and self._starts[shard] < stop:
            begin = self._starts[shard]
            ends = self._ends(shard)
            # As uint64: compared with a signed number, numpy would convert the whole index to float64.
            bounds = np.array([max(start - begin, 0), stop - begin], dtype=np.uint64)
            first, last = ends.searchsorted(bounds, side="right").tolist()
            found.append(ends[first:last].astype(np.int64) + (begin - start))
            shard += 1
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _bad_token(self, start: int, tokens: np.ndarray) -> DataError:
        """The error for the first id beyond the vocabulary in `tokens`, of which the first is the split's `start`th."""
        first = int(np.argmax(tokens >= self.manifest.vocab_size))
        shard = bisect_right(self._starts, start + first) - 1
        return DataError(
            f"{self.folder / self.shards[shard].name}: token {start + first - self._starts[shard]} has the id "
            f"{int(tokens[first])}, beyond the vocabulary of {self.manifest.vocab_size}: the file's content changed; "
            "prepare or copy the data again",
            code="token_beyond_vocabulary",
            key=str(self.folder / self.shards[shard].name),
        )


def open_sources(folders: Mapping[str, str | Path], split: str, seq_length: int) -> list[TokenSource]:
    """Open one split of prepared folders ({name: folder}), in the order of their names.

    Raises:
        DataError: as TokenSource does; no folder at all; folders that were prepared with different tokenizers, or to
            train on, with different eval fractions.
    """
    if not folders:
        raise DataError(
            "data.sources is empty: name at least one folder that prepare_data.py wrote",
            code="no_sources",
            key="data.sources",
        )
    sources = [TokenSource(name, folders[name], split, seq_length) for name in sorted(folders)]
    for source in sources[1:]:
        check_same_tokenizer(sources[0], source)
    if split == "train":
        check_no_leak(sources, sources)
    return sources


def check_no_leak(train: list[TokenSource], held_out: list[TokenSource]) -> None:
    """Check that no document of the folders in `held_out` is evaluated on and, as a copy, trained on in `train`.

    The hash of a document sends it to the eval split where it is below the folder's eval fraction. So a document whose
    hash is between the fractions of two folders is in the train split of one and in the eval split of the other. A
    folder that is all for evaluation (1), or that cuts each document (eval_by position), has no hash split.

    Raises:
        DataError: a held-out folder has a larger fraction than one that is trained on.
    """
    for one, other in itertools.product(train, held_out):
        fractions = one.manifest.eval_fraction, other.manifest.eval_fraction
        by_hash = one.manifest.is_split_by_hash and other.manifest.is_split_by_hash
        if by_hash and fractions[0] < fractions[1]:
            raise DataError(
                f"data sources {one.name!r} and {other.name!r} were split with different --eval_fraction, "
                f"{fractions[0]} ({one.folder}) and {fractions[1]} ({other.folder}): a document that is in both would "
                "be trained on in the first and evaluated on in the second; prepare both with the same --eval_fraction",
                code="different_eval_fractions",
            )


def check_same_tokenizer(one: TokenSource, other: TokenSource) -> None:
    """Raise DataError when the ids of the two mean other texts."""
    if one.manifest.tokenizer_sha256 != other.manifest.tokenizer_sha256:
        raise DataError(
            f"data sources {one.name!r} and {other.name!r} were prepared with different tokenizers "
            f"({one.folder} and {other.folder}); prepare both with the same",
            code="different_tokenizers",
        )


def check_fit(sources: list[TokenSource], vocab_size: int, max_positions: int) -> None:
    """Raise DataError when a model of that vocabulary and so many positions does not take all ids or the samples'
    length."""
    first = sources[0]
    if first.manifest.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer of the data does not fit the model: {first.folder} has a vocabulary of "
            f"{first.manifest.vocab_size}, the model one of {vocab_size}; give the model's JSON (model.config) a "
            "vocab_size of at least that, or prepare the data with the model's tokenizer",
            code="vocabulary_too_large",
            key="model.config",
        )
    if first.seq_length > max_positions:
        raise DataError(
            f"max_seq_length {first.seq_length} exceeds the model's max_position_embeddings {max_positions}; lower the "
            "one or raise the other",
            code="sequence_too_long",
            key="max_seq_length",
        )
