"""Removing documents that hold evaluation texts."""

import itertools
import json
import random
from pathlib import Path

from tests.conftest import refused
from tests.train.prepare.prepare_documents import parse, pipelines_of, run, text_of
from train.data.format import DataError
from train.files import sha256_file
from train.prepare.corpus import WORK_NAME
from train.prepare.filters import ngram_hashes, read_report, split_words
from train.prepare.preparation import INDEX_FOLDER


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
