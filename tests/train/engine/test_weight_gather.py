"""Weights that ZeRO 3 gathers in 8 bits: the same numbers as with 16 bits, and half the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import small_config
from tests.reliability.launching import run_cases
from tests.train.runs import curve, run
from tests.train.test_training import check_resume

GPU = torch.cuda.is_available()
CURRENT = {"recipe": "current"}
DELAYED = {"recipe": "delayed", "amax_history_len": 4}
# Gathered in 16 bits, weights are quantized in each micro-batch, with delayed scaling each time with another scale.
CASES: dict[str, dict[str, Any]] = {
    "current_accumulation": {"precision": CURRENT, "accumulation": 8},
    "delayed": {"precision": DELAYED},
    "delayed_mlp_accumulation": {
        "precision": DELAYED,
        "accumulation": 4,
        "recompute": "mlp",
        "quantize_once": True,
    },
    "delayed_recomputation": {
        "precision": DELAYED,
        "accumulation": 2,
        "recompute": True,
        "quantize_once": True,
    },
    "exceptions": {
        "precision": {**DELAYED, "bf16_modules": ["lm_head", "*.0.self_attention.proj"]},
        "fallbacks": {
            "model.layers.0.layernorm_mlp": "bf16",
            "model.layers.1.layernorm_mlp": "current",
            "model.layers.1.self_attention.proj": "block",
        },
    },
    "fp8_head_te_linear": {"precision": {**CURRENT, "bf16_modules": []}, "variant": "te_linear"},
}


def compare(config: str, folder: Path, ranks: int, names: list[str], **more: Any) -> None:
    """Compare the steps of each case with those of the gather in 16 bits."""
    cases = []
    for name in names:
        for is_packed in (False, True):
            case = {"config": config, "is_packed": is_packed, **CASES[name], **more}
            if is_packed:
                case.pop("quantize_once", None)
            cases.append((ranks, "gathered_steps", case))
    found = run_cases(folder, cases)
    for name, plain, packed in zip(names, found[::2], found[1::2], strict=True):
        for rank in range(ranks):
            where = name, rank
            for key in ("losses", "evaluations"):
                assert packed[rank][key] == plain[rank][key], (*where, key)
            state, expected = packed[rank]["state"], plain[rank]["state"]
            if ranks == 3:  # the last part ends with padding, which has any values
                state, expected = {"fp8": state["fp8"]}, {"fp8": expected["fp8"]}
            assert state == expected, where
            for gemm, values in plain[rank]["health"].items():
                assert packed[rank]["health"][gemm] == pytest.approx(values, rel=1e-5, nan_ok=True), (
                    *where,
                    gemm,
                )
            in_8_bits = packed[rank]["sent"]["torch.uint8"]
            saved = plain[rank]["sent"]["torch.bfloat16"] - packed[rank]["sent"]["torch.bfloat16"]
            assert in_8_bits <= 0.51 * saved, where


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("config") / "config.json"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if GPU else {}
    file.write_text(json.dumps(small_config(num_hidden_layers=2, **sizes).to_dict()))
    return str(file)


@pytest.mark.skipif(GPU, reason="test_on_several_gpus is the form of this test for GPUs")
@pytest.mark.parametrize(
    "names",
    [
        ["current_accumulation", "delayed", "delayed_mlp_accumulation"],
        pytest.param(["delayed_recomputation", "exceptions", "fp8_head_te_linear"], marks=pytest.mark.slow),
    ],
    ids=["short", "more"],
)
@pytest.mark.process
def test_equals_the_gather_in_16_bits(config: str, tmp_path: Path, names: list[str]) -> None:
    """With an evaluation after each step, and a skipped step."""
    compare(config, tmp_path, 2, names)


@pytest.mark.skipif(GPU, reason="needs a machine without CUDA")
@pytest.mark.slow
@pytest.mark.process
def test_parts_with_padding(config: str, tmp_path: Path) -> None:
    """No matrix divides among three ranks."""
    compare(config, tmp_path, 3, ["current_accumulation", "delayed"])


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 3, reason="needs three GPUs, or none")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.process
def test_communication_in_place_equals_deepspeeds(config: str, tmp_path: Path, ranks: int) -> None:
    """On three ranks, NCCL's mean is not exact, gradients need padding, and sums have another order."""
    precision = {**CURRENT, "gradient_communication": "fp32"}
    case = {"config": config, "is_packed": False, "accumulation": 2, "precision": precision}
    cases = [(ranks, "gathered_steps", case | {"in_place": in_place}) for in_place in (False, True)]
    plain, own = run_cases(tmp_path, cases)
    for rank in range(ranks):
        for key in ("evaluations", "norms"):
            assert own[rank][key] == pytest.approx(plain[rank][key], rel=1e-5, nan_ok=True), (rank, key)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.process
def test_on_several_gpus(config: str, tmp_path: Path, name: str) -> None:
    """Ten steps on two to four GPUs."""
    compare(config, tmp_path, min(torch.cuda.device_count(), 4), [name], sizes=(2, 128), steps=10)


# ---------------------------------------------------------------- whole runs

ZERO_3 = {"deepspeed": "ds_config_zero3.json"}


@pytest.mark.skipif(GPU, reason="test_gpu_run_resumes_bit_exactly is the form of this test for GPUs")
def test_run_resumes_bit_exactly(settings: dict) -> None:
    """With evaluations and the export."""
    check_resume(settings | ZERO_3, "te_layer", {**DELAYED, "fp8_weight_gather": True})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [("delayed", False), ("delayed", "mlp"), ("delayed", True), ("current", False), ("current", True)],
)
def test_gpu_run_resumes_bit_exactly(settings: dict, recipe: str, recompute: bool | str) -> None:
    settings |= ZERO_3 | {"gradient_checkpointing": recompute}
    check_resume(settings, "te_layer", {"recipe": recipe, "fp8_weight_gather": True})


@pytest.mark.slow
def test_run_on_one_rank_equals_the_gather_in_16_bits(settings: dict, tmp_path: Path) -> None:
    settings |= ZERO_3
    plain, packed = (
        run(settings, precision={**CURRENT, "fp8_weight_gather": on}, output_dir=str(tmp_path / str(on)))
        for on in (False, True)
    )
    assert curve(plain) == curve(packed)
