"""The switches of the section "speed" in whole runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from model.build import build_model
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.te_reference import gemm
from model.variants import SpeedConfig
from tests.conftest import numbers, small_config
from tests.model.cuda_graphs import use_tapes
from tests.train.runs import PRECISIONS, curve, gradients_without_fp8, metrics, run
from train.config.arguments import ConfigurationError
from train.config.load import load_deepspeed
from train.engine import step
from train.engine.step import MainGrads, MicroStep
from train.trainer import TrainingError

OFF = dataclasses.asdict(SpeedConfig.off())
GPU = torch.cuda.is_available()


@pytest.mark.skipif(GPU, reason="the GPU forms of this test run there")
def test_switches_are_bit_equal_on_the_cpu(settings: dict, tmp_path: Path) -> None:
    on = dict.fromkeys(OFF, True)
    curves = [
        curve(run(settings, speed=speed, output_dir=str(tmp_path / name)))
        for name, speed in (("off", OFF), ("on", on))
    ]
    assert curves[0] == curves[1]


@pytest.mark.gpu
@pytest.mark.parametrize("switch", [s for s in OFF if s != "cuda_graphs"])
def test_switches_train_alike(settings: dict, tmp_path: Path, switch: str) -> None:
    curves = [
        curve(run(settings, speed={**OFF, switch: on}, output_dir=str(tmp_path / str(on))))
        for on in (False, True)
    ]
    losses, others = ([entry[1] for entry in c] for c in curves)
    assert others == pytest.approx(losses, rel=1e-2)
    assert [entry[2] for entry in curves[1]] == pytest.approx([entry[2] for entry in curves[0]], rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "deepspeed", ["ds_config_zero0.json", "ds_config_zero1.json", "ds_config_zero2.json"]
)
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_cuda_graphs_train_alike(
    settings: dict,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    precision: str,
    variant: str,
    deepspeed: str,
) -> None:
    """Bit for bit, through accumulation, clipping, evaluation and a resume; so a run may change over."""
    settings |= {"precision": PRECISIONS[precision], "deepspeed": deepspeed, "save_steps": 3, "eval_steps": 2}
    settings["model"]["variant"] = variant
    eager = curve(run(settings, output_dir=str(tmp_path / "eager")))
    graphs = {**settings, "speed": {"cuda_graphs": True}, "output_dir": str(tmp_path / "graphs")}
    folder = run(graphs)
    assert "CUDA graphs: on" in capsys.readouterr().out
    assert curve(folder) == eager
    (folder / "checkpoints/step-00000006/manifest.json").unlink()
    assert curve(run({**graphs, "speed": {}})) == eager


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{"gradient_accumulation_steps": 1}, {"recipe": "current"}, {"recipe": "block"}]
)
def test_cuda_graphs_without_a_weight_cache_and_with_other_recipes(
    settings: dict, tmp_path: Path, changes: dict
) -> None:
    settings = {**settings, **{k: v for k, v in changes.items() if k != "recipe"}}
    settings["precision"] = {"recipe": changes.get("recipe", "delayed")}
    curves = [
        curve(run(settings, speed={"cuda_graphs": on}, output_dir=str(tmp_path / str(on))))
        for on in (False, True)
    ]
    assert curves[0] == curves[1]
    assert metrics(tmp_path / "True")[-1]["loss"] < metrics(tmp_path / "True")[0]["loss"]


def graphs_on_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """speed.cuda_graphs without a GPU."""
    use_tapes(monkeypatch)
    monkeypatch.setattr(step, "cuda_graphs_problem", lambda *_, **__: None)


class AddToMainGrad(torch.autograd.Function):
    """A weight whose gradient is added to `main_grad`, and is None for whoever asks."""

    @staticmethod
    def forward(ctx, weight, main_grad):  # type: ignore[no-untyped-def, override]
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
        ctx.main_grad.add_(gradient)
        return None, None


def main_grads_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """speed.main_grad without a GPU: as Transformer Engine's, the reference's GEMMs give their weights no gradient and
    add it into `main_grad`."""
    real, begin = gemm.fp8_gemm, MicroStep.__init__

    def fp8_gemm(module, call, x, weight, *others, **options):  # type: ignore[no-untyped-def]
        if not getattr(module, "fuse_wgrad_accumulation", False):
            return real(module, call, x, weight, *others, **options)
        return real(module, call, x, AddToMainGrad.apply(weight, weight.main_grad), *others, **options)

    def with_main_grads(self, engine, precision, arguments) -> None:  # type: ignore[no-untyped-def]
        begin(self, engine, precision, arguments)
        if arguments.speed.main_grad:
            self.main_grads = MainGrads(engine, precision, True)
            assert len(self.main_grads.buffers) == 2 * 4 + 1

    monkeypatch.setattr("model.te_reference.linear.fp8_gemm", fp8_gemm)
    monkeypatch.setattr(MicroStep, "__init__", with_main_grads)


@pytest.mark.skipif(GPU, reason="the GPU forms of this test run there")
@pytest.mark.parametrize(
    "switches",
    [
        ["cuda_graphs", "main_grad"],
        pytest.param(["cuda_graphs"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_graphs_and_main_grads_are_bit_equal(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switches: list[str]
) -> None:
    """Through accumulation, clipping, evaluation and a resume."""
    graphs_on_tapes(monkeypatch)
    main_grads_of_the_reference(monkeypatch)
    settings |= {"precision": {"amax_history_len": 4, "bf16_modules": []}, "save_steps": 3, "eval_steps": 2}
    plain = curve(run(settings, speed=OFF, output_dir=str(tmp_path / "plain")))
    fast = {**settings, "speed": {**OFF, **dict.fromkeys(switches, True)}}
    folder = run(fast)
    assert curve(folder) == plain
    (folder / "checkpoints/step-00000006/manifest.json").unlink()
    assert curve(run(fast)) == plain


@pytest.mark.skipif(GPU, reason="takes the reference's GEMMs out of FP8")
def test_graph_without_fp8_gradients_raises(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules ran FP8 when they were proven; what was captured did not."""
    graphs_on_tapes(monkeypatch)
    begin = MicroStep.__init__

    def without_fp8_from_here(self, *arguments) -> None:  # type: ignore[no-untyped-def]
        begin(self, *arguments)
        gradients_without_fp8(monkeypatch)

    monkeypatch.setattr(MicroStep, "__init__", without_fp8_from_here)
    with pytest.raises(TrainingError) as error:
        run(settings, speed={"cuda_graphs": True})
    assert numbers(error.value)[:4] == [1, 6, 18, 36]  # step, modules, GEMMs in FP8, GEMMs that were planned


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"deepspeed": "ds_config_zero3.json"}, "speed.cuda_graphs"),
        ({"model": {"variant": "hf"}, "precision": {"compute": "bf16"}}, "model.variant"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
    ],
)
def test_cuda_graphs_incompatibilities(settings: dict, changes: dict, key: str) -> None:
    changes = changes | {"model": {**settings["model"], **changes.get("model", {})}}
    with pytest.raises(ConfigurationError) as error:
        run(settings, speed={"cuda_graphs": True}, **changes)
    assert key in str(error.value)


@pytest.mark.parametrize(
    "variant, fused", [("te_layer", True), ("te_layer", False), ("te_linear", True), ("hf", True)]
)
def test_zero_3_gathers_one_layer(variant: str, fused: bool) -> None:
    """What waits for the hooks of modules in Python is the host."""
    precision = Precision(PrecisionConfig(compute="bf16"))
    model = build_model(small_config(), variant, precision, seed=0, speed=SpeedConfig(fused_rope=fused))
    leaves = load_deepspeed("ds_config_zero3.json")["zero_optimization"]["leaf_module"]["classes"]
    assert [module for module in model.modules() if type(module).__name__ in leaves] == list(
        model.model.layers
    )
