"""A folder with a good configuration of a run, which tests spoil."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures import settings_of
from train import launch, train
from train.preflight import sizes
from train.preflight.machine import Device

Usage = namedtuple("Usage", "total used free")
Mistake = Callable[["World"], "list[str] | None"]


class World:
    """`settings` are written by `config`; `gpus` are the sizes of CUDA devices in bytes."""

    def __init__(self, folder: Path, data: Path, model: Path, patch: pytest.MonkeyPatch):
        self.folder, self.patch = folder, patch
        self.data, self.output = folder / "data", folder / "run"
        self.model = Path(shutil.copy(model, folder / "model.json"))
        self.others = data
        self.settings = settings_of(data, self.model, self.output)
        self.gpus: list[Device] = []

    def own_data(self) -> Path:
        """Return a copy of the data, which a test may damage, as the run's source."""
        shutil.copytree(self.others, self.data)
        self.settings["data"]["sources"] = {"text": str(self.data)}
        return self.data

    def devices(self, *gib: int, capability: tuple[int, int] = (9, 0)) -> None:
        self.gpus = [Device(size * 2**30, capability) for size in gib]
        for module in (train, launch):
            self.patch.setattr(module, "cuda_devices", lambda: self.gpus)

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
    """Change keys of the configuration; a section's key has __ for the dot."""

    def change(world: World) -> None:
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            (world.settings.setdefault(section, {}) if section else world.settings)[name] = value

    return change
