"""The steps of preparation together, and their flags."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.prepare.megatron_datasets import contents
from tests.train.prepare.prepare_documents import needs_spacy, parse, pipelines_of, results, run, text_of
from train import export, import_megatron, prepare_data, train_tokenizer
from train.prepare.executors import run_local
from train.prepare.filters import StepOptions


def test_no_steps_by_default(tmp_path: Path) -> None:
    assert parse() == StepOptions()
    assert run(parse(), [["a", "a"], []], tmp_path) == ([["a", "a"], []], Counter())


@needs_spacy
def test_all_steps_together(tmp_path: Path) -> None:
    rng = random.Random(0)
    secret = text_of(rng, 20)
    (tmp_path / "eval.txt").write_text(secret)
    good = [text_of(rng, 80).replace(" ", " and the ") for _ in range(3)]
    ranks = [[good[0], "too short", good[1]], [], [good[1], secret + good[2], good[2]]]
    options = parse(
        "--quality", "gopher_quality", "--decontaminate", str(tmp_path / "eval.txt"), "--dedup", "exact"
    )
    run_local(pipelines_of(options, ranks, tmp_path), tmp_path / "stages", workers=1)
    texts, removed = results(tmp_path, ranks)
    assert texts == [[good[0], good[1]], [], [good[2]]]
    assert removed == {
        "quality gopher_quality: gopher_short_doc": 1,
        f"evaluation text: {tmp_path / 'eval.txt'}": 1,
        "duplicate (exact)": 1,
    }


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (prepare_data, ["--input", "", "--tokenizer", "{tokenizer}", "--output", "out"]),
        (prepare_data, ["--input", "text.txt", "--tokenizer", "{tokenizer}", "--output", ""]),
        (train_tokenizer, ["--input", "text.txt", "", "--vocab_size", "300", "--output", "out"]),
        (train_tokenizer, ["--input", "text.txt", "--vocab_size", "300", "--output", ""]),
        (import_megatron, ["--input", "text", "--tokenizer", "{tokenizer}", "--output", ""]),
        (export, ["run", ""]),
    ],
)
def test_empty_path_raises(
    program: Any,
    words: list[str],
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As "" it was the one in which the command is given: read as text, or written to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("not to be read")
    monkeypatch.setattr("sys.argv", ["program", *(w.format(tokenizer=tokenizer_dir) for w in words)])
    with pytest.raises(SystemExit) as ended:
        sys.exit(program.main())
    assert ended.value.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_refused_preparation_leaves_no_files(
    tmp_path: Path, prepare: Callable[..., int], corpus: Path, reported: list[Any]
) -> None:
    """Its evaluation texts had another key: the message names the option, with which it is another preparation."""
    out, test = tmp_path / "out", tmp_path / "test.jsonl"
    test.write_text('{"question": "one of three words"}\n')
    wrong = {"decontaminate": test, "eval_fraction": 0.2}
    right = {**wrong, "decontaminate_key": "question", "decontaminate_ngram": 3}
    assert prepare(out, corpus, **wrong) == 2 and reported.pop().code == "evaluation_text_unreadable"
    assert list(out.iterdir()) == []
    assert prepare(out, corpus, **right) == 0
    before = contents(out)
    assert prepare(out, corpus, **wrong, overwrite=True) == 2 and contents(out) == before
