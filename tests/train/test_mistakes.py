"""Mistakes that are found before torch is imported or a rank started: one error with a code and a key, and nothing
changed in output_dir. Single keys of the configuration: tests/train/config/test_load.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from model.errors import UserError
from tests.conftest import numbers
from tests.train.mistakes import Mistake, World, keys
from tests.train.runs import ROOT
from train import launch, train
from train.config.load import load_arguments
from train.preflight import check, machine
from train.record.run_folder import EXPORTED_FROM


def model_file(**changes: Any) -> Mistake:
    def change(world: World) -> None:
        world.model.write_text(json.dumps(json.loads(world.model.read_text()) | changes))

    return change


def written(name: str, content: str = "{}") -> Mistake:
    """There is a file at this place in the folder."""

    def change(world: World) -> None:
        (world.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (world.folder / name).write_text(content)

    return change


def source(name: str) -> Mistake:
    def change(world: World) -> None:
        written(name, "once upon a time")(world)
        world.settings["data"]["sources"] = {"text": str(world.folder / name)}

    return change


def shortened_data(world: World) -> None:
    shard = world.own_data() / "train_00000_00000.ds"
    shard.write_bytes(shard.read_bytes()[:-2])


NO_TENSORS = b"\2" + bytes(7) + b"{}"  # a whole safetensors file


def hf_folder(world: World, key: str = "init_from", weights: bytes = NO_TENSORS, **changes: Any) -> None:
    folder = world.folder / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads(world.model.read_text()) | changes))
    if weights:
        (folder / "model.safetensors").write_bytes(weights)
    world.settings["model"][key] = str(folder)


def huge_model(world: World) -> None:
    world.devices(80, 80)
    world.disk(1e15)
    world.settings["model"]["config"] = "mistral_7b"


def missing_package(world: World) -> None:
    world.patch.setattr("importlib.util.find_spec", lambda name: None)
    world.settings["report_to"] = "wandb"


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
# mistake, code and key of the error; {} in a key is the folder
MISTAKES: dict[str, tuple[Mistake, str, str | None]] = {
    "misspelt key": (keys(learnin_rate=1), "configuration", "learnin_rate"),
    "batch that does not divide": (
        keys(train_batch_size_tokens=1000, gradient_accumulation_steps=None),
        "batch_not_divisible",
        "train_batch_size_tokens",
    ),
    "DeepSpeed key": (keys(deepspeed=OFFLOAD), "configuration", "zero_optimization.offload_param"),
    # data
    "no data": (keys(data__sources={"text": "data/pretrian"}), "folder_missing", "data/pretrian"),
    "no evaluation data": (keys(data__eval_sources={"more": "data/more"}), "folder_missing", "data/more"),
    "text": (source("text.txt"), "folder_missing", "{}/text.txt"),
    "folder of text": (source("texts/a.txt"), "folder_missing", "{}/texts/a.txt"),
    "unfinished data": (
        lambda world: (world.own_data() / "manifest.json").unlink(),
        "no_manifest",
        "{}/data",
    ),
    "shortened data": (shortened_data, "wrong_size", "{}/data/train_00000_00000.ds"),
    "other tokenizer": (
        lambda world: (world.own_data() / "tokenizer/tokenizer.model").write_bytes(b"x"),
        "tokenizer_replaced",
        "{}/data/tokenizer/tokenizer.model",
    ),
    "short evaluation split": (
        keys(max_seq_length=2048, per_device_train_batch_size=1),
        "too_few_tokens",
        None,
    ),
    # model and weights
    "small vocabulary": (model_file(vocab_size=256), "vocabulary_too_large", "model.config"),
    "few positions": (model_file(max_position_embeddings=32), "sequence_too_long", "max_seq_length"),
    "no such model": (keys(model__config="hare"), "not_found", "hare"),
    "Qwen": (lambda world: hf_folder(world, "config", model_type="qwen2"), "model_config", "model_type"),
    "misspelt model key": (model_file(num_hiden_layers=2), "model_config", "num_hiden_layers"),
    "no weights folder": (keys(model__init_from="output/first/hf"), "weights", "model.init_from"),
    "other model": (
        lambda world: hf_folder(world, intermediate_size=512),
        "architecture",
        "intermediate_size",
    ),
    "truncated weights": (
        lambda world: hf_folder(world, weights=NO_TENSORS[:-1]),
        "not_safetensors",
        "model.init_from",
    ),
    "no weights": (lambda world: hf_folder(world, weights=b""), "no_weights", "model.init_from"),
    # output
    "file as output": (written("run", "my notes"), "configuration", "output_dir"),
    "data as output": (
        lambda world: world.settings.update(output_dir=str(world.own_data())),
        "configuration",
        "output_dir",
    ),
    "export as output": (written(f"run/{EXPORTED_FROM}"), "configuration", "output_dir"),
    "other model as export": (written("run/hf/config.json"), "configuration", "output_dir"),
    "little disk": (lambda world: world.disk(1e6), "disk", "output_dir"),
    # the machine
    "missing package": (missing_package, "tracker_not_installed", "report_to"),
    "large model on a CPU": (keys(model__config="hare_1.1b"), "configuration", "model.config"),
    "attention of a GPU": (
        keys(model__attention_backend="flash"),
        "configuration",
        "model.attention_backend",
    ),
    "backend of a GPU": (keys(precision__backend="transformer_engine"), "configuration", "precision.backend"),
    "fp16 on a CPU": (keys(precision__compute="fp16"), "configuration", "precision.compute"),
    "too little GPU memory": (huge_model, "gpu_memory", "model.config"),
}


@pytest.mark.parametrize(("mistake", "code", "key"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_one_error(world: World, mistake: Mistake, code: str, key: str | None) -> None:
    mistake(world)
    before, begun = world.content(), time.perf_counter()
    with pytest.raises(UserError) as error:
        check.check(load_arguments([world.config()]), 1, 1, world.gpus)
    assert error.value.code == code and (key is None or error.value.key == key.format(world.folder))
    assert time.perf_counter() - begun < 5
    assert world.content() == before and (before or not world.output.is_dir())


def test_several_mistakes_are_one_error(world: World) -> None:
    keys(data__sources={"text": "data/pretrian"}, model__attention_backend="flash")(world)
    world.disk(1e6)
    assert train.main([world.config()]) == 2
    assert not world.output.exists()
    with pytest.raises(check.PreflightError) as error:
        check.check(load_arguments([world.config()]), 1, 1, [])
    assert {problem.key for problem in error.value.problems} == {  # type: ignore[attr-defined]
        "data/pretrian",
        "model.attention_backend",
        "output_dir",
    }


@pytest.mark.parametrize(("rank", "checks"), [(0, 1), (1, 0)])
def test_only_one_rank_checks(world: World, monkeypatch: pytest.MonkeyPatch, rank: int, checks: int) -> None:
    """Under torchrun or srun, where train/launch.py has not checked."""
    checked: list[int] = []
    monkeypatch.setattr(train.rank_env, "rank", lambda: rank)
    monkeypatch.setattr(train, "check", lambda *_: checked.append(rank) or [])
    monkeypatch.setattr(
        train, "end_after_error", lambda error, _: "goes on" if "was not seen" in str(error) else 0
    )
    assert train.main([world.config()]) == "goes on"
    assert len(checked) == checks


# ---------------------------------------------------------------- by the launcher


def launched(world: World, *options: str) -> int:
    return launch.main([*options, str(launch.TRAIN), world.config()])


def test_launcher_checks_before_starting_ranks(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    keys(data__sources={"text": "data/pretrian"})(world)
    assert launched(world, "--nproc", "2") == 2
    assert capsys.readouterr().err.count("data/pretrian") == 1
    keys(data__sources={"text": str(world.others)})(world)
    world.devices(80, 80)
    assert launched(world, "--nproc", "4") == 2
    assert {4, 2} <= {*numbers(capsys.readouterr().err)}
    assert check.CHECKED not in os.environ
    with pytest.raises(AssertionError, match="was not seen"):  # it goes on to start them
        launched(world, "--nproc", "2")
    assert os.environ.pop(check.CHECKED)  # so that rank 0 does not look again


@pytest.mark.interpreter
def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError

    monkeypatch.setattr(machine.ctypes, "CDLL", no_driver)
    assert machine.cuda_devices() == []
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(machine, "QUERY", "print(5, 9, 0); print(7, 8, 9)")
    assert machine.cuda_devices() == [(5, (9, 0)), (7, (8, 9))]
    monkeypatch.setattr(machine, "QUERY", "print(5); raise SystemExit(1)")
    assert machine.cuda_devices() is None  # not known: nothing is refused


NOTHING_HEAVY = """
import sys
from train import launch, train
for main, words in ((launch.main, ["--nproc", "2", str(launch.TRAIN)]), (train.main, [])):
    assert main([*words, *sys.argv[1:]]) == 2
print([name for name in ("torch", "transformers", "deepspeed", "pandas") if name in sys.modules])
"""


@pytest.mark.interpreter
def test_mistakes_are_found_without_torch(world: World) -> None:
    """Also that a model is too large, or has no room: in a second, and before the next 3 GB are in memory."""
    keys(data__sources={"text": "data/pretrian"}, model__config="hare_1.1b")(world)
    keys(deepspeed="ds_config_zero3.json")(world)
    hf_folder(world)
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_HEAVY, world.config()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr
    assert done.stderr.count("data/pretrian") == 2 and done.stderr.count("model.init_from") == 2


@mock.patch.dict(os.environ)
def test_completed_run_starts_no_training(world: World, own_trained: Path) -> None:
    """Neither train.py nor the supervisor, which also starts no demo."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):  # of the fixture's process group
        os.environ.pop(name, None)
    keys(output_dir=str(own_trained))(world)
    before, demo = world.content(), list[str]()
    world.patch.setattr(launch.Children, "run_ranks", lambda *_: 0)
    world.patch.setattr(os, "execv", lambda path, command: demo.extend(command))
    for options in ([], ["--dry_run"]):
        assert train.main([world.config(), *options]) == 0
    os.environ["NPROC"] = "1"
    assert launch.main(["--supervise", world.config()]) == 0 and not demo
    assert world.content() == before
    longer = ["--max_steps", "9", "--allow_changes_on_resume", "max_steps"]
    (own_trained / "hf" / EXPORTED_FROM).write_text("{}")
    for options in (longer, []):
        assert train.main([world.config(), *options]) == 1, "it has to train or to export"
