"""train/evaluate.py: its numbers against training's own, and against transformers and the plainest sums."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import MistralForCausalLM

from tests import programs
from tests.conftest import numbers
from tests.fixtures import write_jsonl
from tests.reliability.launching import clean_environment
from tests.train.prepare.test_inspect_data import documents_of
from tests.train.runs import ROOT, metrics, run
from train.checkpoint.files import RUN_STATE
from train.data.encoder import TextEncoder
from train.data.order import spread
from train.evaluate import main
from train.evaluation.models import Plan, plan_model
from train.export import export

SAMPLES = 5  # max_eval_samples of the runs


def test_a_checkpoint_has_the_loss_that_its_training_logged(
    trained: Path, data: Path, evaluated: Callable[..., dict], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the scales of training; and so has the export, in current scaling nearly."""
    logged = metrics(trained)[-1]["eval_loss"]
    report = evaluated(trained, "--max_samples", SAMPLES)
    assert (report["variant"], report["precision"], report["recipe"]) == ("te_layer", "fp8", "delayed")
    assert numbers(report["fp8"]) == [6, 7]
    result = report["sources"]["text"]
    assert result == report["all"] and result["tokens"] == 64 * SAMPLES
    assert result["loss"] == pytest.approx(logged, rel=1e-6)
    assert (report["by"], report["max_seq_length"], report["batch_size"]) == ("packed", 64, 2)
    assert (report["max_samples"], report["ranks"]) == (SAMPLES, 1) and 0 < report["seconds"] < 600
    assert result["perplexity"] == pytest.approx(math.exp(logged), rel=1e-6)
    assert f"{result['loss']:.4f}" in capsys.readouterr().out
    of_step = evaluated(trained / "checkpoints/step-00000006", data, "--max_samples", SAMPLES)
    assert of_step["all"] == result
    hf = [trained / "hf", data, "--max_seq_length", 64]
    for options, how in (
        ([trained / "checkpoints", "--precision", "bf16"], ("te_layer", "bf16", None)),
        ([*hf, "--precision", "fp8"], ("te_layer", "fp8", "current")),
        (hf, ("hf", "bf16", None)),
        ([trained, "--precision", "fp16"], ("te_layer", "fp16", None)),
        ([*hf, "--precision", "fp16"], ("hf", "fp16", None)),
    ):
        report = evaluated(*options, "--max_samples", SAMPLES)
        assert tuple(report[key] for key in ("variant", "precision", "recipe")) == how
        assert (report["fp8"] is None) == (how[1] != "fp8")
        assert report["all"]["loss"] == pytest.approx(logged, rel=2e-3)
        assert report["all"]["loss"] != pytest.approx(logged, rel=1e-6)


def test_several_sources_within_documents(
    settings: dict, data: Path, other: Path, evaluated: Callable[..., dict], tmp_path: Path
) -> None:
    """As the run mixes its own sources, with its document mask, which text has as well."""
    settings["data"] = {"sources": {"text": str(data), "other": str(other)}, "document_mask": True}
    settings |= {"model": {**settings["model"], "variant": "te_linear"}, "max_eval_samples": 7}
    output_dir = run(settings, max_steps=2, precision={"recipe": "current"})
    report = evaluated(output_dir, "--max_samples", 7)
    assert report["all"]["loss"] == pytest.approx(metrics(output_dir)[-1]["eval_loss"], rel=1e-6)
    one, two = report["sources"]["text"], report["sources"]["other"]
    assert report["all"]["tokens"] == one["tokens"] + two["tokens"] < 7 * 64  # last tokens predict nothing
    assert report["all"]["documents"] == one["documents"] + two["documents"] > 0
    mean = (one["loss"] * one["tokens"] + two["loss"] * two["tokens"]) / report["all"]["tokens"]
    assert mean == pytest.approx(report["all"]["loss"]) and one["loss"] != two["loss"]
    text = write_jsonl(tmp_path / "text.jsonl", ["one", "another one", "and the third"])
    options = (output_dir, text, "--precision", "fp32", "--max_seq_length", 128)
    row, alone = evaluated(*options)["all"], evaluated(*options, "--by", "document")["all"]
    assert row == pytest.approx(alone, rel=1e-6) and row["documents"] == 3 and row["tokens"] < 128
    cut = evaluated(*options[:-1], 16)["all"]  # where a row begins or ends within a document, or with one
    assert cut["tokens"] == row["tokens"] and cut["loss"] != row["loss"]


def plain_model(run: Path) -> MistralForCausalLM:
    return MistralForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)


def size_of(text: str) -> int:
    return len(text.encode())


def losses_of(model: MistralForCausalLM, ids: list[int], length: int, stride: int) -> torch.Tensor:
    """Of each token but the first, by the first window that has it."""
    losses, start = list[torch.Tensor](), -stride
    while len(losses) < len(ids) - 1:
        start += stride
        window = torch.tensor([ids[start : start + length + 1]])
        logits = model(window[:, :-1]).logits[0]
        of_window = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none")
        losses += of_window[len(losses) - start :]
    return torch.stack(losses).double()


@pytest.mark.parametrize("stride", [None, 20])
def test_documents_alone(
    trained: Path, other: Path, evaluated: Callable[..., dict], stride: int | None, tmp_path: Path
) -> None:
    """Against transformers, a document and a window at a time; text gives the same, with its own bytes."""
    documents, encoder = documents_of(other, "eval"), TextEncoder(other / "tokenizer")
    assert max(map(len, documents)) > 65 and min(map(len, documents)) < 60 and len(documents) > 20
    texts = [encoder.decode(ids[1:-1]) for ids in documents]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    model, size = plain_model(trained), sum(map(size_of, texts))
    with torch.no_grad():
        losses = [losses_of(model, ids, 64, stride or 64) for ids in documents]
    options = ["--by", "document", "--precision", "fp32", "--max_seq_length", 64, "--text_key", "content"]
    report = evaluated(
        trained / "hf", other, text, *options, *([] if stride is None else ["--stride", stride])
    )
    by_source = list(report["sources"].values())
    expected = {
        "loss": float(torch.cat(losses).mean()),
        "perplexity": math.exp(float(torch.cat(losses).mean())),
        "bits_per_byte": float(torch.cat([of[:-1] for of in losses]).sum()) / math.log(2) / size,
        "tokens": sum(len(ids) - 1 for ids in documents),
        "documents": len(documents),
        "bytes": size,
    }
    assert by_source == [pytest.approx(expected, rel=1e-6)] * 2
    twice = {key: 2 * expected[key] for key in ("tokens", "documents", "bytes")}
    assert report["all"] == pytest.approx(expected | twice, rel=1e-6)
    options += ["--max_samples", 11, "--stride", 64 if stride else 100]  # more would leave tokens out
    report = evaluated(trained / "hf", other, text, *options)
    chosen = [documents[number] for number in spread(11, len(documents))]  # of text the first
    assert [(p["documents"], p["tokens"]) for p in report["sources"].values()] == [
        (11, sum(len(ids) - 1 for ids in some)) for some in (chosen, documents[:11])
    ]
    assert report["stride"] == 64


def test_text_in_a_row(trained: Path, other: Path, evaluated: Callable[..., dict], tmp_path: Path) -> None:
    """Nothing of it is left out, unlike of prepared data the last tokens; else it is the same."""
    documents, encoder = documents_of(other, "eval"), TextEncoder(other / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("\n<|next|>\n".join(encoder.decode(ids[1:-1]).strip("\n") for ids in documents))
    ids = [
        i for d in documents for i in [1, *encoder.encode_batch([encoder.decode(d[1:-1]).strip("\n")])[0], 2]
    ]
    report = evaluated(trained, text, "--split_on", "<|next|>", "--precision", "fp32")
    result = report["sources"][str(text)]
    assert (result["tokens"], result["documents"]) == (len(ids) - 1, len(documents))
    model = plain_model(trained)
    with torch.no_grad():
        losses = losses_of(model, ids, 64, 64)
    assert result["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    of_text = torch.tensor([i not in (1, 2) for i in ids[1:]])
    size = size_of(text.read_text()) - (len(documents) - 1) * len("\n<|next|>\n")
    assert result["bits_per_byte"] == pytest.approx(
        float(losses[of_text].sum()) / math.log(2) / size, rel=1e-6
    )
    assert len(ids) % 64 != 1


def test_weights_in_fp8(trained: Path, data: Path, evaluated: Callable[..., dict], tmp_path: Path) -> None:
    """Multiplied out they are those that training multiplied with; the products round the activations, too."""
    folder = tmp_path / "hf-fp8"
    export(trained / "checkpoints/step-00000006", folder, data / "tokenizer", "hf-fp8")
    logged = metrics(trained)[-1]["eval_loss"]
    options = [folder, data, "--max_seq_length", 64, "--max_samples", SAMPLES]
    losses = [evaluated(*options, "--precision", p)["all"]["loss"] for p in ("bf16", "fp8")]
    assert losses == [pytest.approx(logged, rel=2e-3)] * 2 and losses[0] != losses[1]


@pytest.mark.process
def test_two_ranks(
    trained: Path, data: Path, other: Path, evaluated: Callable[..., dict], tmp_path: Path
) -> None:
    """Share the samples and the documents, and come to what one comes to."""
    text, report = tmp_path / "text.txt", tmp_path / "of_two.json"
    text.write_text("def f(x):\n    return x\n" * 9)  # less than a batch of one rank
    options = [trained, data, other, text, "--precision", "bf16"]
    command = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", "2", str(ROOT / "train/evaluate.py")]
    command += [*map(str, options), "--output", str(report)]
    done = programs.run(command, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr
    two, one = json.loads(report.read_text()), evaluated(*options)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    for name in one["sources"]:
        assert two["sources"][name] == pytest.approx(one["sources"][name], rel=1e-4), name
    assert done.stdout.count("bits/byte") == 1


def test_ctrl_c_ends_with_its_status(
    trained: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.evaluation.evaluation.evaluate", Mock(side_effect=KeyboardInterrupt))
    assert main([str(trained)]) == 130


@pytest.fixture
def planned(trained: Path, tmp_path: Path) -> Callable[..., Plan]:
    """planned(compute, section={...}) -> the plan of a checkpoint that was trained otherwise."""

    def call(compute: str | None = None, escalations: Any = (), **changes: Any) -> Plan:
        state = json.loads((trained / "checkpoints/step-00000006" / RUN_STATE).read_text())
        for key, value in changes.items():
            own = state["train_config"]
            own[key] = own[key] | value if isinstance(value, dict) else value
        state |= {"precision": state["train_config"]["precision"], "escalations": list(escalations)}
        (tmp_path / RUN_STATE).write_text(json.dumps(state))
        return plan_model(tmp_path, compute)

    return call


def test_a_checkpoint_is_evaluated_as_it_was_trained(planned: Callable[..., Plan]) -> None:
    trained: dict[str, Any] = {
        "max_seq_length": 32,
        "per_device_eval_batch_size": 6,
        "data": {"document_mask": True},
        "model": {"variant": "te_linear", "attention_backend": "unfused"},
        "speed": {"main_grad": False},
    }
    found = planned(escalations=[{"step": 1, "module": "a", "to": "current"}], **trained)
    assert (found.max_seq_length, found.batch_size, found.document_mask) == (32, 6, True)
    assert (found.variant, found.attention_backend) == ("te_linear", "unfused")
    assert found.speed is not None and found.speed.main_grad is False and found.levels == {"a": "current"}
    assert planned(precision={"backend": "transformer_engine"}).precision.backend == "auto", "this machine's"
    assert planned("bf16", [{"step": 1, "module": "a", "to": "current"}]).levels == {}
    assert planned(per_device_eval_batch_size=None, per_device_train_batch_size=4).batch_size == 4


@pytest.mark.parametrize(
    ("variant", "precision", "compute", "found"),
    [
        ("te_linear", {"compute": "bf16"}, "fp8", ("te_linear", "fp8", "current")),
        ("te_linear", {"recipe": "block"}, None, ("te_linear", "fp8", "block")),
        ("te_linear", {"recipe": "block"}, "fp8", ("te_linear", "fp8", "block")),
        ("hf", {"compute": "bf16"}, "fp8", ("te_layer", "fp8", "current")),
        ("hf", {"compute": "bf16"}, "fp32", ("hf", "fp32", "current")),
        ("torchao", {"recipe": "rowwise"}, "bf16", ("hf", "bf16", "current")),
    ],
)
def test_a_precision_that_is_asked_for_has_the_modules_for_it(
    planned: Callable[..., Plan], variant: str, precision: dict, compute: str | None, found: tuple
) -> None:
    its = planned(compute, model={"variant": variant}, precision=precision)
    assert (its.variant, its.precision.compute, its.precision.recipe) == found


def test_a_folder_is_evaluated_at_its_trained_length_or_2048_tokens(trained: Path, tmp_path: Path) -> None:
    config = json.loads((trained / "hf/config.json").read_text())
    shutil.copy(trained / "hf/model.safetensors", tmp_path)
    for positions, recorded, length in (
        (4096, None, 2048),
        (128, None, 128),
        (4096, 64, 64),
        (4096, 4096, 2048),
    ):
        keys = {"max_position_embeddings": positions, "trained_sequence_length": recorded}
        (tmp_path / "config.json").write_text(json.dumps(config | keys))
        found = plan_model(tmp_path, None)
        assert (found.max_seq_length, found.batch_size, found.levels) == (length, 8, {})


def test_a_source_without_samples_has_no_result(
    trained: Path, data: Path, tmp_path: Path, evaluated: Callable[..., dict]
) -> None:
    shutil.copytree(data, tmp_path / "another")
    options = [trained / "hf", data, tmp_path / "another", "--max_seq_length", 64, "--max_samples"]
    both, one = (evaluated(*options, samples) for samples in (2, 1))
    assert set(both["sources"]) == set(map(str, options[1:3])) and not both["notes"]
    assert len(one["sources"]) == 1 and one["all"]["tokens"] == 64
    (missing,) = both["sources"].keys() - one["sources"].keys()
    assert missing in one["notes"][0]
