"""train/record/trackers.py: wandb and TensorBoard in resumes, and their errors."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from model import install_command
from tests.conftest import refused
from train.record.run_folder import RunFolder
from train.record.trackers import TrackerError, Trackers, check_installed


def open_trackers(folder: Path, report_to: str | list[str], start_step: int = 0) -> Trackers:
    config = {"report_to": report_to, "run_name": None, "wandb_project": "project"}
    return Trackers(RunFolder(folder), config, start_step)


@pytest.mark.process
def test_wandb_offline_without_key(tmp_path, monkeypatch):
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
    assert {name.rpartition("-")[2] for name in os.listdir(tmp_path / "wandb")} >= {*ids}


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> tuple[MagicMock, MagicMock]:
    """Mocks in place of wandb and TensorBoard's writer."""
    mocks = MagicMock(), MagicMock()
    for name, mock in zip(("wandb", "torch.utils.tensorboard"), mocks, strict=True):
        monkeypatch.setitem(sys.modules, name, mock)
    return mocks


@pytest.mark.parametrize("fails", ["init", "define_metric", "log", "SummaryWriter", "add_scalar"])
def test_failing_tracker_is_dropped(fails, services, tmp_path, monkeypatch, logged):
    wandb, tensorboard = services
    run, writer = wandb.init.return_value, tensorboard.SummaryWriter.return_value
    calls = {"init": wandb.init, "define_metric": run.define_metric, "log": run.log}
    calls |= {"SummaryWriter": tensorboard.SummaryWriter, "add_scalar": writer.add_scalar}
    calls[fails].side_effect = RuntimeError("the service has shut down")
    monkeypatch.setenv("WANDB_MODE", "online")
    both = open_trackers(tmp_path, ["wandb", "tensorboard"])
    for step in (1, 2, 3):
        both.log({"step": step, "loss": 1.0})
    both.close()
    is_wandb = fails in ("init", "define_metric", "log")
    name, other = ("wandb", writer.add_scalar) if is_wandb else ("tensorboard", run.log)
    (warning,) = logged
    assert name in warning and "RuntimeError: the service has shut down" in warning
    assert other.call_count == 3 and calls[fails].call_count == 1


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
def test_wandb_online_with_key(key, in_netrc, mode, used, resumes, services, tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password x\n" if in_netrc else "")
    netrc.chmod(0o600)
    for name, value in {"NETRC": str(netrc), "WANDB_API_KEY": key, "WANDB_MODE": mode}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    open_trackers(tmp_path, "wandb", 10).close()  # a resume may be the first run with wandb
    init = services[0].init.call_args.kwargs
    assert (init["mode"], init["resume"], init["project"]) == (used, resumes, "project")
    assert init["id"] == RunFolder(tmp_path).wandb_run_id.read_text().strip()
    assert init["dir"] == str(tmp_path)


def test_tensorboard_scalars(tmp_path):
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
def test_missing_tracker_package_raises(report_to, folder_of_that_name, monkeypatch):
    first = report_to if isinstance(report_to, str) else report_to[0]
    spec = importlib.machinery.ModuleSpec(first, None) if folder_of_that_name else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with refused(TrackerError, key="report_to") as error:
        check_installed(report_to)
    assert install_command(first) in str(error.value)
    check_installed("none")
