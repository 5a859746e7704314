"""Whole runs: real text, real DeepSpeed, real checkpoints, tiny models."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import decoder
from model.checks.startup import StartupCheckError
from model.fp8.precision import PrecisionError
from tests import programs
from tests.conftest import numbers, refused
from tests.fixtures import settings_of
from tests.reliability.launching import clean_environment
from tests.train.runs import PRECISIONS, ROOT, curve, metrics, run
from train import plot, train, trainer
from train import run as training
from train.checkpoint.files import CheckpointError, identity, read_state
from train.config.arguments import ConfigurationError
from train.data.format import DataError
from train.record.run_folder import RunFolder

GPU = torch.cuda.is_available()

TORCHAO = {"tensorwise": {"recipe": "tensorwise"}, "rowwise": {"recipe": "rowwise"}}


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_is_bit_exact_on_gpu(settings: dict, variant: str, precision: str) -> None:
    check_resume(settings, variant, PRECISIONS[precision])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TORCHAO)
def test_compiled_torchao_resume_is_bit_exact_on_gpu(settings: dict, precision: str) -> None:
    check_resume(settings, "torchao", TORCHAO[precision])


@pytest.mark.skipif(GPU, reason="the GPU form of this test runs there")
@pytest.mark.parametrize(
    "variant,precision",
    [("te_layer", "delayed"), ("torchao", "tensorwise")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("te_layer", "bf16"),
            ("te_layer", "current"),
            ("te_linear", "delayed"),
            ("te_linear", "block"),
            ("te_layer", "mxfp8"),
            ("hf", "bf16"),
            ("torchao", "rowwise"),
        ]
    ],
)
def test_resume_is_bit_exact(settings: dict, variant: str, precision: str) -> None:
    check_resume(settings, variant, {**PRECISIONS, **TORCHAO, "mxfp8": {"recipe": "mxfp8"}}[precision])


@pytest.mark.slow
@pytest.mark.usefixtures("traced")  # tests/model/fp8/test_torchao.py has the code of a layer
@pytest.mark.skipif(GPU, reason="on the GPU torchao is compiled in the resume test")
def test_compiled_run_matches_uncompiled(settings: dict, tmp_path: Path) -> None:
    settings["max_eval_samples"] = 4  # of whole micro-batches: one graph evaluates
    curves = []
    for compile in (False, True):
        model = {**settings["model"], "variant": "hf", "compile": compile}
        folder = str(tmp_path / str(compile))
        curves.append(curve(run(settings, model=model, precision=PRECISIONS["bf16"], output_dir=folder)))
    assert [entry[1] for entry in curves[0]] == pytest.approx([entry[1] for entry in curves[1]], rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_zero_3_recomputation_on_gpu(settings: dict, tmp_path: Path, variant: str) -> None:
    """The weights that it gathers for a layer's backward stay through the layer's second forward."""
    settings |= {"model": {**settings["model"], "variant": variant}, "deepspeed": "ds_config_zero3.json"}
    losses = []
    for recomputes in (False, True):
        output = run(settings, gradient_checkpointing=recomputes, output_dir=str(tmp_path / str(recomputes)))
        losses.append([m["loss"] for m in metrics(output)])
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("compute,attention", [("fp16", "auto"), ("fp32", "unfused")])
def test_fp16_and_fp32_training_on_gpu(settings: dict, compute: str, attention: str) -> None:
    """fp16 with DeepSpeed's loss scaling; no fused attention takes float32, so it must be asked for by name."""
    settings["model"]["attention_backend"] = attention
    settings["precision"] = {"compute": compute}
    losses = [m["loss"] for m in metrics(run(settings))]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.gpu
def test_unfused_attention_raises(settings: dict) -> None:
    settings["precision"] = {"compute": "fp32"}
    with refused(StartupCheckError, code="unfused_attention", key="model.attention_backend"):
        run(settings)


def check_resume(settings: dict, variant: str, precision: dict) -> None:
    """n steps = k steps + resume, and the rest of what a run leaves."""
    settings = {**settings, "precision": precision, "model": {**settings["model"], "variant": variant}}
    whole = run(settings, save_steps=3)
    losses, health = curve(whole), read_state(whole / "checkpoints/step-00000006").health
    assert [step for step, *_ in losses] == [1, 2, 3, 4, 5, 6]
    assert losses[-1][1] < losses[0][1] - 0.3  # it learns

    # As if it had been stopped after step 4, its last committed checkpoint being that of step 3. Evaluating more often,
    # in the middle of training, changes nothing.
    (whole / "checkpoints/step-00000006/manifest.json").unlink()
    often = curve(run(settings, save_steps=3, eval_steps=2))
    assert [entry[:4] for entry in often] == [entry[:4] for entry in losses]
    assert [entry[4] is None for entry in often[3:5]] == [False, True] and often[5] == losses[5]
    assert (whole / "checkpoints/step-00000006/manifest.json").exists()
    # what spikes are judged by
    assert read_state(whole / "checkpoints/step-00000006").health == health and len(health["loss"]) == 6
    check_export(whole, metrics(whole)[-1]["eval_loss"], settings)


def check_export(output_dir: Path, eval_loss: float, settings: dict) -> None:
    """hf/ is a model that plain transformers loads, with the same evaluation loss and the tokenizer; in bfloat16, as it
    was trained, though ZeRO 3 saves its weights in float32."""
    weights = load_file(output_dir / "hf/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(output_dir / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output_dir / "hf")
    assert tokenizer.decode(
        tokenizer("def f(x):\n    return 1").input_ids, skip_special_tokens=True
    ).endswith("return 1")
    from train.data.stream import open_stream

    stream = open_stream(settings["data"]["sources"], None, 64, 42, split="eval", max_samples=5)
    ids, labels, _ = stream.batch(0, 5)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert float(loss) == pytest.approx(eval_loss, abs=1e-2)


def deepspeed_launcher() -> list[str]:
    """What the command `deepspeed` is."""
    port = str(20000 + os.getpid() % 20000)
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port]


@pytest.mark.multi_gpu
@pytest.mark.process
def test_two_gpus_with_deepspeed_launcher(trained: Path, settings: dict, tmp_path: Path) -> None:
    check_two_ranks(trained, settings, tmp_path, deepspeed_launcher())


@pytest.mark.skipif(
    GPU, reason="needs a machine without CUDA; test_two_gpus_with_deepspeed_launcher is its form for GPUs"
)
@pytest.mark.process
def test_two_ranks_train_alike(trained: Path, settings: dict, tmp_path: Path) -> None:
    launcher = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", "2"]
    check_two_ranks(trained, settings, tmp_path, launcher)


@pytest.mark.process
def test_profile_steps(data: Path, small_model: Path, tmp_path: Path) -> None:
    """The trace has the asked steps, and the table the longest operations first."""
    (config := tmp_path / "config.json").write_text(
        json.dumps(settings_of(data, small_model, tmp_path / "run"))
    )
    options = ("--profile_steps", "[3, 4]", "--save_strategy", "no")
    done = two_ranks([sys.executable], config, *options)
    assert done.returncode == 0, done.stderr
    trace, table = (tmp_path / "run/profile" / f"steps-3-4{end}" for end in (".json.gz", ".txt"))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert len({event["name"] for event in events if event["name"].startswith("ProfilerStep")}) == 2
    rows = [line for line in table.read_text().splitlines() if "%" in line and "Name" not in line]
    shares = [float(re.findall(r"([\d.]+)%", row)[0]) for row in rows]
    assert len(rows) == 10 and shares == sorted(shares, reverse=True), table.read_text()


# Instead of the client's requests, the arguments of each call go to a file.
HUB = """
import json, os, pathlib
from huggingface_hub import HfApi, RepoUrl

def record(name):
    def call(self, **options):
        if os.environ["HF_TOKEN"] == "expired":
            raise OSError("401 Unauthorized")
        with open(os.environ["HUB_CALLS"], "a") as file:
            print(json.dumps([name, {key: str(value) for key, value in options.items()}]), file=file)
        return RepoUrl("https://huggingface.co/" + options["repo_id"])
    return call

HfApi.create_repo, HfApi.upload_folder = record("create_repo"), record("upload_folder")
"""


@pytest.mark.process
@pytest.mark.parametrize("token", ["", "expired", "valid"])
def test_push_to_hub(data: Path, small_model: Path, tmp_path: Path, token: str) -> None:
    """The export is uploaded. Without a token the run is refused; if the upload fails, the run succeeds."""
    (config := tmp_path / "config.json").write_text(
        json.dumps(settings_of(data, small_model, tmp_path / "run"))
    )
    (tmp_path / "sitecustomize.py").write_text(HUB)
    calls = tmp_path / "calls.jsonl"
    environment = clean_environment(PYTHONPATH=str(tmp_path), HUB_CALLS=str(calls), HF_TOKEN=token)
    options = "--max_steps 2 --push_to_hub true --hub_model_id org/name".split()
    command = [sys.executable, str(ROOT / "train/train.py"), str(config), *options]
    done = programs.run(command, capture_output=True, text=True, env=environment)
    output = done.stdout + done.stderr
    assert done.returncode == (0 if token else 2), output
    folder = str(tmp_path / "run/hf")
    if token != "valid":
        assert not calls.exists() and ("hf upload org/name" if token else "HF_TOKEN") in output
        return
    created, uploaded = (json.loads(line) for line in calls.read_text().splitlines())
    assert created[0] == "create_repo" and created[1]["private"] == "True"
    assert uploaded[0] == "upload_folder" and uploaded[1]["folder_path"] == folder
    assert {call[1]["repo_id"] for call in (created, uploaded)} == {"org/name"}


def two_ranks(launcher: list[str], config: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [*launcher, str(ROOT / "train/train.py"), str(config), *arguments]
    return programs.run(command, capture_output=True, text=True, env=clean_environment())


def check_two_ranks(trained: Path, settings: dict, tmp_path: Path, launcher: list[str]) -> None:
    """The launcher, two ranks, ZeRO 1, FP8: as many samples as one rank, so nearly the same losses; and a resume."""
    alone = curve(trained)
    config = tmp_path / "config.json"
    settings.update(output_dir=str(tmp_path / "two"), train_batch_size_tokens=256, save_steps=4)
    del settings["gradient_accumulation_steps"]
    config.write_text(json.dumps(settings))

    first = two_ranks(launcher, config)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "FP8: 6 of 7 GEMM modules ran FP8 (delayed scaling)" in first.stdout
    (start,) = json.loads((tmp_path / "two/run.json").read_text())["starts"]
    assert list(start["attention"].values()) == [[0, 1]]
    two = curve(tmp_path / "two")
    assert [entry[1] for entry in two] == pytest.approx([entry[1] for entry in alone], rel=5e-3)

    (tmp_path / "two/checkpoints/step-00000006/manifest.json").unlink()
    second = two_ranks(launcher, config)
    assert second.returncode == 0, second.stdout + second.stderr
    assert curve(tmp_path / "two") == two

    lines = (tmp_path / "two/metrics.jsonl").read_text()
    with refused(CheckpointError, key="train_batch_size_tokens"):
        run({**settings, "train_batch_size_tokens": 128})  # on one rank
    assert (tmp_path / "two/metrics.jsonl").read_text() == lines  # a refused start touches nothing


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2))])
def test_zero_stages_train_alike(trained: Path, settings: dict, stage: int) -> None:
    """ZeRO 0, 2 and 3 follow ZeRO 1, resume bit-exactly and export."""
    one = curve(trained)
    deepspeed = f"ds_config_zero{stage}.json"
    output_dir = run(settings, deepspeed=deepspeed, save_steps=3)
    losses = curve(output_dir)
    # the stages accumulate and reduce gradients in another order and precision
    assert [entry[1] for entry in losses] == pytest.approx([entry[1] for entry in one], rel=1e-3)
    (output_dir / "checkpoints/step-00000006/manifest.json").unlink()
    run(settings, deepspeed=deepspeed, save_steps=3)
    assert curve(output_dir) == losses
    check_export(output_dir, losses[-1][-1], settings)


def test_training_with_recomputation_and_tied_embeddings(
    settings: dict, tmp_path: Path, small_model: Path
) -> None:
    config = json.loads(small_model.read_text()) | {"tie_word_embeddings": True}
    tied = tmp_path / "tied.json"
    tied.write_text(json.dumps(config))
    settings = {**settings, "model": {"config": str(tied)}}
    plain = run(settings)
    again = run(settings, output_dir=str(tmp_path / "again"), gradient_checkpointing=True)
    assert curve(plain) == curve(again)
    check_export(plain, metrics(plain)[-1]["eval_loss"], settings)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.slow)])
def test_initial_weights_are_evaluated_first(
    trained: Path, settings: dict, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """As step 0, which a resume keeps; the steps after it are the same without it. Random weights are not evaluated."""
    settings |= {
        "precision": {"recipe": recipe},
        "save_steps": 1,
        "max_steps": 1,
        "lr_scheduler_type": "constant",
    }
    settings["model"]["init_from"] = str(trained / "hf")
    settings["warmup_steps"] = 0
    run(settings)
    resumed = run(settings, max_steps=2, allow_changes_on_resume=["max_steps"])
    first, *steps = [line for line in metrics(resumed) if "changes" not in line]
    assert (first["step"], first["tokens"], [line["step"] for line in steps]) == (0, 0, [1, 2])
    assert first["eval_loss"] == pytest.approx(metrics(trained)[-1]["eval_loss"], rel=2e-2)
    assert first["unigram_loss"] == steps[-1]["unigram_loss"] > 0 and "loss" not in first
    assert metrics(trained)[0]["step"] == 1
    plot.main([str(resumed), "--output", str(resumed / "again.png")])
    monkeypatch.setattr(trainer.Trainer, "_evaluate_first", lambda self: None)
    without = run(settings, max_steps=1, output_dir=str(resumed.parent / "without"))
    assert curve(without)[0][:4] == curve(resumed)[0][:4] and metrics(without)[0]["step"] == 1


def test_finished_run_is_not_trained(
    own_trained: Path, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint is still the one to export, for the start before may have ended without; once is enough."""
    before, exported = curve(own_trained), own_trained / "hf/exported_from.json"
    written, of_checkpoint, export_last = exported.stat().st_mtime_ns, list[Path](), training.export_last

    def exports(args: Any, folder: RunFolder, last: Path) -> None:
        of_checkpoint.append(last)
        export_last(args, folder, last)

    monkeypatch.setattr(training, "export_last", exports)
    run(settings)
    assert curve(own_trained) == before
    assert of_checkpoint == [own_trained / "checkpoints/step-00000006"]
    assert exported.stat().st_mtime_ns == written


def test_new_start_keeps_the_old_run(own_trained: Path, settings: dict) -> None:
    """And what was exported is not taken for the export of the new run."""
    output_dir = own_trained
    run(settings, resume_from_checkpoint="never", max_steps=2, save_strategy="no")
    assert not (output_dir / "hf").exists()
    (old,) = output_dir.glob("hf.discarded-*/exported_from.json")
    assert json.loads(old.read_text())["checkpoint"] == "step-00000006"
    assert [m["step"] for m in metrics(output_dir)] == [1, 2]
    assert list(output_dir.glob("checkpoints.discarded-*/step-00000006/manifest.json"))
    assert list(output_dir.glob("metrics.jsonl.discarded-*"))


def test_checkpoint_after_non_finite_loss(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.causal_lm_loss
    calls = []

    def nan_later(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        # five passes for the numeric check, four for the calibration, one each for bf16 gradients and the startup
        # check, two for each step
        return right(logits, labels) * (float("nan") if len(calls) > 5 + 4 + 1 + 1 + 2 * 3 else 1)

    monkeypatch.setattr(decoder, "causal_lm_loss", nan_later)
    with pytest.raises(trainer.TrainingError) as error:
        run(settings, logging_steps=6, save_steps=1, save_total_limit=9, max_skipped_steps=3)
    assert numbers(error.value)[:2] == [3, 6]
    saved = Path(settings["output_dir"]) / "checkpoints"
    assert [p.name for p in sorted(saved.glob("step-*"))] == [f"step-0000000{n}" for n in range(1, 6)]
    states = [
        torch.load(p / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        for p in sorted(saved.glob("step-*"))
    ]
    same = [all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(states, states[1:], strict=False)]
    assert same == [False, False, True, True]


@pytest.mark.parametrize("step", [3, 6])
def test_resume_from_renamed_checkpoint(trained: Path, settings: dict, tmp_path: Path, step: int) -> None:
    best = shutil.copytree(trained / f"checkpoints/step-{step:08d}", tmp_path / "best")
    other = run(settings, output_dir=str(tmp_path / "other"), resume_from_checkpoint=str(best))
    assert curve(other)[-1:] == curve(trained)[-1:] * (step < 6)
    last = best if step == 6 else other / "checkpoints/step-00000006"
    assert RunFolder(other).exported()[1] == identity(last)


@pytest.mark.process
def test_export_command(own_trained: Path, tmp_path: Path) -> None:
    """It gives what the run exported, and refuses a checkpoint that is not whole."""
    output_dir = own_trained
    path = output_dir / "checkpoints/step-00000006"

    def export(*arguments: Path) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "train/export.py"), *map(str, arguments)]
        return programs.run(command, capture_output=True, text=True)

    done = export(path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for file in (output_dir / "hf").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    whole = (path / "rank_00000.pt").read_bytes()
    (path / "rank_00000.pt").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    damaged = export(path, tmp_path / "other")
    assert damaged.returncode == 2 and "rank_00000.pt" in damaged.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "changes,error",
    [
        (dict(data={"sources": {"x": "nowhere"}}), DataError),
        (dict(train_batch_size_tokens=100), ConfigurationError),
        (dict(max_seq_length=4096), ValueError),
        (dict(model={"config": "nonsense"}), ValueError),
        (dict(precision={"bf16_modules": ["layer.*"]}), PrecisionError),
        (dict(resume_from_checkpoint="nowhere/step-1"), CheckpointError),
    ],
)
def test_invalid_input_raises_before_writing(settings: dict, changes: dict, error: type) -> None:
    with refused(error):
        run({k: v for k, v in settings.items() if k != "gradient_accumulation_steps"}, **changes)
    assert not Path(settings["output_dir"]).exists()


# ---------------------------------------------------------------- dry_run


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_dry_run_of_a_new_run(settings: dict) -> None:
    assert not run(settings, dry_run=True).exists()


def test_dry_run_of_a_resumed_run(settings: dict, own_trained: Path) -> None:
    shutil.rmtree(own_trained / "checkpoints/step-00000006")
    (own_trained / "stopped.json").write_text("{}")
    before = content(own_trained)
    run(settings, dry_run=True)
    assert content(own_trained) == before


def test_dry_run_takes_no_lock(settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make the folder, or write into that of another run."""
    config, ran = tmp_path / "config.json", []
    config.write_text(json.dumps(settings))
    monkeypatch.setattr("train.engine.process_group.init_distributed", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr("train.run.run_training", lambda args, _: ran.append(Path(args.output_dir).exists()))
    assert train.main([str(config), "--dry_run"]) == 0
    assert train.main([str(config), "--max_steps", "5", "--dry_run", "false"]) == 0
    assert ran == [False, True]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_transient(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))

    def runs_out(*_: object) -> None:
        raise error

    monkeypatch.setattr("train.engine.process_group.init_distributed", lambda: None)
    monkeypatch.setattr("train.run.run_training", runs_out)
    assert train.main([str(config)]) == 1
