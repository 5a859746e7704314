"""fp8_inference_demo/fp8_inference.py: the command, what it prints where, and how it ends."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

from fp8_inference_demo import InferenceError, fp8_inference
from fp8_inference_demo.engine import Engine
from model.fp8.te_backend import BackendError
from tests import programs
from tests.conftest import numbers, refused
from tests.fp8_inference_demo.conftest import Demo, Output, refuse

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def say(folder: Path, demo: Demo) -> Demo:
    """say(option...) -> exit status, of a prompt."""
    base = ["--model", folder, "--prompt", "def main", "--precision", "fp32", "--max_new_tokens", 12]
    return lambda *options: demo(*base, "--ignore_eos", *options)


@pytest.mark.process
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_fp8_generation(folder: Path, tmp_path: Path, device: str) -> None:
    """In a process of its own: FP8 ran, and standard output has the continuation alone."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def main", encoding="utf-8")
    command = [sys.executable, ROOT / "fp8_inference_demo" / "fp8_inference.py", "--model", folder.parent]
    command += ["--prompt_file", prompt, "--max_new_tokens", "6", "--temperature", "0", "--ignore_eos"]
    run: subprocess.CompletedProcess[str] = programs.run(
        [*map(str, command)], capture_output=True, text=True, encoding="utf-8", timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() and "def main" not in run.stdout
    assert "FP8" in run.stderr and 5 in numbers(run.stderr)  # steps after the first token


def test_samples_are_printed_in_order(say: Demo, output: Output) -> None:
    """In batches of any size the same texts, the first one that of one sample alone; another seed gives others."""
    outputs = []
    for options in ((), ("--num_samples", 3), ("--num_samples", 3, "--batch_size", 2), ("--seed", 1)):
        assert say(*options) == 0
        outputs.append(output())
    alone, three, batches_of_two, other = outputs
    assert three == batches_of_two and alone != other
    texts = re.split(r"=== \d/3 ===\n", three)[1:]
    assert texts[0] == alone and len(set(texts)) == 3


def test_out_of_memory_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    refuse("--model", folder, "--prompt", "x", code="out_of_memory", key="--batch_size")


@pytest.mark.parametrize("error", [ValueError("bad"), OSError("bad"), BackendError("bad")])
def test_user_errors_exit_with_status_2(say: Demo, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(Engine, "load", Mock(side_effect=error))
    assert say() == 2


def test_hub_model_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError("no network")))
    refuse("--model", "org/name", "--prompt", "x", code="hub", key="org/name")


def test_folder_without_model_raises(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    checkpoint = run / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    for given, code in (
        (tmp_path / "nowhere", "no_config_json"),
        (tmp_path, "no_config_json"),
        (run, "not_exported"),
        (checkpoint, "not_exported"),
    ):
        with refused(InferenceError, code=code, key=str(given)):
            fp8_inference.find_model_folder(given)
    (run / "hf").mkdir()
    (run / "hf/config.json").touch()
    assert fp8_inference.find_model_folder(run) == fp8_inference.find_model_folder(run / "hf") == run / "hf"


def test_damaged_model_raises(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "damaged")
    weights, config = model / "model.safetensors", model / "config.json"
    weights.write_bytes(weights.read_bytes()[:-8])
    refuse("--model", model, "--prompt", "x", code="not_safetensors", key=str(weights))
    config.write_text(config.read_text().replace('"mistral"', '"qwen2"'))
    refuse("--model", model, "--prompt", "x", code="model_config", key="model_type")


@pytest.mark.parametrize(
    "options",
    [
        ["--top_p", "9e-7"],
        ["--top_p", "1.001"],
        ["--top_k", "-1"],
        ["--min_p", "1.001"],
        ["--repetition_penalty", "0.009"],
        ["--max_new_tokens", "0"],
        ["--batch_size", "0"],
        ["--max_length", "1"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "1e-50"],
        ["--stop", ""],
        ["--prompt", "caf\udce9"],
        ["--prompts", "a.jsonl"],
        ["--prompt", "a", "--output", "b"],
        ["--prompt", "a", "--prompt_file", "b"],
        ["--recipe", "current"],
    ],
)
def test_invalid_options(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fp8_inference.parse_arguments(["--model", "x", *options])
    assert ended.value.code == 2
