"""Documents in memory through the steps of preparation, for their tests."""

import argparse
import importlib.util
import json
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path

import dill
import pytest
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from train.prepare.filters import find_step_options
from train.prepare.preparation import make_pipelines
from train.prepare.steps import StepOptions, add_arguments
from train.prepare.tally import Pipeline, Tally

needs_spacy = pytest.mark.skipif(importlib.util.find_spec("spacy") is None, reason="needs the package spacy")
needs_fasttext = pytest.mark.skipif(
    importlib.util.find_spec("fasttext") is None, reason="needs the package fasttext-numpy2-wheel"
)

Ranks = list[list[str]]


class Read(PipelineStep):
    """The documents of each task, from memory."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for number, text in enumerate(self.ranks[rank]):
            yield Document(text=text, id=f"{rank}/{number}")


class Write(PipelineStep):
    """What comes out of a task, and its counts, as a file; refers to the tally as the block of the last pipeline
    does."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__()
        self.folder, self.tally = folder, tally

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        texts = [document.text for document in data]
        self.folder.mkdir(parents=True, exist_ok=True)
        result = {"texts": texts, "removed": self.tally.by_step}
        (self.folder / f"{rank:05d}.json").write_text(json.dumps(result))


def run_pipeline(pipeline: Pipeline, order: Iterable[int] | None = None) -> None:
    """Run the tasks of a pipeline, each with the pipeline as a worker gets it: pickled, then copied."""
    for rank in order or range(pipeline.tasks):
        data = None
        for block in deepcopy(dill.loads(dill.dumps(pipeline.blocks))):
            data = block(data, rank, pipeline.tasks)
        deque(data or (), maxlen=0)


def pipelines_of(options: StepOptions, ranks: Ranks, folder: Path) -> list[Pipeline]:
    write = partial(Write, folder / "out")
    return make_pipelines(options, folder / "scratch", len(ranks), lambda tally: Read(ranks), write)


def results(folder: Path, ranks: Ranks) -> tuple[Ranks, Counter[str]]:
    """What each task wrote, and what all of them removed; checks that nothing is lost between the two."""
    found = [json.loads((folder / "out" / f"{rank:05d}.json").read_text()) for rank in range(len(ranks))]
    for given, result in zip(ranks, found, strict=True):
        assert len(given) == len(result["texts"]) + sum(result["removed"].values())
    return [result["texts"] for result in found], sum((Counter(r["removed"]) for r in found), Counter())


def run(
    options: StepOptions, ranks: Ranks, folder: Path, shuffle: random.Random | None = None
) -> tuple[Ranks, Counter[str]]:
    """All pipelines; the tasks of each in random order with `shuffle`."""
    for pipeline in pipelines_of(options, ranks, folder):
        run_pipeline(pipeline, shuffle and shuffle.sample(range(pipeline.tasks), pipeline.tasks))
    return results(folder, ranks)


def first_of(ranks: Ranks) -> Ranks:
    """What exact deduplication must leave."""
    seen: set[str] = set()
    return [[text for text in texts if not (text in seen or seen.add(text))] for texts in ranks]  # type: ignore[func-returns-value]


def text_of(rng: random.Random, words: int = 200) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(words))


def near(rng: random.Random, text: str, changes: int = 2) -> str:
    words = text.split()
    for place in rng.sample(range(len(words)), changes):
        words[place] = text_of(rng, 1)
    return " ".join(words)


def parse(*argv: str) -> StepOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return find_step_options(parser.parse_args(argv))
