"""Removing duplicates: the first of all stays, whatever the order of the tasks."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.word_tokenizers import WhitespaceTokenizer

from tests.train.prepare.megatron_datasets import contents
from tests.train.prepare.prepare_documents import (
    first_of,
    near,
    parse,
    pipelines_of,
    results,
    run,
    run_tasks,
    text_of,
)
from train.prepare import dedup as prepare_dedup
from train.prepare.dedup import link_to_first, minhash_bands, minhash_signature
from train.prepare.filters import StepOptions, hash_text

BOTH = pytest.mark.parametrize("dedup", ["exact", "minhash"])


@BOTH
@pytest.mark.parametrize("tasks", [0, 1, 3, 20])
def test_exact_dedup_keeps_the_first(tmp_path: Path, dedup: str, tasks: int) -> None:
    rng = random.Random(tasks)
    ranks = [[rng.choice("abcdefghij") * 2 for _ in range(rng.choice([0, 1, 30]))] for _ in range(tasks)]
    ranks = ranks if tasks else [[], []]
    texts, removed = run(StepOptions(dedup=dedup), ranks, tmp_path, random.Random(tasks))
    assert texts == first_of(ranks)
    assert removed.total() == sum(map(len, ranks)) - sum(map(len, texts))
    assert set(removed) <= {f"duplicate ({dedup})"}


def test_minhash_dedup(tmp_path: Path) -> None:
    rng = random.Random(1)
    base, *others = [text_of(rng) for _ in range(8)]
    variants = [near(rng, base) for _ in range(6)]
    ranks = [
        [others[0], variants[0], others[1], "two words", "other words", "...", "!"],
        [],
        [base, variants[1], others[2], others[3], "Two  words!", "one two three four five six"],
        [variants[2], others[4], variants[3], variants[4].upper() + "!", others[5], others[6]],
    ]
    for trial in range(2):
        folder = tmp_path / str(trial)
        texts, removed = run(StepOptions(dedup="minhash"), ranks, folder, random.Random(trial))
        assert texts == [ranks[0], [], [*others[2:4], ranks[2][-1]], others[4:7]]
        assert removed == {"duplicate (minhash)": 6}
    assert contents(tmp_path / "0") == contents(tmp_path / "1")


def test_dedup_runs_after_filters(tmp_path: Path) -> None:
    rng = random.Random(2)
    secret, base = text_of(rng, 13), text_of(rng)
    (tmp_path / "eval.txt").write_text(secret)
    options = parse("--decontaminate", str(tmp_path / "eval.txt"), "--dedup", "minhash")
    # The first of three near-duplicates holds the evaluation text: it goes, and the second stays.
    texts, removed = run(options, [[f"{base} {secret}", "x"], [base, near(rng, base, 1)]], tmp_path)
    assert texts == [["x"], [base]]
    assert removed == {f"evaluation text: {tmp_path / 'eval.txt'}": 1, "duplicate (minhash)": 1}


@BOTH
def test_interrupted_dedup_task(tmp_path: Path, dedup: str) -> None:
    rng = random.Random(3)
    texts = [text_of(rng, 30) for _ in range(6)]
    ranks, options = [texts[:4], texts[2:]], StepOptions(dedup=dedup)
    whole, _ = run(options, ranks, tmp_path / "whole")
    assert whole == first_of(ranks)

    folder = tmp_path / "broken"
    pipelines = pipelines_of(options, ranks, folder)
    for pipeline in pipelines[1:]:
        with pytest.raises(FileNotFoundError):
            pipeline.run(0)
    for pipeline in pipelines:
        before = contents(folder)
        run_tasks(pipeline)
        for name in contents(folder).keys() - before.keys():  # half of a killed task's file
            (folder / name).write_bytes((folder / name).read_bytes()[:-1])
        run_tasks(pipeline)
    assert results(folder, ranks) == results(tmp_path / "whole", ranks)
    assert contents(folder) == contents(tmp_path / "whole")


def test_link_to_first_finds_components() -> None:
    rng = np.random.default_rng(0)
    for nodes, count in itertools.product((2, 10, 100), (0, 1, 5, 60, 400)):
        edges = rng.integers(nodes, size=(count, 2)).astype(np.uint64)
        lowest = {int(node): int(node) for node in edges.reshape(-1)}
        for _ in range(nodes):
            for a, b in edges.tolist():
                lowest[a] = lowest[b] = min(lowest[a], lowest[b])
        expected = [[node, low] for node, low in sorted(lowest.items()) if node != low]
        assert link_to_first(edges).tolist() == expected
    path = np.stack([np.arange(1, 5000), np.arange(4999)], axis=1).astype(np.uint64)  # the longest way
    assert (link_to_first(rng.permutation(path))[:, 1] == 0).all()


@pytest.mark.parametrize("words", [5, 6, 7, 30])
def test_last_words_are_in_the_signature(words: int) -> None:
    same = [f"word{chr(97 + index)}" for index in range(words - 1)]
    one, other = (minhash_bands(" ".join([*same, last]), seed=1) for last in ("north", "south"))
    assert len(one) == len(other) == 14 and one != other


def test_signatures_equal_datatrove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of texts longer than a part, and for each seed."""
    monkeypatch.setattr(prepare_dedup, "SHINGLES", 64)
    for seed, words in ((1, 5), (5, 68), (5, 69), (5, 500)):
        block = MinhashDedupSignature(str(tmp_path), MinhashConfig(seed=seed), language=WhitespaceTokenizer())
        block._hash_func = hash_text
        parts = text_of(random.Random(words), words).split()
        shingles = [hash_text(" ".join(parts[i : i + 5])) for i in range(words - 4)]
        expected = sum(block.get_signature(np.array(shingles, np.uint64)[:, None]), [])
        assert minhash_signature(np.array(shingles, np.uint64), seed).tolist() == expected
    text = text_of(random.Random(4))
    assert len(set(minhash_bands(text, 1))) == 14 and minhash_bands(text, 1) != minhash_bands(text, 2)
