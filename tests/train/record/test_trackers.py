"""train/record/trackers.py: wandb and TensorBoard in resumes, and their errors."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from model import install_command
from tests.conftest import refused
from train.record.run_folder import RunFolder
from train.record.trackers import TrackerError, Trackers, check_installed


def open_trackers(folder: Path, report_to: str | list[str], start_step: int = 0) -> Trackers:
    config = {"report_to": report_to, "run_name": None, "wandb_project": "project"}
    return Trackers(RunFolder(folder), config, start_step)


@pytest.mark.process
def test_wandb_without_a_key_is_offline_and_a_resume_continues_its_run(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for start_step in (0, 10, 0):
        tracker = open_trackers(tmp_path, "wandb", start_step)
        tracker.log({"step": start_step + 10, "loss": 1.0})
        tracker.close()
        ids.append(RunFolder(tmp_path).wandb_run_id.read_text().strip())
    assert ids[0] == ids[1] != ids[2]
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert all(any(name.endswith(each) for name in folders) for each in ids)


class Service:
    """A module or an object of which each call is noted, and one may fail."""

    dir = "wandb/run"

    def __init__(self, calls: list[tuple], fails: str = "") -> None:
        self._calls, self._fails = calls, fails

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._calls.append((name, *arguments, *options.items()))
            if name == self._fails:
                raise RuntimeError("the service has shut down")
            return self

        return call


def module_of(name: str, service: Service) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=f"{name}/__init__.py")
    module.init, module.SummaryWriter = service.init, service.SummaryWriter
    return module


@pytest.mark.parametrize("fails", ["init", "define_metric", "log", "SummaryWriter", "add_scalar"])
def test_a_tracker_that_raises_is_dropped_and_the_other_continues(fails, tmp_path, monkeypatch, logged):
    calls: list[tuple] = []
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, module_of(name, Service(calls, fails)))
    monkeypatch.setenv("WANDB_MODE", "online")
    both = open_trackers(tmp_path, ["wandb", "tensorboard"])
    for step in (1, 2, 3):
        both.log({"step": step, "loss": 1.0})
    both.close()
    name = "tensorboard" if fails in ("SummaryWriter", "add_scalar") else "wandb"
    (warning,) = logged
    assert name in warning and "RuntimeError: the service has shut down" in warning
    counts = [[call[0] for call in calls].count(method) for method in ("log", "add_scalar")]
    assert sorted(counts) == [int(fails in ("log", "add_scalar")), 3]


@pytest.mark.parametrize(
    ("key", "in_netrc", "mode", "used", "resumes"),
    [
        ("", False, "", "offline", None),
        ("k", False, "", "online", "allow"),
        ("", True, "", "online", "allow"),
        ("k", False, "offline", "offline", None),
        ("", False, "online", "online", "allow"),
    ],
)
def test_wandb_is_online_with_a_key(key, in_netrc, mode, used, resumes, tmp_path, monkeypatch):
    calls: list[tuple] = []
    monkeypatch.setitem(sys.modules, "wandb", module_of("wandb", Service(calls)))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n" if in_netrc else "")
    (tmp_path / "netrc").chmod(0o600)
    environment = {"NETRC": str(tmp_path / "netrc"), "WANDB_API_KEY": key, "WANDB_MODE": mode}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    config = {"report_to": "wandb", "run_name": "mine", "wandb_project": "project"}
    Trackers(RunFolder(tmp_path), config, 10).close()  # a resume may be the first run with wandb
    init = dict(next(call[1:] for call in calls if call[0] == "init"))
    assert init["name"] == "mine" and init["config"] == config
    assert (init["mode"], init["resume"], init["project"]) == (used, resumes, "project")
    assert init["id"] == RunFolder(tmp_path).wandb_run_id.read_text().strip()
    assert init["dir"] == str(tmp_path) and ("define_metric", "*", ("step_metric", "step")) in calls


def test_tensorboard_has_the_numbers_that_count(tmp_path):
    """Not those that a rollback or a resume has left behind."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the package tensorboard"
    )
    others = {"time": 1.0, "mfu": None, "ok": True, "skipped": {"ranks": [0]}}
    others["fp8_alarms"] = {"began": [{"gemm": "lm_head"}], "active": 1, "count": 3}
    for start_step, losses in (
        (0, {10: 10.0, 20: 20.0, 30: 30.0}),
        (20, {30: 31.0, 40: float("nan")}),
        (30, {40: 41.0}),
    ):
        tracker = open_trackers(tmp_path, "tensorboard", start_step)
        for step, loss in losses.items():
            tracker.log({"step": step, "loss": loss, **others})
        tracker.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "fp8_alarms/active", "fp8_alarms/count"}
    losses = [(event.step, event.value) for event in found.Scalars("loss")]
    assert losses == [(10, 10), (20, 20), (30, 31), (40, 41)]
    (tag,) = found.Tags()["tensors"]
    assert len(found.Tensors(tag)) == 1, "the configuration, once per run"


@pytest.mark.parametrize("folder_of_that_name", [False, True])
@pytest.mark.parametrize("report_to", ["wandb", ["wandb", "tensorboard"], "tensorboard"])
def test_a_tracker_that_is_not_installed_is_named(report_to, folder_of_that_name, monkeypatch):
    first = report_to if isinstance(report_to, str) else report_to[0]
    spec = importlib.machinery.ModuleSpec(first, None) if folder_of_that_name else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with refused(TrackerError, key="report_to") as error:
        check_installed(report_to)
    assert install_command(first) in str(error.value)
    check_installed("none")
