"""The datatrove blocks at both ends of a pipeline: read documents from files, and write token shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from train.data.encoder import TextEncoder
from train.data.format import SPLITS, Shard, token_dtype
from train.files import write_durably
from train.prepare.corpus import read_share
from train.prepare.output import SplitWriter
from train.prepare.readers import Damaged, Dropped
from train.prepare.tally import Tally

if TYPE_CHECKING:
    from train.prepare.preparation import Preparation

BATCH_DOCUMENTS = 16  # number of documents encoded at a time; even books of several MB then fit into memory

load_encoder = lru_cache(1)(TextEncoder)  # loads the tokenizer once per process


class ReadDocuments(PipelineStep):
    """Pipeline block that reads the input documents of one task. The `id` of a document is its file and line.

    With --eval_by position, each document is cut into a train and an eval document, whose metadata contain the split.
    """

    type, name = "READER", "strict"

    def __init__(self, preparation: Preparation, tally: Tally) -> None:
        super().__init__()
        self.preparation, self.tally = preparation, tally

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        self.tally.reset()
        what = self.preparation
        for item in read_share(what.sources, what.text_key, rank, world_size, what.split_on):
            if isinstance(item, Dropped):
                self.tally.drop(item)
            elif isinstance(item, Damaged):
                self.tally.damage(item)
            elif what.eval_by is None:
                self.tally.read += 1
                yield Document(text=item.text, id=item.where)
            else:
                for split, text in zip(SPLITS, cut_for_eval(item.text, what.eval_fraction), strict=True):
                    if text:
                        self.tally.read += 1
                        yield Document(text=text, id=item.where, metadata={"split": split})


def cut_for_eval(text: str, eval_fraction: float) -> tuple[str, str]:
    """Cut off the end of a text for the eval split, at a line end if possible, or else between words.

    Returns:
        The beginning and the end. The end has between `eval_fraction` and twice `eval_fraction` of the characters. The
        end is empty if the text is too short to be cut.
    """
    length = len(text.rstrip())
    most = min(round(length * (1 - eval_fraction)), length - 1)
    for mark in ("\n", " ", ""):
        at = text.rfind(mark, 0, most) + 1 if mark else most
        if length - at <= 2 * (length - most) and text[:at].strip():
            return text[:at], text[at:]
    return text, ""


class WriteShards(PipelineStep):
    """Pipeline block that tokenizes the documents of one task and writes them to shards.

    The counts of the task are written to RANK.json and RANK.npz in the results folder. With --shuffle_seed, the
    documents in each shard are shuffled. A task that runs again overwrites its files with the same bytes.
    """

    type, name = "TOKENIZER", "shards"

    def __init__(self, preparation: Preparation, tally: Tally) -> None:
        super().__init__()
        self.preparation, self.tally = preparation, tally
        self.results = preparation.work("results")

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tasks already use all cores
        self.results.mkdir(parents=True, exist_ok=True)
        what = self.preparation
        encoder = what.encoder()
        seed = None if what.shuffle_seed is None else [what.shuffle_seed, rank]
        writer = SplitWriter(what.work("new"), encoder.vocab_size, what.eval_fraction, what.shard_tokens,
                             f"{rank:05d}_", seed)  # fmt: skip
        dtype = token_dtype(encoder.vocab_size)
        documents = iter(data)
        while batch := list(islice(documents, BATCH_DOCUMENTS)):
            texts = [document.text for document in batch]
            contents = list(map(str.encode, texts))
            self.tally.kept += len(batch)
            self.tally.text_bytes += sum(map(len, contents))
            encoded = [[encoder.bos_id, *ids, encoder.eos_id] for ids in encoder.encode_batch(texts)]
            splits = [document.metadata.get("split") for document in batch]
            writer.write([np.array(ids, dtype) for ids in encoded], contents, splits)
        shards = [asdict(shard) for shard in writer.close()]
        np.savez_compressed(self.results / f"{rank:05d}.npz", **writer.counts)  # type: ignore[arg-type]
        values = {"tally": self.tally.to_json(), "shards": shards}
        write_durably(self.results / f"{rank:05d}.json", json.dumps(values) + "\n")


def read_results(
    results: Path, tasks: int, vocab_size: int
) -> tuple[Tally, list[Shard], dict[str, np.ndarray]]:
    """Read and add up the results that `WriteShards` wrote for each task.

    Returns:
        The document counts; the shards, ordered by split and then by task; for each split, how often each token id
        occurs, [vocab_size].

    Raises:
        OSError: if the results of a task are missing.
    """
    tally, shards = Tally(), []
    counts = {split: np.zeros(vocab_size, dtype=np.int64) for split in SPLITS}
    for rank in range(tasks):
        values = json.loads((results / f"{rank:05d}.json").read_text(encoding="utf-8"))
        tally.add(Tally.from_json(values["tally"]))
        shards += [Shard(**shard) for shard in values["shards"]]
        with np.load(results / f"{rank:05d}.npz") as found:
            for split in SPLITS:
                counts[split] += found[split]
    shards.sort(key=lambda shard: SPLITS.index(shard.split))  # the sort is stable and keeps the task order
    return tally, shards, counts
