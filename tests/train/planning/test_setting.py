"""What a plan takes of a configuration, key by key, and of plan.py's options; the table that it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.planning.settings import setting
from train import plan as program
from train.planning.plan import PlanError, _count, parse_tokens
from train.planning.rates import GPUS
from train.planning.setting import Setting

ZERO_3 = {"deepspeed": "ds_config_zero3.json"}
BF16 = {"precision__compute": "bf16"}
MUON_FP32 = {"optim": "muon", "precision__compute": "fp32", "deepspeed": "ds_config_zero0.json"}


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({}, "eval_batch", None),
        ({"per_device_eval_batch_size": 3}, "eval_batch", 3),
        ({"per_device_train_batch_size": 3}, "micro_batch", 3),
        ({"max_seq_length": 512}, "seq_length", 512),
        ({"gradient_accumulation_steps": 5}, "accumulation", 5),
        ({"model__attention_backend": "flash"}, "flash", True),
        ({"model__attention_backend": "fused"}, "flash", False),
        ({}, "flash", True),
        ({"model__config": "hare_0.4b"}, "flash", False),  # heads of 32
        ({"full_determinism": True}, "deterministic", True),
        ({"full_determinism": False}, "deterministic", False),
        ({"gradient_checkpointing": True}, "recompute", True),
        ({"speed__cuda_graphs": True}, "cuda_graphs", True),
        ({"speed__fused_cross_entropy": False}, "fused_cross_entropy", False),
        ({"precision__compute": "fp16"}, "fused_cross_entropy", False),
        (BF16, "fused_cross_entropy", True),
        ({"model__variant": "te_linear"}, "fused_swiglu", True),
        ({"model__variant": "te_linear", "speed__fused_swiglu": False}, "fused_swiglu", False),
        ({}, "fused_swiglu", False),
        ({"speed__main_grad": False}, "main_grad_asked", False),
        ({"model__variant": "torchao", "precision__recipe": "rowwise"}, "compiled", True),
        ({"model__variant": "hf", **BF16}, "compiled", False),
        ({"model__variant": "hf", "model__compile": True, **BF16}, "compiled", True),
        ({"precision__compute": "fp32"}, "optimizer_bytes", 8),  # the weights are their own masters
        ({"precision__health_steps": 0}, "health", False),
        ({}, "health", True),
        ({"precision__health_steps": 10, **BF16}, "health", False),
        ({"adam_beta2": 0.9}, "adam_beta2", 0.9),
        ({"optim": "muon"}, "optim", "muon"),
        ({"precision__gradient_communication": "fp32"}, "reduces_in_float32", True),
        ({}, "reduces_in_float32", False),
        ({"precision__optimizer_states": "int8"}, "moments", "int8"),
        (ZERO_3, "overlap_comm", True),
        (ZERO_3, "reduce_bucket", 50_000_000),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "overlap_comm", True),
        ({"deepspeed": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 9}}}, "reduce_bucket", 9),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "reduce_bucket", 500_000_000),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "float32_gradients", False),
        ({}, "float32_gradients", True),
        (ZERO_3, "float32_gradients", True),
        ({"deepspeed": "ds_config_zero2.json"}, "float32_gradients", True),
        ({"deepspeed": "ds_config_zero2.json"}, "main_grad", False),
        ({"deepspeed": "ds_config_zero2.json", "precision__compute": "fp32"}, "float32_gradients", False),
        (ZERO_3, "zero_stages", (1, 2, 3)),
        ({"optim": "muon"}, "zero_stages", (1,)),
        (MUON_FP32, "zero_stages", (0,)),
        ({"precision__compute": "fp32"}, "optimizer_bytes", 8),
        ({"precision__optimizer_states": "int8"}, "packs", True),
        ({}, "packs", False),
        ({"precision__compute": "fp32"}, "packs", False),
        ({"gradient_accumulation_steps": 2}, "keeps_fp8_weights", True),
        ({"gradient_accumulation_steps": 1}, "keeps_fp8_weights", False),
        ({"gradient_accumulation_steps": 2, **ZERO_3}, "keeps_fp8_weights", False),
        ({"gradient_accumulation_steps": 2, **BF16}, "keeps_fp8_weights", False),
    ],
)
def test_each_key_is_planned_with(keys: dict[str, Any], field: str, value: Any) -> None:
    found = getattr(setting(**{"gradient_accumulation_steps": 8, **keys}), field)
    assert found == value and type(found) is type(value)


def test_a_head_in_fp8_is_named_whichever_stage_has_it() -> None:
    schedule = [{"until_step": 500, "bf16_modules": ["lm_head"]}, {"bf16_modules": []}]
    s = setting(precision__schedule=schedule, max_steps=1000)
    assert not s.fp8_head and "lm_head in FP8" in s.described()


# ---------------------------------------------------------------- plan.py


def planned(output: Path, *words: str) -> dict[str, Any]:
    assert program.main([*words, "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (8, GPUS["h100"], 20_000 * 2**20, 400)),
        (
            ["--gpus", "16", "--gpu", "H200", "--tokens", "1B", "--network", "50"],
            (16, GPUS["h200"], 10**9, 50),
        ),
    ],
)
def test_options_of_a_plan_and_their_defaults(
    monkeypatch: pytest.MonkeyPatch, options: list[str], expected: tuple[Any, ...]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def plan(model: str, s: Setting, *others: Any) -> None:
        asked.append((s.ranks, *others))
        raise PlanError("enough")

    monkeypatch.setattr(program, "plan", plan)
    assert program.main(["train_config_fp8", *options]) == 2
    assert asked == [expected]


def test_a_plan_knows_what_a_checkpoint_has_and_that_bf16_has_no_recipe(tmp_path: Path) -> None:
    words = ["train_config_bf16", "--gpus", "1", "--precision.optimizer_states", "bf16_remainder"]
    found = planned(tmp_path / "plan.json", *words)
    assert found["recipe"] is None and found["checkpoint_bytes"] == (2 + 2 + 6) * found["parameters"]


@pytest.mark.parametrize(("gpu", "gib"), [("h100", "79.1"), ("h200", "139.8")])
def test_a_plan_in_words_has_the_figures_of_its_json(
    gpu: str, gib: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that fits with recomputation, on one GPU with packed states, or not at all."""
    words = ["--tokens", "100B", "--gpus", "4", "--gpu", gpu, "--per_device_train_batch_size", "4"]
    found = planned(tmp_path / "plan.json", "mistral_7b", *words)
    text = capsys.readouterr().out
    its = found["configured"]
    speed, memory = its["tokens_per_second"], its["memory_gib"]
    assert f"a checkpoint has {found['checkpoint_bytes'] / 1e9:,.1f} GB" in text
    assert "7,242 M parameters, 44.27 GFLOP a token of 2048; 100 B tokens on 4 x " in text
    assert f"  memory: {memory['peak']:,.1f} GiB a GPU at the peak ({its['peak_is_at']})" in text
    fits = "fits" if its["fits"] else "DOES NOT FIT"
    assert f"allocator's waste {memory['needed']:,.1f} of {gib} GiB: {fits}; " in text
    assert f"the largest micro-batch that fits is {its['largest_micro_batch']}\n" in text
    assert (
        f"  speed: {speed:,.0f} tokens/s, {speed / 4:,.0f} a GPU, within {100 * its['within']:.0f} %" in text
    )
    assert f"  time: {its['days']:,.1f} days, {its['gpu_hours']:,.0f} GPU-hours without" in text
    assert f"1,048,576 tokens a step of {its['step_s']:.2f} s" in text
    rows = {
        line.split()[0]: line.split()[1:] for line in text.splitlines() if re.match(r" *\d+  +[d\d]", line)
    }
    assert len(rows) == 11
    for gpus, row in rows.items():
        if (its := found["by_gpus"][gpus]) is None:
            assert row == ["does", "not", "fit"]
            continue
        assert row == [
            str(its["zero_stage"]), its["optimizer_states"], "yes" if its["gradient_checkpointing"] else "no",
            str(its["per_device_train_batch_size"]), str(its["gradient_accumulation_steps"]),
            f"{its['train_batch_size_tokens']:,}", f"{its['memory_gib']['peak']:,.1f}",
            f"{its['tokens_per_second']:,.0f}", f"{100 * its['within']:.0f}", "%",
            f"{its['days']:,.1f}", f"{its['gpu_hours']:,.0f}",
        ]  # fmt: skip
    one, two, largest = (" ".join(rows[gpus]) for gpus in ("1", "2", "1024"))
    assert (gpu == "h200") == one.startswith("1 bf16_remainder no ") == two.startswith("1 fp32 no ")
    assert (gpu == "h100") == (one == "does not fit") == two.startswith("3 fp32 yes ")
    assert largest.startswith("1 fp32 no 1 1 2,097,152 ")


def test_a_short_run_is_told_in_hours_and_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for tokens in ("1M", "100M", "2B", "100B"):
        assert program.main(["hare_1.1b", "--gpus", "1", "--gpu", "h200", "--tokens", tokens]) == 0
        told[tokens] = re.search(r"time: ([\d.]+ \w+), ([\d.,]+) GPU-hours", capsys.readouterr().out)
    spans = [match[1].split()[1] for match in told.values() if match]
    assert spans == ["seconds", "minutes", "hours", "days"]
    hours = [float(match[2].replace(",", "")) for match in told.values() if match]
    _, minutes, of_2b, days = (float(match[1].split()[0]) for match in told.values() if match)
    assert [minutes / 60, of_2b, days * 24] == pytest.approx(hours[1:], rel=0.05) and 0 <= hours[0] < 0.01


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["train_config_fp8", "--per_device_train_batch_size", "64"]) == 0
    assert "DOES NOT FIT; the largest micro-batch" in capsys.readouterr().out


def test_a_models_step_is_the_nearest_that_so_many_gpus_can_have() -> None:
    """Unless its size is given, or how many micro-batches it has."""
    micro_batch = 3 * 16 * 2048
    assert program.configured("hare_1.1b", [], 3).train_batch_size_tokens == 11 * micro_batch
    given = ["--train_batch_size_tokens", str(2 * micro_batch), "--learning_rate", "1e-4"]
    arguments = program.configured("hare_1.1b", given, 3)
    assert arguments.train_batch_size_tokens == 2 * micro_batch and arguments.learning_rate == 1e-4
    assert program.configured("hare_1.1b", ["--train_batch_size_tokens=7"], 3).train_batch_size_tokens == 7
    arguments = program.configured("hare_1.1b", ["--gradient_accumulation_steps", "4"], 8)
    assert arguments.resolve(8).train_batch_size_tokens == 4 * 16 * 8 * 2048
    arguments = program.configured("hare_1.1b", ["--gradient_accumulation_steps", "null"], 3)
    assert arguments.train_batch_size_tokens == 11 * micro_batch, "null is what nobody gave"
    large = program.configured("hare_1.1b", ["--per_device_train_batch_size", "512"], 8)
    assert large.train_batch_size_tokens == 512 * 8 * 2048


def test_what_is_planned_as_a_model(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text('{"model_type": "mistral"}')
    named = {
        "hare_1.1b": True,
        "train_config_fp8": False,
        str(model): True,
        str(tmp_path): True,
        "gone": False,
    }
    assert {name: program.is_of_a_model(name) for name in named} == named
    model.write_text('{"model": {"config": "tiny"}}')
    assert not program.is_of_a_model(str(model))


def test_numbers_of_tokens_for_people() -> None:
    given = {999: "999", 1000: "1 K", 10**9: "1 B", 1_234_567: "1.235 M", 15 * 10**11: "1.5 T"}
    assert {tokens: _count(tokens) for tokens in given} == given
    assert parse_tokens("1,000") == 1000 and parse_tokens(" 2.5m ") == 2_500_000
