"""train/evaluate.py: its numbers against training's own, and against transformers and the plainest sums."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import MistralForCausalLM

from tests import programs
from tests.conftest import numbers
from tests.fixtures import write_jsonl
from tests.reliability.launching import clean_environment
from tests.train.prepare.megatron_datasets import imported
from tests.train.runs import ROOT, curve, metrics, run
from train.checkpoint.files import RUN_STATE
from train.data.encoder import TextEncoder
from train.data.order import spread
from train.data.stream import NO_LABEL
from train.evaluate import main
from train.evaluation.models import Plan, plan_model
from train.evaluation.texts import Documents, Source
from train.export import export

SAMPLES = 5  # max_eval_samples of the runs


def test_loss_equals_logged_loss(
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
    expected = {"by": "packed", "max_seq_length": 64, "batch_size": 2, "max_samples": SAMPLES, "ranks": 1}
    assert report | expected == report and 0 < report["seconds"] < 600
    assert f"{result['loss']:.4f}" in capsys.readouterr().out
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


def test_several_sources_with_document_mask(
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
    assert report["all"]["documents"] is one["documents"] is None  # a sample has parts of documents
    assert [two["loss"], report["all"]["loss"]] == pytest.approx(
        [metrics(output_dir)[-1][f"eval_loss{name}"] for name in ("/other", "")], rel=1e-6
    )
    mean = (one["loss"] * one["tokens"] + two["loss"] * two["tokens"]) / report["all"]["tokens"]
    assert mean == pytest.approx(report["all"]["loss"]) and one["loss"] != two["loss"]
    text = write_jsonl(tmp_path / "text.jsonl", ["one", "another one", "and the third"])
    options = (output_dir, text, "--precision", "fp32", "--max_seq_length", 128)
    row, alone = evaluated(*options)["all"], evaluated(*options, "--by", "document")["all"]
    assert row == pytest.approx(alone, rel=1e-6) and row["documents"] == 3 and row["tokens"] < 128
    cut = evaluated(*options[:-1], 16)["all"]  # where a row begins or ends within a document, or with one
    assert cut["tokens"] == row["tokens"] and cut["loss"] != row["loss"]


@torch.no_grad()
def expected_result(run: Path, rows: list[list[int]], documents: list[list[int]], size: int) -> Any:
    """Return the result of transformers in windows of 64 tokens."""
    model = MistralForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    losses = list[torch.Tensor]()
    for ids in rows:
        for start in range(0, len(ids) - 1, 64):
            window = torch.tensor([ids[start : start + 65]])
            losses += cross_entropy(model(window[:, :-1]).logits[0], window[0, 1:], reduction="none")
    total = torch.stack(losses).double()
    is_text = torch.tensor([token not in (1, 2) for ids in rows for token in ids[1:]])
    result = {
        "loss": float(total.mean()),
        "perplexity": math.exp(total.mean()),
        "bits_per_byte": float(total[is_text].sum()) / math.log(2) / size,
        "tokens": len(total),
        "documents": len(documents),
        "bytes": size,
    }
    return pytest.approx(result, rel=1e-6)


def test_evaluation_by_document(
    trained: Path, other: Path, evaluated: Callable[..., dict], tmp_path: Path
) -> None:
    """Text gives the same as prepared data."""
    documents, encoder = imported(other, "eval"), TextEncoder(other / "tokenizer")
    texts = [encoder.decode(ids[1:-1]) for ids in documents]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    options = ["--by", "document", "--precision", "fp32", "--max_seq_length", 64, "--text_key", "content"]
    report = evaluated(trained / "hf", other, text, *options)
    expected = expected_result(trained, documents, documents, len("".join(texts).encode()))
    assert list(report["sources"].values()) == [expected] * 2
    assert report["all"]["tokens"] == 2 * report["sources"][str(text)]["tokens"]
    report = evaluated(trained / "hf", other, text, *options, "--max_samples", 11)
    chosen = [documents[number] for number in spread(11, len(documents))]  # of text the first
    assert [(p["documents"], p["tokens"]) for p in report["sources"].values()] == [
        (11, sum(len(ids) - 1 for ids in some)) for some in (chosen, documents[:11])
    ]


def test_evaluation_of_packed_text(
    trained: Path, other: Path, evaluated: Callable[..., dict], tmp_path: Path
) -> None:
    """No token is skipped, unlike the last tokens of prepared data."""
    encoder, text = TextEncoder(other / "tokenizer"), tmp_path / "text.txt"
    texts = [encoder.decode(ids[1:-1]).strip("\n") for ids in imported(other, "eval")]
    text.write_text("\n<|next|>\n".join(texts))
    report = evaluated(trained, text, "--split_on", "<|next|>", "--precision", "fp32")
    documents = [[1, *ids, 2] for ids in encoder.encode_batch(texts)]
    row = [token for ids in documents for token in ids]
    expected = expected_result(trained, [row], documents, len("".join(texts).encode()))
    assert report["sources"][str(text)] == expected and len(row) % 64 != 1


def test_evaluation_of_fp8_weights(
    trained: Path, data: Path, evaluated: Callable[..., dict], tmp_path: Path
) -> None:
    """Multiplied out they are those that training multiplied with; the products round the activations, too."""
    folder = tmp_path / "hf-fp8"
    export(trained / "checkpoints/step-00000006", folder, data / "tokenizer", "hf-fp8")
    logged = metrics(trained)[-1]["eval_loss"]
    options = [folder, data, "--max_seq_length", 64, "--max_samples", SAMPLES]
    losses = [evaluated(*options, "--precision", p)["all"]["loss"] for p in ("bf16", "fp8")]
    assert losses == [pytest.approx(logged, rel=2e-3)] * 2 and losses[0] != losses[1]


@pytest.mark.process
def test_evaluation_on_two_ranks(
    trained: Path, data: Path, other: Path, evaluated: Callable[..., dict], tmp_path: Path
) -> None:
    """Share the samples and the documents, and come to what one comes to."""
    text, report = tmp_path / "text.txt", tmp_path / "of_two.json"
    text.write_text("def f(x):\n    return x\n" * 9)  # less than a batch of one rank
    options = [trained, data, other, text, "--precision", "bf16"]
    command = [sys.executable, ROOT / "train/launch.py", "--nproc", 2, ROOT / "train/evaluate.py"]
    done = programs.run(
        [*map(str, [*command, *options, "--output", report])],
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    two, one = json.loads(report.read_text()), evaluated(*options)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    for name in one["sources"]:
        assert two["sources"][name] == pytest.approx(one["sources"][name], rel=1e-4), name


def test_ctrl_c_exit_status(trained: Path, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_evaluation_uses_training_settings(planned: Callable[..., Plan]) -> None:
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
    assert found.speed is not None and found.speed.main_grad is False and found.fallbacks == {"a": "current"}
    assert planned(precision={"backend": "transformer_engine"}).precision.backend == "auto", "this machine's"
    assert planned("bf16", [{"step": 1, "module": "a", "to": "current"}]).fallbacks == {}
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
def test_requested_precision(
    planned: Callable[..., Plan], variant: str, precision: dict, compute: str | None, found: tuple
) -> None:
    its = planned(compute, model={"variant": variant}, precision=precision)
    assert (its.variant, its.precision.compute, its.precision.recipe) == found


def test_evaluation_length_of_hf_folder(trained: Path, tmp_path: Path) -> None:
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
        assert (found.max_seq_length, found.batch_size, found.fallbacks) == (length, 8, {})


def test_additional_evaluation_sets(trained: Path, settings: dict, data: Path, other: Path) -> None:
    settings["data"]["eval_sources"] = {"same": str(data), "other": str(other)}
    output_dir = run(settings)
    assert curve(output_dir) == curve(trained)
    last = metrics(output_dir)[-1]
    assert last["eval_loss/same"] == last["eval_loss"] != last["eval_loss/other"]
    settings["data"]["eval_sources"] = None  # which a resume may change
    assert run(settings, max_steps=6) == output_dir


# ---------------------------------------------------------------- rows and batches of documents

NO_ENCODER: Any = None
LENGTHS = [3, 8, 5, 2, 16, 7, 1, 9, 4, 4, 4]


def documents(**how: Any) -> Documents:
    """Documents of these LENGTHS. All tokens are different."""
    found = Documents(size=3, **how)
    found.add(Source("a", NO_ENCODER), np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1]))
    return found


def predicted(found: Documents, world: int) -> Counter[int]:
    """How often each token is predicted, by all ranks; from the one before it."""
    times: Counter[int] = Counter()
    for rank in range(world):
        for batch, _, _ in found.batches(rank, world):
            at = batch.labels != NO_LABEL
            assert (batch.labels[at] == batch.input_ids[at] + 1).all()
            times.update(batch.labels[at].tolist())
    return times


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 8, 11, 100])
def test_each_token_is_predicted_once(length: int, world: int) -> None:
    begins = {0, *np.cumsum(LENGTHS)[:-1].tolist()}
    every = set(range(sum(LENGTHS)))
    for how, unseen in (
        ({"one_per_row": False}, {0}),  # one behind the other: what follows a document is predicted, too
        ({"one_per_row": False, "document_mask": True}, begins),
        ({"one_per_row": True}, begins),
    ):
        found = documents(length=length, **how)
        assert predicted(found, world) == Counter(every - unseen), how
        ended = sum(sum(rows.documents) for rank in range(world) for rows in found.batches(rank, world))
        assert ended == len(LENGTHS) - (how["one_per_row"] and LENGTHS.count(1)), how
