"""The documents of Megatron's indexed datasets -> this project's: checked ids, BOS and EOS around each, its split."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.data.format import SPLITS, DataError, token_dtype
from train.prepare.encoder import TextEncoder
from train.prepare.megatron_index import Block, IndexedDataset
from train.prepare.output import ShardWriter

EMPTY = "empty document"
SHARE_TO_WARN = 0.9  # of the documents, with the same last token that is not EOS


@dataclass
class Counts:
    """What was imported: documents as they were found, those without tokens, and what was done to the others.

    `tokens[split]` [V] counts every id written; `last_ids` [V] the last token of documents that had no EOS.
    """

    tokens: dict[str, np.ndarray]
    last_ids: np.ndarray
    found: int = 0
    empty: int = 0
    bos_added: int = 0
    eos_added: int = 0
    eod_replaced: int = 0

    @property
    def kept(self) -> int:
        return self.found - self.empty

    @property
    def written(self) -> int:
        """Tokens, with those added."""
        return int(sum(counts.sum() for counts in self.tokens.values()))

    def inside(self, special_id: int, at_edges: int) -> int:
        """How often an id stands elsewhere than at the edges of documents, where it stands `at_edges` times each."""
        return int(sum(counts[special_id] for counts in self.tokens.values())) - at_edges * self.kept

    def documents(self, encoder: TextEncoder) -> dict[str, Any]:
        """The manifest's "documents"."""
        same = encoder.bos_id == encoder.eos_id
        return {
            "in": self.found,
            "out": self.kept,
            "dropped": {EMPTY: self.empty} if self.empty else {},
            "removed": {},
            "bos_added": self.bos_added,
            "eos_added": self.eos_added,
            "bos_inside": 0 if same else self.inside(encoder.bos_id, 1),
            "eos_inside": self.inside(encoder.eos_id, 2 if same else 1),
            "eod_replaced": self.eod_replaced,
        }


def token_ids(
    block: Block, dataset: IndexedDataset, encoder: TextEncoder, eod_id: int
) -> tuple[np.ndarray, int]:
    """The block's tokens [n] in the type of the shards, EOS in place of `eod_id`; and how often that was.

    Raises:
        DataError: an id is negative or beyond the vocabulary (and not `eod_id`, which may be).
    """
    tokens, replaced = block.tokens, 0
    is_eod = tokens == eod_id if eod_id != encoder.eos_id else None
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= encoder.vocab_size:
        is_bad = (tokens < 0) | (tokens >= encoder.vocab_size)
        if is_eod is not None:
            is_bad &= ~is_eod
        if is_bad.any():
            raise _bad_id(int(np.argmax(is_bad)), block, dataset, encoder)
    ids = tokens.astype(token_dtype(encoder.vocab_size), copy=False)
    if is_eod is not None:
        ids[is_eod] = encoder.eos_id
        replaced = int(np.count_nonzero(is_eod))
    return ids, replaced


def _bad_id(place: int, block: Block, dataset: IndexedDataset, encoder: TextEncoder) -> DataError:
    """The error for the block's token `place`."""
    found = int(block.tokens[place])
    document = int(np.searchsorted(block.ends, place, side="right"))
    start = int(block.ends[document - 1]) if document else 0
    problem = "which is negative" if found < 0 else f"beyond the vocabulary of {encoder.folder}"
    remedy = f" (or with --eod_id {found}, if that is what ends its documents)" if found >= 0 else ""
    return DataError(
        f"{dataset.bin}: token {place - start} of document {block.first_document + document} (token "
        f"{block.first_token + place} of the file) has the id {found}, {problem}, 0 to {encoder.vocab_size - 1}; "
        f"import the dataset with the tokenizer that made it{remedy}, or make it again"
    )


@dataclass(frozen=True)
class Framed:
    """Documents between BOS and EOS: `tokens` [n], `ends` [documents] in tokens, and whether each had its own before.

    A document of nothing else is one of two tokens.
    """

    tokens: np.ndarray
    ends: np.ndarray
    had_bos: np.ndarray
    had_eos: np.ndarray

    @property
    def has_text(self) -> np.ndarray:
        """[documents]: whether there is anything between BOS and EOS."""
        return np.diff(self.ends, prepend=0) > 2


def add_edges(ids: np.ndarray, ends: np.ndarray, bos_id: int, eos_id: int) -> Framed:
    """Put BOS before and EOS behind each document of ids [n] that has none; ends [documents]."""
    lengths = np.diff(ends, prepend=0)
    had_bos, had_eos = np.zeros(len(ends), dtype=bool), np.zeros(len(ends), dtype=bool)
    some = np.flatnonzero(lengths)
    had_bos[some] = ids[ends[some] - lengths[some]] == bos_id
    lengths = lengths - had_bos
    some = np.flatnonzero(lengths)  # one token is not both, where BOS and EOS are one id
    had_eos[some] = ids[ends[some] - 1] == eos_id
    new_ends = np.cumsum(lengths - had_eos + 2)
    starts = np.concatenate([[0], new_ends[:-1]])
    is_old = np.ones(int(new_ends[-1]), dtype=bool)
    is_old[starts[~had_bos]] = is_old[new_ends[~had_eos] - 1] = False
    tokens = np.empty(len(is_old), dtype=ids.dtype)
    tokens[is_old] = ids
    tokens[starts], tokens[new_ends - 1] = bos_id, eos_id
    return Framed(tokens, new_ends, had_bos, had_eos)


def write_block(
    framed: Framed, writers: dict[str, ShardWriter], counts: Counts, eval_fraction: float
) -> None:
    """Append the documents that have text to the shards of their splits, and count them and their tokens."""
    limit, start = eval_fraction * 2**64, 0
    chosen: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for end in framed.ends.tolist():
        document = framed.tokens[start:end]
        if end - start > 2:
            digest = hashlib.blake2b(document.data, digest_size=8).digest()
            split = "eval" if int.from_bytes(digest, "little") < limit else "train"
            writers[split].write(document)
            chosen[split].append(document)
        start = end
    for split, documents in chosen.items():
        if documents:
            size = len(counts.tokens[split])
            counts.tokens[split] += np.bincount(np.concatenate(documents), minlength=size)
    has_text = framed.has_text
    counts.found += len(framed.ends)
    counts.empty += int(np.count_nonzero(~has_text))
    counts.bos_added += int(np.count_nonzero(has_text & ~framed.had_bos))
    counts.eos_added += int(np.count_nonzero(has_text & ~framed.had_eos))
    last = framed.tokens[framed.ends[has_text & ~framed.had_eos] - 2]
    counts.last_ids += np.bincount(last, minlength=len(counts.last_ids))


def likely_eod(counts: Counts) -> str:
    """A warning when nearly all documents end in one id that is not EOS, as they do where the EOD is another id."""
    most = int(counts.last_ids.argmax())
    number = int(counts.last_ids[most])
    if counts.kept < 2 or number < SHARE_TO_WARN * counts.kept:
        return ""
    return (f"{number:,} of {counts.kept:,} documents end in the id {most} and not in the tokenizer's EOS; if that is "
            f"the end-of-document id of the datasets, import them with --eod_id {most} --overwrite")  # fmt: skip
