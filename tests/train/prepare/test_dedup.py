"""Removing duplicates: the first of all stays, whatever the order of the tasks."""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

from tests.conftest import refused
from tests.train.prepare.prepare_documents import (
    Read,
    first_of,
    last_stage,
    near,
    parse,
    results,
    run,
    run_stage,
    text_of,
    tree_hashes,
)
from train.data.format import DataError
from train.prepare import dedup as prepare_dedup
from train.prepare.dedup import MinhashSignature, link_to_first
from train.prepare.steps import StepOptions, passes


def test_exact_keeps_the_first_across_tasks(tmp_path: Path) -> None:
    # datatrove's own search keeps the second "twice", whose number in its task is the lower one.
    ranks = [["a", "b", "twice"], [], ["twice", "c", "c"], ["c ", "b"]]
    texts, removed = run(StepOptions(dedup="exact"), ranks, tmp_path)
    assert texts == [["a", "b", "twice"], [], ["c"], ["c "]]
    assert removed == {"duplicate (exact)": 3}


@pytest.mark.parametrize("tasks", [1, 3, 20])
def test_exact_does_not_depend_on_the_order_of_tasks(tmp_path: Path, tasks: int) -> None:
    rng = random.Random(tasks)
    ranks = [[str(rng.randrange(100)) for _ in range(rng.choice([0, 1, 30]))] for _ in range(tasks)]
    for trial in range(2):
        texts, _ = run(StepOptions(dedup="exact"), ranks, tmp_path / str(trial), random.Random(trial))
        assert texts == first_of(ranks)


@pytest.mark.parametrize("dedup", ["exact", "minhash"])
def test_a_folder_that_a_glob_takes_for_a_pattern_makes_no_difference(tmp_path: Path, dedup: str) -> None:
    text = " ".join(map(str, range(60)))
    for name in ("plain", "v[1]", "all*of?them"):
        texts, removed = run(StepOptions(dedup=dedup), [["a", text], [text, "b"]], tmp_path / name)
        assert texts == [["a", text], ["b"]] and removed.total() == 1


def test_minhash_keeps_the_first_of_near_duplicates_and_all_different_ones(tmp_path: Path) -> None:
    rng = random.Random(1)
    base, *others = [text_of(rng) for _ in range(8)]
    variants = [near(rng, base) for _ in range(6)]
    ranks = [
        [others[0], variants[0], others[1]],
        [],
        [base, variants[1], others[2], others[3]],
        [variants[2], others[4], variants[3], variants[4].upper() + "!", others[5], others[6]],
    ]
    for trial in range(2):
        folder = tmp_path / str(trial)
        texts, removed = run(StepOptions(dedup="minhash"), ranks, folder, random.Random(trial))
        assert texts == [ranks[0], [], others[2:4], others[4:7]]
        assert removed == {"duplicate (minhash)": 5}
    assert tree_hashes(tmp_path / "0") == tree_hashes(tmp_path / "1")


def test_minhash_seed_chooses_the_hashes(tmp_path: Path) -> None:
    text, found = text_of(random.Random(4)), []
    for words in ((), ("--minhash_seed", "1"), ("--minhash_seed", "7")):
        block: Any = passes(parse("--dedup", "minhash", *words), tmp_path, 1, Read([]))[0].pipeline[-1]
        found.append(block.get_signature(block.get_shingles(text)))
    assert found[0] == found[1] != found[2]


def test_minhash_finds_equal_short_texts(tmp_path: Path) -> None:
    ranks = [["two words", "other words", "...", "!"], ["Two  words!", "one two three four five six"]]
    texts, _ = run(StepOptions(dedup="minhash"), ranks, tmp_path)
    assert texts == [ranks[0], ranks[1][1:]]


@pytest.mark.parametrize("dedup", ["exact", "minhash"])
def test_no_documents_and_no_duplicates(tmp_path: Path, dedup: str) -> None:
    for number, ranks in enumerate([[[]], [[], [], []], [["a b c"], [], ["d e f"]]]):
        texts, removed = run(StepOptions(dedup=dedup), ranks, tmp_path / str(number))
        assert (texts, removed) == (ranks, Counter())


def test_duplicates_are_searched_among_what_the_filters_leave(tmp_path: Path) -> None:
    rng = random.Random(2)
    secret, base = text_of(rng, 13), text_of(rng)
    (tmp_path / "eval.txt").write_text(secret)
    options = parse("--decontaminate", str(tmp_path / "eval.txt"), "--dedup", "minhash")
    # The first of three near-duplicates holds the evaluation text: it goes, and the second stays.
    texts, removed = run(options, [[f"{base} {secret}", "x"], [base, near(rng, base, 1)]], tmp_path)
    assert texts == [["x"], [base]]
    assert removed == {f"evaluation text: {tmp_path / 'eval.txt'}": 1, "duplicate (minhash)": 1}


@pytest.mark.parametrize("dedup", ["exact", "minhash"])
def test_a_task_that_was_interrupted_runs_again(tmp_path: Path, dedup: str) -> None:
    rng = random.Random(3)
    texts = [text_of(rng, 30) for _ in range(6)]
    ranks = [texts[:4], texts[2:]]
    options = StepOptions(dedup=dedup)
    whole, _ = run(options, ranks, tmp_path / "whole")
    assert whole == first_of(ranks)

    folder = tmp_path / "broken"
    broken = passes(options, folder / "scratch", 2, Read(ranks, fail_after=3))
    with pytest.raises(KeyboardInterrupt):
        run_stage(broken[0], [1])
    stages = passes(options, folder / "scratch", 2, Read(ranks))
    for stage in stages:
        before = tree_hashes(folder)
        run_stage(stage)
        for name in tree_hashes(folder).keys() - before.keys():  # a killed task's: half of it, or unsorted
            (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"garbage")
        run_stage(stage)
    run_stage(last_stage(options, ranks, folder))
    assert results(folder, ranks) == results(tmp_path / "whole", ranks)
    assert tree_hashes(folder) == tree_hashes(tmp_path / "whole")


@pytest.mark.parametrize("dedup", ["exact", "minhash"])
def test_a_missing_stage_is_an_error(tmp_path: Path, dedup: str) -> None:
    ranks = [["a b c", "d e f"], ["a b c"]]
    options = StepOptions(dedup=dedup)
    stages = passes(options, tmp_path / "scratch", 2, Read(ranks))
    run_stage(stages[0], [0])
    for stage in (stages[1], last_stage(options, ranks, tmp_path)):
        with refused(DataError, code="stage_unfinished"):
            run_stage(stage)


def test_too_many_tasks_or_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with refused(DataError, code="too_many_tasks", key="--tasks"):
        passes(StepOptions(dedup="exact"), tmp_path, 70_000, Read([]))
    passes(StepOptions(dedup="exact"), tmp_path, 65_535, Read([]))
    monkeypatch.setattr(prepare_dedup.resource, "getrlimit", lambda _: (64, 600))
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(prepare_dedup.resource, "setrlimit", lambda _, limit: limits.append(limit))
    prepare_dedup.allow_open_files(300)
    assert limits == [(556, 600)]
    monkeypatch.setattr(prepare_dedup.resource, "getrlimit", lambda _: (64, 300))
    with refused(DataError, code="too_few_open_files", key="--tasks"):
        prepare_dedup.allow_open_files(300)


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
    path = np.stack([np.arange(1, 5000), np.arange(4999)], axis=1).astype(
        np.uint64
    )  # the longest way to the first
    assert (link_to_first(rng.permutation(path))[:, 1] == 0).all()


def test_long_texts_have_datatroves_signature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prepare_dedup, "SHINGLES", 64)
    block = MinhashSignature(tmp_path, MinhashConfig(seed=5))
    for words in (5, 68, 69, 500):
        shingles = block.get_shingles(text_of(random.Random(words), words))
        assert len(shingles) == words - 4
        assert block.get_signature(shingles) == MinhashDedupSignature.get_signature(block, shingles)
