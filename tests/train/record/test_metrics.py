"""train/record/metrics.py: metrics.jsonl, the lines that a resume keeps, the logged lines, MFU."""

import json
import resource
import time

import pytest

from tests.conftest import numbers
from train.record.history import read_history
from train.record.metrics import MetricsLogger, mfu, peak_tflops
from train.record.run_folder import RunFolder

METRICS = "metrics.jsonl"
CONFIG = {"report_to": "none", "max_steps": 100, "train_batch_size_tokens": 64}


def write(folder, *records, start_step=0, **options):
    """Log records, of which a number is a step, as one start of a run."""
    log = MetricsLogger(RunFolder(folder), CONFIG, True, start_step, **options)
    for record in records:
        record = {"step": record, "loss": 1.0} if isinstance(record, int) else record
        log.log({"tokens": 64 * record["step"], **record})
    log.close()


def lines(folder):
    """The lines without their times."""
    found = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    now = time.time()
    assert all(now - 600 < line.pop("time") <= now + 1 for line in found)
    return found


def steps(folder):
    return [line["step"] for line in lines(folder)]


def test_lines_are_written_and_logged(tmp_path, logged):
    records = [
        {"step": 10, "tokens": 640, "loss": 5.25, "tokens_per_second": 1.6, "learning_rate": 1e-3},
        {"step": 20, "tokens": 1280, "eval_loss": 4.0, "eval_loss/a {b}": 4.5, "unigram_loss": 6.0},
        {"step": 30, "tokens": 1920, "loss": 5.0, "grad_norm": 0.5, "mfu": 0.375, "memory_gib": 61.25},
        {"step": 40, "tokens": 2560, "grad_norm": float("nan")},
        {"step": 50, "tokens": 3200, "fp8_alarms": {"count": 1}},
    ]
    log = MetricsLogger(RunFolder(tmp_path), CONFIG, True)
    for index, record in enumerate(records):
        log.log(record)
        assert len(lines(tmp_path)) == index + 1
    log.close()
    log.close()
    assert lines(tmp_path) == [*records[:3], records[3] | {"grad_norm": None}, records[4]]
    printed = [numbers(line.replace(",", "").replace("/", " ")) for line in logged]
    assert printed[0][:5] == [10, 100, 5.25, 1e-3, 2] and logged[0].split()[-2] == "1:00:00"
    assert printed[1:3] == [[20, 100, 4.0, 4.5, 6.0], [30, 100, 5.0, 0.5, 37.5, 61.2]] and len(printed) == 4


def test_other_ranks_write_nothing(tmp_path, logged):
    log = MetricsLogger(RunFolder(tmp_path / "run"), CONFIG, False)
    log.log({"step": 1, "loss": 1.0})
    log.rewind(0)
    log.close()
    assert not (tmp_path / "run").exists() and not logged


def test_failing_plot_does_not_end_the_run(tmp_path, logged):
    MetricsLogger(RunFolder(tmp_path), CONFIG, True).draw_last()  # no metrics
    assert len(logged) == 1 and not list(tmp_path.glob("*.png"))


def test_resume_moves_later_lines(tmp_path):
    write(tmp_path, 10, 20, 30, 40)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"loss": 1.0}\n[1]\n')
        file.write('{"step": 50, "lo')  # cut off by a crash
    write(tmp_path, {"step": 30, "loss": 3.5}, start_step=20)
    assert [line["loss"] for line in lines(tmp_path)] == [1.0, 1.0, 3.5]
    (aside,) = tmp_path.glob(f"{METRICS}.discarded-*")
    assert len(aside.read_text().splitlines()) == 5 and aside.read_text().endswith('{"step": 50, "lo\n')
    text = (tmp_path / METRICS).read_text()
    (tmp_path / METRICS).write_text(text.rstrip("\n"))  # a crash may lose the end of a line only
    write(tmp_path, 40, start_step=30)
    assert steps(tmp_path) == [10, 20, 30, 40] and len(read_history(tmp_path).records) == 4
    for _ in range(2):
        write(tmp_path, 10)  # a new run moves all lines
    assert steps(tmp_path) == [10] and len(list(tmp_path.glob(f"{METRICS}.discarded-*"))) == 3


def test_rollback_moves_later_lines(tmp_path):
    log = MetricsLogger(RunFolder(tmp_path), CONFIG, True)
    for step in (1, 2, 3):
        log.log({"step": step, "tokens": 0})
    log.rewind(2)
    log.log({"step": 3, "tokens": 0, "loss": 2.0})
    log.close()
    assert steps(tmp_path) == [1, 2, 3] and lines(tmp_path)[2]["loss"] == 2.0


@pytest.mark.parametrize(
    ("record", "again", "kept"),
    [
        ({"changes": [1]}, False, False),
        ({"began_at": {}}, False, False),
        ({"eval_loss": 1.0}, True, False),
        ({"eval_loss": 1.0}, False, True),
        ({"fp8_escalations": {"changes": [1]}, "loss": 1.5}, True, True),
    ],
)
def test_repeated_first_lines_are_moved(tmp_path, record, again, kept):
    write(tmp_path, {"step": 2, **record}, {"step": 3, **record})
    write(tmp_path, start_step=3, evaluates_again=again)
    assert steps(tmp_path) == ([2, 3] if kept else [2])


def test_full_disk_delays_lines(tmp_path, logged):
    """A limit on the size of files acts like a full disk, here in the middle of a line."""
    log = MetricsLogger(RunFolder(tmp_path), CONFIG, True)
    log.log({"step": 1, "tokens": 0})
    size, (_, limit) = (tmp_path / METRICS).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limit))
    try:
        log.log({"step": 2, "tokens": 0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    log.close()
    assert steps(tmp_path) == [1, 2] and len(logged) == 1


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
def test_peak_tflops(name, peak):
    assert peak_tflops(name) == peak


def test_mfu():
    shares = [mfu(100_000, 6.9e9, peak) for peak in (989.0, None)]
    assert shares == [pytest.approx(0.6977, abs=1e-4), None]
