"""train/plot.py: plots and comparisons of runs, finished or in progress, and folders that are no runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train import plot
from train.record.history import read_history, remove_abandoned, smoothed
from train.record.plots import draw


def make_run(folder: Path, lines: int = 3, starts: list[dict] | None = None, **last: object) -> Path:
    folder.mkdir(parents=True)
    records = [
        {"step": n, "tokens": 64 * n, "loss": 6 - n, "grad_norm": 1.0, "tokens_per_second": 10.0 * n}
        for n in range(1, lines + 1)
    ]
    records.append({"step": lines, "tokens": 64 * lines, "eval_loss": 4.5, "unigram_loss": 6.6, **last})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if starts is not None:
        (folder / "run.json").write_text(json.dumps({"starts": starts}))
    return folder


def start(step: int, how: str = "") -> dict:
    ended = {"how": how, "step": step, "tokens": 64 * (step + 1)} if how else None
    where = {"step": step, "tokens": 64 * step, "gpus": 2}
    return {**where, "fp8": "12/13 delayed", "phases": [], "ended": ended}


@pytest.fixture
def legends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of what is drawn."""
    found: list[str] = []
    monkeypatch.setattr(Axes, "legend", lambda axes, **_: found.extend(axes.get_legend_handles_labels()[1]))
    return found


def test_marks_of_stops_and_resumes(tmp_path, capsys, legends):
    starts = [start(0, "stopped"), start(2), start(2, "failed") | {"gpus": 0}]
    starts[-1]["ended"]["why"] = "a reason"
    folder = make_run(tmp_path / "a", starts=starts, **{"eval_loss/other $x": 5.0})
    assert plot.main([str(folder)]) == 0
    _, row, why, _ = capsys.readouterr().out.splitlines()
    assert row.split() == f"{folder} 3 3.0000 4.5000 192 25 failed 12/13 delayed".split()
    assert why == f"{folder}: a reason"
    assert [path.name for path in folder.glob("*.png*")] == ["loss.png"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert legends == [
        "training", "evaluation", "evaluation, other $x", "unigram model", "stopped", "resumed"
    ]  # fmt: skip
    history = read_history(folder)
    history.records[1]["rollback"] = {"from_step": 3}
    assert history.marks() == [(64, "stopped"), (128, "resumed"), (128, "resumed"), (128, "rolled back")]


def test_fp8_description_by_phase(tmp_path):
    """Modules may have gone to other levels in it (precision.on_trouble)."""
    stages = [
        {"step": 3, "fp8": "b", "new_phase": True},
        {"step": 4, "fp8": "c", "new_phase": False},
        {"step": 5, "fp8": "d"},
    ]
    starts = [start(0) | {"fp8": "a", "phases": stages}]
    assert read_history(make_run(tmp_path / "a", starts=starts)).fp8() == "a; then c; then d"


def test_plot_panels(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or path.touch())
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    draw([read_history(make_run(tmp_path / "a", lines=2))], tmp_path / "x.png")
    loss, rate, norm, speed = figures[0].axes
    lines = [axis.lines[-1].get_xydata().tolist() for axis in (norm, speed)]
    assert lines == [[[64, 1.0], [128, 1.0]], [[64, 10.0], [128, 20.0]]]
    assert loss.lines[1].get_xydata().tolist() == [[64, 5.0], [128, 4.0]]
    assert [axis.get_yscale() for axis in (loss, rate, norm, speed)] == ["linear", "linear", "log", "linear"]
    pyplot.close("all")


@pytest.mark.parametrize("norms", [(0.7, 0.9), (0.3, 40.0)])
def test_gradient_norm_ticks_are_plain_numbers(tmp_path, monkeypatch, norms):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or path.touch())
    monkeypatch.setattr(pyplot, "close", lambda figure: figure.canvas.draw())
    history = read_history(make_run(tmp_path / "a", lines=2))
    for record, norm in zip(history.records, norms, strict=False):
        record["grad_norm"] = norm
    draw([history], tmp_path / "x.png")
    axis = figures[0].axes[2]
    low, high = axis.get_ylim()
    ticks = [label.get_text() for label in axis.get_yticklabels(which="both")]
    shown = [float(tick) for tick in ticks if tick]  # raises for "$9\\times10^{-1}$"
    assert 2 <= len([value for value in shown if low <= value <= high]) <= 9
    monkeypatch.undo()
    pyplot.close("all")


def test_plot_of_several_runs(tmp_path, capsys, legends, monkeypatch):
    one = make_run(tmp_path / "x/run", starts=[start(0)])
    two = make_run(tmp_path / "y/run", loss=2.0, unigram_loss=5.0)  # of other data
    with (two / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')  # being written
    monkeypatch.chdir(tmp_path)
    assert plot.main([str(one), str(two)]) == 0
    _, *rows, wrote = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [str(one), str(two)]
    assert rows[1].split()[2] == "2.0000" and rows[1].endswith("-")
    assert str(tmp_path / "comparison.png") in wrote
    assert Path("comparison.png").read_bytes().startswith(b"\x89PNG")
    assert legends[:2] == [f"{one}: training", f"{one}: evaluation"]
    assert not {"resumed", "unigram model"} & {*legends}


def test_folder_without_metrics_raises(tmp_path):
    good, empty, other, missing = (tmp_path / name for name in ("good", "empty", "other", "missing"))
    make_run(good)
    for folder, text in ((empty, ""), (other, '{"a": 1}\n[]\nhello\n')):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(text)
    for folder in (empty, other, missing, good / "metrics.jsonl"):
        assert plot.main([str(good), str(folder)]) == 2
    assert not list(tmp_path.rglob("*.png"))
    with (good / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n{"step": 4}\n')
    assert len(read_history(good).records) == 4


def test_unwritable_output_raises(tmp_path):
    folder = make_run(tmp_path / "a")
    assert plot.main([str(folder), "--output", "/proc/none/x.png"]) == 2
    with pytest.raises(SystemExit) as stop:
        plot.main([str(folder), "--output", str(tmp_path / "x.pdf")])
    assert stop.value.code == 2 and not (tmp_path / "x.pdf").exists()


def test_remove_abandoned():
    def steps(*starts: int) -> list[int]:
        return [entry["step"] for entry in remove_abandoned([{"step": step} for step in starts])]

    assert steps(0, 10, 20) == [0, 10, 20]
    assert steps(0, 10, 0, 5) == [0, 5]  # begun anew
    assert steps(0, 10, 20, 10, 15) == [0, 10, 10, 15]  # from a checkpoint before that of 20
    assert steps(30, 40) == [30, 40]  # a branch of another run


def test_smoothed():
    assert smoothed([5.0, 1.0, 3.0]) == [5.0, 1.0, 3.0]
    values = [2.0 + (-1) ** n for n in range(500)]
    assert np.ptp(smoothed(values)[100:]) < 0.25
