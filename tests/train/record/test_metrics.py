"""metrics.jsonl, what a resume leaves of it, the printed lines, wandb without a key, the plot, MFU."""

import contextlib
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from train.record import metrics as metrics_module
from train.record.metrics import MetricsLogger, mfu, peak_tflops, plot_loss
from train.record.run_folder import RunFolder

METRICS = "metrics.jsonl"


def logger(folder, start_step=0, is_main=True, report_to="none", total_steps=100):
    config = {"seed": 1, "report_to": report_to, "run_name": None, "wandb_project": "project"}
    return MetricsLogger(RunFolder(folder), config | {"max_steps": total_steps}, is_main, start_step)


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_each_line_is_on_disk_at_once_and_printed(tmp_path, capsys):
    log = logger(tmp_path)
    log.log({"step": 10, "tokens": 640, "loss": 5.25, "tokens_per_second": 12345.6, "learning_rate": 1e-3})
    assert lines(tmp_path) == [
        {"step": 10, "tokens": 640, "loss": 5.25, "tokens_per_second": 12345.6, "learning_rate": 1e-3}
    ]
    log.message("hello")
    log.close()
    log.close()
    out = capsys.readouterr().out
    assert "step 10/100  loss 5.2500  lr 1.00e-03  12,346 tokens/s" in out and "left" in out
    assert "hello" in out
    assert len(lines(tmp_path)) == 1  # messages are for people


def test_nan_stays_valid_json_and_visible(tmp_path, capsys):
    log = logger(tmp_path)
    log.log({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    log.close()
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None}]
    assert "loss nan" in capsys.readouterr().out


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    log = logger(tmp_path / "run", is_main=False)
    log.log({"step": 1, "loss": 1.0})
    log.message("hello")
    log.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_resume_moves_later_lines_aside(tmp_path):
    log = logger(tmp_path)
    for step in (10, 20, 30, 40):
        log.log({"step": step, "loss": 1.0 * step})
    log.close()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 50, "lo')  # cut off by a crash
    log = logger(tmp_path, start_step=20)
    log.log({"step": 30, "loss": 3.5})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30]
    assert lines(tmp_path)[-1]["loss"] == 3.5
    (aside,) = tmp_path.glob(f"{METRICS}.discarded-*")
    assert aside.read_text().splitlines()[-1] == '{"step": 50, "lo'
    assert len(aside.read_text().splitlines()) == 3


def test_the_next_line_is_not_glued_to_one_without_an_end(tmp_path):
    """A crash may leave a line that lacks nothing but its end."""
    (tmp_path / METRICS).write_text('{"step": 10, "tokens": 640, "loss": 1.0}')
    log = logger(tmp_path, start_step=10)
    log.log({"step": 20, "tokens": 1280, "loss": 2.0})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]
    assert plot_loss(RunFolder(tmp_path)) and not list(tmp_path.glob(f"{METRICS}.discarded-*"))


def test_a_new_run_in_the_same_folder_starts_empty_and_loses_nothing(tmp_path):
    for _ in range(3):
        log = logger(tmp_path)
        log.log({"step": 10, "loss": 1.0})
        log.close()
    assert len(lines(tmp_path)) == 1
    assert len(list(tmp_path.glob(f"{METRICS}.discarded-*"))) == 2


def test_time_left_follows_the_recent_speed(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    log = logger(tmp_path, start_step=50, total_steps=3700)
    now[0] = 100.0
    log.log({"step": 100, "loss": 1.0})
    log.close()
    assert "2:00:00 left" in capsys.readouterr().out  # 3600 steps at 2 s


class FullDisk:
    """A file whose disk takes `room` bytes more."""

    def __init__(self, file, room=0):
        self.file, self.room = file, room

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        part = data[: self.room]
        if not part:
            raise OSError(28, "No space left on device")
        self.room -= len(part)
        return self.file.write(part)


@pytest.mark.parametrize("room", [0, 5])
def test_lines_that_cannot_be_written_are_kept_and_written_later(tmp_path, capsys, room):
    log = logger(tmp_path)
    log.log({"step": 1, "loss": 1.0})
    file = log._file
    log._file = FullDisk(file, room)
    for step in (2, 3):
        log.log({"step": step, "loss": 1.0})
        assert [line["step"] for line in lines(tmp_path)] == [1]  # no half line either
    log._file = file
    log.log({"step": 4, "loss": 1.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    log._file = FullDisk(file, room)
    for step in (5, 6):
        log.log({"step": step, "loss": 1.0})
    log._file = file
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    out = capsys.readouterr().out
    assert (
        out.count("metrics.jsonl cannot be written: [Errno 28] No space left on device; its lines are kept")
        == 2
    )
    assert out.count("metrics.jsonl could be written again; no line is missing") == 2


def test_lines_that_are_kept_follow_the_run_back(tmp_path, capsys):
    log = logger(tmp_path)
    file = log._file
    log._file = FullDisk(file)
    for step in (1, 2, 3):
        log.log({"step": step, "loss": 1.0})
    log.rewind(2)
    log.log({"step": 3, "loss": 2.0})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_lines_that_stay_unwritten_are_told(tmp_path, capsys):
    log = logger(tmp_path)
    log._file = FullDisk(log._file)
    log.log({"step": 1, "loss": 1.0})
    log.close()
    assert "1 lines of" in capsys.readouterr().out and lines(tmp_path) == []


def test_a_way_back_without_room_for_the_lines_that_are_left(tmp_path, capsys, monkeypatch):
    log = logger(tmp_path)
    for step in (1, 2, 3):
        log.log({"step": step, "loss": 1.0})
    right = Path.write_text

    def write_text(path, text, **options):
        right(path, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        log.rewind(2)
    log.log({"step": 3, "loss": 2.0})
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)][2:] == [(3, 1.0), (3, 2.0)]
    assert "warning: the lines after step 2 stay in" in capsys.readouterr().out


def test_a_console_on_a_full_disk_is_no_obstacle(tmp_path, monkeypatch):
    log = logger(tmp_path)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        log.log({"step": 1, "loss": 1.0})
        log.message("hello")
        with contextlib.suppress(OSError):
            full.close()
    assert [line["step"] for line in lines(tmp_path)] == [1]


@pytest.mark.process
def test_wandb_without_a_key_is_offline_and_keeps_its_run(tmp_path, capsys, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_id = tmp_path / "wandb_run_id"
    ids = []
    for start_step in (0, 10, 0):
        log = logger(tmp_path, start_step=start_step, report_to="wandb")
        log.log({"step": start_step + 10, "loss": 1.0})
        log.close()
        ids.append(run_id.read_text())
    assert ids[0] == ids[1] != ids[2]  # a resumed run goes on, a new one does not
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert any(name.endswith(ids[0]) for name in folders) and any(name.endswith(ids[2]) for name in folders)
    assert "no API key" in capsys.readouterr().out


@pytest.mark.parametrize("fails", ["init", "define_metric", "log", "finish"])
def test_whatever_wandb_raises_is_told_once_and_the_run_goes_on(fails, tmp_path, capsys, monkeypatch):
    class Failing:
        dir = "wandb/run"

        def __getattr__(self, name):
            def call(*arguments, **options):
                if name == fails:
                    raise RuntimeError("the service has shut down")
                return self

            return call

    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    module.init = Failing().init
    monkeypatch.setitem(sys.modules, "wandb", module)
    log = logger(tmp_path, report_to="wandb")
    for step in (1, 2, 3):
        log.log({"step": step, "loss": 1.0})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    out = capsys.readouterr().out
    assert out.count("warning: wandb: RuntimeError: the service has shut down; the run goes on") == 1


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize("folder_of_that_name", [False, True])
def test_wandb_that_is_not_installed_stops_the_run_before_it_writes(
    is_main, folder_of_that_name, tmp_path, monkeypatch
):
    spec = importlib.machinery.ModuleSpec("wandb", None) if folder_of_that_name else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ValueError, match='pip install wandb, or set report_to to "none"'):
        logger(tmp_path / "run", is_main=is_main, report_to="wandb")
    assert not (tmp_path / "run").exists()


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
    assert metrics_module._has_wandb_key() is has


def test_plot_needs_a_loss(tmp_path, capsys, monkeypatch):
    log = logger(tmp_path)
    assert plot_loss(RunFolder(tmp_path)) is None
    log.log({"step": 1, "tokens": 64, "loss": 5.0})
    log.log({"step": 2, "tokens": 128, "loss": float("nan")})
    log.log({"step": 2, "tokens": 128, "eval_loss": 4.0, "eval_loss/a {b}": 4.5, "unigram_loss": 6.0})
    log.close()
    assert "eval_loss 4.0000  eval_loss/a {b} 4.5000  (unigram model 6.0000)" in capsys.readouterr().out
    labels = []
    monkeypatch.setattr(Axes, "legend", lambda axes: labels.extend(axes.get_legend_handles_labels()[1]))
    path = plot_loss(RunFolder(tmp_path))
    assert path == tmp_path / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert labels == ["training", "evaluation", "evaluation, a {b}", "unigram model"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H800", 989.0),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_peaks_are_given_only_for_known_parts(name, peak):
    assert peak_tflops(name) == peak


def test_mfu_is_the_fraction_of_the_peak():
    assert mfu(100_000, 6.9e9, 989.0) == pytest.approx(0.6977, abs=1e-4)
    assert mfu(100_000, 6.9e9, None) is None
