"""Documents in memory through the steps of preparation, for their tests."""

import importlib.util
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from datatrove.data import Document

from train.prepare.corpus import WORK_NAME
from train.prepare.executors import Pipeline
from train.prepare.filters import StepOptions, build_index, find_step_options
from train.prepare.preparation import INDEX_FOLDER, Preparation
from train.prepare.tally import Tally
from train.prepare_data import parse_arguments

needs_spacy = pytest.mark.skipif(importlib.util.find_spec("spacy") is None, reason="needs the package spacy")
needs_fasttext = pytest.mark.skipif(
    importlib.util.find_spec("fasttext") is None, reason="needs the package fasttext-numpy2-wheel"
)

Ranks = list[list[str]]


@dataclass(frozen=True)
class InMemory(Preparation):
    """A preparation of the documents in `ranks`, a list of texts for each task."""

    ranks: Ranks = field(default_factory=list)

    def read(self, task: int, tally: Tally) -> Iterator[Document]:
        for number, text in enumerate(self.ranks[task]):
            yield Document(text=text, id=f"{task}/{number}")

    def write(self, documents: Iterator[Document], task: int, tally: Tally) -> None:
        texts = [document.text for document in documents]
        self.work("out").mkdir(parents=True, exist_ok=True)
        self.work(f"out/{task:05d}.json").write_text(json.dumps({"texts": texts, "removed": tally.by_step}))


def run_tasks(pipeline: Pipeline, shuffle: random.Random | None = None) -> None:
    tasks = range(pipeline.tasks)
    for task in shuffle.sample(tasks, len(tasks)) if shuffle else tasks:
        pipeline.run(task)


def pipelines_of(options: StepOptions, ranks: Ranks, folder: Path) -> list[Pipeline]:
    found = InMemory(
        inputs=(), sources=(), tokenizer=folder, tokenizer_is=("", 0, 0), output=folder, text_key="text",
        eval_fraction=0.1, eval_by=None, split_on=None, shard_tokens=1, tasks=len(ranks),
        steps=options, ranks=ranks,
    )  # fmt: skip
    if options.decontaminate:
        build_index(options, found.work(INDEX_FOLDER))
    return found.pipelines()


def results(folder: Path, ranks: Ranks) -> tuple[Ranks, Counter[str]]:
    """What each task wrote, and what all of them removed; checks that nothing is lost between the two."""
    found = [
        json.loads((folder / WORK_NAME / f"out/{rank:05d}.json").read_text()) for rank in range(len(ranks))
    ]
    for given, result in zip(ranks, found, strict=True):
        assert len(given) == len(result["texts"]) + sum(result["removed"].values())
    return [result["texts"] for result in found], sum((Counter(r["removed"]) for r in found), Counter())


def run(
    options: StepOptions, ranks: Ranks, folder: Path, shuffle: random.Random | None = None
) -> tuple[Ranks, Counter[str]]:
    """All pipelines; the tasks of each in random order with `shuffle`."""
    for pipeline in pipelines_of(options, ranks, folder):
        run_tasks(pipeline, shuffle)
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
    return find_step_options(parse_arguments(["--input", "a", "--tokenizer", "a", "--output", "a", *argv]))
