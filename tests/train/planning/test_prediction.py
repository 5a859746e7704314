"""Planning: predictions against committed measurements, what takes less, recommendations, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from model.config import CONFIGS, GIB, load_sizes, state_parts_gib
from model.variants import VARIANTS
from train import plan as program
from train.config.ds_config import resolve_ds_config
from train.config.load import load_arguments, resolve_arguments
from train.files import REPOSITORY
from train.planning.memory import (
    MUON_BYTES,
    WORKSPACES_GIB,
    largest_micro_batch,
    offload_host_gib,
    predict_memory,
    saved_by_layer,
)
from train.planning.prediction import describe_prediction, duration, parse_tokens, recommend
from train.planning.setting import Setting
from train.planning.speed import GPUS, Gpu, estimate

RESULTS = REPOSITORY / "test_fp8" / "results"

H100, H200 = GPUS["h100"], GPUS["h200"]


def setting(config: str = "train_config_fp8.json", ranks: int = 1, **keys: object) -> Setting:
    """The setting of a shipped configuration, with a micro-batch of 8 unless another is given."""
    keys = {"per_device_train_batch_size": 8} | keys
    words = [f"--{key.replace('__', '.')}={json.dumps(value)}" for key, value in keys.items()]
    arguments = resolve_arguments(load_arguments([config, "--train_batch_size_tokens=null", *words]), ranks)
    sizes = load_sizes(arguments.model.config)
    return Setting.from_run(arguments, resolve_ds_config(arguments, sizes, ranks), sizes, ranks)


OFFLOAD = {
    "deepspeed": "ds_config_zero2.json",
    "deepspeed__zero_optimization__offload_optimizer__device": "cpu",
}


class Measured(NamedTuple):
    """A committed measurement. Memory as the allocator reports it, without what earlier cases left."""

    name: str
    setting: Setting
    gpu: Gpu
    tokens_per_second: float
    peak_gib: float


def measured() -> list[Measured]:
    """Steps of this project's variants with the shipped defaults on one to four GPUs."""
    found = []
    for path in sorted(RESULTS.glob("*_shipped_step.json")):
        report = json.loads(path.read_text())
        for row in report["results"]:
            if VARIANTS.get(row["variant"]) and VARIANTS[row["variant"]].te:
                s = _configured(report, row["configuration"], micro_batch=row["micro_batch"])
                peak = row["allocated_gib"] - max(0.0, row["before_gib"] - WORKSPACES_GIB)
                speed = row["tokens_per_second"]
                found.append(Measured(f"{path.stem} {row['row']}", s, _gpu(report), speed, peak))
    report = json.loads((RESULTS / "mistral_7b_mlp_step.json").read_text())
    (row,) = report["results"]
    s = _configured(report, row["configuration"], report["ranks"], micro_batch=row["micro_batch"])
    found.append(Measured("mistral_7b on 4", s, _gpu(report), row["tokens_per_second"], row["allocated_gib"]))
    for path in sorted(RESULTS.glob("*_scaling*.json")):
        report = json.loads(path.read_text())
        for row in report["results"]:
            report["accumulation"] = row["accumulation"]
            s = _configured(report, row["configuration"], row["ranks"])
            name = f"{row['row']} on {row['ranks']}"
            found.append(Measured(name, s, _gpu(report), row["tokens_per_second"], row["peak_gib"]))
    return found


def _gpu(report: dict[str, Any]) -> Gpu:
    return next(gpu for name, gpu in GPUS.items() if name.upper() in report["machine"]["gpu"])


def _configured(report: dict[str, Any], keys: dict[str, Any], ranks: int = 1, **fields: Any) -> Setting:
    s = setting(
        ranks=ranks,
        model__config=report["model"],
        max_seq_length=report["seq_length"],
        gradient_accumulation_steps=report["accumulation"],
        per_device_train_batch_size=fields.get("micro_batch") or report["micro_batch"],
        **{key.replace(".", "__"): True if value == "true" else value for key, value in keys.items()},
    )
    return replace(s, eval_batch=0)


# ---------------------------------------------------------------- predictions


@pytest.mark.parametrize("m", measured(), ids=lambda m: m.name)
def test_predictions_match_measurements(m: Measured) -> None:
    """Memory within 3 %, or 0.2 GiB of a small model; speed within 10 %."""
    memory = predict_memory(m.setting).measured_as_gib
    assert memory == pytest.approx(m.peak_gib, rel=0.03, abs=0.2)
    assert estimate(m.setting, m.gpu).tokens_per_second == pytest.approx(m.tokens_per_second, rel=0.1)


@pytest.mark.parametrize(("variant", "heads"), [("te_layer", 16 + 8 + 8), ("te_linear", 16 + 8)])
def test_norms_of_q_and_k_save_their_inputs(variant: str, heads: int) -> None:
    """16-bit heads of 128 channels: those of q and k, and in te_layer those of v, which are in the same tensor."""
    s = setting(model__config="qwen3_0.6b", model__variant=variant)
    without = replace(s, sizes=SimpleNamespace(**vars(s.sizes) | {"model_type": "llama"}))
    assert saved_by_layer(s, True) - saved_by_layer(without, True) == 2 * heads * 128


@pytest.mark.parametrize(
    ("less", "part"),
    [
        ({"gradient_checkpointing": True}, "activations"),
        ({"gradient_checkpointing": "mlp"}, "activations"),
        ({"per_device_train_batch_size": 4}, "activations"),
        ({"max_seq_length": 1024}, "activations"),
        ({"precision__compute": "bf16"}, "FP8 copies of weights"),
        ({"precision__optimizer_states": "bf16_remainder"}, "optimizer"),
        ({"optim": "muon"}, "optimizer"),
        ({"deepspeed": "ds_config_zero2.json"}, "gradients"),
        ({"deepspeed": "ds_config_zero3.json"}, "weights"),
        ({"model__config": "hare_0.4b"}, "weights"),
    ],
)
def test_memory_savings(less: dict[str, Any], part: str) -> None:
    usual, other = (predict_memory(setting(ranks=8, **keys)).parts for keys in ({}, less))
    assert other.get(part, 0) < 0.99 * usual[part]


@pytest.mark.parametrize(
    ("slower", "usual"),
    [
        ({"gradient_checkpointing": True}, {}),
        ({"precision__compute": "bf16"}, {}),
        ({"precision__recipe": "block"}, {"precision__recipe": "current"}),
        ({"precision__recipe": "current"}, {}),
        ({"model__variant": "te_linear"}, {}),
        ({"optim": "muon"}, {}),
        ({"precision__optimizer_states": "int8"}, {}),
        ({"deepspeed": "ds_config_zero3.json"}, {}),
        ({"model__config": "hare_2.0b"}, {}),
    ],
)
def test_slower_settings(slower: dict[str, Any], usual: dict[str, Any]) -> None:
    for ranks in (8, 64):
        speeds = [estimate(setting(ranks=ranks, **keys), H200).tokens_per_second for keys in (slower, usual)]
        assert speeds[0] < speeds[1]


def test_scaling_is_sublinear() -> None:
    """At ZeRO 0. With ZeRO 1, the ranks share the optimizer step, which can save more than the links cost."""
    s = setting(gradient_accumulation_steps=8, deepspeed="ds_config_zero0.json")
    one, eight, many = (estimate(replace(s, ranks=n), H100).tokens_per_second for n in (1, 8, 128))
    assert 0.9 < eight / (8 * one) < 1 and many / 128 < eight / 8
    assert estimate(replace(s, ranks=128), H100, 50).tokens_per_second < 0.9 * many
    assert estimate(s, H200).tokens_per_second > estimate(s, H100).tokens_per_second


def test_state_memory_equals_the_docs() -> None:
    for stage, ranks in ((0, 1), (1, 8), (2, 8), (3, 8)):
        s = setting(ranks=ranks, deepspeed=f"ds_config_zero{stage}.json", speed__main_grad=False)
        parts = predict_memory(s).parts
        kept = 2 * s.parameters / GIB if stage == 1 else 0  # bf16 gradients beside the float32 ones
        state = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
        assert state - kept == pytest.approx(sum(state_parts_gib(s.sizes, stage, ranks).values()))


@pytest.mark.parametrize(
    ("stage", "moved", "bytes_"), [(2, ["optimizer"], 18), (3, ["gradients", "optimizer"], 20)]
)
def test_optimizer_offload(stage: int, moved: list[str], bytes_: int) -> None:
    """States leave the GPU. The host also has 4 GiB of a rank's process and the copy for a background save."""
    plain = setting(ranks=8, deepspeed=f"ds_config_zero{stage}.json")
    offloaded = setting(ranks=8, **OFFLOAD | {"deepspeed": f"ds_config_zero{stage}.json"})
    before, after = (predict_memory(s).parts for s in (plain, offloaded))
    assert before["optimizer"] == pytest.approx(12 * plain.parameters / 8 / GIB)
    assert {name for name in before if name not in after} - {"gradients of the step"} == set(moved)
    assert before["weights"] == after["weights"] and before["activations"] == after["activations"]
    exact = replace(offloaded, pins=False, args=replace(offloaded.args, save_async=False))
    states = 8 * (bytes_ * plain.parameters / 8 / GIB)
    assert offload_host_gib(exact, 8) == pytest.approx(states + 8 * 4)
    assert offload_host_gib(exact, 4) == pytest.approx(states / 2 + 4 * 4)
    saved = (14 if stage == 2 else 12) * plain.parameters / GIB
    assert offload_host_gib(replace(offloaded, pins=False), 8) == pytest.approx(states + saved + 8 * 4)
    assert offload_host_gib(offloaded, 8) > states + saved + 8 * 4  # powers of two
    assert estimate(offloaded, H200).tokens_per_second < estimate(plain, H200).tokens_per_second


def test_8_bit_gather() -> None:
    """A rank keeps its part in FP8, gathers fewer bytes, and has the FP8 copies of one layer at a time."""
    keys = {"deepspeed": "ds_config_zero3.json", "max_seq_length": 64, "gradient_accumulation_steps": 8}
    plain, packed = (setting(ranks=16, precision__fp8_weight_gather=on, **keys) for on in (False, True))
    before, after = (predict_memory(s).parts for s in (plain, packed))
    matrices = 22 * packed.layer_matrices
    assert after["weights"] - before["weights"] == pytest.approx(matrices / 16 / GIB)
    assert before["communication buffers"] - after["communication buffers"] == pytest.approx(
        1e9 * matrices / packed.parameters / GIB
    )
    assert after["FP8 copies of weights"] == pytest.approx(2 * packed.layer_matrices / GIB)
    # between nodes, gathers and the reduction of gradients take most of the time; both send 2 bytes per parameter
    slow, fast = (1 / estimate(s, H100, 1).tokens_per_second for s in (plain, packed))
    assert fast / slow == pytest.approx(1 - 2 * matrices / packed.parameters / 6, rel=0.02)


def test_peak_memory_of_7b_on_two_gpus() -> None:
    """Measured on two H200s: 108 GiB, in the reduction of the gradients."""
    keys = {"model__config": "mistral_7b", "gradient_checkpointing": True, "per_device_train_batch_size": 4}
    memory = predict_memory(setting(ranks=2, gradient_accumulation_steps=16, **keys))
    assert memory.moment == "optimizer" and memory.peak_gib == pytest.approx(108, rel=0.03)


@pytest.mark.parametrize(
    ("config", "variant", "captured"),
    [
        ("hare_1.1b", "te_layer", (3072 + 2048 + 3 * 5632) * 2048),
        ("hare_1.1b", "te_linear", (2048 + 512 + 2 * 5632) * 2048),
        # gate and up together are too large for a graph
        ("mistral_7b", "te_layer", (6144 + 4096 + 14336) * 4096),
    ],
)
def test_muon_graphs_stay_in_memory(config: str, variant: str, captured: int) -> None:
    adamw, muon = (
        predict_memory(setting(model__config=config, model__variant=variant, optim=optim))
        for optim in ("adamw", "muon")
    )
    saved = adamw.parts["optimizer"] - muon.parts["optimizer"]
    assert muon.moment == adamw.moment == "start of the backward pass"
    assert muon.peak_gib - adamw.peak_gib + saved == pytest.approx(MUON_BYTES * captured / GIB)


def test_evaluation_peak_of_a_small_model() -> None:
    s = setting(model__config="hare_0.4b", gradient_accumulation_steps=2)
    assert predict_memory(s).moment == "evaluation" != predict_memory(replace(s, eval_batch=0)).moment


def test_largest_micro_batch() -> None:
    s = setting(ranks=8)
    largest = largest_micro_batch(s, 79.1)
    for samples, fits in ((largest, True), (largest + 1, False)):
        assert (predict_memory(replace(s, micro_batch=samples)).needed_gib(8) <= 79.1) is fits
    assert largest_micro_batch(s, 1.0) == 0


SCHEDULE = [
    {"until_step": 50, "compute": "bf16"},
    {"until_share": 0.9, "bf16_modules": []},
    {"compute": "bf16"},
]


def test_schedule_memory_and_time() -> None:
    keys: dict[str, Any] = {
        "gradient_accumulation_steps": 8,
        "max_steps": 1000,
        "per_device_eval_batch_size": 1,
    }
    s = setting(precision__schedule=SCHEDULE, **keys)
    bf16, fp8 = setting(precision__compute="bf16", **keys), setting(precision__bf16_modules=[], **keys)
    assert [share for share, _ in s.phases] == pytest.approx([0.05, 0.85, 0.1])
    assert predict_memory(s).peak_gib == max(predict_memory(phase).peak_gib for phase in (bf16, fp8))
    seconds = [estimate(phase, H200).step_s for phase in (bf16, fp8)]
    assert estimate(s, H200).step_s == pytest.approx(0.15 * seconds[0] + 0.85 * seconds[1])


@pytest.mark.parametrize(
    ("keys", "ranks", "gpu"),
    [
        ({}, 8, H100),
        ({}, 1, H200),
        ({"model__config": "mistral_7b"}, 2, H100),
        ({"max_seq_length": 2056}, 4, H200),
    ],
)
def test_recommendation_fits(keys: dict, ranks: int, gpu: Any) -> None:
    s = setting(ranks=ranks, gradient_accumulation_steps=8, **keys)
    best = recommend(s, gpu, ranks, s.step_tokens, 400)
    assert best and best.fits and best.setting.step_tokens == s.step_tokens
    assert best.setting.micro_batch % best.setting.micro_batch_unit == 0
    if predict_memory(s).needed_gib(ranks) <= gpu.memory_gib:
        assert best.estimate.tokens_per_second >= 0.99 * estimate(s, gpu).tokens_per_second


@pytest.mark.parametrize(
    ("keys", "ranks", "gpu", "states"),
    [
        ({}, 8, H200, "fp32"),
        ({"model__config": "mistral_7b"}, 1, H200, "bf16_remainder"),
        ({"model__config": "mistral_7b"}, 1, H100, "offloaded"),
        ({"model__config": "mistral_7b"} | OFFLOAD, 4, H200, "fp32"),
        ({"model__config": "mistral_7b", "optim": "muon"}, 1, H200, "fp32"),
    ],
)
def test_recommended_optimizer_states(keys: dict, ranks: int, gpu: Any, states: str) -> None:
    """They are offloaded only where nothing else fits."""
    s = setting(ranks=ranks, gradient_accumulation_steps=8, **keys)
    best = recommend(s, gpu, ranks, s.step_tokens, 400)
    assert best and ("offloaded" if best.setting.offloads else best.setting.optimizer_states) == states


@pytest.mark.parametrize(
    ("text", "tokens"), [("600B", 600 * 10**9), ("1.5t", 1500 * 10**9), ("20_000", 20_000), ("2K", 2000)]
)
def test_parse_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "words",
    [
        ["tiny", "--tokens", "600X"],
        ["tiny", "--tokens", "0"],
        ["tiny", "--gpus", "0"],
        ["tiny", "--gpus", "65537"],
        ["tiny", "--network", "0"],
        ["tiny", "--output", "nowhere/plan.json"],
        ["nothing"],
        ["train_config_fp8", "--learnin_rate", "1"],
        ["train_config_fp8", "--gpus", "3", "--train_batch_size_tokens", "1048576"],
        ["mistral_7b", "--gpus", "1", "--optim", "muon"],
        ["tiny", "--precision.compute", "fp32"],
        ["tiny", "--model.variant", "hf", "--precision.compute", "bf16"],
    ],
)
def test_unsupported_settings_raise(words: list[str]) -> None:
    try:
        status = program.main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2


@pytest.mark.parametrize(
    ("tokens", "gpus"),
    [
        (4096, 2),
        (6144, 1),
        (None, 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(8192, 4), (16384, 8)]),
    ],
)
def test_default_gpus(tmp_path: Path, tokens: int | None, gpus: int) -> None:
    """4,096 tokens in micro-batches of 8 x 256 are those of docs/getting-started.md."""
    sizes = {"max_seq_length": 256, "per_device_train_batch_size": 8, "train_batch_size_tokens": tokens}
    run, output = tmp_path / "run.json", tmp_path / "plan.json"
    data = {"sources": {"mine": "data/mine"}}
    run.write_text(json.dumps({"model": {"config": "tiny"}, "data": data, "max_steps": 60, **sizes}))
    assert program.main([str(run), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["configured"]["gpus"] == gpus
    assert program.main([str(run), "--gpus", "3"]) == (2 if tokens in (4096, 8192, 16384) else 0)


@pytest.mark.parametrize(
    "config",
    [
        str(CONFIGS / "mistral_0.4b.json"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("train_config_bf16", "hare_2.0b")),
    ],
)
def test_plan_as_json(config: str, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    assert program.main([config, "--gpu", "h200", "--tokens", "600B", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert list(found["by_gpus"]) == [str(2**n) for n in range(11)]
    configured = found["configured"]
    parts = dict(configured["memory_gib"])
    peak, needed = parts.pop("peak"), parts.pop("needed")
    assert sum(parts.values()) == pytest.approx(peak) and needed > peak
    seconds = 600e9 / configured["tokens_per_second"]
    assert configured["days"] == pytest.approx(seconds / 86400)
    assert configured["gpu_hours"] == pytest.approx(seconds / 3600 * 8)


@pytest.mark.parametrize(
    ("words", "gpus", "status"),
    [
        (["train_config_fp8", "--speed.cuda_graphs", "true"], 8, 0),
        (["train_config_fp8", "--model.config", "mistral_7b"], 2, 2),  # does not fit as configured
        (["train_config_fp8", "--model.config", "mistral_7b"], 8, 2),
        (
            ["train_config_bf16", "--train_batch_size_tokens", "null", "--gradient_accumulation_steps", "3"],
            4,
            0,
        ),
    ],
)
def test_options_give_the_recommended_setting(
    words: list[str], gpus: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    options = ["--gpus", str(gpus), "--tokens", "70B", "--output", str(output)]
    assert program.main([*words, *options]) == status
    printed, found = capsys.readouterr().out, json.loads(output.read_text())
    assert found["configured"]["fits"] == (status == 0)
    for n, entry in {gpus: found["recommended"], **found["by_gpus"]}.items():
        if entry is None:
            continue
        arguments = load_arguments([*words, *entry["flags"].split()])
        args = resolve_arguments(arguments, int(n))
        model_sizes = load_sizes(args.model.config)
        s = Setting.from_run(args, resolve_ds_config(args, model_sizes, int(n)), model_sizes, int(n))
        parts = {k: gib for k, gib in entry["memory_gib"].items() if k not in ("peak", "needed")}
        assert predict_memory(s).parts == pytest.approx(parts)
        assert (
            s.step_tokens == entry["train_batch_size_tokens"]
            and s.accumulation == entry["gradient_accumulation_steps"]
        )
        assert args.max_steps == round(70e9 / s.step_tokens)
        assert entry["flags"] in printed


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (264.41, "260 days"),
        (1.9, "46 hours"),
        (0.0834, "2 hours"),
        (0.01, "14 minutes"),
        (1e-5, "0.86 seconds"),
        (1234.5, "1,200 days"),
    ],
)
def test_times_have_two_digits(days: float, text: str) -> None:
    assert duration(days) == text


@pytest.mark.slow
@pytest.mark.interpreter
def test_plan_does_not_import_torch() -> None:
    code = (
        "import sys; from train import plan; status = plan.main(['train_config_fp8']); "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules); sys.exit(status)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H200", H200),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4", None),
    ],
)
def test_prediction_of_a_run(name: str, gpu: Any) -> None:
    s: Setting = setting()
    _, values = describe_prediction(s, name)
    assert values.get("tokens_per_second") == (estimate(s, gpu).tokens_per_second if gpu else None)
