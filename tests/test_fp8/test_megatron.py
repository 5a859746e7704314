"""test_fp8/model/megatron.py: our weights in Megatron-Core's model; where it is installed, its loss is ours."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.build import build_model
from model.config import weight_shapes
from model.conversion import to_hf, to_hf_state_dict
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.variants import ATTENTION_BACKENDS
from test_fp8 import bench_model
from test_fp8.common.rows import NotHere
from test_fp8.common.same_model import DifferentModel, Reference
from test_fp8.model import megatron
from test_fp8.model.megatron import free_attention, from_megatron, to_megatron, transformer_config
from test_fp8.model.rows import PRESETS
from test_fp8.model.visit import Visitor
from tests.conftest import random_ids, small_config
from tests.test_fp8.test_bench_model import configured
from train.data.stream import Batch


def numbered(config: object) -> dict[str, Tensor]:
    """Hugging Face's tensors, of which no two values are alike."""
    first, weights = 0, {}
    for name, shape in weight_shapes(config).items():
        size = torch.Size(shape).numel()
        weights[name] = torch.arange(first, first + size, dtype=torch.float64).view(shape)
        first += size
    return weights


@pytest.mark.parametrize("modules", ["te", "local"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_go_there_and_back(modules: str, tied: bool) -> None:
    config = small_config(tie_word_embeddings=tied, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    weights = numbered(config)
    named = to_megatron(weights, config, modules)
    back = from_megatron(named, config, modules)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
    assert sum(t.numel() for t in named.values()) == sum(t.numel() for t in weights.values())
    assert ("output_layer.weight" in named) is not tied
    qkv = named["decoder.layers.1.self_attention.linear_qkv.weight"]
    of = {x: weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"}
    # a group: its four queries, then their key, then their value; 16 rows each
    assert qkv.shape == (2 * 6 * 16, config.hidden_size)
    assert torch.equal(qkv[96 : 96 + 64], of["q"][64:])
    assert torch.equal(qkv[96 + 64 : 96 + 80], of["k"][16:]) and torch.equal(qkv[96 + 80 :], of["v"][16:])
    fc1 = named["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(fc1[: config.intermediate_size], weights["model.layers.0.mlp.gate_proj.weight"])
    named["decoder.layers.0.self_attention.linear_qkv.bias"] = qkv
    with pytest.raises(DifferentModel, match=r"linear_qkv\.bias"):
        from_megatron(named, config, modules)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("megatron_core")])
def test_configuration_is_the_rows(name: str) -> None:
    arguments, switches = configured(PRESETS[name]), PRESETS[name].megatron
    assert switches is not None
    for window, expected in ((64, None), (63, (62, 0)), (None, None)):  # samples have 64 tokens
        config = small_config(sliding_window=window)
        options = transformer_config(config, arguments, switches)
        assert options["window_size"] == expected
    recipe = {"delayed": "delayed", "current": "tensorwise"}
    if "bf16" in name:
        assert "fp8" not in options and options["bf16"] is True
    else:
        assert (options["fp8"], options["fp8_recipe"]) == ("e4m3", recipe[name.split("_")[3]])
    assert ("use_transformer_engine_op_fuser" in options) is ("op_fuser" in name)
    assert options["gradient_accumulation_fusion"] and options["cross_entropy_fusion_impl"] == "te"


def test_the_environment_says_nothing_of_attention_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_backend, "_attention_environment", {})
    for variable in ATTENTION_BACKENDS["fused"]:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with free_attention(deterministic=False):
        assert "NVTE_FLASH_ATTN" not in os.environ
        os.environ["NVTE_FUSED_ATTN"] = "1"  # as Megatron does
    assert os.environ["NVTE_FLASH_ATTN"] == "0" and "NVTE_FUSED_ATTN" not in os.environ


@pytest.mark.parametrize("before", [None, "1"])
def test_deterministic_attention_is_asked_of_the_environment(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron refuses the row otherwise."""
    monkeypatch.setattr(te_backend, "_attention_environment", {})
    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    for deterministic, inside in ((True, "0"), (False, before)):
        with free_attention(deterministic):
            assert os.environ.get(name) == inside
        assert os.environ.get(name) == before


def test_an_attention_that_there_is_not_is_no_fault_of_megatrons_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        raise ValueError(fault)

    monkeypatch.setattr(megatron, "build", build)
    monkeypatch.setattr(megatron, "require", lambda: None)
    precision = Precision(PrecisionConfig(compute="bf16"))
    monkeypatch.setattr(megatron, "Precision", lambda _: precision)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(megatron, "free_memory", lambda: None)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    visitor = Visitor(Reference({}, torch.empty(0), []), Batch(ids, ids), 0.0)
    arguments = configured(PRESETS["megatron_core_bf16"])
    arguments.model.attention_backend, arguments.full_determinism = "flash", True
    fault = "No dot product attention backend is available for the provided inputs."
    with pytest.raises(NotHere, match="no attention flash for this model"):
        megatron.visit(arguments, {}, visitor, small_config())
    fault = "something else"
    with pytest.raises(ValueError, match=fault):
        megatron.visit(arguments, {}, visitor, small_config())


@pytest.mark.parametrize(
    ("ran", "errors", "complaint"),
    [
        ("fused (cuDNN, 2)", (1e-3, 1e-3), None),
        ("flash (4.0.0)", (1e-3, 1e-3), r"fused \(cuDNN, 1\) was timed, and flash \(4\.0\.0\) ran"),
        ("fused (cuDNN, 1)", (1e-3, 0.5), "differs from SDPA by 1.0e-03 and 5.0e-01"),
        ("fused (cuDNN, 1)", (1e-3, float("nan")), "differs from SDPA by 1.0e-03 and nan"),
    ],
)
def test_the_attention_that_is_proven_is_the_one_that_was_timed(
    ran: str, errors: tuple[float, float], complaint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "attention_errors", lambda *_: errors)
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: ran)
    precision = Precision(PrecisionConfig(compute="bf16"))
    with pytest.raises(DifferentModel, match=complaint) if complaint else contextlib.nullcontext():
        megatron.prove_attention("fused (cuDNN, 1)", small_config(), precision, 64)


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.18.0")
    with pytest.raises(NotHere, match=r"megatron-core 0\.18\.0 is installed; .* for 0\.19\.2"):
        megatron.require()


@pytest.mark.usefixtures("process_group")
def test_a_missing_package_is_a_line_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no failure."""
    monkeypatch.setattr(megatron, "PACKAGE", "no-such-megatron")
    output = tmp_path / "bench.json"
    options = ["--rows", "megatron_core_bf16", "--step_rows", "*", "--rounds", "1", "--output", str(output)]
    assert bench_model.main(options) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert result["failed"] is False and "pip install --no-deps no-such-megatron==0.19.2" in result["reason"]
    assert "megatron_core_bf16 not measured: no-such-megatron is not installed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("tied", [False, True])
def test_megatrons_model_computes_our_loss(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own modules, in float32 on the CPU; Transformer Engine's are checked in each visit to a row."""
    for package in ("megatron", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {'megatron-core' if package == 'megatron' else package}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # the state of a GPU's random numbers, of which a model without dropout needs none
    monkeypatch.setattr(random.get_cuda_rng_tracker(), "fork", lambda *_: contextlib.nullcontext())
    config = small_config(initializer_range=0.08, tie_word_embeddings=tied, rope_theta=5000.0)
    ours = build_model(config, "te_layer", Precision(PrecisionConfig(compute="fp32")), seed=1)
    weights, ids = to_hf_state_dict(ours), random_ids(config, 2, 65)
    try:
        arguments = configured(PRESETS["megatron_core_bf16"])
        theirs, _ = megatron.build(config, arguments, {}, weights, "local")
        back = from_megatron(dict(theirs.gpt.named_parameters()), config, "local")
        assert all(torch.equal(back[name], weight) for name, weight in weights.items())
        losses = [m(ids[:, :-1], labels=ids[:, 1:]).loss for m in (ours, theirs)]
        assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-6)
        for loss in losses:
            loss.backward()
        gradients = from_megatron(
            {name: p.grad for name, p in theirs.gpt.named_parameters()}, config, "local"
        )
        for name, gradient in to_hf({n: p.grad for n, p in ours.named_parameters()}, config).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
    finally:
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
