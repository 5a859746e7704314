"""--report: the figures are what they are called, every token counts once, and what does not fit is told."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributions import Categorical, kl_divergence
from transformers import MistralForCausalLM

from fp8_inference_demo import engine, report
from fp8_inference_demo.engine import Engine
from fp8_inference_demo.errors import InferenceError
from fp8_inference_demo.weights import Weights
from model.fp8 import hf_fp8
from model.fp8.hf_fp8 import Quantized
from tests.conftest import numbers, refused
from tests.fp8_inference_demo.conftest import Demo, refuse


def test_figures_are_what_they_are_called() -> None:
    """In two parts, against torch's own loss and divergence."""
    torch.manual_seed(0)
    bf16, fp8 = torch.randn(2, 50, 30)
    following = torch.randint(30, (50,))
    sums = report.Comparison()
    for part in (slice(0, 20), slice(20, 50)):
        sums.add(bf16[part], fp8[part], following[part])
    result = sums.result("few rows")
    perplexity = [torch.nn.functional.cross_entropy(logits, following).exp().item() for logits in (bf16, fp8)]
    kl = kl_divergence(Categorical(logits=bf16), Categorical(logits=fp8)).mean().item()
    assert (result["path"], result["tokens"]) == ("few rows", 50)
    assert [result["perplexity_bf16"], result["perplexity_fp8"]] == pytest.approx(perplexity, rel=1e-5)
    assert result["perplexity_difference_percent"] == pytest.approx(
        (perplexity[1] / perplexity[0] - 1) * 100, rel=1e-3
    )
    assert result["kl_mean_nats"] == pytest.approx(kl, rel=1e-5)
    assert result["equal_greedy_percent"] == (bf16.argmax(-1) == fp8.argmax(-1)).sum().item() * 2


def test_logits_that_are_not_finite_are_no_figure() -> None:
    bad = torch.zeros(2, 3)
    bad[1, 2] = torch.nan
    with refused(InferenceError, code="not_finite", key="fp8"):
        report.Comparison().add(torch.zeros(2, 3), bad, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("bos", [0, None])
@pytest.mark.parametrize(("length", "most"), [(4, 100), (4, 6), (11, 100), (2, 3)])
def test_every_token_is_predicted_once(length: int, most: int, bos: int | None) -> None:
    ids = list(range(11))
    parts = list(report.windows(ids, length, most, bos))
    predicted = [token for part in parts for token in part[1:]]
    assert predicted == ids[1 : most + 1]
    firsts = [part[0] for part in parts]
    assert firsts == ([0] * len(parts) if bos == 0 else [part[1] - 1 for part in parts])
    assert max(map(len, parts)) <= length


@pytest.mark.parametrize("path", ["few rows", "many rows"])
def test_the_logits_before_a_token_count(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Against the loss of transformers; so many positions at a time as there is room for."""
    monkeypatch.setattr(report, "ROWS", 7)
    ids = list(range(1, 60))
    engines = {precision: Engine.load(folder, precision, 1, 24) for precision in report.PRECISIONS}
    result = report.compare(engines, ids, 100, path, bos=1)
    model, loss = MistralForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), 0.0
    for part in report.windows(ids, 24, 100, bos=1):
        tokens = torch.tensor([part])
        loss += model(tokens, labels=tokens).loss.item() * (len(part) - 1)
    assert result["perplexity_bf16"] == pytest.approx(math.exp(loss / 58), rel=0.05)
    assert ("fp8 gemm" in engines["fp8"].forward.ran) == (path == "many rows")


def test_the_first_batch_only_warms_up(folder: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Engine.load(folder, "bf16", 1, 24).weights
    generate = Mock(side_effect=Engine.generate)
    monkeypatch.setattr(Engine, "generate", lambda *given: generate(*given))
    seconds = itertools.count()  # a second between any two looks at the clock
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    row = report.times(weights, "bf16", 2, [1, 5, 6])
    assert generate.call_count == 2
    assert row == {
        "precision": "bf16", "batch_size": 2, "prompt_tokens": 8, "new_tokens": 3,
        "prefill_tokens_per_s": 16.0, "decode_tokens_per_s": 4 / 2,
    }  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "COMPARED", {False: {"many rows": 60, "few rows": 20}})
    monkeypatch.setattr(report, "TIMED", {False: (8, 3)})


def test_a_report_in_table_json_and_plot(
    folder: Path,
    tmp_path: Path,
    small: None,
    demo: Demo,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "new" / "report.json"
    text.write_text("def main(): return the value of the thing\n" * 20, encoding="utf-8")
    begin = Engine.__init__

    def no_room_for_four_rows(self: Engine, weights: Weights, batch_size: int, max_length: int) -> None:
        if batch_size == 4 and not weights.fp8:
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB. More.")
        begin(self, weights, batch_size, max_length)

    monkeypatch.setattr(Engine, "__init__", no_room_for_four_rows)
    arguments = ("--model", folder.parent, "--report", text, "--output", output, "--max_length", 24)
    assert demo(*arguments) == 0
    shown = numbers(capfd.readouterr().out.replace(",", ""))
    results = json.loads(output.read_text(encoding="utf-8"))
    assert [(q["path"], q["tokens"]) for q in results["quality"]] == [("many rows", 60), ("few rows", 20)]
    for q in results["quality"]:
        assert (
            q["perplexity_bf16"] > 1 and 0 < q["kl_mean_nats"] < 2 and 20 < q["equal_greedy_percent"] <= 100
        )
        assert {round(q["perplexity_fp8"], 4), round(q["kl_mean_nats"], 5)} <= set(shown)
    gib = results["weights_gib"]
    assert gib["fp8"] < gib["bf16"] == 2 * results["model"]["parameters"] / 2**30
    assert {round(gib["bf16"], 3), round(gib["fp8"], 3)} <= set(shown)
    assert results["window_tokens"] == 24
    assert results["text"] == {"name": "text.txt", "sha256": hashlib.sha256(text.read_bytes()).hexdigest()}
    rows = {(s["precision"], s["batch_size"]): s for s in results["speed"]}
    assert list(rows) == [("bf16", 1), ("fp8", 1), ("bf16", 4), ("fp8", 4)]
    assert "reason" in rows["bf16", 4] and round(rows["fp8", 1]["decode_tokens_per_s"], 1) in shown
    assert results["command"] == (
        f"python fp8_inference_demo/fp8_inference.py --model {folder.parent.name} --report text.txt --max_length 24"
    )
    assert {"cpu", "torch_threads"} <= results["machine"].keys() and "torch" in results["versions"]
    assert results["model"]["name"] == f"{folder.parent.name}/{folder.name}"
    assert results["model"]["weights"] == "fp32"
    assert str(tmp_path) not in output.read_text(encoding="utf-8")
    assert output.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("blocks", [False, True])
def test_a_folder_in_fp8_is_read_as_it_is(
    folder: Path, tmp_path: Path, blocks: bool, small: None, demo: Demo
) -> None:
    """The codes of the engine are those of the folder, and bf16 is these, multiplied out."""
    fp8, text, output = tmp_path / "hf-fp8", tmp_path / "text.txt", tmp_path / "report.json"
    shutil.copytree(folder, fp8)
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if "proj" in name:
            shape = [-(-n // 128) for n in weight.shape] if blocks else [len(weight), 1]
            tensors[name] = Quantized((weight * 100).to(torch.float8_e4m3fn), torch.full(shape, 0.01))
    save_file(hf_fp8.flat(tensors), fp8 / "model.safetensors", {"format": "pt"})
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = hf_fp8.quantization_config(blocks, ["lm_head"])
    (fp8 / "config.json").write_text(json.dumps(config))

    stored = tensors["model.layers.1.mlp.down_proj.weight"]
    loaded = {p: Engine.load(fp8, p, 1, 24).weights.layers[1].down for p in report.PRECISIONS}
    assert loaded["fp8"].values.view(torch.uint8).equal(stored.codes.view(torch.uint8))
    assert loaded["bf16"].values.equal(stored.dequantize(torch.bfloat16))
    text.write_text("def main(): return the value of the thing", encoding="utf-8")
    options = ("--max_length", 24, "--batch_size", 1)
    assert demo("--model", fp8, "--report", text, "--output", output, *options) == 0
    results = json.loads(output.read_text())
    assert results["model"]["weights"] == "FP8" and [row["batch_size"] for row in results["speed"]] == [1, 1]


@pytest.mark.parametrize(("content", "code"), [(b"", "short_text"), (b"abc\xff", "not_utf8")])
def test_texts_that_will_not_do(folder: Path, tmp_path: Path, content: bytes, code: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    refuse("--model", folder, "--report", text, code=code, key=f"--report {text}")
