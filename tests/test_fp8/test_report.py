"""test_fp8/common/report.py: what every benchmark's JSON says about where it was measured, and how it times."""

import getpass
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.fp8.machine import describe, headline
from test_fp8 import bench_model
from test_fp8.common import report, timing
from test_fp8.common.options import Options, positive
from test_fp8.model import visit as visits
from train.files import drawing
from train.record.provenance import commit

ROOT = Path(__file__).resolve().parents[2]


def test_describe_names_hardware_and_software_and_no_place(tmp_path: Path) -> None:
    machine, versions = describe()
    assert machine["cpu"]
    assert {"python", "torch", "fp8", "deepspeed", "transformers"} <= versions.keys()
    assert "Transformer Engine" in versions["fp8"]
    assert versions["fp8"] in headline(machine, versions)
    values = [str(value) for value in [*machine.values(), *versions.values()]]
    for private in (platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd())):
        assert private not in values
    assert not any("/" in value for value in values)


def test_written_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "r.json"
    report.write_json(
        path, "python test_fp8/x.py", [{"loss": float("nan"), "ok": (1.5, float("inf"))}], tolerance=0.1
    )
    written = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(written) == ["command", "date", "commit", "machine", "versions", "tolerance", "results"]
    assert written["commit"] == commit()
    assert written["results"] == [{"loss": None, "ok": [1.5, None]}]
    assert written["tolerance"] == 0.1
    assert str(tmp_path) not in path.read_text()


@pytest.mark.usefixtures("process_group")
def test_a_row_that_was_visited_is_written_whatever_comes_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    visit, stops = visits.Visitor.visit, iter((False, True))

    def stopped(*args: Any) -> Any:
        if next(stops):
            raise KeyboardInterrupt
        return visit(*args)

    monkeypatch.setattr(visits.Visitor, "visit", stopped)
    output = tmp_path / "bench.json"
    options = ["--rows", "te_*_bf16", "--measure", "bare", "--rounds", "1", "--seconds", "0"]
    with pytest.raises(KeyboardInterrupt):
        bench_model.main([*options, "--output", str(output)])
    written = json.loads(output.read_text())
    first, second = written["results"]
    assert first["tokens_per_second"] > 0 and written["rounds_finished"] == {"bare": 0}
    assert (second["reason"], second["failed"]) == ("not visited", False)


def test_a_key_of_the_report_cannot_be_overwritten(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="machine"):
        report.write_json(tmp_path / "r.json", "command", [], machine={})
    assert not list(tmp_path.iterdir())


def test_steps_take_turns() -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = timing.take_turns({"a": [noted("a")], "b": [noted("before b"), noted("b")]}, 3)
    assert order == ["a", "before b", "b", "before b", "b", "a", "a", "before b", "b"]
    assert [len(samples) for samples in times.values()] == [3, 3]


def test_time_is_in_milliseconds_and_without_what_runs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [5.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s[-1]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: now_s.append(now_s[-1] + seconds)

    assert timing.take_turns({"x": [takes(0.25), takes(0.5)]}, 2) == {"x": [500.0, 500.0]}


def test_a_plot_makes_its_folder(tmp_path: Path) -> None:
    with drawing(tmp_path / "results" / "r.png", 1, 2) as (_, axes):
        assert axes.shape == (1, 2)
        report.bars(axes[0, 0], ["a", "b"], [3, 4])
    assert (tmp_path / "results" / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "r.png").write_text("before")
    with pytest.raises(OSError, match="No space"), drawing(tmp_path / "r.png") as (figure, _):

        def half(path: Path, **_: object) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        figure.savefig = half
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_table_has_a_dash_for_what_is_missing() -> None:
    columns: report.Columns = {"row": ("row", "<"), "x": ("x", ".1f"), "twice": (lambda r: 2 * r["n"], "d")}
    text = report.table([{"row": "long name", "x": 1.26, "n": 4}, {"row": "b", "n": 10}], columns)
    assert text.splitlines() == ["row          x  twice", "long name  1.3      8", "b            -     20"]


def test_the_command_that_repeats_a_run(tmp_path: Path) -> None:
    """Also with what --row has; without what was not asked for, where the output goes, and folders of the machine."""
    options = Options("/somewhere/test_fp8/x.py", "What it does.")
    options.add("config", "tiny", "the model", nargs="?")
    options.add("--steps", 5, "of training, 100 %", type=positive)
    options.add("--sizes", [], "in tokens", type=positive, nargs="+")
    options.add("--names", ["a"], "of rows", nargs="*")
    options.add("--data", None, "prepared", type=Path)
    options.add_rows()
    options.add_flag("--all", "of them")
    options.add_output("JSON")
    with pytest.raises(SystemExit):
        options.parse_args(["--output", "b.png"])
    given = [str(tmp_path / "model.json"), "--names", "--data", str(tmp_path / "text"), "--output", "x.json"]
    given += ["--row", "a", "key=two words", f"data={tmp_path}/b", "--row", "b", "x=1", "--all"]
    assert options.command(options.parse_args(given), "--", 1) == (
        "python test_fp8/x.py model.json --steps 5 --names --data text --row a 'key=two words' data=b --row b x=1 "
        "--all -- 1"
    )
    assert options.command(options.parse_args([])) == "python test_fp8/x.py tiny --steps 5 --names a"
    assert "100 %; default: 5\n" in options.format_help() and "in tokens\n" in options.format_help()


BAD_ARGUMENTS = {
    "test_fp8/test_fp8.py": ["--shapes", "8x8x8"],
    "test_fp8/bench_model.py": ["--config", "tinny"],
    "test_fp8/bench_data.py": ["--tokens", "0"],
    "test_fp8/bench_prepare.py": ["--tokenizer", "nowhere"],
    "test_fp8/bench_save.py": ["--config", "tinny"],
    "test_fp8/compare_convergence.py": ["--", "--learnin_rate", "1"],
    "test_fp8/compare_gradients.py": ["--rows", "fp9"],
    "test_fp8/zero_matrix.py": ["--ranks", "1"],
    "fp8_inference_demo/fp8_inference.py": ["--model", "nowhere"],
}


@pytest.mark.interpreter
def test_help_and_bad_arguments_are_answered_without_torch() -> None:
    code = """
import json, runpy, sys
for program, bad in json.loads(sys.argv[1]).items():
    for arguments, status in ((["--help"], {0}), (bad, {1, 2})):
        sys.argv = [program, *arguments]
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            assert end.code in status, (program, end.code)
        heavy = {"torch", "transformers", "deepspeed", "matplotlib", "pyarrow", "datatrove"} & set(sys.modules)
        assert not heavy, (program, arguments, heavy)
"""
    command = [sys.executable, "-c", code, json.dumps(BAD_ARGUMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for told in (
        "8x8x8",
        "'tinny' is neither a file",
        "--tokens: 0: allowed is 1 or more",
        "did you mean learning_rate?",
        "no such folder",
    ):
        assert told in done.stderr
