"""The switches of the section "speed" in whole runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from model.variants import SpeedConfig
from tests.train.runs import PRECISIONS, curve, metrics, run
from train.config.arguments import ConfigurationError

OFF = dataclasses.asdict(SpeedConfig.off())
GPU = torch.cuda.is_available()


@pytest.mark.skipif(GPU, reason="the GPU forms of this test run there")
def test_without_a_gpu_switches_change_no_bit(settings: dict, tmp_path: Path) -> None:
    on = dict.fromkeys(OFF, True)
    curves = [
        curve(run(settings, speed=speed, output_dir=str(tmp_path / name)))
        for name, speed in (("off", OFF), ("on", on))
    ]
    assert curves[0] == curves[1]


@pytest.mark.gpu
@pytest.mark.parametrize("switch", [s for s in OFF if s != "cuda_graphs"])
def test_each_switch_trains_alike(settings: dict, tmp_path: Path, switch: str) -> None:
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
def test_a_run_with_cuda_graphs_is_the_same_run(
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


def test_cuda_graphs_and_what_excludes_them(settings: dict) -> None:
    with pytest.raises(ConfigurationError, match="ZeRO 3 moves the weights.*speed.cuda_graphs"):
        run(settings, speed={"cuda_graphs": True}, deepspeed="ds_config_zero3.json")
    with pytest.raises(ConfigurationError, match='model.variant "hf": CUDA graphs are for te_linear'):
        settings_of_hf = {**settings["model"], "variant": "hf"}
        run(settings, speed={"cuda_graphs": True}, model=settings_of_hf, precision={"compute": "bf16"})
    with pytest.raises(ConfigurationError, match="gradient_checkpointing true.*: recomputation"):
        run(settings, speed={"cuda_graphs": True}, gradient_checkpointing=True)
