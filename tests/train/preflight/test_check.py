"""What a run is warned of at its start, and what it is not refused for; tests/train/test_mistakes.py has what it is.

At the end: settings of `accelerate launch` that contradict the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from model.config import layer_matrix_parameters, load_sizes, num_parameters, state_parts_gib
from tests.conftest import refused
from tests.reliability.launching import clean_environment
from tests.train.mistakes import World, keys
from tests.train.runs import ROOT, curve
from train.config.arguments import TrainingArguments
from train.config.load import build_arguments, load_arguments, load_deepspeed, resolve_arguments
from train.data.format import read_manifest
from train.planning.memory import checkpoint_bytes
from train.preflight import check, machine, sizes
from train.preflight.check import contradictions
from train.preflight.machine import Device


def checked(
    world: World,
    world_size: int = 1,
    local_ranks: int = 1,
    devices: list[int] | None = None,
    capability: tuple[int, int] = (9, 0),
) -> list[str]:
    arguments = build_arguments(world.settings)
    gpus = [Device(memory, capability) for memory in devices or []]
    return check.check(arguments, world_size, local_ranks, gpus)


@contextmanager
def problem(key: str, code: str | None = None) -> Iterator[Any]:
    with refused(check.PreflightError, code=code, key=key) as error:
        yield error


def bytes_of_checkpoint(world: World) -> int:
    return checkpoint_bytes(load_sizes(str(world.model)), 1, "fp8")


def test_valid_configuration_has_no_warnings(world: World) -> None:
    assert checked(world) == [] and checked(world, 2, 2, [80 * 2**30] * 2) == []
    # no driver that answers
    assert check.check(build_arguments(world.settings), 8, 8, None) == []


def test_disk_space(world: World, own_trained: Path) -> None:
    """own_trained has the checkpoints of steps 3 and 6."""
    keys(max_steps=100, allow_changes_on_resume=["max_steps"], output_dir=str(own_trained))(world)
    size = bytes_of_checkpoint(world)
    files = (own_trained / "checkpoints/step-00000006").iterdir()
    assert size == pytest.approx(sum(path.stat().st_size for path in files), rel=0.1)
    parameters = num_parameters(load_sizes(str(world.model)))
    world.disk(2.1 * size + 2 * parameters)
    assert (
        checked(world) == []
    )  # two there, which will go, three that are kept, and the one that is being written
    keys(resume_from_checkpoint="never")(world)  # those there are moved aside, and stay
    assert len(checked(world)) == 1
    keys(save_minutes=0, save_steps=50)(world)
    assert checked(world) == []  # two saves
    world.disk(2 * size + parameters)  # and hf/
    assert len(checked(world)) == 1
    for limit, every, saves in ((0, 0, 10), (2, 50, 5)):  # the last is written while 2 + 2 are kept
        keys(save_steps=10, save_total_limit=limit, keep_every_steps=every)(world)
        world.disk((saves + 0.1) * size + 2 * parameters)
        assert checked(world) == []
        world.disk(saves * size + parameters)
        assert len(checked(world)) == 1
    keys(save_strategy="no")(world)
    world.disk(0)
    assert checked(world) == []


def test_unfinished_saves_count_as_free(world: World) -> None:
    size = bytes_of_checkpoint(world)
    world.disk(0.9 * size)
    with problem("output_dir", code="disk"):
        checked(world)
    left = world.output / "checkpoints/step-00000003"
    left.mkdir(parents=True)
    (left / "rank_00000.pt").write_bytes(bytes(size // 5))
    assert len(checked(world)) == 1


def test_excess_checkpoints_count_as_free(world: World, own_trained: Path) -> None:
    """own_trained has those of steps 3 and 6; with a limit of 1 the first one goes before the save."""
    keys(output_dir=str(own_trained), max_steps=9, allow_changes_on_resume=["max_steps"])(world)
    world.disk(0.5 * bytes_of_checkpoint(world))
    for limit, setting in ((2, "auto"), (1, str(own_trained / "checkpoints/step-00000003"))):
        keys(save_total_limit=limit, resume_from_checkpoint=setting)(world)
        with problem("output_dir", code="disk"):
            checked(world)
    keys(save_total_limit=1, resume_from_checkpoint="auto")(world)
    assert checked(world) == []


def test_finished_run_needs_no_disk_space(world: World, own_trained: Path) -> None:
    keys(output_dir=str(own_trained))(world)
    world.disk(0)
    assert checked(world) == []
    keys(max_steps=7, allow_changes_on_resume=["max_steps"])(world)
    with problem("output_dir", code="disk"):
        checked(world)


def test_unwritable_output_dir_raises(
    world: World, own_trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder may be written, and what the first save or the export would write in it may not."""
    keys(output_dir=str(own_trained), max_steps=9, allow_changes_on_resume=["max_steps"])(world)
    assert checked(world) == []
    locked = {own_trained, *(own_trained / name for name in ("checkpoints", "hf", "metrics.jsonl"))}
    monkeypatch.setattr(os, "access", lambda place, mode: place not in locked or not mode & os.W_OK)
    with problem("output_dir") as error:
        checked(world)
    assert all(str(place) in str(error.value) for place in locked)
    locked -= {own_trained, own_trained / "metrics.jsonl"}
    keys(save_strategy="no")(world)
    assert checked(world) == []
    keys(save_strategy="steps", max_steps=6)(world)  # it has all its steps
    assert checked(world) == []


def test_invalid_resume_raises(world: World, own_trained: Path) -> None:
    """By the checkpoint that it would resume from. A damaged one is refused where it was asked for."""
    keys(output_dir=str(own_trained), learning_rate=1e-3)(world)
    with refused(check.PreflightError) as error:
        checked(world)
    assert "step-00000006" in str(error.value) and "learning_rate" in str(error.value)
    keys(resume_from_checkpoint="never")(world)
    assert checked(world) == []
    start = own_trained / "checkpoints/step-00000003"
    keys(resume_from_checkpoint=str(start), output_dir=str(own_trained.parent / "branch"))(world)
    with refused(check.PreflightError) as error:
        checked(world)
    assert "step-00000003" in str(error.value)
    keys(precision__auto=True)(world)
    assert checked(world) == []  # its choice is not known yet
    keys(precision__auto=False)(world)
    (start / "run_state.json").write_text("")
    with problem("resume_from_checkpoint", code="no_checkpoint"):
        checked(world)
    keys(
        resume_from_checkpoint="auto", output_dir=str(own_trained), allow_changes_on_resume=["learning_rate"]
    )(world)
    assert checked(world) == []


def test_resume_on_a_gpu_without_block_scaling(world: World, own_trained: Path) -> None:
    """A null precision.fp8_head_gradients is true or false by the GPU. The checkpoint has true."""
    keys(output_dir=str(own_trained))(world)
    memory = [80 * 2**30]
    assert checked(world) == checked(world, devices=memory) == []
    with problem("precision.fp8_head_gradients", code="change_not_allowed"):
        checked(world, devices=memory, capability=(8, 9))
    keys(precision__backend="reference", allow_changes_on_resume=["precision.backend"])(world)
    assert checked(world, devices=memory, capability=(8, 9)) == []


def test_resume_needs_no_initial_weights(world: World, own_trained: Path) -> None:
    keys(output_dir=str(own_trained), model__init_from=str(world.folder / "gone"))(world)
    assert checked(world) == []
    keys(resume_from_checkpoint="never")(world)
    with problem("model.init_from"):
        checked(world)


@pytest.mark.parametrize(
    ("compute", "stage", "world_size", "least"),
    [
        ("bf16", 0, 1, 16), ("bf16", 0, 8, 4 + 12 / 8), ("fp8", 1, 8, 4 + 12 / 8), ("fp8", 2, 8, 2 + 14 / 8),
        ("fp8", 3, 8, 16 / 8), ("fp32", 0, 1, 16), ("fp32", 1, 8, 8 + 8 / 8),
        ("fp32", 3, 8, 16 / 8),
    ],
)  # fmt: skip
def test_gpu_memory_lower_bound(
    world: World, compute: str, stage: int, world_size: int, least: float
) -> None:
    parameters = num_parameters(load_sizes(str(world.model)))
    zero = {"zero_optimization": {"stage": stage}}
    keys(precision__compute=compute, deepspeed=zero)(world)
    bytes_least = round(least * parameters)
    assert (
        sum(state_parts_gib(load_sizes(str(world.model)), stage, world_size, compute).values()) * 2**30
        >= bytes_least - 1
    )
    with problem("model.config", code="gpu_memory"):
        checked(world, world_size, 1, [bytes_least - 1000])
    if compute != "fp32":  # whose activations are not planned
        assert len(checked(world, world_size, 1, [bytes_least + 1000])) == 1  # it may just fit
    assert checked(world, world_size, 1, [16 * 2**30]) == []
    # the smallest of the GPUs that have a rank counts
    assert checked(world, 2, 1, [16 * 2**30, 1000]) == []
    with problem("model.config", code="gpu_memory"):
        checked(world, 2, 2, [16 * 2**30, 1000])


def test_too_large_micro_batch_warns(world: World) -> None:
    keys(per_device_train_batch_size=2**17, precision__compute="bf16")(world)
    (warning,) = checked(world, devices=[4 * 2**30])
    largest = int(re.findall(r"per_device_train_batch_size\D*(\d+)", warning)[0])
    for size, count in ((largest, 0), (largest + 1, 1)):
        keys(per_device_train_batch_size=size)(world)
        assert len(checked(world, devices=[4 * 2**30])) == count


def test_host_memory_for_optimizer_offload(world: World, tmp_path: Path) -> None:
    """18 bytes per parameter and 4 GiB per rank; the ranks of this node count."""
    deepspeed = load_deepspeed("ds_config_zero2.json")
    deepspeed["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    keys(deepspeed=deepspeed, save_async=False)(world)
    parameters = num_parameters(load_sizes(str(world.model)))
    for local_ranks, needed in ((2, 18 * parameters + 8 * 2**30), (1, 9 * parameters + 4 * 2**30)):
        world.patch.setattr(sizes, "free_host_memory", lambda needed=needed: needed + 2**10)
        assert checked(world, 2, local_ranks) == []
        world.patch.setattr(sizes, "free_host_memory", lambda needed=needed: needed - 2**10)
        with problem("deepspeed", code="host_memory"):
            checked(world, 2, local_ranks)
    keys(deepspeed=None)(world)
    assert checked(world, 2, 2) == []


def test_host_memory_of_a_container(tmp_path: Path) -> None:
    """Its limit counts, without the files that it has cached."""
    assert machine.free_host_memory(tmp_path) > 2**20  # no limit
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 100\ninactive_file 150\nshmem 50\n")
    assert machine.free_host_memory(tmp_path) == 1000 - 700 + 250
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_host_memory(tmp_path) > 2**20


def test_large_model_on_cpu(world: World) -> None:
    small, large = load_sizes(str(world.model)), load_sizes("hare_1.1b")
    assert num_parameters(large) > check.CPU_PARAMETERS > num_parameters(small)
    for backend, count in (("auto", 1), ("reference", 0)):
        keys(precision__backend=backend)(world)
        arguments = build_arguments(world.settings)
        assert len(check.device_problems(arguments, large, 2, 0)) == count
        assert check.device_problems(arguments, small, 2, 0) == []


@pytest.mark.parametrize(
    ("changes", "checkpoint", "export"),
    [
        ({}, 14.0, 2),
        ({"precision__optimizer_states": "bf16_remainder"}, 2 + 2 + 6.0, 2),
        ({"precision__compute": "bf16", "deepspeed": "ds_config_zero0.json"}, 14.0, 2),
        ({"deepspeed": "ds_config_zero3.json"}, 12.0, 2),
        ({"precision__compute": "fp32"}, 16.0, 4),
        ({"precision__compute": "fp32", "deepspeed": "ds_config_zero0.json"}, 12.0, 4),
        ({"precision__compute": "fp32", "deepspeed": "ds_config_zero3.json"}, 12.0, 4),
    ],
)
def test_disk_space_by_dtype(world: World, changes: dict, checkpoint: float, export: int) -> None:
    """Bytes of a parameter in a checkpoint and in hf/; Muon keeps one moment of the layers' matrices."""
    keys(**changes)(world)
    arguments, config = resolve_arguments(build_arguments(world.settings), 1), load_sizes(str(world.model))
    stage = load_deepspeed(arguments.deepspeed)["zero_optimization"]["stage"]
    arguments = replace(arguments, save_total_limit=1)  # two at a time
    need, total, _ = sizes.disk_need(arguments, config, stage)
    parameters = num_parameters(config)
    assert need == checkpoint * parameters and total - 2 * need == export * parameters
    if not changes:
        muon, _, _ = sizes.disk_need(replace(arguments, optim="muon"), config, stage)
        assert need - muon == 4 * layer_matrix_parameters(config)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("CUDA out of memory. Tried to\nmore"), "CUDA out of memory. Tried to"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "DefaultCPUAllocator: can't"),
        (MemoryError(), "no memory left"),
        (RuntimeError("shapes do not fit"), ""),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception, line: str) -> None:
    assert machine.out_of_memory(error).startswith(line) and bool(machine.out_of_memory(error)) == bool(line)
    assert "\n" not in machine.out_of_memory(error)


@pytest.fixture
def same_ids(tmp_path: Path, data: Path, prepare: Callable[..., int], corpus: Path) -> Path:
    """Data with the tokenizer of `data`, but from its tokenizer.json instead of its tokenizer.model."""
    tokenizer, folder = shutil.copytree(data / "tokenizer", tmp_path / "json"), tmp_path / "same"
    (tokenizer / "tokenizer.model").unlink()
    assert prepare(folder, corpus, tokenizer=tokenizer, eval_fraction=0.2) == 0
    assert read_manifest(folder).tokenizer_sha256 != read_manifest(data).tokenizer_sha256
    return folder


def test_initial_weights_need_their_tokenizer(
    world: World, trained: Path, shards: Path, same_ids: Path, logged: list[str]
) -> None:
    """`shards` have another tokenizer. Without the model's tokenizer nobody can say."""
    model = shutil.copytree(trained / "hf", world.folder / "hf")
    keys(model__init_from=str(model))(world)
    for folder in (world.others, same_ids):
        keys(data__sources={"text": str(folder)})(world)
        assert checked(world) == [] and logged == []
    keys(data__sources={"text": str(shards)})(world)
    with problem("model.init_from", code="another_tokenizer"):
        checked(world)
    for file in model.glob("tokenizer.*"):
        file.unlink()
    assert checked(world) == [] and len(logged) == 1 and str(model) in logged[0]


def test_resume_needs_data_of_the_same_tokenizer(
    world: World, own_trained: Path, shards: Path, same_ids: Path
) -> None:
    keys(output_dir=str(own_trained), allow_changes_on_resume=True)(world)
    for folder in (world.others, same_ids):
        keys(data__sources={"text": str(folder)})(world)
        assert checked(world) == []
    keys(data__sources={"text": str(shards)})(world)
    with problem("data.sources", code="another_tokenizer"):
        checked(world)


# ---------------------------------------------------------------- accelerate launch


YAML = ROOT / "train_args/accelerate_fp8.yaml"
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "fp8"}
PREFIX = "ACCELERATE_"


def launched_arguments(*options: str) -> TrainingArguments:
    return resolve_arguments(load_arguments([str(ROOT / "train_args/train_config_fp8.json"), *options]), 8)


def test_shipped_accelerate_file_matches() -> None:
    assert contradictions(launched_arguments(), LAUNCHED) == [] == contradictions(launched_arguments(), {})
    text = YAML.read_text()
    assert "\nmixed_precision: fp8\n" in text and "\ndistributed_type: MULTI_GPU\n" in text


@pytest.mark.parametrize(
    ("theirs", "options", "key"),
    [
        ({"MIXED_PRECISION": "bf16"}, "", "precision.compute"),
        ({"MIXED_PRECISION": "no"}, "", "precision.compute"),
        ({}, "--precision.compute bf16", "precision.compute"),
        ({"GRADIENT_ACCUMULATION_STEPS": "2"}, "", "gradient_accumulation_steps"),
        ({"GRADIENT_CLIPPING": "0.5"}, "", "max_grad_norm"),
        ({"USE_DEEPSPEED": "true"}, "", "ACCELERATE_USE_DEEPSPEED"),
        ({"USE_FSDP": "true"}, "", "ACCELERATE_USE_FSDP"),
        ({"USE_MEGATRON_LM": "true"}, "", "ACCELERATE_USE_MEGATRON_LM"),
        ({"USE_PARALLELISM_CONFIG": "true"}, "", "ACCELERATE_USE_PARALLELISM_CONFIG"),
        ({"GRADIENT_ACCUMULATION_STEPS": "4", "GRADIENT_CLIPPING": "1"}, "", None),
        ({"GRADIENT_ACCUMULATION_STEPS": "auto", "GRADIENT_CLIPPING": "none"}, "", None),
        ({"MIXED_PRECISION": "no"}, "--precision.compute fp32", None),
        ({"MIXED_PRECISION": "bf16"}, "--precision.compute bf16", None),
    ],
)
def test_only_contradicting_settings_raise(theirs: dict[str, str], options: str, key: str | None) -> None:
    environment = LAUNCHED | {PREFIX + name: value for name, value in theirs.items()}
    found = contradictions(launched_arguments(*options.split()), environment)
    assert [problem.key for problem in found] == [key] * bool(key)  # type: ignore[attr-defined]


def test_contradictions_refuse_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(check.PreflightError):
        check.check(load_arguments([str(ROOT / "train_args/train_config_fp8.json")]), 8, 8, None)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    find_spec("accelerate") is None,
    reason="needs accelerate (requirements-serving.txt), which starts the ranks",
)
def test_accelerate_starts_a_run(settings: dict, tmp_path: Path) -> None:
    """Two ranks on the CPU, by the shipped file."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings | {"max_steps": 2, "save_strategy": "no"}))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(YAML),
        "--num_processes",
        "2",
    ]
    command += [str(ROOT / "train/train.py"), str(config)]

    def launched(*options: str) -> subprocess.CompletedProcess[str]:
        given = clean_environment(TMPDIR=str(tmp_path))  # torchrun, which it is, leaves files there
        return subprocess.run([*command, *options], env=given, capture_output=True, text=True)

    done = launched()
    assert done.returncode == 0, done.stderr
    assert [m[0] for m in curve(Path(settings["output_dir"]))] == [1, 2]
    refused = launched("--precision.compute", "fp16")
    assert refused.returncode != 0 and "precision.compute" in refused.stderr
