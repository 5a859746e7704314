import argparse
import hashlib
import importlib.util
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import dill
import numpy as np
import pytest
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

from train import prepare_dedup, prepare_filters, prepare_minhash
from train.data_format import DataError
from train.prepare_decontaminate import HASHES, build_index
from train.prepare_minhash import MinhashSignature, link_to_first
from train.prepare_steps import StepOptions, add_arguments, filters, options_of, passes, removal, report
from train.prepare_tally import Stage, Tally
from train.prepare_words import ngram_hashes, split_words

needs_spacy = pytest.mark.skipif(importlib.util.find_spec("spacy") is None, reason="needs the package spacy")
needs_fasttext = pytest.mark.skipif(
    importlib.util.find_spec("fasttext") is None, reason="needs the package fasttext-numpy2-wheel"
)

Ranks = list[list[str]]


class Read(PipelineStep):
    """The documents of each task, from memory."""

    def __init__(self, ranks: Ranks, fail_after: int | None = None) -> None:
        super().__init__()
        self.ranks, self.fail_after = ranks, fail_after

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for number, text in enumerate(self.ranks[rank]):
            if number == self.fail_after:
                raise KeyboardInterrupt
            yield Document(text=text, id=f"{rank}/{number}")


class Write(PipelineStep):
    """What comes out of a task, and its counts, as a file; refers to the tally as the block of the last stage does."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__()
        self.folder, self.tally = folder, tally

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        texts = [document.text for document in data]
        self.folder.mkdir(parents=True, exist_ok=True)
        result = {"texts": texts, "removed": self.tally.by_step}
        (self.folder / f"{rank:05d}.json").write_text(json.dumps(result))


def run_stage(stage: Stage, order: list[int] | None = None) -> None:
    """Run the tasks of a stage, each with the pipeline as a worker gets it: pickled, then copied."""
    for rank in order or range(stage.tasks):
        data = None
        for block in deepcopy(dill.loads(dill.dumps(stage.pipeline))):
            data = block(data, rank, stage.tasks)
        deque(data or (), maxlen=0)


def last_stage(options: StepOptions, ranks: Ranks, folder: Path) -> Stage:
    tally = Tally()
    blocks = [*filters(options, folder / "scratch", tally), *removal(options, folder / "scratch", tally)]
    return Stage("last", [Read(ranks), *blocks, Write(folder / "out", tally)], len(ranks))


def results(folder: Path, ranks: Ranks) -> tuple[Ranks, Counter[str]]:
    """What each task wrote, and what all of them removed; checks that nothing is lost between the two."""
    found = [json.loads((folder / "out" / f"{rank:05d}.json").read_text()) for rank in range(len(ranks))]
    for given, result in zip(ranks, found, strict=True):
        assert len(given) == len(result["texts"]) + sum(result["removed"].values())
    return [result["texts"] for result in found], sum((Counter(r["removed"]) for r in found), Counter())


def run(
    options: StepOptions, ranks: Ranks, folder: Path, shuffle: random.Random | None = None
) -> tuple[Ranks, Counter[str]]:
    """All stages; the tasks of each in random order with `shuffle`."""
    stages = passes(options, folder / "scratch", len(ranks), lambda: [Read(ranks)])
    for stage in [*stages, last_stage(options, ranks, folder)]:
        order = list(range(stage.tasks))
        if shuffle:
            shuffle.shuffle(order)
        run_stage(stage, order)
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
    return options_of(parser.parse_args(argv))


def tree_hashes(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---------------------------------------------------------------- none, and all


def test_without_flags_nothing_is_done(tmp_path: Path) -> None:
    options = parse()
    assert options == StepOptions()
    assert run(options, [["a", "a"], []], tmp_path) == ([["a", "a"], []], Counter())
    assert report(options, tmp_path) == {}


@needs_spacy
def test_all_steps_at_once_in_the_executor(tmp_path: Path) -> None:
    rng = random.Random(0)
    secret = text_of(rng, 20)
    (tmp_path / "eval.txt").write_text(secret)
    good = [text_of(rng, 80).replace(" ", " and the ") for _ in range(3)]
    ranks = [[good[0], "too short", good[1]], [], [good[1], secret + good[2], good[2]]]
    options = parse(
        "--quality", "gopher_quality", "--decontaminate", str(tmp_path / "eval.txt"), "--dedup", "exact"
    )
    stages = passes(options, tmp_path / "scratch", 3, lambda: [Read(ranks)])
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


# ---------------------------------------------------------------- duplicates


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
    broken = passes(options, folder / "scratch", 2, lambda: [Read(ranks, fail_after=3)])
    with pytest.raises(KeyboardInterrupt):
        run_stage(broken[0], [1])
    stages = passes(options, folder / "scratch", 2, lambda: [Read(ranks)])
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
def test_a_missing_stage_and_changed_documents_are_errors(tmp_path: Path, dedup: str) -> None:
    ranks = [["a b c", "d e f"], ["a b c"]]
    options = StepOptions(dedup=dedup)
    stages = passes(options, tmp_path / "scratch", 2, lambda: [Read(ranks)])
    run_stage(stages[0], [0])
    for stage in (stages[1], last_stage(options, ranks, tmp_path)):
        with pytest.raises(DataError, match="an earlier stage has not ended"):
            run_stage(stage)
    for stage in stages:
        run_stage(stage)
    for changed in (["a b c", "other"], ["a b c"], ["d e f", "a b c"]):
        with pytest.raises(DataError, match="the input or the packages have changed meanwhile"):
            run_stage(last_stage(options, [changed, ranks[1]], tmp_path), [0])


def test_too_many_tasks_or_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--tasks 70000 with --dedup: at most 65535"):
        passes(StepOptions(dedup="exact"), tmp_path, 70_000, lambda: [Read([])])
    monkeypatch.setattr(prepare_dedup.resource, "getrlimit", lambda _: (64, 300))
    with pytest.raises(DataError, match="needs 556 open files at once, the limit here is 300"):
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
    monkeypatch.setattr(prepare_minhash, "SHINGLES", 64)
    block = MinhashSignature(tmp_path, MinhashConfig(seed=5))
    for words in (5, 68, 69, 500):
        shingles = block.get_shingles(text_of(random.Random(words), words))
        assert len(shingles) == words - 4
        assert block.get_signature(shingles) == MinhashDedupSignature.get_signature(block, shingles)


# ---------------------------------------------------------------- evaluation texts


def test_words_of_scripts_without_spaces() -> None:
    assert split_words("the 模型 ok") == ["the", "模", "型", "ok"]
    assert len(ngram_hashes("一二三四五六七八九十百千万", 13)) == 1


def test_ngram_hashes_tell_words_and_their_order() -> None:
    words = [f"w{i}" for i in range(13)]
    hashes = [
        ngram_hashes(" ".join(order), 13).tolist()[0]
        for order in itertools.islice(itertools.permutations(words), 2000)
    ]
    assert len(set(hashes)) == 2000
    assert ngram_hashes("A, b.\n C é", 4).tolist() == ngram_hashes("a b c e", 4).tolist()
    assert ngram_hashes("a b c", 4).tolist() == []
    assert ngram_hashes("on 1 2", 3) != ngram_hashes("on 1 3", 3)


def test_decontamination_removes_documents_with_an_ngram(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(4)
    first, second, chinese = text_of(rng, 20), text_of(rng, 15), "从前有座山山里有座庙庙里有个老和尚"
    plain, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text(f"{first}\n\nonly a few words\n{chinese}\n", encoding="utf-8")
    records.write_text("".join(json.dumps({"question": text}) + "\n" for text in (second, first, "short")))
    options = parse("--decontaminate", str(plain), str(records), "--decontaminate_key", "question")

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
    assert report(options, tmp_path / "scratch") == {"evaluation_files": [
        {"file": str(plain), "texts": 3, "too_short": 1, "ngrams": 13},
        {"file": str(records), "texts": 3, "too_short": 1, "ngrams": 11},
    ]}  # fmt: skip
    assert "11 n-grams of 3 texts, of which 1 are not looked for: under 13 words" in capsys.readouterr().err


def test_the_index_is_the_same_when_built_again(tmp_path: Path) -> None:
    file = tmp_path / "eval.txt"
    file.write_text(text_of(random.Random(5), 100))
    build_index((str(file),), "text", 8, tmp_path / "index")
    before = tree_hashes(tmp_path / "index")
    (tmp_path / "index" / HASHES).write_bytes(b"half")
    build_index((str(file),), "text", 8, tmp_path / "index")
    assert tree_hashes(tmp_path / "index") == before


def test_evaluation_files_that_cannot_serve(tmp_path: Path) -> None:
    short, broken = tmp_path / "short.txt", tmp_path / "broken.jsonl"
    short.write_text("too short\nas well\n")
    broken.write_text('{"text": "one"}\n{"question": "two"}\n')
    for file, message in ((short, "none of the 2 texts of .*short.txt has 13 words"),
                          (broken, "broken.jsonl:2: missing key: .*--decontaminate_key")):  # fmt: skip
        options = parse("--decontaminate", str(file))
        with pytest.raises(DataError, match=message):
            passes(options, tmp_path, 1, lambda: [Read([])])
    with pytest.raises(ValueError, match="nowhere.txt does not exist"):
        parse("--decontaminate", str(tmp_path / "nowhere.txt"))


# ---------------------------------------------------------------- quality and language


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
def test_c4_removes_lines_before_duplicates_are_searched(tmp_path: Path) -> None:
    ranks = [[PROSE + "Click here\n"], [PROSE + "Home | About\n"]]
    texts, removed = run(parse("--quality", "c4", "--dedup", "exact"), ranks, tmp_path)
    assert texts == [[PROSE.strip()], []]
    assert removed == {"duplicate (exact)": 1}


@needs_spacy
def test_stop_words_are_asked_of_english_alone(tmp_path: Path) -> None:
    german = " ".join(["Der alte Leuchtturm wurde vor vielen Jahren von den Leuten des Dorfes gebaut."] * 5)
    kept, _ = run(parse("--quality", "gopher_quality", "--quality_language", "de"), [[german]], tmp_path)
    assert kept == [[german]]
    _, removed = run(parse("--quality", "gopher_quality"), [[german]], tmp_path)
    assert removed == {"quality gopher_quality: gopher_enough_stop_words": 1}


def test_a_language_without_a_splitter_is_an_error_at_start() -> None:
    with pytest.raises(DataError, match="--quality_language zzz: .*doesn't have a tokenizer assigned"):
        parse("--quality", "c4", "--quality_language", "zzz")
    if importlib.util.find_spec("pythainlp") is None:
        with pytest.raises(DataError, match="install `pythainlp`"):
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


def test_languages_by_a_local_model(tmp_path: Path, language_model: Path) -> None:
    options = parse("--languages", "en", "--language_model", str(language_model))
    ranks = [
        ["the river is big\nand the water", "das haus ist gross"],
        [],
        ["wir haben das wasser", "we have seen"],
    ]
    texts, removed = run(options, ranks, tmp_path)
    assert texts == [ranks[0][:1], [], ranks[2][1:]]
    assert removed == {"language": 2}
    both = parse("--languages", "en", "de", "--language_model", str(language_model))
    assert run(both, ranks, tmp_path) == (ranks, Counter())
    assert options.sha256 == ((str(language_model), hashlib.sha256(language_model.read_bytes()).hexdigest()),)


def test_language_models_that_cannot_serve(tmp_path: Path, language_model: Path) -> None:
    no_model = tmp_path / "text.bin"
    no_model.write_text("not a model")
    for code, file, message in (
        ("fr", language_model, "--languages fr: .*model.bin does not know them; it knows de, en"),
        ("en", no_model, "text.bin is no fastText model"),
        ("en", tmp_path / "nowhere.bin", "nowhere.bin does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            parse("--languages", code, "--language_model", str(file))


@needs_fasttext
def test_no_network_names_the_flag_for_a_local_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(prepare_filters, "cached_asset_path_or_download", fail)
    with pytest.raises(DataError, match="no route to host.*--language_model FILE"):
        parse("--languages", "en")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_filters.LanguageFilter, "_requires_dependencies", ["no_such_package"])
    with pytest.raises(DataError, match="install `no_such_package`"):
        parse("--languages", "en")


def test_bad_flags_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError) as error:
        parse("--language_threshold", "1.5", "--language_model", "x.bin", "--quality", "c4", "c4",
              "--decontaminate_ngram", "0", "--minhash_seed", "-1")  # fmt: skip
    for message in ("--quality has c4 more than once", "--language_threshold 1.5: allowed is 0 to 1",
                    "--decontaminate_ngram 0: allowed is 1 to 100", "--minhash_seed -1",
                    "--language_model without --languages"):  # fmt: skip
        assert message in str(error.value)
    for flags in (["--dedup", "fuzzy"], ["--quality", "good"], ["--languages"]):
        with pytest.raises(SystemExit):
            parse(*flags)
        assert flags[0] in capsys.readouterr().err
