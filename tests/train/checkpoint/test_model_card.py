"""README.md of an export."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from model.serving import quantization_config
from tests.train.record.test_plots import make_run, start
from train.export import MARK, write_card

CONFIG: dict[str, Any] = {
    "model": {"config": "/home/me/my.json", "variant": "te_layer", "init_from": None},
    "precision": {"compute": "fp8", "recipe": "delayed", "schedule": None},
    "data": {"sources": {"text": "/home/me/data"}},
    "max_seq_length": 64,
}
Card = Callable[..., str]


@pytest.fixture
def card(tmp_path: Path) -> Card:
    """Write the card of an export that replaces one with the card `former`, and return it."""

    def write(
        config: dict = CONFIG, step: int = 2, former: str = "", quantization: dict | None = None
    ) -> str:
        out, old = (Path(tempfile.mkdtemp(dir=tmp_path)) for _ in range(2))
        model_config = {
            "model_type": "mistral",
            "max_position_embeddings": 2048,
            "quantization_config": quantization,
        }
        (out / "config.json").write_text(json.dumps(model_config))
        if former:
            (old / "README.md").write_text(former)
        checkpoint = tmp_path / "my run/checkpoints/step-00000002"
        write_card(out, old, checkpoint, config, step, 64 * step)
        return (out / "README.md").read_text()

    return write


def facts(text: str) -> dict[str, str]:
    """Return the rows of a card; the Hub must be able to read it."""
    parsed = ModelCard(text, ignore_metadata_errors=False)
    assert (parsed.data.library_name, parsed.data.pipeline_tag) == ("transformers", "text-generation")
    assert "/home/me" not in text
    rows = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ")]
    return {name: value for name, value in (row for row in rows if len(row) == 2)}


def test_card_has_checkpoint_facts(card: Card) -> None:
    assert facts(card()) == {
        "model": "my.json, trained as te_layer",
        "started from": "random weights",
        "data": "text",
        "steps, tokens": "2, 128",
        "sequence length": "64",
        "precision": "fp8, delayed scaling",
        "max_position_embeddings": "2,048",
    }
    config = CONFIG | {
        "model": CONFIG["model"] | {"init_from": "/home/me/base/hf"},
        "precision": {"compute": "bf16", "schedule": [{"until_step": 10, "compute": "fp8"}, {}]},
    }
    other = facts(card(config))
    assert other["started from"] == "the weights of base/hf" and other["precision"] == "bf16"
    assert "until_step" in other["precision.schedule"]


@pytest.mark.parametrize("init_from", ["/home/me/models--org--a-model/snapshots/0123", "/home/me/base", None])
@pytest.mark.parametrize("quantization", [None, quantization_config(True, [])])
def test_card_has_hub_metadata(card: Card, init_from: str | None, quantization: dict | None) -> None:
    config = CONFIG | {"model": CONFIG["model"] | {"init_from": init_from}}
    metadata = ModelCard(card(config, quantization=quantization), ignore_metadata_errors=False).data.to_dict()
    expected = {
        "license": "other",
        "language": "und",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mistral", "fp8"],
        "training_tokens": 128,
        "sequence_length": 64,
        "precision": "fp8",
    }
    if init_from and "models--" in init_from:
        expected["base_model"] = "org/a-model"
    if quantization:
        expected["quantization"] = "fp8"
    assert metadata == expected


def test_card_has_run_facts(card: Card, tmp_path: Path) -> None:
    known = {
        "startup_checks": ["FP8: 12 of 13", "  not FP8: a|b"],
        "commit": "abc",
        "versions": {"torch": "2"},
    }
    fallbacks = [{"module": module, "step": step} for module, step in (("a", 1), ("a", 2), ("b", 2))]
    known |= {"escalations": fallbacks, "machine": {"gpu": "NVIDIA H200"}}
    starts = [start(0, "stopped") | known, start(2, "done") | known | {"commit": "def"}]
    make_run(tmp_path / "my run", starts=starts, lines=3)
    early, late = facts(card()), facts(card(step=3))
    assert early["training loss"].split()[0] == "4.0000" and "evaluation loss" not in early
    assert late["evaluation loss"].split()[0] == "4.5000"
    assert early["startup check"] == "FP8: 12 of 13; not FP8: a\\|b" and early["versions"] == "torch 2"
    assert (early["commit"], late["commit"]) == ("abc", "def") and early["GPU"] == "2 x NVIDIA H200"
    assert (early["modules after a fallback"], late["modules after a fallback"]) == ("1", "2")


def test_card_of_fp8_export(card: Card) -> None:
    for is_blocks, method in ((False, "compressed-tensors"), (True, "fp8")):
        row = facts(card(quantization=quantization_config(is_blocks, [])))["quantization"]
        assert f"quant_method {method}" in row and ("pip install" in row) != is_blocks


def test_user_card_is_kept(card: Card) -> None:
    own = card()
    assert card(former=own, step=3) != own
    for changed in ("# Mine\n", own.replace(MARK, "")):
        assert card(former=changed) == changed
