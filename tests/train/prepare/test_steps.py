"""The steps of preparation together, and their flags."""

import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datatrove.executor.local import LocalPipelineExecutor

from tests.conftest import refused
from tests.train.prepare.prepare_documents import Read, last_stage, needs_spacy, parse, results, run, text_of
from tests.train.prepare.test_prepare_data import contents
from train import export, import_megatron, prepare_data, train_tokenizer
from train.data.format import DataError
from train.prepare.steps import StepOptions, passes, report


def test_without_flags_nothing_is_done(tmp_path: Path) -> None:
    options = parse()
    assert options == StepOptions()
    assert run(options, [["a", "a"], []], tmp_path) == ([["a", "a"], []], Counter())
    assert report(options, tmp_path) == {}


@needs_spacy
@pytest.mark.process
def test_all_steps_at_once_in_the_executor(tmp_path: Path) -> None:
    rng = random.Random(0)
    secret = text_of(rng, 20)
    (tmp_path / "eval.txt").write_text(secret)
    good = [text_of(rng, 80).replace(" ", " and the ") for _ in range(3)]
    ranks = [[good[0], "too short", good[1]], [], [good[1], secret + good[2], good[2]]]
    options = parse(
        "--quality", "gopher_quality", "--decontaminate", str(tmp_path / "eval.txt"), "--dedup", "exact"
    )
    stages = passes(options, tmp_path / "scratch", 3, Read(ranks))
    for stage in [*stages, last_stage(options, ranks, tmp_path)]:
        logs = str(tmp_path / "logs" / stage.name)
        LocalPipelineExecutor(stage.pipeline, tasks=stage.tasks, workers=1, logging_dir=logs).run()
    texts, removed = results(tmp_path, ranks)
    assert texts == [[good[0], good[1]], [], [good[2]]]
    assert removed == {
        "quality gopher_quality: gopher_short_doc": 1,
        f"evaluation text: {tmp_path / 'eval.txt'}": 1,
        "duplicate (exact)": 1,
    }


def test_bad_flags_are_named_together() -> None:
    with refused(DataError, code="bad_values", key="--quality") as error:
        parse("--language_threshold", "1.5", "--language_model", "x.bin", "--quality", "c4", "c4",
              "--decontaminate", "x.txt", "x.txt", "--decontaminate_ngram", "0", "--minhash_seed", "-1")  # fmt: skip
    named = set(re.findall(r"--\w+", str(error.value)))
    assert named >= {"--quality", "--decontaminate", "--language_threshold", "--decontaminate_ngram",
                     "--minhash_seed", "--language_model"}  # fmt: skip
    for flags in (["--dedup", "fuzzy"], ["--quality", "good"], ["--languages"]):
        with pytest.raises(SystemExit):
            parse(*flags)


def test_an_evaluation_file_that_no_manifest_can_name_is_refused_at_once(tmp_path: Path) -> None:
    """In a folder, of which the name alone was given. The manifest is written when all is done."""
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("a text")
    with refused(DataError, code="name_not_utf8"):
        parse("--decontaminate", str(tmp_path))


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
def test_a_variable_that_is_not_set_is_no_folder(
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


def test_a_preparation_that_came_to_nothing_is_in_nobodys_way(
    tmp_path: Path, prepare: Callable[..., int], corpus: Path, reported: list[Any]
) -> None:
    """Its evaluation texts had another key: the message names the option, with which it was one of another kind."""
    out, test = tmp_path / "out", tmp_path / "test.jsonl"
    test.write_text('{"question": "one of three words"}\n')
    wrong = {"decontaminate": test, "eval_fraction": 0.2}
    right = {**wrong, "decontaminate_key": "question", "decontaminate_ngram": 3}
    assert prepare(out, corpus, **wrong) == 2 and reported.pop().code == "evaluation_text_unreadable"
    assert prepare(out, corpus, **right) == 0
    before = contents(out)
    assert prepare(out, corpus, **wrong, overwrite=True) == 2
    # where there are data, only --overwrite has others take their place
    assert prepare(out, corpus, **right) == 2 and reported.pop().code == "other_preparation"
    assert {name: data for name, data in contents(out).items() if "prepare_data." not in name} == before
