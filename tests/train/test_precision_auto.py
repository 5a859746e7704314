"""precision.auto in training: a run with it is the run written by hand, and a resumed run keeps its choice."""

from __future__ import annotations

import json
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
from tests.train.runs import curve, run
from train import phase as glue
from train.config.arguments import TrainingArguments
from train.config.load import build_arguments, resolve_arguments


@pytest.fixture
def settings(settings: dict) -> dict[str, Any]:
    settings["model"]["variant"] = "te_linear"
    return settings | {"precision": {"auto": True, "amax_history_len": 4}, "max_steps": 4, "save_steps": 2}


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


def check_runs(settings: dict[str, Any]) -> dict[str, Any]:
    """Compare a run with auto, the same resumed, and one with the choice written by hand; return the configuration."""
    output_dir = run(settings)
    first = curve(output_dir)
    written = json.loads((output_dir / "train_config.json").read_text())
    assert written["precision"]["auto"] is False
    assert curve(run({**written, "output_dir": str(output_dir) + "-by-hand"})) == first
    # as if it had been stopped in its third step
    (output_dir / "checkpoints/step-00000004/manifest.json").unlink()
    assert curve(run(settings)) == first
    assert json.loads((output_dir / "train_config.json").read_text()) == written
    return written


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
def test_auto_equals_explicit_configuration(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real measurement except for its times, in which bf16 is the faster. The resumed run does not measure."""
    script = Script(2 * 330.0, 300.0, 2 * 330.0)
    monkeypatch.setattr(PrecisionConfig, "emulated", property(lambda self: False))
    monkeypatch.setattr(glue, "autotune", lambda task: autotune(task, timer=script))
    assert check_runs(settings)["precision"]["compute"] == "bf16"


def test_resume_without_graphs_keeps_the_choice(
    settings: dict, measured: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings)
    saved = replace(glue.read_state(Path(settings["output_dir"]) / "checkpoints/step-00000004"))
    saved.train_config["speed"]["cuda_graphs"] = True
    monkeypatch.setattr(glue, "read_state", lambda path: saved)
    assert resolve(arguments(settings)).speed.cuda_graphs
    resumed = resolve(arguments(settings, gradient_checkpointing=True))
    assert not resumed.speed.cuda_graphs and resumed.precision.compute == "bf16" and len(measured) == 1
    resolve(arguments(settings, resume_from_checkpoint="never"))
    assert len(measured) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_auto_equals_explicit_configuration_on_gpu(
    settings: dict, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW_MS", 20.0)
    settings["model"]["variant"] = variant
    assert check_runs(settings)["model"]["attention_backend"] in ("fused", "flash")
