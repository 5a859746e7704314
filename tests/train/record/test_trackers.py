"""wandb and TensorBoard: who is asked for, resumes go on with the same run, failures end nothing."""

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
from train.record import trackers
from train.record.metrics import MetricsLogger
from train.record.run_folder import RunFolder
from train.record.trackers import TrackerError, Trackers, check_installed


def open_trackers(folder: Path, report_to: str | list[str], start_step: int = 0) -> Trackers:
    config = {"report_to": report_to, "run_name": None, "wandb_project": "project"}
    return Trackers(RunFolder(folder), config, start_step)


@pytest.mark.process
def test_wandb_without_a_key_is_offline_and_keeps_keeps_its_run(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for start_step in (0, 10, 0):
        tracker = open_trackers(tmp_path, "wandb", start_step)
        tracker.log({"step": start_step + 10, "loss": 1.0})
        if start_step:
            tracker.rewind(start_step)
            tracker.log({"step": start_step + 10, "loss": 1.0})
        tracker.close()
        ids.append(trackers.read_wandb_id(RunFolder(tmp_path)))
    # a resumed run goes on, in a run of the same group when it goes back; a new one does not
    assert ids[1] == f"{ids[0]}-2" and ids[2] != ids[0]
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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is asked of wandb and of TensorBoard's writer, neither of which is there."""
    noted: list[tuple] = []
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, module_of(name, Service(noted)))
    return noted


def module_of(name: str, service: Service) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=f"{name}/__init__.py")
    module.init, module.SummaryWriter = service.init, service.SummaryWriter
    return module


@pytest.mark.parametrize("fails", ["init", "define_metric", "log", "finish", "SummaryWriter", "add_scalar"])
def test_whatever_a_tracker_raises_is_told_once_and_the_other_goes_on(
    fails, tmp_path, calls, monkeypatch, logged
):
    bad, names = [], ("wandb", "torch.utils.tensorboard")
    for name in names:
        monkeypatch.setitem(sys.modules, name, module_of(name, Service(bad, fails)))
    config = {"report_to": ["wandb", "tensorboard"], "run_name": None, "wandb_project": "project"}
    both = Trackers(RunFolder(tmp_path), config, 0)
    for step in (1, 2, 3):
        both.log({"step": step, "loss": 1.0})
    both.close()
    name = "tensorboard" if fails in ("SummaryWriter", "add_scalar") else "wandb"
    (warning,) = (line for line in logged if "the run continues" in line)
    assert name in warning and "RuntimeError: the service has shut down" in warning
    other = [call[0] for call in bad].count("log" if name == "tensorboard" else "add_scalar")
    assert other == 3


@pytest.mark.parametrize(
    ("key", "mode", "used", "resumes"),
    [
        ("", "", "offline", None),
        ("k", "", "online", "allow"),
        ("k", "offline", "offline", None),
        ("", "online", "online", "allow"),
    ],
)
def test_wandb_goes_online_with_a_key_and_a_resume_may_be_its_first_run(
    key, mode, used, resumes, tmp_path, calls, monkeypatch
):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", mode)
    config = {"report_to": "wandb", "run_name": "mine", "wandb_project": "project"}
    Trackers(RunFolder(tmp_path), config, 10).close()
    init = dict(next(call[1:] for call in calls if call[0] == "init"))
    assert init["name"] == "mine" and init["config"] == config
    assert (init["mode"], init["resume"], init["project"]) == (used, resumes, "project")
    assert init["id"] == trackers.read_wandb_id(RunFolder(tmp_path)) and init["dir"] == str(tmp_path)
    assert ("define_metric", "*", ("step_metric", "step")) in calls


def test_wandb_begins_a_new_run_of_the_group_when_a_run_goes_back(tmp_path, calls, monkeypatch):
    """By a rollback, or by a resume before the last logged step; no wandb run has a step twice."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"max_steps": 9, "report_to": ["wandb"], "run_name": None, "wandb_project": "project"}

    def start(step: int) -> MetricsLogger:
        return MetricsLogger(RunFolder(tmp_path), config, is_main=True, start_step=step)

    def logs(log: MetricsLogger, *steps: int) -> None:
        for step in steps:
            log.log({"step": step, "tokens": 64 * step, "loss": 1.0})

    log = start(0)
    logs(log, 1, 2, 3)
    log.rewind(2)
    logs(log, 3, 4)
    log.close()
    log = start(4)
    logs(log, 5)
    log.close()
    log = start(3)  # after a crash
    logs(log, 4, 5)
    log.close()
    runs: dict[str, list[int]] = {}
    opened = []
    for call in calls:
        if call[0] == "init":
            opened.append(dict(call[1:]))
        elif call[0] == "log":
            runs.setdefault(opened[-1]["id"], []).append(call[1]["step"])
    (group,) = {each["group"] for each in opened}
    assert runs == {group: [1, 2, 3], f"{group}-2": [3, 4, 5], f"{group}-3": [4, 5]}
    assert [each["name"] for each in opened] == [None, f"{group}-2", f"{group}-2", f"{group}-3"]
    assert [call[0] for call in calls].count("finish") == 4


def test_tensorboard_has_the_numbers_that_count(tmp_path):
    """Not those that a rollback or a resume has left behind."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the package tensorboard"
    )
    others = {"time": 1.0, "mfu": None, "ok": True, "skipped": {"ranks": [0]}}
    others["fp8_alarms"] = {"began": [{"gemm": "lm_head"}], "active": 1, "count": 3}
    first = open_trackers(tmp_path, "tensorboard", 0)
    for step in (10, 20, 30):
        first.log({"step": step, "loss": step, **others})
    first.rewind(20)
    first.log({"step": 30, "loss": 31})
    first.log({"step": 40, "loss": float("nan")})
    first.close()
    resumed = open_trackers(tmp_path, "tensorboard", 30)
    resumed.log({"step": 40, "loss": 41})
    resumed.close()
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


@pytest.mark.parametrize(
    ("key", "in_netrc", "has"), [("x", False, True), (None, True, True), (None, False, False)]
)
def test_where_a_wandb_key_is_looked_for(key, in_netrc, has, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password x\n" if in_netrc else "")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    assert trackers.has_wandb_key() is has
