"""train/export.py --format hf-fp8, from checkpoints of short runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralForCausalLM

from model import serving
from model.config import load_config
from model.fp8.precision import PrecisionError
from model.hf_folder import check_init_from, read_hf_folder
from model.te_reference.quantize import Quantized
from tests.conftest import numbers, random_ids, refused
from tests.train.runs import run
from train import export


def export_fp8(settings: dict, checkpoint: Path, out: Path) -> list[str]:
    return export.export(checkpoint, out, Path(settings["data"]["sources"]["text"]) / "tokenizer", "hf-fp8")


def weights_of(folder: Path) -> dict[str, Any]:
    return read_hf_folder(folder, load_config(str(folder)), torch.float32)


def upside_down(weights: dict[str, Any]) -> dict[str, Any]:
    """The rows of each FP8 matrix in reverse order, without their scales."""
    return {
        name: Quantized(w.codes.view(torch.uint8).flip(0).view(w.codes.dtype), w.scale)
        if isinstance(w, Quantized)
        else w
        for name, w in weights.items()
    }


def layers_of(folder: Path) -> dict[str, Quantized]:
    return {name: w for name, w in weights_of(folder).items() if isinstance(w, Quantized)}


def logits(folder: Path, dequantized: bool) -> torch.Tensor:
    """Of the folder's model in float32, its FP8 weights multiplied out."""
    weights = weights_of(folder)
    model = MistralForCausalLM(load_config(str(folder)))
    plain = {n: w.dequantize(torch.float32) if isinstance(w, Quantized) else w for n, w in weights.items()}
    assert dequantized == any(isinstance(w, Quantized) for w in weights.values())
    model.load_state_dict(plain)
    return model(input_ids=random_ids(model.config, 1, 48)).logits.detach()


def test_export_with_delayed_scaling(settings: dict, tmp_path: Path) -> None:
    output_dir = run(settings, precision={"recipe": "delayed", "bf16_modules": ["lm_head", "*.0.*mlp"]})
    checkpoint, out = output_dir / "checkpoints/step-00000006", tmp_path / "fp8"
    remarks = export_fp8(settings, checkpoint, out)
    sizes = [128 * 128 + 2 * 64 * 128 + 128 * 128] * 2 + [3 * 128 * 256]
    assert numbers(remarks[0])[0] == 11 and f" {sum(sizes):,} " in remarks[0]
    assert any("compressed-tensors" in remark for remark in remarks), "what transformers needs"
    written, whole = weights_of(out), weights_of(output_dir / "hf")
    assert written.keys() == whole.keys() and len(layers_of(out)) == 11
    for name, weight in written.items():
        if not isinstance(weight, Quantized):
            assert torch.equal(weight, whole[name]) and weight.dtype == torch.bfloat16
    # the rest of the folder is that of hf/
    ours, theirs = ({path.name: path for path in folder.iterdir()} for folder in (out, output_dir / "hf"))
    assert ours.keys() == theirs.keys()
    modes = {path.stat().st_mode & 0o777 for path in (*ours.values(), *theirs.values())}
    tmp_path.joinpath("a file").touch()
    assert modes == {tmp_path.joinpath("a file").stat().st_mode & 0o777}, "others may read it, as any file"
    assert "| quantization |" in ours["README.md"].read_text()
    for name in ours.keys() - {"config.json", "model.safetensors", "README.md"}:
        assert ours[name].read_bytes() == theirs[name].read_bytes()
    config, plain = (json.loads(files["config.json"].read_text()) for files in (ours, theirs))
    quantization = config.pop("quantization_config")
    assert config == plain and config["sliding_window"] is None and config["dtype"] == "bfloat16"
    assert quantization == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "type": "float",
                    "num_bits": 8,
                    "symmetric": True,
                    "strategy": "channel",
                    "dynamic": False,
                },
                "input_activations": {
                    "type": "float",
                    "num_bits": 8,
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": [*(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")), "lm_head"],
    }
    reference = logits(output_dir / "hf", dequantized=False)
    error = (logits(out, dequantized=True) - reference).norm() / reference.norm()
    assert 1e-3 < error < 0.05, "that of rounding to FP8"

    with pytest.raises(ValueError):
        check_init_from(str(out), load_config(str(out)))
    assert not hasattr(load_config(str(out)), "quantization_config"), "a run that takes it is another model"

    # again, over the old one; and where other codes are written, nothing is left
    with pytest.MonkeyPatch.context() as patch:
        flat = serving.to_stored_tensors
        patch.setattr(serving, "to_stored_tensors", lambda weights: flat(upside_down(weights)))
        with pytest.raises(AssertionError):
            export_fp8(settings, checkpoint, tmp_path / "other")
        assert not (tmp_path / "other").exists()
    assert export_fp8(settings, checkpoint, out) == remarks
    with pytest.MonkeyPatch.context() as patch:  # as if precision.on_trouble had taken a module up
        name = "model.layers.1.self_attention.proj"
        patch.setattr(export.RunState, "fallbacks", {name: "current"})
        assert "delayed and current" in export_fp8(settings, checkpoint, out)[0]


@pytest.mark.slow
def test_export_with_block_scaling(settings: dict, tmp_path: Path, small_model: Path) -> None:
    """Sizes that blocks do not divide are refused; those that they do have the format of blocks."""
    settings |= {"max_steps": 2, "precision": {"recipe": "block"}}
    out = tmp_path / "fp8"
    with refused(PrecisionError, code="block_dimensions"):
        export_fp8(settings, run(settings) / "checkpoints/step-00000002", out)
    assert not out.exists()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(small_model.read_text()) | {"num_key_value_heads": 4}))
    output_dir = run(settings, model={"config": str(config)}, output_dir=str(tmp_path / "even"))
    remarks = export_fp8(settings, output_dir / "checkpoints/step-00000002", out)
    assert numbers(remarks[0])[0] == 14
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    down = layers_of(out)["model.layers.0.mlp.down_proj.weight"]
    assert down.scale.shape == (1, 2) and (down.scale.frexp().mantissa == 0.5).all(), "powers of two"


@pytest.mark.parametrize(
    ("model", "precision", "count"),
    [
        ({"variant": "te_layer"}, {"compute": "fp32"}, 14),
        pytest.param(
            {"variant": "torchao"},
            {"recipe": "rowwise", "bf16_modules": ["lm_head", "*.k_proj"]},
            12,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fp8_export_with_a_scale_for_each_row(
    settings: dict, tmp_path: Path, model: dict, precision: dict, count: int
) -> None:
    settings["model"] |= model
    output_dir = run(settings, max_steps=2, precision=precision)
    export_fp8(settings, output_dir / "checkpoints/step-00000002", tmp_path / "fp8")
    written, whole = weights_of(tmp_path / "fp8"), weights_of(output_dir / "hf")
    assert len(layers_of(tmp_path / "fp8")) == count
    for name, weight in written.items():
        if isinstance(weight, Quantized):
            exact = whole[name].float()
            torch.testing.assert_close(weight.dequantize(torch.float32), exact, rtol=0.07, atol=1e-4)
            largest = exact.abs().amax(dim=1, keepdim=True)
            torch.testing.assert_close(weight.scale, largest / 448, rtol=1e-6, atol=0)
        else:
            assert torch.equal(weight, whole[name].bfloat16()) and weight.dtype == torch.bfloat16
    assert json.loads((tmp_path / "fp8/config.json").read_text())["dtype"] == "bfloat16"
