"""Mistakes that a user makes: a good configuration of a run, and what spoils it."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures import settings_of
from train import launch, train
from train.files import sha256_file
from train.guard import lock
from train.preflight import check, sizes
from train.record.run_folder import EXPORTED_FROM

Usage = namedtuple("Usage", "total used free")
Mistake = Callable[["World"], "list[str] | None"]


class World:
    """A folder with a good configuration of a run, some of which a mistake spoils."""

    def __init__(self, folder: Path, data: Path, model: Path, patch: pytest.MonkeyPatch):
        self.folder, self.patch = folder, patch
        self.data, self.output = folder / "data", folder / "run"
        self.model = Path(shutil.copy(model, folder / "model.json"))
        self.others = data
        self.settings = settings_of(data, self.model, self.output)

    def own_data(self) -> Path:
        """A copy, which may be damaged."""
        shutil.copytree(self.others, self.data)
        self.settings["data"]["sources"] = {"text": str(self.data)}
        return self.data

    def edit_model(self, **changes: Any) -> None:
        self.model.write_text(json.dumps(json.loads(self.model.read_text()) | changes))

    def devices(self, *gib: int) -> None:
        for module in (train, launch):
            self.patch.setattr(module, "cuda_devices", lambda: [size * 2**30 for size in gib])

    def disk(self, free: float) -> None:
        usage = lambda _: Usage(10**15, 0, int(free))  # noqa: E731
        self.patch.setattr(sizes, "shutil", SimpleNamespace(disk_usage=usage))

    def config(self) -> str:
        path = self.folder / "config.json"
        path.write_text(json.dumps(self.settings))
        return str(path)

    def content(self) -> dict[str, bytes | None]:
        return {
            str(path): path.read_bytes() if path.is_file() else None
            for path in sorted(self.output.rglob("*"))
        }


def keys(**changes: Any) -> Mistake:
    """Of the configuration file; a section's by __."""

    def change(world: World) -> None:
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            (world.settings.setdefault(section, {}) if section else world.settings)[name] = value

    return change


def options(*words: str) -> Mistake:
    return lambda world: list(words)


def model_file(**changes: Any) -> Mistake:
    return lambda world: world.edit_model(**changes)


def no_config(world: World) -> None:
    world.config = lambda: str(world.folder / "confg.json")  # type: ignore[method-assign]


def broken_config(world: World) -> None:
    path = world.folder / "broken.json"
    path.write_text('{"max_steps": 10,}')
    world.config = lambda: str(path)  # type: ignore[method-assign]


def raw_text_as_data(world: World) -> None:
    (world.folder / "text.txt").write_text("once upon a time")
    world.settings["data"]["sources"] = {"text": str(world.folder / "text.txt")}


def unfinished_data(world: World) -> None:
    (world.own_data() / "manifest.json").unlink()


def shortened_data(world: World) -> None:
    shard = next(world.own_data().glob("train_*.ds"))
    shard.write_bytes(shard.read_bytes()[:-2])


def another_tokenizer_beside_the_data(world: World) -> None:
    (world.own_data() / "tokenizer/tokenizer.model").write_bytes(b"another")


def sources_of_two_tokenizers(world: World) -> None:
    manifest = world.own_data() / "manifest.json"
    tokenizer = world.data / "tokenizer/tokenizer.model"
    before = json.loads(manifest.read_text())["tokenizer_sha256"]
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    manifest.write_text(manifest.read_text().replace(before, sha256_file(tokenizer)))
    world.settings["data"]["sources"] = {"mine": str(world.data), "theirs": str(world.others)}


def held_out_by_another_tokenizer(world: World) -> None:
    sources_of_two_tokenizers(world)
    world.settings["data"] = {
        "sources": {"text": str(world.others)},
        "eval_sources": {"held_out": str(world.data)},
    }


def sources_of_two_eval_fractions(world: World) -> None:
    path = world.own_data() / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eval_fraction": 0.5}))
    world.settings["data"]["sources"] = {"mine": str(world.data), "theirs": str(world.others)}


def held_out_by_a_larger_fraction(world: World) -> None:
    sources_of_two_eval_fractions(world)
    sets = {"held_out": str(world.data)}
    world.settings["data"] = {"sources": {"text": str(world.others)}, "eval_sources": sets}


NO_TENSORS = b"\2" + bytes(7) + b"{}"  # a whole safetensors file


def hf_folder(world: World, weights: bool = True, **changes: Any) -> str:
    folder = world.folder / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads(world.model.read_text()) | changes))
    if weights:
        (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return str(folder)


def a_llama_folder(world: World) -> None:
    world.settings["model"]["config"] = hf_folder(
        world, model_type="llama", architectures=["LlamaForCausalLM"]
    )


def weights_of_another_model(world: World) -> None:
    world.settings["model"]["init_from"] = hf_folder(world, intermediate_size=512)


def no_weights(world: World) -> None:
    world.settings["model"]["init_from"] = hf_folder(world, weights=False)


def weights_that_are_cut_off(world: World) -> None:
    world.settings["model"]["init_from"] = folder = hf_folder(world)
    (Path(folder) / "model.safetensors").write_bytes(NO_TENSORS[:-1])


def a_file_as_output(world: World) -> None:
    world.output.write_text("my notes")


def data_as_output(world: World) -> None:
    world.settings["output_dir"] = str(world.own_data())


def export_as_output(world: World) -> None:
    world.output.mkdir()
    (world.output / EXPORTED_FROM).write_text("{}")


def export_of_somebody_else(world: World) -> None:
    (world.output / "hf").mkdir(parents=True)
    (world.output / "hf/config.json").write_text("{}")


def export_by_a_link(world: World) -> None:
    world.output.mkdir()
    (world.output / "hf").symlink_to(world.folder)


def output_of_somebody_else(world: World) -> None:
    world.patch.setattr(check.os, "access", lambda place, mode: place != world.folder)


def part_of_somebody_else(name: str, right: int) -> Mistake:
    """Of the run: this user has not the `right` (of os.access) to it."""

    def change(world: World) -> None:
        part, access = world.output / name, os.access
        (part.parent if part.suffix else part).mkdir(parents=True)
        if part.suffix:
            part.touch()
        world.patch.setattr(
            os, "access", lambda path, mode: access(path, mode) and not (path == part and mode & right)
        )

    return change


def second_run(world: World) -> None:
    """In this folder this process's parent runs, which lives."""
    world.output.mkdir()
    holder = lock.Lock(world.output / "run.lock")
    holder.owner |= {"pid": os.getppid(), "process_started": lock.process_started(os.getppid())}
    holder.path.write_text(json.dumps(holder.owner))


def little_disk(world: World) -> None:
    world.disk(1e6)


def huge_model(world: World) -> list[str]:
    world.devices(80, 80)
    world.disk(1e15)
    return ["--model.config", "mistral_7b"]


def damaged_checkpoint(world: World) -> list[str]:
    folder = world.folder / "old/checkpoints/step-00000003"
    folder.mkdir(parents=True)
    (folder / "run_state.json").write_text("{}")
    return ["--resume_from_checkpoint", str(folder)]


def tracker_that_is_not_installed(world: World) -> list[str]:
    world.patch.setattr("importlib.util.find_spec", lambda name: None)
    return ["--report_to", "wandb"]
