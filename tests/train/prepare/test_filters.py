"""The optional filters: quality, language, evaluation texts, and all of them together."""

import hashlib
import importlib.util
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.conftest import refused
from tests.train.prepare.megatron_datasets import contents
from tests.train.prepare.prepare_documents import (
    needs_fasttext,
    needs_spacy,
    parse,
    pipelines_of,
    results,
    run,
    text_of,
)
from train import export, import_megatron, prepare_data, train_tokenizer
from train.data.format import DataError
from train.files import sha256_file
from train.prepare import filters as prepare_filters
from train.prepare.corpus import WORK_NAME
from train.prepare.executors import run_local
from train.prepare.filters import (
    QUALITY_FILTERS,
    StepOptions,
    make_filters,
    ngram_hashes,
    read_report,
    split_words,
)
from train.prepare.preparation import INDEX_FOLDER

PROSE = (
    "The old lighthouse on the northern cliff was built by the people of the village many years ago.\n"
    "They carried every stone up the steep path, and it took them more than three summers to finish.\n"
    "In winter the storms would beat against its walls, but the keeper always lit the lamp at dusk.\n"
    "Sailors who came home from distant seas used to say that they could smell the land before they saw it.\n"
    "Nobody remembers the name of the first keeper, yet his songs are still sung on quiet evenings with friends.\n"
)


@needs_spacy
@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("gopher_quality", "# " * 20 + PROSE, "gopher_too_many_hashes"),
        ("gopher_repetition", PROSE + "again and again\n" * 20, "dup_line_frac"),
        ("c4", PROSE + "The set {a, b} has two elements.", "curly_bracket"),
        ("fineweb", "a line without an end\n" * 20, "line_punct_ratio"),
    ],
)
def test_quality_filters(tmp_path: Path, name: str, bad: str, reason: str) -> None:
    texts, removed = run(parse("--quality", name), [[PROSE, bad], [bad]], tmp_path)
    assert [[text.strip() for text in rank] for rank in texts] == [[PROSE.strip()], []]
    assert removed == {f"quality {name}: {reason}": 2}


@needs_spacy
def test_stop_word_filter_is_for_english(tmp_path: Path) -> None:
    german = " ".join(["Der alte Leuchtturm wurde vor vielen Jahren von den Leuten des Dorfes gebaut."] * 5)
    kept, _ = run(parse("--quality", "gopher_quality", "--quality_language", "de"), [[german]], tmp_path)
    assert kept == [[german]]
    for english in ("en", "eng"):
        options = parse("--quality", "gopher_quality", "--quality_language", english)
        _, removed = run(options, [[german]], tmp_path)
        assert removed == {"quality gopher_quality: gopher_enough_stop_words": 1}


def test_quality_language() -> None:
    found = make_filters(StepOptions(quality=tuple(QUALITY_FILTERS), quality_language="de"), Path())
    assert {each.language for each in found.values()} == {"de"} and len(found) == 4


def test_language_without_splitter_raises() -> None:
    with refused(DataError, code="no_word_splitter", key="--quality_language"):
        parse("--quality", "c4", "--quality_language", "zzz")
    if importlib.util.find_spec("pythainlp") is None:
        with refused(DataError, code="no_word_splitter", key="--quality_language"):
            parse("--quality", "c4", "--quality_language", "th")


ENGLISH = "the house is big and we have seen the water of the river with many people".split()
GERMAN = "das haus ist gross und wir haben das wasser des flusses mit vielen leuten gesehen".split()


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fastText model of two languages."""
    fasttext = pytest.importorskip("fasttext", reason="needs the package fasttext-numpy2-wheel")
    folder, rng = tmp_path_factory.mktemp("languages"), random.Random(0)
    lines = [f"__label__{code} {' '.join(rng.choices(words, k=12))}\n"
             for _ in range(400) for code, words in (("en", ENGLISH), ("de", GERMAN))]  # fmt: skip
    (folder / "train.txt").write_text("".join(lines))
    # 11 threads: with fewer than 10, fastText 0.9.2 leaves a part of its matrix uninitialised.
    model = fasttext.train_supervised(
        str(folder / "train.txt"), dim=8, epoch=20, lr=0.2, thread=11, verbose=0, minn=2, maxn=3, bucket=2000
    )
    model.save_model(str(folder / "model.bin"))
    return folder / "model.bin"


def test_language_filter(tmp_path: Path, language_model: Path) -> None:
    model = ("--language_model", str(language_model))
    english = ["the river is big\nand the water", "we have seen"]
    ranks = [[english[0], "das haus ist gross"], [], ["wir haben das wasser", english[1]]]
    options = parse("--languages", "en", *model)
    assert options.sha256 == ((str(language_model), hashlib.sha256(language_model.read_bytes()).hexdigest()),)
    assert run(options, ranks, tmp_path) == ([english[:1], [], english[1:]], {"language": 2})
    assert run(parse("--languages", "en", "de", *model), ranks, tmp_path) == (ranks, Counter())


def test_unsuitable_language_models_raise(tmp_path: Path, language_model: Path) -> None:
    no_model = tmp_path / "text.bin"
    no_model.write_text("not a model")
    for language, file, code in (
        ("fr", language_model, "unknown_language"),
        ("en", no_model, "language_model_unusable"),
        ("en", tmp_path / "nowhere.bin", "language_model_unusable"),
    ):
        with refused(DataError, code=code):
            parse("--languages", language, "--language_model", str(file))


@needs_fasttext
def test_missing_network_or_package_error(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = Mock(side_effect=ConnectionError("no route to host"))
    monkeypatch.setattr(prepare_filters, "cached_asset_path_or_download", offline)
    with refused(DataError, code="language_model_unusable", key="--language_model"):
        parse("--languages", "en")
    monkeypatch.setattr(prepare_filters.LanguageFilter, "_requires_dependencies", ["no_such_package"])
    with refused(DataError, code="package_missing", key="--languages"):
        parse("--languages", "en")


# ---------------------------------------------------------------- evaluation texts


def test_words_in_scripts_without_spaces() -> None:
    assert split_words("the 模型 ok") == ["the", "模", "型", "ok"]
    assert split_words("กข ลາ မြ កខ かカ") == list("กขลາမြកខかカ")
    assert len(ngram_hashes("一二三四五六七八九十百千万", 13)) == 1


def test_ngram_hashes() -> None:
    words = [f"w{i}" for i in range(13)]
    hashes = [
        ngram_hashes(" ".join(order), 13).tolist()[0]
        for order in itertools.islice(itertools.permutations(words), 2000)
    ]
    assert len(set(hashes)) == 2000
    assert ngram_hashes("A, b.\n C é", 4).tolist() == ngram_hashes("a b c e", 4).tolist()
    assert ngram_hashes("a b c", 4).tolist() == []
    assert ngram_hashes("on 1 2", 3) != ngram_hashes("on 1 3", 3)


def test_decontamination(tmp_path: Path) -> None:
    rng = random.Random(4)
    first, second, chinese = text_of(rng, 20), text_of(rng, 15), "从前有座山山里有座庙庙里有个老和尚"
    plain, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text(f"{first}\n\nonly a few words\n{chinese}\n", encoding="utf-8")
    records.write_text("".join(json.dumps({"question": text}) + "\n" for text in (second, first, "short")))
    options = parse("--decontaminate", str(plain), str(records), "--decontaminate_key", "question")
    # else an unfinished preparation would resume after these files have changed
    assert options.sha256 == tuple((str(file), sha256_file(file)) for file in (plain, records))

    def part(text: str, start: int, words: int) -> str:
        return " ".join(text.split()[start : start + words])

    kept = [
        text_of(rng),
        part(first, 3, 12),
        part(first, 0, 12) + " x " + part(first, 12, 8),
        "only a few words",
    ]
    mixed = "Before. " + ",\n ".join(part(first, 5, 13).upper().split()) + "! After."
    ranks = [[kept[0], mixed, kept[1]], [f"x {second}", kept[2]], [], [kept[3], f"他说:{chinese}。"]]
    texts, removed = run(options, ranks, tmp_path)
    assert texts == [kept[:2], [kept[2]], [], [kept[3]]]
    assert removed == {f"evaluation text: {plain}": 2, f"evaluation text: {records}": 1}
    assert read_report(tmp_path / WORK_NAME / INDEX_FOLDER) == [
        {"file": str(plain), "texts": 3, "too_short": 1, "ngrams": 13},
        {"file": str(records), "texts": 3, "too_short": 1, "ngrams": 11},
    ]  # fmt: skip


def test_ngram_length_option(tmp_path: Path) -> None:
    words = text_of(random.Random(6), 20).split()
    (tmp_path / "eval.txt").write_text(" ".join(words))
    four, five = (f"x {' '.join(words[2 : 2 + n])} y" for n in (4, 5))
    options = parse("--decontaminate", str(tmp_path / "eval.txt"), "--decontaminate_ngram", "5")
    assert run(options, [[four, five]], tmp_path)[0] == [[four]]


def test_unsuitable_evaluation_files_raise(tmp_path: Path) -> None:
    short, broken = tmp_path / "short.txt", tmp_path / "broken.jsonl"
    short.write_text("too short\nas well\n")
    broken.write_text('{"text": "one"}\n{"question": "two"}\n')
    for file, code in ((short, "evaluation_texts_too_short"), (broken, "evaluation_text_unreadable")):
        options = parse("--decontaminate", str(file))
        with refused(DataError, code=code, key=str(file)):
            pipelines_of(options, [], tmp_path)
    with refused(DataError, code="file_missing"):
        parse("--decontaminate", str(tmp_path / "nowhere.txt"))


# ---------------------------------------------------------------- all filters


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
