"""metrics.jsonl, what a resume leaves of it, the printed lines, MFU."""

import json
import time
from pathlib import Path

import pytest

from tests.conftest import numbers
from train.record import metrics as metrics_module
from train.record.history import read_history
from train.record.metrics import MetricsLogger, mfu, peak_tflops
from train.record.run_folder import RunFolder

METRICS = "metrics.jsonl"


def logger(folder, start_step=0, is_main=True, report_to="none", total_steps=100):
    config = {"seed": 1, "report_to": report_to, "run_name": None, "wandb_project": "project"}
    return MetricsLogger(RunFolder(folder), config | {"max_steps": total_steps}, is_main, start_step)


def lines(folder):
    """Without the time at which each was written."""
    found = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    now = time.time()
    assert all(now - 600 < line.pop("time") <= now + 1 for line in found)
    return found


def test_each_line_is_on_disk_at_once_and_printed(tmp_path, logged):
    log = logger(tmp_path)
    log.log({"step": 10, "tokens": 640, "loss": 5.25, "tokens_per_second": 12345.6, "learning_rate": 1e-3})
    assert lines(tmp_path) == [
        {"step": 10, "tokens": 640, "loss": 5.25, "tokens_per_second": 12345.6, "learning_rate": 1e-3}
    ]
    log.log({"step": 20, "tokens": 1280, "eval_loss": 4.0, "eval_loss/a {b}": 4.5, "unigram_loss": 6.0})
    log.log({"step": 30, "tokens": 1920, "loss": 5.0, "grad_norm": 0.5, "mfu": 0.375, "memory_gib": 61.25})
    log.close()
    log.close()
    printed = [numbers(line.replace(",", "").replace("/", " ")) for line in logged]
    assert printed[0][:5] == [10, 100, 5.25, 1e-3, 12346]
    assert printed[1:] == [[20, 100, 4.0, 4.5, 6.0], [30, 100, 5.0, 0.5, 37.5, 61.2, *printed[2][6:]]]
    assert len(lines(tmp_path)) == 3


def test_nan_stays_valid_json(tmp_path):
    log = logger(tmp_path)
    log.log({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    log.close()
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None}]


def test_other_ranks_write_and_print_nothing(tmp_path, logged):
    log = logger(tmp_path / "run", is_main=False)
    log.log({"step": 1, "loss": 1.0})
    log.close()
    assert not (tmp_path / "run").exists()
    assert not logged


def test_resume_moves_later_lines_aside(tmp_path):
    log = logger(tmp_path)
    for step in (10, 20, 30, 40):
        log.log({"step": step, "loss": 1.0 * step})
    log.close()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"loss": 1.0}\n[1]\n')  # no run's
        file.write('{"step": 50, "lo')  # cut off by a crash
    log = logger(tmp_path, start_step=20)
    log.log({"step": 30, "loss": 3.5})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30]
    assert lines(tmp_path)[-1]["loss"] == 3.5
    (aside,) = tmp_path.glob(f"{METRICS}.discarded-*")
    assert aside.read_text().splitlines()[-1] == '{"step": 50, "lo'
    assert len(aside.read_text().splitlines()) == 5


def test_the_next_line_is_not_glued_to_one_without_an_end(tmp_path):
    """A crash may leave a line that lacks nothing but its end."""
    (tmp_path / METRICS).write_text(f'{{"step": 10, "tokens": 640, "loss": 1.0, "time": {time.time()}}}')
    log = logger(tmp_path, start_step=10)
    log.log({"step": 20, "tokens": 1280, "loss": 2.0})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]
    assert len(read_history(tmp_path).records) == 2 and not list(tmp_path.glob(f"{METRICS}.discarded-*"))


def test_a_new_run_in_the_same_folder_starts_empty_and_loses_nothing(tmp_path):
    for _ in range(3):
        log = logger(tmp_path)
        log.log({"step": 10, "loss": 1.0})
        log.close()
    assert len(lines(tmp_path)) == 1
    assert len(list(tmp_path.glob(f"{METRICS}.discarded-*"))) == 2


def test_time_left_forgets_what_is_long_ago_and_what_was_taken_back(tmp_path, logged, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(metrics_module.LivePlot, "update", lambda plot: None)
    log = logger(tmp_path, total_steps=3620)
    for step in range(1, 21):
        now[0] += 100.0 if step <= 11 else 1.0
        log.log({"step": step, "loss": 1.0})
    assert logged[-1].split()[-2] == "1:00:00"  # by the last ten lines
    now[0] += 500.0
    log.rewind(10)
    now[0] += 20.0
    log.log({"step": 20, "loss": 1.0})
    log.close()
    assert logged[-1].split()[-2] == "2:00:00"


@pytest.mark.parametrize("key", ["changes", "began_at"])
def test_what_a_start_notes_is_there_once(tmp_path, key):
    """Of one that saved nothing the next start begins at the same step, and notes it again; what earlier starts noted
    stays."""
    for step in (2, 3, 3):
        log = logger(tmp_path, start_step=step)
        log.log({"step": step, key: {"a": 1}})
        log.close()
    assert [line["step"] for line in lines(tmp_path)] == [2, 3]


def test_the_line_of_a_step_that_a_module_went_up_in_is_no_note_of_a_start(tmp_path):
    """Its changes are another thing; what it has is logged once."""
    record = {"step": 3, "loss": 1.5, "fp8_escalations": {"changes": [{"module": "lm_head"}], "count": 1}}
    log = logger(tmp_path)
    log.log(record)
    log.close()
    logger(tmp_path, start_step=3).close()
    (line,) = lines(tmp_path)
    assert {key: line[key] for key in record} == record


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
def test_lines_that_cannot_be_written_are_kept_and_written_later(tmp_path, logged, room):
    log = logger(tmp_path)
    log.log({"step": 1, "tokens": 0, "loss": 1.0})
    file = log._file
    log._file = FullDisk(file, room)
    for step in (2, 3):
        log.log({"step": step, "tokens": 0, "loss": 1.0})
        assert [record["step"] for record in read_history(tmp_path).records] == [1], "no half line either"
    log._file = file
    log.log({"step": 4, "loss": 1.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    log._file = FullDisk(file, room)
    for step in (5, 6):
        log.log({"step": step, "loss": 1.0})
    log._file = file
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert sum("[Errno 28]" in line for line in logged) == 2, "logged once each time"
    log = logger(tmp_path)
    log._file = FullDisk(log._file)
    log.log({"step": 1, "loss": 1.0})
    log.close()
    assert numbers(logged[-1])[0] == 1 and lines(tmp_path) == []


def test_a_way_back_without_room_for_the_lines_that_are_left(tmp_path, monkeypatch):
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
