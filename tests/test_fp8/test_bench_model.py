"""test_fp8/bench_model.py: rows are the same model or have no speed; best settings, ratios; and the program as run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model import build, conversion
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.proof import ProofError
from test_fp8 import bench_model
from test_fp8.common.rows import NotHere, Row, RowError, parse_rows
from test_fp8.common.same_model import (
    DifferentModel,
    Reference,
    check_same_model,
    loss_error,
    weight_problems,
)
from test_fp8.common.timing import Laps, mean_pass_ms
from test_fp8.model import rows as bench_rows
from test_fp8.model import visit as bench_visit
from test_fp8.model.results import OUT_OF_MEMORY, Series, lines, panel_title, results_of
from test_fp8.model.rows import PRESETS, ROW_KEYS, Setting, select
from test_fp8.model.visit import Proof, Visit
from tests import programs
from tests.conftest import random_ids, small_config
from tests.model.fp8.test_gemms import without_fp8
from train import setup
from train.config.arguments import TrainingArguments
from train.data.stream import Batch

ROOT = Path(__file__).resolve().parents[2]


def small_model(variant: str, seed: int = 1, **changes: object) -> nn.Module:
    # weights large enough that attention and MLP matter beside the residual stream
    config = small_config(initializer_range=0.08, **changes)
    return build.build_model(config, variant, Precision(PrecisionConfig(compute="bf16")), seed=seed)


# ---------------------------------------------------------------- the same model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(small_config(), 2, 65)


@pytest.fixture(scope="module")
def reference(ids: Tensor) -> Reference:
    return Reference.of(small_model("hf"), ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("variant", ["hf", "te_linear", "te_layer"])
def test_every_variant_is_the_same_model(variant: str, reference: Reference, ids: Tensor) -> None:
    model = small_model(variant)
    assert check_same_model(model, "bf16", reference, ids[:, :-1]) < 2e-2
    loss = model(ids[:1, :-1], labels=ids[:1, 1:]).loss.item()
    assert loss_error(loss, "bf16", reference, 1) < 1e-3


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_one_changed_bit_of_a_weight_is_found(name: str, reference: Reference, ids: Tensor) -> None:
    model = small_model("te_linear")
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.view(torch.int16).view(-1)[5] ^= 1
    with pytest.raises(DifferentModel, match=f"{name} has other values"):
        check_same_model(model, "bf16", reference, ids[:, :-1])


def test_another_seed_is_another_model(reference: Reference, ids: Tensor) -> None:
    with pytest.raises(DifferentModel, match=r"other weights: .* more"):
        check_same_model(small_model("te_layer", seed=2), "bf16", reference, ids[:, :-1])


def test_the_same_weights_in_another_architecture_are_found(reference: Reference, ids: Tensor) -> None:
    with pytest.raises(DifferentModel, match="logits differ by"):
        check_same_model(small_model("te_layer", sliding_window=2), "bf16", reference, ids[:, :-1])
    with pytest.raises(DifferentModel, match=r"[\d,]+ parameters"):
        model = small_model("te_layer")
        model.config.num_hidden_layers = 3
        check_same_model(model, "bf16", reference, ids[:, :-1])


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_is_as_far_off_as_its_operands_are_rounded(
    recipe: str, reference: Reference, ids: Tensor
) -> None:
    """Other rotary angles change the logits by 0.27: less than FP8 may make of some models, and more than of this."""

    def check(**changes: object) -> float:
        precision = Precision(PrecisionConfig(recipe=recipe))
        config = small_config(initializer_range=0.08, **changes)
        return check_same_model(
            build.build_model(config, "te_layer", precision, seed=1), "fp8", reference, ids[:, :-1]
        )

    assert check() == pytest.approx(reference.fp8_error, rel=0.1)
    with pytest.raises(
        DifferentModel, match=r"logits differ by (2.9|3.1|3.0)e-01 relative, allowed are 1.7e-01 in fp8"
    ):
        check(rope_theta=5000.0)


def test_weights_that_are_missing_unknown_or_of_another_type(reference: Reference) -> None:
    weights = conversion.to_hf_state_dict(small_model("hf"))
    weights["lm_head.bias"] = weights.pop("lm_head.weight")
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    assert weight_problems(weights, reference.weights) == [
        "lm_head.bias is unknown",
        "lm_head.weight is missing",
        "model.norm.weight is torch.float32 (128,)",
    ]


def test_a_loss_is_compared_with_that_of_the_same_samples() -> None:
    reference = Reference({}, torch.empty(0), [10.0, 12.0])
    assert loss_error(10.002, "bf16", reference, 1) == pytest.approx(2e-4)
    assert loss_error(11.04, "fp8", reference, 2) == pytest.approx(0.04 / 11)
    with pytest.raises(DifferentModel, match=r"11\.04000.*11\.00000.*allowed are 3e-04 in bf16"):
        loss_error(11.04, "bf16", reference, 2)
    with pytest.raises(DifferentModel):
        loss_error(float("nan"), "fp8", reference, 1)


# ---------------------------------------------------------------- rows


def test_presets_are_what_the_trainer_takes() -> None:
    for row in PRESETS.values():
        arguments = configured(row)
        assert arguments.speed.cuda_graphs is row.name.endswith("_graph"), row.name
        assert (arguments.precision.compute == "bf16") is ("bf16" in row.name)
    off = configured(PRESETS["te_layer_fp8_delayed_off"]).speed
    assert not any(vars(off).values())
    for patterns in (bench_rows.DEFAULT_ROWS, bench_rows.DEFAULT_STEP_ROWS, bench_rows.CPU_ROWS):
        assert select(patterns, PRESETS, "--rows")


def configured(row: Row, micro_batch: int = 2) -> TrainingArguments:
    base = {
        "model": {"config": "tiny"},
        "data": {"sources": {"none": "none"}},
        "max_steps": 1,
        "max_seq_length": 64,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": 4,
    }
    return TrainingArguments.from_dict(row.configured(base)).resolve(1)


def test_rows_are_chosen_by_pattern_in_the_order_of_the_table() -> None:
    names = [row.name for row in select(["te_layer_bf16*", "hf_*"], PRESETS, "--rows")]
    assert names == ["hf_bf16", "hf_bf16_compiled", "te_layer_bf16", "te_layer_bf16_graph"]
    with pytest.raises(RowError, match=r"--rows: 'te_layr\*' matches no row; there are hf_bf16, "):
        select(["hf_bf16", "te_layr*"], PRESETS, "--rows")


def test_a_row_of_ones_own() -> None:
    pairs = ["model.variant=te_linear", "precision.bf16_modules=[]", "speed.main_grad=false"]
    (row,) = parse_rows([["mine", *pairs]], PRESETS, ROW_KEYS, "another model or batch")
    arguments = configured(row)
    assert (arguments.model.variant, arguments.precision.bf16_modules) == ("te_linear", [])
    assert arguments.speed.main_grad is False and arguments.speed.fused_rope is True
    for name, pair, complaint in (
        ("hf_bf16", "precision.compute=bf16", "another name"),
        ("a b", "precision.compute=bf16", "letters"),
        ("mine", "precision.compute", "key=value"),
        ("mine", "learning_rate=1", "another model or batch"),
    ):
        with pytest.raises(RowError, match=complaint):
            parse_rows([[name, pair]], PRESETS, ROW_KEYS, "another model or batch")


# ---------------------------------------------------------------- settings, speeds, ratios


def series(name: str, measure: str = "bare", micro_batches: tuple[int, ...] = (2,)) -> Series:
    row = PRESETS[name]
    return Series(row, measure, {Setting(b, "auto"): configured(row, b) for b in micro_batches})


def visit(**laps: list[float]) -> Visit:
    one = Visit(laps, 1.0, 0.5, None, 8.0, 1e-4, [], "torch SDPA")
    one.proof = Proof(0.01, 0, "torch SDPA")
    return one


def test_a_pass_in_the_mean_of_a_step_counts_the_first_once() -> None:
    assert mean_pass_ms({"first": [20.0, 22.0, 40.0], "later": [10.0, 10.0]}, 4) == (22 + 3 * 10) / 4
    assert mean_pass_ms({"later": [10.0, 12.0, 11.0]}, 4) == 11


def test_laps_without_a_name_do_not_count() -> None:
    laps = Laps()
    for name in (None, "a", None, "b", "a"):
        laps.mark(name)
    times = laps.ms()
    assert {name: len(ms) for name, ms in times.items()} == {"a": 2, "b": 1}
    assert min(times["a"] + times["b"]) >= 0


def test_the_best_micro_batch_is_visited_again_and_reported() -> None:
    one = series("te_layer_bf16", micro_batches=(2, 4))
    assert list(one.candidates(0, None)) == [Setting(2, "auto"), Setting(4, "auto")]
    one.visits = {
        Setting(2, "auto"): [visit(later=[8.0])],
        Setting(4, "auto"): [visit(later=[10.0])],
    }
    assert list(one.candidates(1, None)) == [Setting(4, "auto")]
    one.visits[Setting(4, "auto")].append(visit(later=[11.0]))
    (result,) = results_of([one], [], 2e9)
    assert result["micro_batch"] == 4
    assert result["tokens_per_second"] == pytest.approx(4 * 64 / 10.5 * 1e3)
    assert result["tflops"] == pytest.approx(2e9 * result["tokens_per_second"] / 1e12)
    assert result["drift"] == pytest.approx(0.1)
    assert [tried["micro_batch"] for tried in result["tried"]] == [2, 4]

    step = series("te_layer_bf16", "step", (2, 4))
    assert list(step.candidates(0, one)) == [Setting(4, "auto"), Setting(2, "auto")], "fastest bare first"


def test_what_does_not_fit_is_a_reason_and_larger_ones_are_not_tried() -> None:
    one = series("hf_bf16", micro_batches=(2, 4, 8))
    candidates = one.candidates(0, None)
    one.visits[next(candidates)] = [visit(later=[1.0])]
    capture = RuntimeError("capture failed")
    capture.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    assert one.refuse(next(candidates), capture) is False
    assert list(candidates) == []
    assert one.failed is None and one.best() == Setting(2, "auto")
    assert one.reasons == {Setting(4, "auto"): OUT_OF_MEMORY, Setting(8, "auto"): OUT_OF_MEMORY}


@pytest.mark.parametrize(
    ("error", "fault", "text"),
    [
        (NotHere("a CUDA graph needs a GPU"), False, "a CUDA graph needs a GPU"),
        (DifferentModel("other weights"), True, "other weights"),
        (RuntimeError("broken\nin two lines"), True, "RuntimeError: broken in two lines"),
    ],
)
def test_a_row_without_a_speed_says_why(error: Exception, fault: bool, text: str) -> None:
    one = series("te_layer_fp8_delayed")
    if fault:  # found in a later round: what was measured before does not count
        one.visits[Setting(2, "auto")] = [visit(later=[1.0])]
    assert one.refuse(Setting(2, "auto"), error) is fault
    (result,) = results_of([one], [], 1.0)
    assert (result["reason"], result["failed"]) == (text, fault)
    assert "tokens_per_second" not in result


def test_ratios_are_to_eager_and_to_the_fastest_bf16_of_the_same_measure() -> None:
    rows = {"hf_bf16": 20.0, "te_layer_bf16": 10.0, "te_layer_fp8_delayed": 8.0}
    measured = []
    for measure, factor in (("bare", 1), ("step", 5)):
        for name, ms in rows.items():
            one = series(name, measure)
            laps = {"later": [ms], "step": [ms * factor]} if measure == "step" else {"later": [ms]}
            one.visits[Setting(2, "auto")] = [visit(**laps)]
            measured.append(one)
    results = {(r["measure"], r["row"]): r for r in results_of(measured, [2.0], 1.0)}
    for measure in ("bare", "step"):
        fp8 = results[measure, "te_layer_fp8_delayed"]
        assert fp8["ratio_to_hf_bf16"] == pytest.approx(2.5)
        assert fp8["ratio_to_best_bf16"] == pytest.approx(1.25)
        assert [r["row"] for r in results.values() if r["measure"] == measure and r["best_bf16"]] == [
            "te_layer_bf16"
        ]
    # 4 passes of 8 ms and 2 ms of optimizer in a step of 40 ms
    assert results["step", "te_layer_fp8_delayed"]["deepspeed_share"] == pytest.approx(1 - 34 / 40)
    assert results["step", "hf_bf16"]["tokens_per_second"] == pytest.approx(4 * 2 * 64 / 0.1)


def test_a_panel_with_megatrons_steps_is_not_called_deepspeeds() -> None:
    rows = [{"measure": "step", "variant": "hf"}, {"measure": "step", "variant": "megatron_core"}]
    assert [panel_title(rows[:1]), panel_title(rows)] == ["whole DeepSpeed step", "whole step"]


def test_what_precision_auto_gave_bf16_is_not_the_bf16_to_beat() -> None:
    auto, bf16 = series("te_layer_auto"), series("te_layer_bf16")
    setting = Setting(2, "auto")
    auto.settings[setting] = replace(
        auto.settings[setting], precision=PrecisionConfig(compute="bf16", recipe="delayed")
    )
    auto.choices[setting] = {"compute": "bf16", "cuda_graphs": False, "why": []}
    auto.visits[setting], bf16.visits[setting] = [visit(later=[9.0])], [visit(later=[10.0])]
    results = results_of([auto, bf16], [], 1.0)
    assert [r["best_bf16"] for r in results] == [False, True]
    assert results[0]["ratio_to_best_bf16"] == pytest.approx(10 / 9)
    assert "bare te_layer_auto chose: compute bf16, cuda_graphs False" in lines(results)


# ---------------------------------------------------------------- the program


@pytest.mark.usefixtures("process_group")
def test_a_tampered_row_is_left_out_and_the_program_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tampered(config: Any, variant: str, *args: Any, **kwargs: Any) -> nn.Module:
        model = build.build_model(config, variant, *args, **kwargs)
        if variant == "te_linear":
            with torch.no_grad():
                model.lm_head.weight[3, 7] += 0.5
        return model

    monkeypatch.setattr(setup, "build_model", tampered)
    output = tmp_path / "bench.json"
    rows = [
        "--rows",
        "te_*_bf16",
        "te_layer_auto",
        "--row",
        "graphs",
        "model.variant=te_layer",
        "speed.cuda_graphs=true",
    ]
    options = ["--measure", "bare", "--rounds", "1", "--micro_batch", "1", "2", "--output", str(output)]
    assert bench_model.main([*rows, *options]) == 1
    results = {r["row"]: r for r in json.loads(output.read_text())["results"]}
    assert results["te_linear_bf16"]["failed"] is True
    assert "lm_head.weight has other values" in results["te_linear_bf16"]["reason"]
    assert results["te_layer_bf16"]["tokens_per_second"] > 0
    assert "lm_head.weight has other values" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert (results["graphs"]["failed"], results["graphs"]["reason"]) == (
            False,
            "a CUDA graph needs a GPU",
        )


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_rows_within_documents_are_timed_and_proven(tmp_path: Path) -> None:
    output = tmp_path / "documents.json"
    rows = ["te_layer_fp8_delayed", "documents_te_layer_fp8_delayed", "documents_te_linear_bf16"]
    options = ["--rows", "hf_bf16", *rows, "--step_rows", "documents_te_layer*delayed", "--rounds", "1"]
    options += ["--document_length", "20", "--output", str(output)]
    assert bench_model.main(options) == 0
    report = json.loads(output.read_text())
    assert "--document_length 20" in report["command"]
    losses = {(r["measure"], r["row"]): r["loss"] for r in report["results"]}
    assert set(losses) == {*(("bare", row) for row in ("hf_bf16", *rows)), ("step", rows[1])}
    # the same weights and tokens, with and without what is before a document
    assert losses["bare", rows[0]] != losses["bare", rows[1]] == pytest.approx(losses["step", rows[1]])


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("measure", ["bare", "step"])
def test_what_is_timed_has_to_run_fp8(measure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what was proven before."""
    monkeypatch.setattr(bench_visit, "prove_row", lambda *_: Proof(0.0, 28, "torch SDPA"))
    monkeypatch.setattr(bench_visit, "loss_error", lambda *_: 0.0)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    visitor = bench_visit.Visitor(Reference({}, torch.empty(0), []), Batch(ids, ids), 0.0)
    visitor.visit(configured(PRESETS["te_layer_fp8_current"]), measure)
    without_fp8(monkeypatch, "nn", "tn")
    with pytest.raises(ProofError, match="ran 0 FP8 GEMMs"):
        visitor.visit(configured(PRESETS["te_layer_fp8_current"]), measure)


@pytest.mark.usefixtures("process_group")
def test_an_attention_that_there_is_not_is_no_fault_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_attention(*_: object) -> Proof:
        raise ValueError("No dot product attention backend is available for the provided inputs.")

    monkeypatch.setattr(bench_visit, "prove_row", no_attention)
    batch = Batch(torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64, dtype=torch.int64))
    visitor = bench_visit.Visitor(Reference({}, torch.empty(0), [1.0, 1.0]), batch, 0.0)
    arguments = configured(PRESETS["te_layer_bf16"])
    arguments.model.attention_backend = "flash"
    with pytest.raises(NotHere, match="no attention flash for this model"):
        visitor.visit(arguments, "bare")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--rows", "te_layr"], "matches no row"),
        (["--rows", "hf_bf16", "--step_rows", "te_layer_bf16", "--measure", "step"], "nothing to measure"),
        (["--seq_length", "40"], "multiple of 16"),
        (["--rows", "hf_bf16", "--row", "r", "precision.compute=fp32"], "fp32"),
        (["--row", "r", "precision.recipe=delyed"], "delyed"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_model.main(options) == 2
    assert complaint in capsys.readouterr().err


def run_program(folder: Path) -> None:
    output = folder / "results" / "bench.json"
    command = [sys.executable, str(ROOT / "test_fp8" / "bench_model.py"), "--config", "tiny", "--rounds", "1"]
    command += ["--rows", "hf_bf16", "te_layer_fp8_delayed", "--accumulation", "2", "--seq_length", "64"]
    command += ["--step_rows", "*", "--micro_batch", "2", "--seconds", "0", "--output", str(output)]
    run = programs.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert str(folder) not in output.read_text(), "a report must not hold the machine's paths"
    assert output.with_suffix(".png").stat().st_size > 10_000
    report = json.loads(output.read_text())
    assert {"command", "date", "machine", "versions", "results", "loss_tolerance"} <= report.keys()
    assert report["deterministic"] is False and len(report["optimizer_ms"]) > 1

    results = {(r["measure"], r["row"]): r for r in report["results"]}
    names = ["hf_bf16", "te_layer_fp8_delayed"]
    assert list(results) == [(m, n) for m in ("bare", "step") for n in names]
    for (measure, name), r in results.items():
        assert f"{r['tokens_per_second']:,.0f}" in run.stdout
        assert (r["fp8_modules"] > 0) is (name != "hf_bf16")
        assert r["loss"] == pytest.approx(8.3, abs=0.2)  # ln(4096), and a little for the logits' spread
        tokens = 2 * 64 * (2 if measure == "step" else 1)
        ms = r["step_ms"] if measure == "step" else r["pass_ms"]
        assert r["tokens_per_second"] == pytest.approx(tokens / ms * 1e3)
        assert measure == "bare" or r["deepspeed_share"] < 1
    # the same weights and tokens, so through DeepSpeed too the same first loss
    assert results["bare", names[1]]["loss"] == pytest.approx(results["step", names[1]]["loss"], rel=1e-3)


@pytest.mark.process
def test_program(tmp_path: Path) -> None:
    run_program(tmp_path)


@pytest.mark.gpu
@pytest.mark.process
def test_program_on_a_gpu(tmp_path: Path) -> None:
    run_program(tmp_path)
