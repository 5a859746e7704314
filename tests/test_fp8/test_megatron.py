"""test_fp8/model/megatron.py: our weights in Megatron-Core's model, and what its cases are configured with."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from model import startup_check
from model.config import weight_shapes
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.startup_check import StartupCheckError
from test_fp8.bench_model import BENCHMARK
from test_fp8.common.same_model import DifferentModel
from test_fp8.model import megatron
from test_fp8.model.cases import PRESETS
from test_fp8.model.megatron import to_megatron, transformer_config
from tests.conftest import small_config
from tests.test_fp8.running import report_of
from tests.test_fp8.test_bench_model import configured

NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_has_its_place(tied: bool) -> None:
    config = small_config(tie_word_embeddings=tied, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    first, weights = 0, {}
    for name, shape in weight_shapes(config).items():  # no two values are alike
        size = torch.Size(shape).numel()
        weights[name] = torch.arange(first, first + size, dtype=torch.float64).view(shape)
        first += size
    named = to_megatron(weights, config)
    values = [
        torch.cat([t.flatten() for t in tensors.values()]).sort().values for tensors in (named, weights)
    ]
    assert torch.equal(*values) and ("output_layer.weight" in named) is not tied
    qkv = named["decoder.layers.1.self_attention.linear_qkv.weight"]
    of = {x: weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"}
    # a group: its four queries, then their key, then their value; 16 rows each
    assert qkv.shape == (2 * 6 * 16, config.hidden_size)
    assert torch.equal(qkv[96 : 96 + 64], of["q"][64:])
    assert torch.equal(qkv[96 + 64 : 96 + 80], of["k"][16:]) and torch.equal(qkv[96 + 80 :], of["v"][16:])
    fc1 = named["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(fc1[: config.intermediate_size], weights["model.layers.0.mlp.gate_proj.weight"])


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("megatron_core")])
def test_configuration_is_the_cases(name: str) -> None:
    arguments, switches = configured(PRESETS[name]), PRESETS[name].megatron
    assert switches is not None
    for window, expected in ((64, None), (63, (62, 0)), (None, None)):  # samples have 64 tokens
        options = transformer_config(small_config(sliding_window=window), arguments, switches)
        assert options["window_size"] == expected
    recipe = {"delayed": "delayed", "current": "tensorwise"}
    if "bf16" in name:
        assert "fp8" not in options and options["bf16"] is True
    else:
        assert (options["fp8"], options["fp8_recipe"]) == ("e4m3", recipe[name.split("_")[3]])
    assert ("use_transformer_engine_op_fuser" in options) is ("op_fuser" in name)


@pytest.mark.parametrize(
    ("ran", "errors", "is_right"),
    [
        ("fused (cuDNN, 2)", (1e-3, 1e-3), True),
        ("flash (4.0.0)", (1e-3, 1e-3), False),
        ("fused (cuDNN, 1)", (1e-3, 0.5), False),
        ("fused (cuDNN, 1)", (1e-3, float("nan")), False),
    ],
)
def test_the_attention_that_is_checked_is_the_one_that_was_timed(
    ran: str, errors: tuple[float, float], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_check, "attention_errors", lambda *_, **__: errors)
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: ran)
    precision = Precision(PrecisionConfig(compute="bf16"))
    with contextlib.nullcontext() if is_right else pytest.raises((DifferentModel, StartupCheckError)):
        megatron.check_attention("fused (cuDNN, 1)", small_config(), precision, 64)


@pytest.mark.usefixtures("process_group")
def test_a_missing_package_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "PACKAGE", "no-such-megatron")
    options = ["--rows", "megatron_core_bf16", "--step_rows", "*", "--rounds", "1"]
    (result,) = report_of(BENCHMARK, tmp_path, *options)["results"]
    assert result["failed"] is False and result["reason"]
