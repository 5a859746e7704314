"""train/evaluate.py: what cannot be evaluated, each in a line that says what to do."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checks.gemm_counts import Gemms
from tests.conftest import numbers
from tests.conftest import refused as raises_error
from tests.folders import write_word_tokenizer
from train.checkpoint.files import RunState, read_state
from train.data.format import read_manifest
from train.evaluate import main as evaluate
from train.evaluation import evaluation, models
from train.evaluation.models import EvaluationError, plan_model


@pytest.fixture
def own_hf(trained: Path, tmp_path: Path) -> Path:
    """A copy of the export, which may be damaged."""
    return shutil.copytree(trained / "hf", tmp_path / "hf")


def test_tasks_need_lm_eval(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        evaluate([str(trained), "--tasks", "hellaswag"])
    assert error.value.code == 2 and "requirements-serving.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["{none}"], "{none}"),
        (["{empty}"], "{empty}"),
        (["{data}"], "{data}"),
        (["{file}"], "{file}"),
        (["{run}", "{shards}"], "{shards}"),
        (["{hf}"], "{hf}"),
        (["{run}", "{empty}"], "{empty}"),
        (["{run}", "{half}"], "{half} has no manifest.json"),
        (["{run}", "{part}"], "{part} has no manifest.json"),
        (["{run}", "{blank}"], "{blank}"),
        (["{run}", "{key}"], "--text_key"),
        (["{run}", "{one_bad}"], "--max_dropped 1"),
        (["{run}", "{cut}", "--max_dropped", "9"], "{cut}"),
        (["{run}", "{file}", "--tokenizer", "{empty}"], "{empty}"),
        (["{run}", "--max_seq_length", "4096"], "--max_seq_length 4096"),
        (["{run}", "--max_seq_length", "7"], "--batch_size 2 x --max_seq_length 7"),
        (["{run}", "{data}", "{data}"], "DATA"),
        (["{run}", "{data}", "{data}/."], "DATA"),
        (["{run}", "--output", "{empty}/x.txt"], "{empty}/x.txt"),
        (["{run}", "--output", "{folder}"], "{folder}"),
        (["{run}", "--output", "{locked}/x.json"], "{locked}"),
        (["{run}", "--batch_size", "0"], "--batch_size"),
    ],
)
def test_invalid_options_raise(
    arguments: list[str],
    named: str,
    trained: Path,
    data: Path,
    shards: Path,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {
        "file.txt": "some text",
        "blank.txt": " \n ",
        "key.jsonl": '{"title": "a"}\n{"title": "b"}\n',
        "one_bad.jsonl": '{"text": "a"}\n{"text": null}\n',
        "cut.json": '[{"text": "a"}, {"text": "b"',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "half/prepare_data.unfinished").mkdir(parents=True)
    shutil.copytree(data, tmp_path / "part", ignore=shutil.ignore_patterns("manifest.json"))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path / "locked")  # root may all
    folders = ("none", "empty", "half", "part", "folder.json", "locked")
    places = {name.split(".")[0]: str(tmp_path / name) for name in (*folders, *texts)}
    places |= {"run": str(trained), "hf": str(trained / "hf"), "data": str(data), "shards": str(shards)}
    assert named.format(**places) in refused(*(argument.format(**places) for argument in arguments))


def test_skipped_document_is_named(
    trained: Path, tmp_path: Path, evaluated: Callable[..., dict], capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "some text"}\n{"text": null}\n')
    report = evaluated(trained, text, "--max_dropped", 1)
    assert report["all"]["documents"] == 1 and f"{text}:2:" in capsys.readouterr().err
    assert len(report["notes"]) == 1 and str(text) in report["notes"][0]


def test_vocabulary_larger_than_the_model_raises(
    trained: Path,
    tmp_path: Path,
    prepare: Callable[..., int],
    refused: Callable[..., str],
) -> None:
    words = ["<s>", "</s>", *(f"w{i}" for i in range(598))]  # more than the model's 512 ids
    large_vocabulary = write_word_tokenizer(tmp_path / "large", {word: i for i, word in enumerate(words)})
    text = tmp_path / "text.txt"
    text.write_text("".join(f"w{i} w597\n\n" for i in range(60)))
    options = trained, "--tokenizer", large_vocabulary
    assert {599, 512} <= {*numbers(refused(*options, text))}
    assert (
        prepare(tmp_path / "data", text, tokenizer=large_vocabulary, split_on="blank_line", eval_fraction=0.5)
        == 0
    )
    assert {599, 512} <= {*numbers(refused(*options, tmp_path / "data"))}


def test_vocabulary_smaller_than_the_model(
    trained: Path, shards: Path, evaluated: Callable[..., dict]
) -> None:
    assert read_manifest(shards).vocab_size == 400  # of 512
    options = "--tokenizer", shards / "tokenizer", "--max_samples", 1
    assert evaluated(trained, shards, *options)["all"]["tokens"] > 0


def test_folder_without_tokenizer_raises(
    own_hf: Path,
    data: Path,
    tmp_path: Path,
    evaluated: Callable[..., dict],
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prepared data have their own, and that it is the model's nobody can say."""
    for file in own_hf.glob("tokenizer*"):
        file.unlink()
    evaluated(own_hf, data, "--max_seq_length", 64, "--max_samples", 1)
    assert f"warning: {own_hf} " in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("some text")
    assert str(own_hf) in refused(own_hf, tmp_path / "text.txt")


def test_changed_training_data_raise(
    trained: Path,
    shards: Path,
    tmp_path: Path,
    evaluated: Callable[..., dict],
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tokenizer is not the model's, or they are gone. The export has it."""
    text = tmp_path / "text.txt"
    text.write_text("some text")

    def changed(path: Path) -> RunState:
        state = read_state(path)
        state.train_config["data"]["sources"] = {"text": str(folder)}
        return state

    monkeypatch.setattr(models, "read_state", changed)
    for folder in (shards, tmp_path / "gone"):
        assert evaluated(trained, text)["all"]["bytes"] == len("some text")
        assert str(folder) in refused(trained)


def test_damaged_weights_raise(
    trained: Path, own_hf: Path, own_trained: Path, data: Path, refused: Callable[..., str]
) -> None:
    weights = load_file(own_hf / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, own_hf / "model.safetensors")
    assert "model.norm.weight" in refused(own_hf, data, "--max_seq_length", 64)
    config = json.loads((own_hf / "config.json").read_text())
    (own_hf / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    assert "model_type 'qwen2'" in refused(own_hf, data, "--max_seq_length", 64)
    last = own_trained / "checkpoints/step-00000006"
    with (last / "rank_00000.pt").open("ab") as file:
        file.write(b"x")
    assert "rank_00000.pt" in refused(last)


def test_newest_intact_checkpoint_is_evaluated(
    own_trained: Path, evaluated: Callable[..., dict], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any, the export."""
    (own_trained / "checkpoints/step-00000006/rank_00000.pt").unlink()
    assert "step-00000003, step 3" in evaluated(own_trained, "--max_samples", 1)["model"]
    assert "step-00000006" in capsys.readouterr().err
    sources = json.loads((own_trained / "train_config.json").read_text())["data"]["sources"]
    shutil.rmtree(own_trained / "checkpoints")
    report = evaluated(own_trained, sources["text"], "--max_seq_length", 64)
    assert (report["variant"], report["precision"]) == ("hf", "bf16") and "run/hf" in report["model"]


def test_missing_fp8_raises(
    trained: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any batch: one has 8 products."""
    right, products = Gemms._record_gemm, list[int]()

    def note(gemms: Gemms) -> None:
        products.append(1)
        if len(products) <= 9:
            right(gemms)

    monkeypatch.setattr(Gemms, "_record_gemm", note)
    assert numbers(refused(trained, "--max_samples", 4))[0] == 5
    monkeypatch.setattr(Gemms, "_record_gemm", lambda gemms: None)
    assert "precision.compute" in refused(trained)


def test_changed_content_raises(
    trained: Path, other: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = shutil.copytree(other, tmp_path / "data")
    shard = folder / read_manifest(folder).split_shards("eval")[0].name
    ids = bytearray(shard.read_bytes())
    ids[10:12] = (600).to_bytes(2, "little")
    shard.write_bytes(ids)
    options = trained, folder, "--by", "document"
    assert numbers(refused(*options))[-2:] == [600, 512]
    index = shard.with_name(shard.name + ".index")
    index.write_bytes(index.read_bytes()[8:16] + index.read_bytes()[8:])
    assert index.name in refused(*options)
    shard.write_bytes(ids[:-2])
    assert shard.name in refused(*options)


def test_unknown_text_bytes() -> None:
    """Bits per byte are of text that was read, or of decoded tokens; None without text."""
    sums = torch.tensor([[6.0, 5.0, 3.0, 2.0, 1.0], [6.0, 5.0, 3.0, 0.0, 1.0], [8.0, 8.0, 4.0, 0.0, 2.0]])
    sources: list[Any] = [
        SimpleNamespace(name=name, text_bytes=size) for name, size in zip("abc", (None, None, 4), strict=True)
    ]
    by_source, everything = evaluation.compute_results(sums.double(), sources)
    bits = [by_source[name]["bits_per_byte"] for name in "abc"]
    assert bits == [pytest.approx(5 / math.log(2) / 2), None, pytest.approx(8 / math.log(2) / 4)]
    assert everything["bytes"] == 6
    assert (everything["loss"], everything["tokens"], everything["documents"]) == (2.0, 10, 4)
    lines = evaluation.table(by_source, everything).splitlines()
    assert lines[2].split() == ["b", "1", "3", "2.0000", "7.39", "?"]
    by_source["a"]["perplexity"] = None
    assert evaluation.table(by_source, everything).splitlines()[1].split()[4] == "?"
    sums[1, evaluation.TOKENS] = 0
    assert set(evaluation.compute_results(sums.double(), sources)[0]) == {"a", "c"}
    sums[:, evaluation.TOKENS] = 0
    with raises_error(EvaluationError, code="nothing_to_predict", key="a, b, c"):
        evaluation.compute_results(sums.double(), sources)


def test_training_data_lookup(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As training finds them: in the repository, where a relative folder is not here."""
    model = plan_model(trained / "checkpoints/step-00000006", None)
    assert model.state is not None
    model.state.train_config["data"]["sources"] = {"text": data.name, "gone": "gone"}
    monkeypatch.setattr("train.files.REPOSITORY", data.parent)
    monkeypatch.chdir(tmp_path)
    assert model.sources() == {"text": str(data), "gone": "gone"}
    assert model.tokenizer_folder(None) == data / "tokenizer"
