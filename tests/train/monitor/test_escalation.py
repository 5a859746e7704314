"""precision.on_trouble escalate: each trouble injected into a run is found, named and mended; a run with escalations
goes on from its checkpoints bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.fp8 import te_backend
from model.fp8.precision import PrecisionError
from tests.reliability.launching import run_cases, training_case
from tests.train.runs import PRECISIONS, curve, metrics, run, tensors
from train.checkpoint.files import read_state
from train.config.arguments import ConfigurationError
from train.config.load import build_arguments, resolve_arguments
from train.evaluation.models import plan_model
from train.record.history import read_history
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder
from train.trainer import Trainer

GPU = torch.cuda.is_available()
ESCALATE = {"health_steps": 1, "on_trouble": "escalate"}


def changes(folder: Path) -> list[dict[str, Any]]:
    return [c for m in metrics(folder) for c in m.get("fp8_escalations", {}).get("changes", [])]


def path_of(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Module -> (step, level) of each change."""
    found: dict[str, list[tuple[int, str]]] = {}
    for change in changes(folder):
        found.setdefault(change["module"].rpartition("layers.")[2], []).append((change["step"], change["to"]))
    return found


def active(folder: Path) -> dict[int, int]:
    """Alarms after each step."""
    return {m["step"]: m.get("fp8_alarms", {}).get("active", 0) for m in metrics(folder)}


def growing(variant: str) -> Callable[[Any], None]:
    """The input of one MLP, 64 times larger in one channel each step, of which its matrices take nothing."""

    def change(model: Any, step: int) -> None:
        layer = model.model.layers[1]
        if variant == "te_layer":
            norm, taking = layer.layernorm_mlp.layer_norm_weight, [layer.layernorm_mlp.fc1_weight]
        else:
            norm, taking = (
                layer.post_attention_layernorm.weight,
                [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight],
            )
        norm[3] = 64.0**step
        for weight in taking:
            weight[:, 3] = 0

    return change


def before_each_step(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, int], None]) -> None:
    take = Trainer.take_step

    def changed(self: Trainer) -> Any:
        with torch.no_grad():
            change(self.engine.module, self.state.step)
        return take(self)

    monkeypatch.setattr(Trainer, "take_step", changed)


def test_resume_after_fallback_is_bit_exact(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; counted, proved anew, and known to whoever takes the checkpoint."""
    before_each_step(monkeypatch, growing("te_layer"))
    section = {**PRECISIONS["delayed"], "health_steps": 1, "schedule": [{"on_trouble": "escalate"}]}
    settings |= {"learning_rate": 1e-4, "max_steps": 4, "precision": section}
    whole = run(settings)
    mlp = "model.layers.1.layernorm_mlp"
    assert path_of(whole) == {"1.layernorm_mlp": [(3, "current"), (4, "block")]}
    counts = {m["step"]: m["fp8_escalations"]["count"] for m in metrics(whole) if "fp8_escalations" in m}
    (start,) = read_starts(RunFolder(whole))
    assert counts == {3: 1, 4: 2} and start["escalations"] == changes(whole)
    assert len(start["phases"]) == 1
    assert read_history(whole).fp8() == start["phases"][0]["fp8"]
    saved = [whole / f"checkpoints/step-0000000{n}" for n in (3, 4)]
    assert [read_state(path).fallbacks for path in saved] == [{mlp: "current"}, {mlp: "block"}]
    evaluated = plan_model(saved[0], None)
    model, precision = evaluated.build()
    assert precision.module_recipe(mlp) == "current"
    assert plan_model(saved[0], "bf16").fallbacks == {}

    again = run(settings, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(saved[0]))
    assert curve(again) == curve(whole)[3:] and tensors(again, 4) == tensors(whole, 4)
    assert changes(again) == changes(whole)[1:]


# Steps at which the module of `growing` goes to each level, by recipe; te_layer's has no bf16_backward. The first is
# the second look at an alarm, which goes on through the next.
UP = {
    "delayed": [(3, "current"), (4, "block"), (5, "bf16_backward"), (6, "bf16")],
    "current": [(5, "block"), (6, "bf16_backward"), (7, "bf16")],
}


def check_every_level(settings: dict, tmp_path: Path, monkeypatch: Any, variant: str, recipe: str) -> None:
    """The whole way up, and on from the first change, and of delayed scaling from the last, too. Lines of metrics are
    fewer than looks."""
    before_each_step(monkeypatch, growing(variant))
    settings |= {
        "learning_rate": 1e-4,
        "max_steps": 8,
        "save_steps": 1,
        "save_total_limit": 20,
        "logging_steps": 4,
    }
    settings["precision"] = {**PRECISIONS[recipe], **ESCALATE}
    settings["model"]["variant"] = variant
    whole, up = run(settings), UP[recipe]
    if variant == "te_layer":
        last = min(step for step, level in up if level == "bf16_backward")
        up = [entry for entry in up if entry[1] not in ("bf16_backward", "bf16")] + [(last, "bf16")]
    modules = ["1.layernorm_mlp"] if variant == "te_layer" else ["1.mlp.gate_proj", "1.mlp.up_proj"]
    assert path_of(whole) == dict.fromkeys(modules, up)
    assert {c["operand"] for c in changes(whole)} == {"input"}
    # mended: from the look after the last change on
    assert all(count == 0 for step, count in active(whole).items() if step > up[-1][0])
    for step, _ in (up[0], up[-1]) if recipe == "delayed" else up[:1]:
        branch = {"output_dir": str(tmp_path / f"from-{step}"), "save_steps": 3}
        start = str(whole / f"checkpoints/step-{step:08d}")
        folder = run(settings, **branch, resume_from_checkpoint=start)
        assert curve(folder) == [entry for entry in curve(whole) if entry[0] > step]
        assert tensors(folder, 8) == tensors(whole, 8)
        assert changes(folder) == [c for c in changes(whole) if c["step"] > step]


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="the GPU form of this test runs there")
@pytest.mark.parametrize(("variant", "recipe"), [("te_linear", "delayed"), ("te_layer", "current")])
def test_every_fallback_resumes(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, recipe: str
) -> None:
    check_every_level(settings, tmp_path, monkeypatch, variant, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_every_fallback_resumes_on_gpu(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, recipe: str, graphs: bool
) -> None:
    settings["speed"] = {"cuda_graphs": graphs}
    check_every_level(settings, tmp_path, monkeypatch, variant, recipe)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("block", marks=pytest.mark.slow)])
def test_skipped_step_causes_no_fallback(
    settings: dict, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """An inf that a sample made is in the gradients of all layers before; the samples are left, the weights stay."""
    take = Trainer.take_step

    def with_an_inf(self: Trainer) -> Any:
        def overflow(gradient: torch.Tensor) -> torch.Tensor:
            channel = torch.arange(gradient.shape[-1]) == 3
            return gradient.masked_fill(channel, torch.inf) if self.state.step == 1 else gradient

        hook = self.engine.module.model.norm.register_forward_hook(
            lambda _, given, out: out.register_hook(overflow) and None
        )
        try:
            return take(self)
        finally:
            hook.remove()

    monkeypatch.setattr(Trainer, "take_step", with_an_inf)
    settings |= {"max_steps": 3, "precision": {**PRECISIONS[recipe], **ESCALATE}}
    folder = run(settings)
    lines = metrics(folder)
    assert [m["step"] for m in lines if "skipped" in m] == [2] and lines[-1]["skipped_steps"] == 1
    assert changes(folder) == [] and not [m for m in lines if "fp8_alarms" in m]
    looked = lines[1]["fp8_health"]["model.layers.*.layernorm_mlp.fc2"]
    assert max(looked["gradient"]["saturated"]) > 0.05 > max(looked["input"]["saturated"])


@pytest.mark.slow
def test_fallbacks_survive_a_bf16_phase(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_each_step(monkeypatch, growing("te_layer"))
    schedule = [{"until_step": 3}, {"until_step": 4, "compute": "bf16"}, {}]
    section = {**PRECISIONS["delayed"], **ESCALATE, "schedule": schedule}
    settings |= {"learning_rate": 1e-4, "max_steps": 6}
    whole = run(settings, precision=section)
    assert path_of(whole) == {"1.layernorm_mlp": [(3, "current"), (5, "block"), (6, "bf16")]}
    (start,) = read_starts(RunFolder(whole))
    assert [(stage["step"], stage["fp8"].partition(",")[0]) for stage in start["phases"]] == [
        (3, "bf16"),  # and the change that was due
        (4, "6/7 delayed"),
        (5, "6/7 delayed"),
    ]
    resume_from = str(whole / "checkpoints/step-00000004")
    again = run(
        settings, precision=section, output_dir=str(tmp_path / "again"), resume_from_checkpoint=resume_from
    )
    assert curve(again) == curve(whole)[4:] and tensors(again, 6) == tensors(whole, 6)
    section["on_trouble"] = "warn"
    kept = run(
        settings, precision=section, output_dir=str(tmp_path / "kept"), resume_from_checkpoint=resume_from
    )
    assert curve(kept)[0] == curve(whole)[4] and active(kept)[6] == 1
    fallbacks = read_state(kept / "checkpoints/step-00000006").fallbacks
    assert fallbacks == {"model.layers.1.layernorm_mlp": "current"}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("gathers_fp8", [False, True])
def test_all_ranks_fall_back_together(settings: dict, tmp_path: Path, gathers_fp8: bool) -> None:
    """Run two ranks with different samples, then one rank with the same fallbacks. The margin makes some operands
    underflow."""
    settings |= {"max_steps": 4, "deepspeed": "ds_config_zero3.json", "save_steps": 1}
    settings["precision"] = {"margin": 10, "fp8_weight_gather": gathers_fp8, **ESCALATE}
    whole, again, alone = (tmp_path / name for name in ("whole", "again", "alone"))
    start = str(whole / "checkpoints/step-00000003")
    cases = []
    for folder, resume_from, ranks in ((whole, "never", 2), (again, start, 2), (alone, start, 1)):
        config = {
            **settings,
            "resume_from_checkpoint": resume_from,
            "gradient_accumulation_steps": 4 // ranks,
        }
        cases.append(training_case(ranks, config, folder))
    found = run_cases(tmp_path / "results", cases)
    assert found == [[{"error": None}] * ranks for ranks, *_ in cases]
    up = path_of(whole)
    assert {level for path in up.values() for _, level in path} == {"current"} and path_of(again) == {}
    assert curve(again) == curve(whole)[3:] and tensors(again, 4) == tensors(whole, 4)
    fallbacks = [
        read_state(folder / "checkpoints/step-00000004").fallbacks for folder in (whole, again, alone)
    ]
    assert fallbacks[0] == fallbacks[1] == fallbacks[2] and len(fallbacks[0]) == len(up)
    # scales of the modules that are at delayed scaling still are of the micro-batches before, on one rank of others
    assert curve(alone)[0][1] == pytest.approx(curve(whole)[3][1], rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "others", "key"),
    [
        ({"health_steps": 0}, {}, "precision.on_trouble"),
        ({"recipe": "tensorwise", "health_steps": 0}, {}, "precision.on_trouble"),
        ({}, {"save_strategy": "no"}, "save_strategy"),
        ({"schedule": [{"until_step": 2, "health_steps": 0}, {}]}, {}, "1 of 2"),
    ],
)
def test_incompatible_fallback_settings_raise(settings: dict, keys: dict, others: dict, key: str) -> None:
    if "recipe" in keys:
        settings["model"]["variant"] = "torchao"
    with pytest.raises(ConfigurationError) as error:
        resolve_arguments(build_arguments({**settings, "precision": {**ESCALATE, **keys}, **others}), 1)
    assert key in str(error.value)


def test_missing_block_scaling_raises_before_training(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(te: Any, recipe: str, instead: str = "use delayed or current") -> None:
        if recipe == "block":
            raise te_backend.BackendError(f"recipe block is not available here; {instead}")

    monkeypatch.setattr(te_backend, "require_fp8", require)
    with pytest.raises(PrecisionError) as error:
        run(settings, precision=ESCALATE)
    assert "precision.on_trouble" in str(error.value)
    assert not (Path(settings["output_dir"]) / "metrics.jsonl").exists()
