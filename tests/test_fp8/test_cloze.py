"""test_fp8/compare_cloze.py: which words are targets, and how models are scored on them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from test_fp8.compare_cloze import BENCHMARK
from test_fp8.model.cloze import choose_items, find_target, score
from tests.test_fp8.running import report_of
from train.evaluation.models import Plan
from train.evaluation.texts import Documents, Source, make_batches

FILLER = [" so"] * 40  # 120 characters


class Pieces:
    """A tokenizer whose tokens are given with the texts."""

    bos_id, eos_id = 0, 1

    def __init__(self) -> None:
        self.pieces = ["<s>", "</s>"]

    def ids(self, pieces: Sequence[str]) -> np.ndarray:
        self.pieces += [piece for piece in dict.fromkeys(pieces) if piece not in self.pieces]
        return np.array([0, *map(self.pieces.index, pieces), 1])

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


class Copier(nn.Module):
    """A model that predicts what followed the last occurrence of the two tokens before."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        best = torch.zeros_like(ids)
        for index, row in enumerate(ids.tolist()):
            followed: dict[tuple[int, int], int] = {}
            for at in range(1, len(row)):
                best[index, at] = followed.get((row[at - 1], row[at]), 0)
                if at + 1 < len(row):
                    followed[row[at - 1], row[at]] = row[at + 1]
        return SimpleNamespace(logits=nn.functional.one_hot(best, self.vocab_size))


@pytest.mark.parametrize(
    ("pieces", "target"),
    [
        (["look", *FILLER, " look", "."], " look"),
        (["look", *FILLER, "(", "look", ")"], "look"),
        (["look", *FILLER, " lo", "ok", "!"], " look"),
        (["look", *FILLER, " look"], " look"),
        (["look", *FILLER[:30], " look", "."], None),  # 90 characters
        (["look", *FILLER, " looks", "."], None),
        (["see", *FILLER, " see", "."], None),
        (["1234", *FILLER, " 1234", "."], None),
        (["look", *FILLER, " lo", "ok.", "x"], None),
        (["look", *FILLER, " l", "ook", " look", "."], " look"),  # only the first is far enough
        (["look", " _look2", *FILLER, " _look2", " look", "."], " _look2"),
        (["_look2", " look", *FILLER, " _look2.", " look", "."], " look"),
        (["look", " glass", *FILLER, " look", " glass", "."], " glass"),
        (["look", " mark", *FILLER, " look", " mark", "."], " mark"),
    ],
)
def test_targets(pieces: list[str], target: str | None) -> None:
    encoder: Any = Pieces()
    ids = encoder.ids(pieces)
    found = find_target(ids, encoder)
    assert (found and encoder.decode(ids[slice(*found)].tolist())) == target
    if found and found[1] == len(ids) - 1:
        assert find_target(ids[:-1], encoder) is None, "the word may continue in the next passage"


def test_copying_model_is_scored() -> None:
    """Half of the targets follow what they followed before."""
    encoder: Any = Pieces()
    begin = ["a", "b", " look", "ing", " c", *FILLER]
    texts = [[*begin, f" {i}", *("ab" if i % 2 else "ac"), " look", "ing", "."] for i in range(20)]
    documents = Documents(64, 4, None)
    documents.add(Source("texts", encoder), [encoder.ids(text) for text in texts])
    rows = choose_items(documents, 100)
    assert len(rows) == 20 and choose_items(documents, 7)[3].tokens.tolist() == rows[3].tokens.tolist()
    assert len({row.tokens[-5] for row in rows}) == 20, "one of each document"
    batches = list(make_batches(iter(rows), 4, 64, 16))
    assert all((batch.batch.labels >= 0).sum() == 2 * len(batch.sources) for batch in batches), (
        "two tokens each"
    )
    bf16 = Precision(PrecisionConfig(compute="bf16"))
    correct, _ = score(Copier(len(encoder.pieces)), bf16, batches)
    before = torch.cat([batch.batch.input_ids[:, 48] for batch in batches])
    assert correct.tolist() == (before == encoder.pieces.index("b")).tolist() and correct.sum() == 10


def test_report(trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in FP8, and a model that copies in place of its export, on the same items."""
    build = Plan.build
    copier = Copier(512), Precision(PrecisionConfig(compute="bf16"))
    monkeypatch.setattr(Plan, "build", lambda self: build(self) if self.state else copier)
    models = ["--model", f"fp8={trained}", "--model", f"copier={trained / 'hf'}"]
    options = ["--max_seq_length", "128", "--items", "6"]
    report = report_of(BENCHMARK, tmp_path, str(data), *models, *options)
    described = report["models"]["fp8"]
    assert (described["step"], described["precision"]) == (6, "fp8") and "6 of 7" in described["fp8"][0]
    places = [(r["source"], r["row"], r["items"]) for r in report["results"]]
    assert places == [(s, m, 6) for s in ("text", "all") for m in ("fp8", "copier")]
    fp8, copied = report["results"][:2]
    assert fp8["accuracy_percent"] < copied["accuracy_percent"] < 100
    share = copied["accuracy_percent"] / 100
    assert copied["accuracy_margin"] == pytest.approx(196 * (share * (1 - share) / 6) ** 0.5)
    difference = copied["accuracy_percent"] - fp8["accuracy_percent"]
    assert copied["difference_points"] == pytest.approx(difference) and copied["difference_margin"] > 0
    alone = report_of(BENCHMARK, tmp_path, str(data), *models[2:], *options, "--batch_size", "1")
    assert alone["results"][0]["accuracy_percent"] == copied["accuracy_percent"]


def test_errors(trained: Path, data: Path, prepare: Callable[..., int], tmp_path: Path) -> None:
    model = ["--model", f"a={trained / 'hf'}"]
    assert BENCHMARK.main([str(data), *model, "--baseline", "b"]) == 2
    assert BENCHMARK.main([str(data), *model, *model]) == 2
    assert BENCHMARK.main([str(data), *model, "--max_seq_length", "16"]) == 2, "shorter than 100 characters"
    empty = tmp_path / "empty"
    assert prepare(empty, argparse.__file__, tokenizer=data / "tokenizer", eval_fraction=1e-6) == 0
    assert BENCHMARK.main([str(empty), *model]) == 2
