"""test_fp8/common/report.py: what every benchmark's JSON says about where it was measured, and how it times."""

import argparse
import getpass
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from test_fp8.common import report


def test_describe_names_hardware_and_software_and_no_place(tmp_path: Path) -> None:
    machine, versions = report.describe()
    assert machine["cpu"]
    assert {"python", "torch", "fp8", "deepspeed", "transformers"} <= versions.keys()
    assert "Transformer Engine" in versions["fp8"]
    assert versions["fp8"] in report.headline(machine, versions)
    values = [str(value) for value in [*machine.values(), *versions.values()]]
    for private in (platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd())):
        assert private not in values
    assert not any("/" in value for value in values)


def test_written_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "r.json"
    command = report.command_line("test_fp8/x.py", ["--steps", 3, "--name", "two words"])
    report.write_json(path, command, [{"loss": float("nan"), "ok": (1.5, float("inf"))}], tolerance=0.1)
    written = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(written) == ["command", "date", "machine", "versions", "tolerance", "results"]
    assert written["command"] == "python test_fp8/x.py --steps 3 --name 'two words'"
    assert written["results"] == [{"loss": None, "ok": [1.5, None]}]
    assert written["tolerance"] == 0.1
    assert str(tmp_path) not in path.read_text()


def test_a_key_of_the_report_cannot_be_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machine"):
        report.write_json(tmp_path / "r.json", "command", [], machine={})
    assert not list(tmp_path.iterdir())


def test_steps_take_turns() -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = report.take_turns({"a": noted("a"), "b": noted("b")}, 3, before={"b": noted("before b")})
    assert order == ["a", "before b", "b", "before b", "b", "a", "a", "before b", "b"]
    assert [len(samples) for samples in times.values()] == [3, 3]


def test_time_is_in_milliseconds_and_without_what_runs_before() -> None:
    times = report.take_turns({"x": lambda: time.sleep(0.01)}, 1, before={"x": lambda: time.sleep(0.2)})
    assert 10 <= times["x"][0] < 150


def test_the_plot_lies_beside_the_json(tmp_path: Path) -> None:
    figure, axes = report.subplots(1, 2)
    assert axes.shape == (1, 2)
    axes[0, 0].plot([1, 2], [3, 4])
    path = report.save_plot(figure, tmp_path / "results" / "r.json")
    assert path == tmp_path / "results" / "r.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_output_must_be_json() -> None:
    assert report.output_file("a/b.json") == Path("a/b.json")
    with pytest.raises(argparse.ArgumentTypeError, match="b.png"):
        report.output_file("a/b.png")
