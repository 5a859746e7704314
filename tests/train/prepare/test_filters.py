"""Filters of quality and of language."""

import hashlib
import importlib.util
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import refused
from tests.train.prepare.prepare_documents import needs_fasttext, needs_spacy, parse, run
from train.data.format import DataError
from train.prepare import filters as prepare_filters
from train.prepare.filters import QUALITY_FILTERS, StepOptions, make_filters

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
        ("en", no_model, "not_a_language_model"),
        ("en", tmp_path / "nowhere.bin", "not_a_language_model"),
    ):
        with refused(DataError, code=code):
            parse("--languages", language, "--language_model", str(file))


@needs_fasttext
def test_missing_network_or_package_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(prepare_filters, "cached_asset_path_or_download", fail)
    with refused(DataError, code="download_failed", key="--language_model"):
        parse("--languages", "en")
    monkeypatch.setattr(prepare_filters.LanguageFilter, "_requires_dependencies", ["no_such_package"])
    with refused(DataError, code="package_missing", key="--languages"):
        parse("--languages", "en")
