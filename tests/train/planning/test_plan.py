"""The plan against what was measured (peaks and speeds of rates.STEPS), and what train/plan.py says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.config import CONFIGS, GIB, load_sizes, state_memory_gib
from tests.train.planning.settings import setting
from train import plan as program
from train.config.arguments import REPOSITORY, load_deepspeed
from train.planning.memory import checkpoint_bytes, largest_micro_batch, memory_of
from train.planning.plan import PlanError, gpu_called, parse_tokens, plan
from train.planning.rates import GPUS, MEASURED_ON, RESULTS, estimate, measured
from train.planning.recommend import recommend
from train.planning.setting import ZERO_3_BUCKET, Setting

SPEED = 0.12
# Of a model as if it had not been measured: te_linear waits for the host where a model is small.
UNSEEN = {"te_linear": 0.15}


# ---------------------------------------------------------------- against measurements


def test_every_measured_peak_is_predicted() -> None:
    """Of three models, all variants, bf16 and FP8, graphs, recomputation: a tensor that is not counted shows."""
    assert len(measured()) > 35 and {m.setting.variant for m in measured()} > {"hf", "torchao"}
    wrong = {
        m.source: (planned, m.peak_gib)
        for m in measured()
        for planned in [memory_of(m.setting).measured_as_gib]
        if abs(planned - m.peak_gib) > 0.1 + (0.02 if m.setting.cuda_graphs else 0.001) * m.peak_gib
    }
    assert not wrong


@pytest.mark.parametrize(
    ("patterns", "kept", "head"),
    [
        ([], 0, True),
        (["lm_head"], 0, False),
        (["model.layers.0", "model.layers.1"], 2, True),
        (["model.layers.[23]", "*.o_proj"], 2, True),  # a layer of which a part is kept is FP8
        (["model.layers"], None, True),
        (["model"], None, True),
    ],
)
def test_layers_that_bf16_modules_keeps_are_planned_so(
    patterns: list[str], kept: int | None, head: bool
) -> None:
    s = setting(precision__bf16_modules=patterns)
    layers = s.sizes.num_hidden_layers
    assert (layers - s.fp8_layers, s.fp8_head) == (layers if kept is None else kept, head)


def test_a_reduction_beside_the_backward_takes_a_second_bucket() -> None:
    for stage, buckets in ((1, (0, 0)), (2, (1, 2))):
        s = setting(ranks=2, deepspeed=f"ds_config_zero{stage}.json", per_device_train_batch_size=32)
        for overlap_comm, count in zip((False, True), buckets, strict=True):
            parts = memory_of(replace(s, overlap_comm=overlap_comm)).parts
            assert parts.get("communication buffers", 0) == count * 2 * s.reduce_bucket / GIB


@pytest.mark.parametrize("row", ["bf16", "delayed", "current", "block"])
def test_trainings_of_a_model_without_rates_are_predicted(row: str) -> None:
    """compare_convergence.py's of mistral_0.4b, by train.py itself: peak and speed."""
    report = json.loads((RESULTS / "convergence.json").read_text())
    (found,) = [r for r in report["results"] if r["row"] == row]
    precision = {"precision__compute": "bf16"} if row == "bf16" else {"precision__recipe": row}
    precision |= {"precision__fp8_head_gradients": False} if row != "bf16" else {}  # not yet then
    s = setting("train_config_convergence.json", gradient_accumulation_steps=4, **precision)
    assert memory_of(s).measured_as_gib == pytest.approx(found["memory_gib"], rel=0.03)
    assert estimate(s, MEASURED_ON).tokens_per_second == pytest.approx(found["tokens_per_second"], rel=SPEED)


def test_the_speed_of_a_model_is_predicted_from_the_others() -> None:
    """Within what the estimate says of itself, and of the variants that are used most within 12 %."""
    wrong = {}
    for m in measured():
        unseen = estimate(m.setting, MEASURED_ON, without_model=m.model)
        error = abs(m.step_s / unseen.step_s - 1)
        allowed = UNSEEN.get(m.setting.variant, SPEED)
        if error > allowed or estimate(m.setting, MEASURED_ON).step_s != pytest.approx(m.step_s, rel=0.03):
            wrong[m.source] = error
    assert not wrong


# ---------------------------------------------------------------- what follows from what


def test_the_state_is_that_of_the_other_tables() -> None:
    for stage, ranks in ((0, 1), (1, 8), (2, 8), (3, 8)):
        s = setting(ranks=ranks, deepspeed=f"ds_config_zero{stage}.json", speed__main_grad=False)
        parts = memory_of(s).parts
        kept = 2 * s.parameters / GIB if stage == 1 else 0  # bf16 gradients beside the float32 ones
        state = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
        assert state - kept == pytest.approx(state_memory_gib(s.sizes, stage, ranks))


@pytest.mark.parametrize(
    ("less", "part"),
    [
        ({"gradient_checkpointing": True}, "activations"),
        ({"per_device_train_batch_size": 4}, "activations"),
        ({"max_seq_length": 1024}, "activations"),
        ({"precision__compute": "bf16"}, "FP8 copies of weights"),
        ({"precision__optimizer_states": "bf16_remainder"}, "optimizer"),
        ({"deepspeed": "ds_config_zero2.json"}, "gradients"),
        ({"deepspeed": "ds_config_zero3.json"}, "weights"),
    ],
)
def test_what_takes_less_takes_less(less: dict[str, Any], part: str) -> None:
    usual, other = (memory_of(setting(ranks=8, **keys)).parts for keys in ({}, less))
    assert other.get(part, 0) < 0.99 * usual[part]


@pytest.mark.parametrize("stage, ranks", [(1, 1), (1, 8), (0, 8)])
def test_muon_keeps_one_moment_of_the_matrices_of_the_layers(stage: int, ranks: int) -> None:
    """And of the whole it knows what a GPU holds, what a checkpoint has and what can be recommended."""
    usual, muon = (
        setting(ranks=ranks, deepspeed=f"ds_config_zero{stage}.json", optim=optim)
        for optim in ("adamw", "muon")
    )
    matrices = usual.sizes.num_hidden_layers * usual.layer_matrices
    parts = [memory_of(s).parts["optimizer"] for s in (usual, muon)]
    assert parts[0] - parts[1] == pytest.approx(4 * matrices / (ranks if stage else 1) / GIB)
    assert memory_of(muon).peak_gib < memory_of(usual).peak_gib
    saved = [checkpoint_bytes(s.sizes, stage, s.compute, optim=s.optim) for s in (usual, muon)]
    assert saved[0] - saved[1] == 4 * matrices
    assert estimate(muon, MEASURED_ON).step_s > estimate(usual, MEASURED_ON).step_s
    recommended = recommend(muon, MEASURED_ON, ranks, muon.step_tokens, 400)
    assert recommended is not None and recommended.setting.zero_stage == 1
    assert recommended.setting.optim == "muon"


def test_te_linears_fused_swiglu_saves_what_was_measured() -> None:
    """Passes of hare_1.1b at micro-batch 16 before and with it: docs/performance.md. te_layer has no such choice."""
    keys = {"model__config": "hare_1.1b", "per_device_train_batch_size": 16, "per_device_eval_batch_size": 1}
    before, now = (
        setting(model__variant="te_linear", speed__fused_swiglu=fused, **keys) for fused in (False, True)
    )
    assert memory_of(before).peak_gib - memory_of(now).peak_gib == pytest.approx(53.8 - 46.2, rel=0.02)
    estimates = [estimate(s, MEASURED_ON) for s in (before, now)]
    assert estimates[1].tokens_per_second == pytest.approx(1.04 * estimates[0].tokens_per_second, rel=0.02)
    rows = [m.setting for m in measured() if m.setting.variant == "te_linear" and not m.setting.fused_swiglu]
    assert rows and estimate(rows[0], MEASURED_ON).basis.startswith("measured")
    assert estimate(replace(rows[0], fused_swiglu=True), MEASURED_ON).basis.startswith("scaled from")
    usual = setting(**keys)
    assert memory_of(replace(usual, fused_swiglu=True)) == memory_of(usual)


def test_without_a_cache_of_fp8_weights_recomputation_holds_one_layer_of_them() -> None:
    keys = {"gradient_checkpointing": True, "per_device_eval_batch_size": 1}
    once, cached = (setting(gradient_accumulation_steps=n, **keys) for n in (1, 2))
    copies = [memory_of(s).parts["FP8 copies of weights"] for s in (once, cached)]
    assert copies[0] * once.sizes.num_hidden_layers == pytest.approx(copies[1])


def test_gradients_are_reduced_in_16_bits_beside_the_others() -> None:
    """The peak of mistral_7b on two H200s (108 GiB, by hand) is there, not in the backward. In float32 they
    need no copy."""
    keys = {"model__config": "mistral_7b", "gradient_checkpointing": True, "per_device_train_batch_size": 4}
    s = setting(ranks=2, gradient_accumulation_steps=16, **keys)
    memory = memory_of(s)
    assert memory.moment == "optimizer" and memory.peak_gib == pytest.approx(108, rel=0.02)
    assert memory_of(replace(s, reduces_in_float32=True)).moment != "optimizer"
    fast = replace(s, deterministic=False, flash=True)
    assert estimate(fast, GPUS["h200"]).tokens_per_second == pytest.approx(30_600, rel=SPEED)


def test_what_deepspeed_holds_by_stage() -> None:
    """Of its sources: float32 gradients in the step of ZeRO 0, gathered weights and a bucket at 3, a bucket at 2."""
    keys = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_seq_length": 64}
    zero, two, three = (
        memory_of(setting(ranks=8, deepspeed=f"ds_config_zero{n}.json", **keys)) for n in (0, 2, 3)
    )
    parameters = setting().parameters
    assert zero.moment == "optimizer" and zero.parts["gradients of the step"] == 4 * parameters / GIB
    assert two.parts["communication buffers"] == 2 * 5e8 / GIB
    assert three.parts["communication buffers"] == 2 * (1e9 + ZERO_3_BUCKET) / GIB
    assert load_deepspeed("ds_config_zero3.json")["zero_optimization"]["reduce_bucket_size"] == ZERO_3_BUCKET


def test_a_device_holds_more_than_tensors() -> None:
    memory = memory_of(setting())
    assert memory.needed_gib(1) == pytest.approx(1.04 * memory.peak_gib + 1.0)
    assert memory.needed_gib(2) == pytest.approx(1.04 * memory.peak_gib + 1.8)


def test_a_small_models_peak_is_in_its_evaluation() -> None:
    """Logits in bf16 and float32, and the logarithms of their softmax."""
    s = setting(model__config="hare_0.4b", gradient_accumulation_steps=2)
    memory, without = memory_of(s), memory_of(replace(s, eval_batch=0))
    assert (memory.moment, without.moment) == ("evaluation", "begin of the backward")
    assert memory.parts["logits"] == pytest.approx(10 * 8 * 2048 * 32000 / GIB, rel=0.02)
    fewer = setting(model__config="hare_0.4b", gradient_accumulation_steps=2, per_device_eval_batch_size=2)
    assert memory_of(fewer) == without


def test_a_graph_holds_its_activations_while_the_run_evaluates() -> None:
    s = setting(model__config="hare_0.4b", gradient_accumulation_steps=2)
    eager, graph = memory_of(s), memory_of(replace(s, cuda_graphs=True))
    activations = memory_of(replace(s, eval_batch=0)).parts["activations"]
    assert graph.peak_gib > eager.peak_gib + activations
    assert graph.measured_as_gib == eager.measured_as_gib  # the evaluation's


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_graph_of_fp8s_health_has_gradients_of_its_own(accumulation: int) -> None:
    """Where no GEMM adds them into a buffer (model/graphs.py)."""
    keys = {"gradient_accumulation_steps": accumulation, "per_device_eval_batch_size": 1}
    for main_grad in (False, True):
        usual, looked_at = (
            memory_of(
                setting(
                    speed__main_grad=main_grad, speed__cuda_graphs=True, precision__health_steps=n, **keys
                )
            ).peak_gib
            for n in (0, 10)
        )
        gradients = 0 if main_grad else 2 * setting().parameters / GIB
        assert looked_at - usual == pytest.approx(gradients)


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    s = setting(ranks=8)
    largest = largest_micro_batch(s, 79.1)
    for samples, fits in ((largest, True), (largest + 1, False)):
        assert (memory_of(replace(s, micro_batch=samples)).needed_gib(8) <= 79.1) is fits
    assert largest_micro_batch(s, 1.0) == 0


@pytest.mark.parametrize(
    ("config", "communication", "bytes_"),
    [("hare_0.4b", None, 4 + 2), ("hare_0.4b", "fp32", 4), ("hare_1.1b", None, 2)],
)
def test_what_the_reduction_of_gradients_takes(config: str, communication: str | None, bytes_: int) -> None:
    """DeepSpeed joins those of less than a bucket, and casts what it reduces in bf16."""
    changes = {"model__config": config, "precision__gradient_communication": communication}
    s = replace(setting(precision__compute="bf16", **changes), micro_batch=1, eval_batch=0, seq_length=64)
    memory = memory_of(s)
    assert memory.moment == "optimizer"
    assert memory.parts["gradients of the step"] * 2**30 == pytest.approx(bytes_ * s.parameters)


def test_estimates_say_what_they_are_derived_from() -> None:
    s = setting(full_determinism=False, gradient_accumulation_steps=8)
    measured_here = estimate(replace(s, micro_batch=16), MEASURED_ON)
    assert measured_here.basis.startswith("measured hare_1.1b_shipped_step.json, te_layer_fp8_delayed")
    said = [
        (replace(s, micro_batch=4), "h200", "scaled from"), (s, "h800", "by its data sheet"),
        (replace(s, ranks=8), "h200", "links between GPUs"), (replace(s, ranks=16), "h200", "never measured"),
        (replace(s, zero_stage=3), "h200", "ZeRO 3 measured on two GPUs alone"),
        (replace(s, sizes=load_sizes("mistral_7b")), "h200", "measured of hare_0.4b, hare_1.1b, hare_2.0b"),
    ]  # fmt: skip
    for other, gpu, words in said:
        found = estimate(other, GPUS[gpu])
        assert words in found.basis and found.within > measured_here.within


def test_more_ranks_are_faster_but_not_as_many_times() -> None:
    s = setting(gradient_accumulation_steps=8)
    one, eight, many = (estimate(replace(s, ranks=n), GPUS["h100"]).tokens_per_second for n in (1, 8, 128))
    assert 0.9 < eight / (8 * one) < 1 and many / 128 < eight / 8
    slow = estimate(replace(s, ranks=128), GPUS["h100"], network_gbit_s=50).tokens_per_second
    assert slow < 0.9 * many


def test_what_takes_longer() -> None:
    s = setting(gradient_accumulation_steps=8)

    def times_as_long(longer: Setting, than: Setting) -> float:
        return estimate(longer, MEASURED_ON).step_s / estimate(than, MEASURED_ON).step_s

    assert times_as_long(replace(s, deterministic=True), replace(s, deterministic=False)) == pytest.approx(
        1.02, abs=2e-3
    )
    assert times_as_long(replace(s, flash=False), replace(s, flash=True)) == pytest.approx(1.023, abs=2e-3)
    eight = replace(s, ranks=8)
    assert times_as_long(replace(eight, zero_stage=3), eight) > 1.1
    # AdamW's work is shared from ZeRO 1 on; ZeRO 2 communicates with each micro-batch
    one = replace(s, accumulation=1, micro_batch=1)
    shared, whole = (replace(one, ranks=8, zero_stage=stage) for stage in (1, 0))
    assert times_as_long(whole, shared) > 1.03
    slow = GPUS["h800"]
    two = replace(s, ranks=1024, zero_stage=2, float32_gradients=False)
    of_each = [estimate(replace(two, accumulation=n), slow, 1).step_s / n for n in (1, 16)]
    assert of_each[1] > 0.5 * of_each[0]


SCHEDULE = [
    {"until_step": 50, "compute": "bf16"},
    {"until_share": 0.9, "bf16_modules": []},
    {"compute": "bf16"},
]


def test_a_schedule_takes_the_memory_of_its_dearest_stage_and_the_time_of_all() -> None:
    keys: dict[str, Any] = {
        "gradient_accumulation_steps": 8,
        "max_steps": 1000,
        "per_device_eval_batch_size": 1,
    }
    s = setting(precision__schedule=SCHEDULE, **keys)
    bf16, fp8 = setting(precision__compute="bf16", **keys), setting(precision__bf16_modules=[], **keys)
    assert [share for share, _ in s.in_each_stage] == pytest.approx([0.05, 0.85, 0.1])
    assert [its for _, its in s.in_each_stage] == [bf16, fp8, bf16]
    peaks = [memory_of(its).peak_gib for its in (bf16, fp8)]
    assert memory_of(s).peak_gib == max(peaks) > 1.02 * min(peaks)
    seconds = [estimate(its, MEASURED_ON).step_s for its in (bf16, fp8)]
    found = estimate(s, MEASURED_ON)
    assert found.step_s == pytest.approx(0.15 * seconds[0] + 0.85 * seconds[1])
    assert found.tokens_per_second == pytest.approx(s.step_tokens / found.step_s)
    assert "bf16, 5 % of the steps: " in found.basis and "FP8 delayed, 85 % of the steps: " in found.basis
    assert "te_layer bf16 (5 %), then FP8 delayed (85 %), then bf16 (10 %), lm_head in FP8" in s.described()
    largest = largest_micro_batch(s, 79.1)
    assert largest == min(largest_micro_batch(its, 79.1) for its in (bf16, fp8))


@pytest.mark.parametrize(
    ("tokens", "shares"), [("500K", [1.0]), ("3276800", [0.25, 0.65, 0.1]), ("81.92M", [0.01, 0.89, 0.1])]
)
def test_the_shares_of_stages_are_those_of_the_tokens_that_are_planned(
    tokens: str, shares: list[float], tmp_path: Path
) -> None:
    """The stage that ends at step 50, of 16,384 tokens, is another share of each length."""
    output = tmp_path / "plan.json"
    words = (
        "train_config_fp8 --gpus=1 --per_device_train_batch_size=8 --train_batch_size_tokens=16384".split()
    )
    words += [f"--tokens={tokens}", f"--precision.schedule={json.dumps(SCHEDULE)}", f"--output={output}"]
    assert program.main(words) == 0
    stages = json.loads(output.read_text())["stages"]
    assert [its["share"] for its in stages] == pytest.approx(shares, abs=0.01)
    assert [its["compute"] for its in stages] == ["bf16", "fp8", "bf16"][: len(shares)]


# ---------------------------------------------------------------- the program


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("600B", 600 * 10**9), ("1.5t", 1500 * 10**9), ("20_000", 20_000), ("3m", 3 * 10**6), ("2K", 2000)],
)
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "--gpu", "a100"], "--gpu 'a100': one of h100, h200, h800"),
        (["tiny", "--tokens", "600X"], "--tokens '600X': a number above 0 is expected, with K, M, B"),
        (["tiny", "--tokens", "0"], "--tokens '0': a number above 0"),
        (["tiny", "--gpus", "0"], "--gpus 0: 1 to 65536"),
        (["tiny", "--gpus", "65537"], "--gpus 65537: 1 to 65536"),
        (["tiny", "--network", "0"], "--network 0: Gbit/s a GPU"),
        (["tiny", "--output", "plan.txt"], "a file that ends in .json"),
        (["tiny", "--output", "nowhere/plan.json"], "there is no folder nowhere; make it"),
        (["nothing"], "no model of that name: model/configs has hare_0.4b,"),
        (
            ["train_config_fp8", "--learnin_rate", "1"],
            "learnin_rate: unknown key (did you mean learning_rate",
        ),
        (["train_config_fp8", "--gpus", "3"], "not divisible by per_device_train_batch_size 16"),
        (
            ["mistral_7b", "--gpus", "1"],
            "in no way: micro-batch 1 of 2048 tokens with ZeRO 1, optimizer_states int8, ",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(words) == 2
    out, error = capsys.readouterr()
    assert said in error and not out


@pytest.mark.parametrize(("tokens", "gpus"), [(4096, 2), (8192, 4), (16384, 8), (6144, 1), (None, 8)])
def test_by_default_so_many_gpus_are_planned_for_as_the_batch_has_micro_batches(
    tmp_path: Path, tokens: int | None, gpus: int
) -> None:
    """4,096 tokens in micro-batches of 8 x 256 are those of docs/getting-started.md."""
    sizes = {"max_seq_length": 256, "per_device_train_batch_size": 8, "train_batch_size_tokens": tokens}
    run, output = tmp_path / "run.json", tmp_path / "plan.json"
    data = {"sources": {"mine": "data/mine"}}
    run.write_text(json.dumps({"model": {"config": "tiny"}, "data": data, "max_steps": 60, **sizes}))
    assert program.main([str(run), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["configured"]["gpus"] == gpus
    assert program.main([str(run), "--gpus", "3"]) == (2 if tokens in (4096, 8192, 16384) else 0)


def test_a_model_that_fits_nowhere_is_told_where_it_would() -> None:
    s = setting(ranks=1, model__config="mistral_7b")
    with pytest.raises(PlanError, match=r"needs \d\d GiB a GPU. Take --gpus 2, or --gpu h200, or a smaller"):
        plan("mistral_7b", s, gpu_called("H100"), 10**9, 400)


@pytest.mark.parametrize("config", ["train_config_bf16", "hare_2.0b", str(CONFIGS / "mistral_0.4b.json")])
def test_a_plan_in_words_and_as_json(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    assert program.main([config, "--gpu", "h200", "--tokens", "600B", "--output", str(output)]) == 0
    text, found = capsys.readouterr().out, json.loads(output.read_text())
    assert (
        "as configured: te_layer" in text
        and "recommended" in text
        and "600 B tokens on 8 x NVIDIA H200" in text
    )
    assert list(found["by_gpus"]) == [str(2**n) for n in range(11)]
    configured = found["configured"]
    parts = dict(configured["memory_gib"])
    peak, needed = parts.pop("peak"), parts.pop("needed")
    assert sum(parts.values()) == pytest.approx(peak) and needed > peak
    assert "  optimizer states: fp32, " in text and configured["optimizer_states"] == "fp32"
    assert found["recommended"]["why_these_states"] in text and configured["why_these_states"] is None
    seconds = 600e9 / configured["tokens_per_second"]
    assert configured["days"] == pytest.approx(seconds / 86400)
    assert configured["gpu_hours"] == pytest.approx(seconds / 3600 * 8)
    assert f"{configured['tokens_per_second']:,.0f} tokens/s" in text
    for planned in filter(None, found["by_gpus"].values()):
        assert planned["fits"] and f"{planned['tokens_per_second']:,.0f}" in text


@pytest.mark.parametrize(
    ("micro_batch", "tokens", "notes"),
    [
        (8, 1_048_576, ["From 1024 GPUs on a step has more than the 1,048,576 tokens"]),
        (5, 10_240, ["On 2, 4 GPUs no step has exactly", "From 8 GPUs on a step has more than the 10,240"]),
    ],
)
def test_a_step_of_other_size_is_said(
    micro_batch: int, tokens: int, notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [f"--per_device_train_batch_size={micro_batch}", f"--train_batch_size_tokens={tokens}"]
    assert program.main(["train_config_fp8", "--gpus", "1", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    (end,) = (i for i, line in enumerate(lines) if line.startswith("1024 "))
    assert f" {max(tokens, 1024 * 2048):,} " in lines[end]
    for line, note in zip(lines[end + 1 :], notes, strict=True):
        assert line.startswith(note)


def test_the_length_of_a_training_is_that_of_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["train_config_fp8", "--max_steps", "1000"]) == 0
    assert "1.049 B tokens on 8 x" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.interpreter
def test_it_needs_no_torch() -> None:
    program_and_what_it_imported = (
        "import sys; from train import plan; status = plan.main(['train_config_fp8']); "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules); sys.exit(status)"
    )
    command = [sys.executable, "-c", program_and_what_it_imported]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
