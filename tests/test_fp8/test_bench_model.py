"""test_fp8/bench_model.py: cases are the same model or have no speed; Megatron-Core's cases; the program as run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model import build, conversion
from model.checks import startup
from model.checks.startup import StartupCheckError
from model.config import weight_shapes
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from test_fp8.bench_model import BENCHMARK
from test_fp8.common.cases import Case, Unavailable, select
from test_fp8.common.same_model import Conditions, DifferentModel, Reference, check_same_model, loss_error
from test_fp8.model import bench, megatron
from test_fp8.model import cases as bench_cases
from test_fp8.model.bench import Series, add_ratios, measure_case
from test_fp8.model.cases import PRESETS, Setting
from test_fp8.model.megatron import to_megatron, transformer_config
from tests.conftest import random_ids, small_config
from tests.model.conftest import without_fp8
from tests.test_fp8.running import report_of
from train import phase
from train.config.arguments import TrainingArguments
from train.config.load import build_arguments, resolve_arguments
from train.data.stream import Batch


def small_model(variant: str, seed: int = 1, **changes: object) -> nn.Module:
    return build.build_model(
        small_config(**changes), variant, Precision(PrecisionConfig(compute="bf16")), seed=seed
    )


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(small_config(), 2, 65)


@pytest.fixture(scope="module")
def reference(ids: Tensor) -> Reference:
    return Reference.compute(small_model("hf"), ids[:, :-1], ids[:, 1:])


def check(model: nn.Module, compute: str, reference: Reference, ids: Tensor) -> float:
    return check_same_model(model, conversion.to_hf_state_dict(model), compute, reference, ids[:, :-1])


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
@pytest.mark.parametrize("variant", ["hf", "te_linear", "te_layer"])
def test_all_variants_compute_the_same_model(variant: str, kind: str, ids: Tensor) -> None:
    reference = Reference.compute(small_model("hf", model_type=kind), ids[:, :-1], ids[:, 1:])
    model = small_model(variant, model_type=kind)
    assert check(model, "bf16", reference, ids) < 2e-2
    loss = model(ids[:1, :-1], labels=ids[:1, 1:]).loss.item()
    assert loss_error(loss, "bf16", reference, 1) < 1e-3


def changed_bit(name: str) -> nn.Module:
    model = small_model("te_linear")
    with torch.no_grad():
        model.get_parameter(name).view(torch.int16).view(-1)[5] ^= 1
    return model


def renamed_weight() -> nn.Module:
    model = small_model("hf")
    model.lm_head.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    return model


@pytest.mark.parametrize(
    "other",
    [
        lambda: changed_bit("model.layers.1.self_attn.k_proj.weight"),
        lambda: changed_bit("model.norm.weight"),
        lambda: small_model("te_layer", seed=2),
        lambda: small_model("te_layer", sliding_window=2),
        renamed_weight,
    ],
)
def test_different_model_is_detected(other: Any, reference: Reference, ids: Tensor) -> None:
    model = other()
    with pytest.raises(DifferentModel):
        check(model, "bf16", reference, ids)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_tolerance_follows_rounding_error(recipe: str, reference: Reference, ids: Tensor) -> None:
    """Other rotary angles change the logits by about as much as FP8."""

    def fp8_error(**changes: object) -> float:
        precision = Precision(PrecisionConfig(recipe=recipe))
        model = build.build_model(small_config(**changes), "te_layer", precision, seed=1)
        return check(model, "fp8", reference, ids)

    assert fp8_error() == pytest.approx(reference.fp8_error, rel=0.1)
    with pytest.raises(DifferentModel):
        fp8_error(rope_theta=5000.0)


def test_bf16_tolerance_follows_rounding_error(ids: Tensor) -> None:
    """Eight layers with large weights amplify rounding errors to more than 5e-2."""

    def deep(variant: str, **changes: object) -> nn.Module:
        config = small_config(initializer_range=0.2, num_hidden_layers=8, **changes)
        bf16 = Precision(PrecisionConfig(compute="bf16"))
        return build.build_model(config, variant, bf16, seed=1, initialization="normal")

    reference = Reference.compute(deep("hf"), ids[:, :-1], ids[:, 1:])
    assert check(deep("te_layer"), "bf16", reference, ids) > 5e-2
    with pytest.raises(DifferentModel):
        check(deep("te_layer", sliding_window=2), "bf16", reference, ids)


def test_loss_reference_uses_the_same_samples() -> None:
    reference = Reference({}, torch.empty(0), [10.0, 12.0])
    assert loss_error(10.002, "bf16", reference, 1) == pytest.approx(2e-4)
    assert loss_error(11.04, "fp8", reference, 2) == pytest.approx(0.04 / 11)
    for loss, compute in ((11.04, "bf16"), (float("nan"), "fp8")):
        with pytest.raises(DifferentModel):
            loss_error(loss, compute, reference, 2)


def configured(case: Case, micro_batch: int = 2) -> TrainingArguments:
    base = {
        "model": {"config": "tiny"},
        "data": {"sources": {"none": "none"}},
        "max_steps": 1,
        "max_seq_length": 64,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": 4,
    }
    return resolve_arguments(build_arguments(case.configured(base)), 1)


def test_presets_are_valid_configurations() -> None:
    for case in PRESETS.values():
        arguments = configured(case)
        own_graphs = case.megatron is None and case.name.endswith("_graph")
        assert arguments.speed.cuda_graphs is own_graphs, case.name
        assert (arguments.precision.compute == "bf16") is ("bf16" in case.name)
    assert not any(vars(configured(PRESETS["te_layer_fp8_delayed_off"]).speed).values())
    for patterns in (bench_cases.DEFAULT_ROWS, bench_cases.CPU_ROWS):
        assert select(patterns, PRESETS)


def series(name: str, *ms: float) -> Series:
    """With these measurements of its first setting."""
    one = Series(PRESETS[name], {Setting(b, "auto"): configured(PRESETS[name], b) for b in (2, 4)})
    if ms:
        facts = {"allocated_gib": 1.0, "reserved_gib": 2.0, "loss_error": 1e-4}
        one.found[Setting(2, "auto")] = [{"ms": each, **facts} for each in ms]
    return one


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), False),
        (Unavailable("a CUDA graph needs a GPU"), False),
        (RuntimeError("No available kernel. Aborting execution."), False),
        (ValueError("No dot product attention backend is available for the provided inputs."), False),
        (DifferentModel("other weights"), True),
        (RuntimeError("broken\nin two lines"), True),
    ],
)
def test_case_without_speed_has_a_reason(error: Exception, fault: bool) -> None:
    one = series("te_layer_fp8_delayed", *([1.0] if fault else []))
    capture = RuntimeError("capture failed")
    capture.__context__ = error
    one.refuse(Setting(2, "auto"), capture if isinstance(error, torch.OutOfMemoryError) else error)
    result = one.result(1.0)
    assert result["failed"] is fault and "tokens_per_second" not in result
    assert result["reason"] and "\n" not in result["reason"]


def test_speed_ratios() -> None:
    times = {"hf_bf16": 20.0, "te_layer_bf16": 10.0, "te_layer_fp8_delayed": 8.0}
    results = [series(name, ms).result(1.0) for name, ms in times.items()]
    add_ratios(results)
    fp8 = results[-1]
    assert fp8["ratio_to_hf_bf16"] == pytest.approx(2.5) and fp8["ratio_to_best_bf16"] == pytest.approx(1.25)
    assert [r["row"] for r in results if r["best_bf16"]] == ["te_layer_bf16"]
    assert fp8["tokens_per_second"] == pytest.approx(4 * 2 * 64 / 0.008) and fp8["step_ms"] == 8


@pytest.mark.usefixtures("process_group")
def test_wrong_model_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tampered(config: Any, variant: str, *args: Any, **kwargs: Any) -> nn.Module:
        model = build.build_model(config, variant, *args, **kwargs)
        if variant == "te_linear":
            with torch.no_grad():
                model.lm_head.weight[3, 7] += 0.5
        return model

    monkeypatch.setattr(phase, "build_model", tampered)
    rows = ["--rows", "te_*_bf16", "--row", "graphs", "model.variant=te_layer", "speed.cuda_graphs=true"]
    options = ["--rounds", "1", "--micro_batch", "1", "2"]
    report = report_of(BENCHMARK, tmp_path, *rows, *options, status=1)
    results = {r["row"]: r for r in report["results"]}
    assert (
        results["te_linear_bf16"]["failed"] is True and "tokens_per_second" not in results["te_linear_bf16"]
    )
    assert results["te_layer_bf16"]["tokens_per_second"] > 0
    assert torch.cuda.is_available() or results["graphs"]["failed"] is False


def unchecked(monkeypatch: pytest.MonkeyPatch) -> Conditions:
    """Conditions of a model that nothing is compared with."""
    facts = {"logits_error": 0.0, "fp8_modules": 28, "attention": "torch SDPA", "startup_checks": []}
    monkeypatch.setattr(bench, "check_case", lambda *_: dict(facts))
    monkeypatch.setattr(bench, "loss_error", lambda *_: 0.0)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    return Conditions(None, Reference({}, torch.empty(0), []), Batch(ids, ids), 0.0)


@pytest.mark.usefixtures("process_group")
def test_timed_steps_must_run_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what was checked before."""
    conditions, arguments = unchecked(monkeypatch), configured(PRESETS["te_layer_fp8_current"])
    measure_case(arguments, Setting(2, "auto"), conditions)
    without_fp8(monkeypatch, "nn", "tn")
    with pytest.raises(StartupCheckError):
        measure_case(arguments, Setting(2, "auto"), conditions)


@pytest.mark.parametrize(
    "options",
    [
        ["--rows", "te_layr"],
        ["--seq_length", "40"],
        ["--rows", "hf_bf16", "--row", "r", "precision.compute=fp32"],
        ["--row", "r", "precision.recipe=delyed"],
        ["--row", "r", "max_steps=2"],
    ],
)
def test_unsupported_case_raises(options: list[str]) -> None:
    assert BENCHMARK.main(options) == 2


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.usefixtures("process_group")
def test_benchmark(tmp_path: Path, device: str) -> None:
    names = ["hf_bf16", "te_layer_fp8_delayed"]
    command = "--config tiny --rounds 1 --seq_length 64 --accumulation 2 --micro_batch 2".split()
    report = report_of(BENCHMARK, tmp_path, *command, "--seconds", "0", "--rows", *names)
    results = {r["row"]: r for r in report["results"]}
    assert list(results) == names
    for name, r in results.items():
        assert (r["fp8_modules"] > 0) is (name != "hf_bf16")
        assert r["loss"] == pytest.approx(8.3, abs=0.2)  # ln(4096), and a little for the logits' spread
        assert r["tokens_per_second"] == pytest.approx(2 * 2 * 64 / r["step_ms"] * 1e3)


@pytest.mark.parametrize(("tied", "kind"), [(False, "mistral"), (True, "qwen3")])
def test_megatron_weight_conversion(tied: bool, kind: str) -> None:
    sizes: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    config = small_config(tie_word_embeddings=tied, model_type=kind, **sizes)
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
def test_megatron_configuration(name: str) -> None:
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
    found = [options.get(key) for key in ("use_transformer_engine_op_fuser", "cuda_graph_impl", "fp8_param")]
    given = "op_fuser" in name, "_graph" in name, "_fp8_params" in name
    assert found == [
        value if is_on else None for value, is_on in zip((True, "local", True), given, strict=True)
    ]


@pytest.mark.parametrize(
    ("ran", "errors", "is_right"),
    [
        ("fused (cuDNN, 2)", (1e-3, 1e-3), True),
        ("flash (4.0.0)", (1e-3, 1e-3), False),
        ("fused (cuDNN, 1)", (1e-3, 0.5), False),
        ("fused (cuDNN, 1)", (1e-3, float("nan")), False),
    ],
)
def test_megatron_attention_check(
    ran: str, errors: tuple[float, float], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "attention_errors", lambda *_, **__: errors)
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: ran)
    precision = Precision(PrecisionConfig(compute="bf16"))
    with contextlib.nullcontext() if is_right else pytest.raises((DifferentModel, StartupCheckError)):
        megatron.check_attention("fused (cuDNN, 1)", small_config(), precision, 64)


@pytest.mark.usefixtures("process_group")
def test_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "PACKAGE", "no-such-megatron")
    options = ["--rows", "megatron_core_bf16", "--rounds", "1"]
    (result,) = report_of(BENCHMARK, tmp_path, *options)["results"]
    assert result["failed"] is False and result["reason"]
