"""precision.auto in training: a run with it is the run written by hand, and a resumed run keeps its choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model import autotune as module
from model.autotune import Choice, Task, autotune
from model.config import GIB, load_config, num_parameters
from model.fp8.recipes import PrecisionConfig
from tests.model.test_autotune import Script
from train import phase as glue
from train import run as training
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.load import build_arguments, open_inputs, resolve_arguments

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    config = load_config("tiny")
    config.vocab_size, config.num_hidden_layers, config.intermediate_size = 512, 2, 256
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return {
        "model": {"config": str(tmp_path / "config.json"), "variant": "te_linear"},
        "data": {"sources": {"text": str(tmp_path / "text")}},
        "precision": {"auto": True, "amax_history_len": 4},
        "output_dir": str(tmp_path / "run"),
        "max_steps": 4,
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "max_eval_samples": 2,
    }


def arguments(settings: dict[str, Any], **changes: Any) -> TrainingArguments:
    return resolve_arguments(build_arguments({**settings, **changes}), 1)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Lets a CPU count as a GPU on which bf16 is the fastest. Grows by a task per measurement."""
    tasks: list[Task] = []

    def fake(task: Task) -> Choice:
        tasks.append(task)
        return Choice("bf16", False, "auto")

    monkeypatch.setattr(PrecisionConfig, "emulated", property(lambda self: False))
    monkeypatch.setattr(glue, "autotune", fake)
    return tasks


def resolve(args: TrainingArguments) -> TrainingArguments:
    return glue.resolve_auto(args, load_config(args.model.config), 1)


@pytest.mark.parametrize(
    "precision", [{"auto": True, "compute": "bf16"}, {"auto": True, "recipe": "rowwise"}, {"auto": "a/path"}]
)
def test_auto_without_candidates_raises(settings: dict, precision: dict) -> None:
    with pytest.raises(ConfigurationError):
        arguments(settings, precision=precision)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_auto_without_gpu_keeps_the_configuration(settings: dict) -> None:
    assert resolve(arguments(settings)) == arguments(settings, precision={"amax_history_len": 4})


@pytest.mark.parametrize("packs", [False, True])
def test_choice_is_applied(settings: dict, measured: list[Task], packs: bool) -> None:
    te_layer = {"model": {**settings["model"], "variant": "te_layer"}}
    changes = {"gradient_checkpointing": "mlp", **te_layer} if packs else {}
    resolved = resolve(arguments(settings, **changes))
    assert resolved.precision.compute == "bf16" and resolved.precision.auto is False and len(measured) == 1
    from_file = resolve_arguments(build_arguments(resolved.to_dict()), 1)
    assert resolve(from_file) == from_file and len(measured) == 1


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        ({}, (False, True)),
        ({"precision": {"auto": True, "recipe": "block"}}, (False, True)),
        ({"speed": {"cuda_graphs": True}}, (True,)),
        ({"gradient_checkpointing": True}, (False,)),
        ({"deepspeed": "ds_config_zero3.json"}, (False,)),
    ],
)
def test_graph_candidates(settings: dict, changes: dict, graphs: tuple[bool, ...]) -> None:
    args = arguments(settings, **changes)
    assert glue.make_task(args, load_config(args.model.config), 1).graph_modes() == graphs


def test_optimizer_memory_is_reserved(settings: dict) -> None:
    config = load_config(settings["model"]["config"])
    one, two = (
        glue.make_task(resolve_arguments(build_arguments(settings), ranks), config, ranks).other_memory_gib
        for ranks in (1, 2)
    )
    assert one - two == pytest.approx(12 * num_parameters(config) / 2 / GIB)


def run(settings: dict[str, Any], **changes: Any) -> list[tuple]:
    """Train; returns what must be equal, bit for bit, of two runs with the same numbers."""
    args = arguments(settings, **changes)
    training.run_training(args, open_inputs(args))
    lines = (Path(str(args.output_dir)) / "metrics.jsonl").read_text().splitlines()
    return [(m["step"], m["loss"], m["grad_norm"], m.get("eval_loss")) for m in map(json.loads, lines)]


def check_runs(settings: dict[str, Any]) -> dict[str, Any]:
    """Compare a run with auto, the same resumed, and one with the choice written by hand; return the configuration."""
    first = run(settings)
    output_dir = Path(settings["output_dir"])
    written = json.loads((output_dir / "train_config.json").read_text())
    assert written["precision"]["auto"] is False
    assert run({**written, "output_dir": str(output_dir) + "-by-hand"}) == first
    # as if it had been stopped in its third step
    (output_dir / "checkpoints/step-00000004/manifest.json").unlink()
    assert run(settings) == first
    assert json.loads((output_dir / "train_config.json").read_text()) == written
    return written


@pytest.fixture
def prepared(settings: dict, corpus: Path, prepare: Callable[..., int]) -> dict[str, Any]:
    """The settings, with data."""
    folder = Path(settings["data"]["sources"]["text"])
    assert prepare(folder, corpus, eval_fraction=0.2) == 0
    return settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
def test_auto_equals_explicit_configuration(prepared: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real measurement except for its times, in which bf16 is the faster. The resumed run does not measure."""
    script = Script(2 * 330.0, 300.0, 2 * 330.0)
    monkeypatch.setattr(PrecisionConfig, "emulated", property(lambda self: False))
    monkeypatch.setattr(glue, "autotune", lambda task: autotune(task, timer=script))
    assert check_runs(prepared)["precision"]["compute"] == "bf16"


def test_resume_without_graphs_keeps_the_choice(
    prepared: dict, measured: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(prepared)
    saved = replace(glue.read_state(Path(prepared["output_dir"]) / "checkpoints/step-00000004"))
    saved.train_config["speed"]["cuda_graphs"] = True
    monkeypatch.setattr(glue, "read_state", lambda path: saved)
    assert resolve(arguments(prepared)).speed.cuda_graphs
    resumed = resolve(arguments(prepared, gradient_checkpointing=True))
    assert not resumed.speed.cuda_graphs and resumed.precision.compute == "bf16" and len(measured) == 1
    resolve(arguments(prepared, resume_from_checkpoint="never"))
    assert len(measured) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_auto_equals_explicit_configuration_on_gpu(
    prepared: dict, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW_MS", 20.0)
    prepared["model"]["variant"] = variant
    assert check_runs(prepared)["model"]["attention_backend"] in ("fused", "flash")
