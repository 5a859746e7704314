"""test_fp8/common: what every benchmark's JSON says about where it was measured, how it times, and how it starts
programs."""

from __future__ import annotations

import getpass
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.fp8.machine import describe
from test_fp8.common import report, timing
from test_fp8.common.cases import CaseError, parse_cases, select
from test_fp8.common.launch import Program, run_together
from test_fp8.common.options import Options, positive
from train.files import drawing
from train.record.provenance import commit

ROOT = Path(__file__).resolve().parents[2]


def test_describe_names_hardware_and_software_and_no_place() -> None:
    machine, versions = describe()
    assert machine["cpu"] and {"python", "torch", "fp8", "deepspeed", "transformers"} <= versions.keys()
    values = [str(value) for value in [*machine.values(), *versions.values()]]
    assert not {platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd())} & set(values)
    assert not any("/" in value for value in values)


def test_written_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "r.json"
    results = [{"loss": float("nan"), "ok": (1.5, float("inf"))}]
    report.write_json(path, "python test_fp8/x.py", results, tolerance=0.1)
    written = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(written) == ["command", "date", "commit", "machine", "versions", "tolerance", "results"]
    assert written["commit"] == commit() and written["results"] == [{"loss": None, "ok": [1.5, None]}]
    with pytest.raises(TypeError):
        report.write_json(tmp_path / "r.json", "command", [], machine={})


def test_steps_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now_s = [5.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s[-1]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def takes(name: str, seconds: float) -> Callable[[], None]:
        return lambda: (order.append(name), now_s.append(now_s[-1] + seconds)) and None

    assert timing.take_turns({"a": takes("a", 0.25), "b": takes("b", 0.5)}, 3) == {
        "a": [250.0] * 3,
        "b": [500.0] * 3,
    }
    assert "".join(order) == "abbaab"
    assert timing.laps_ms([takes("c", 1.0), takes("d", 2.0)]) == [1000.0, 2000.0]


def test_a_table_has_a_dash_for_what_is_missing() -> None:
    columns: report.Columns = {"row": ("row", "<"), "x": ("x", ".1f"), "twice": (lambda r: 2 * r["n"], "d")}
    text = report.table([{"row": "long name", "x": 1.26, "n": 4}, {"row": "b", "n": 10}], columns)
    assert text.splitlines() == ["row          x  twice", "long name  1.3      8", "b            -     20"]


def test_plots_are_bars_or_lines(tmp_path: Path) -> None:
    report.plot(tmp_path / "new/bars.json", "t", {"a": {"x": 3.0, "y": 4.0}}, "speed")
    lines = report.curves([{"row": "x", "n": 1, "v": 2.0}, {"row": "x", "n": 2, "v": 3.0}], "row", "n", "v")
    assert lines == {"x": ([1, 2], [2.0, 3.0])}
    report.plot(tmp_path / "new/lines.json", "t", {"a": lines, "b": lines}, "n")
    for name in ("bars.png", "lines.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "r.png").write_text("before")
    with pytest.raises(OSError, match="No space"), drawing(tmp_path / "r.png") as (figure, _):

        def half(path: Path, **_: object) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        figure.savefig = half
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_the_command_that_repeats_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what was not asked for, where the output goes, and folders of the machine."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = Options("/somewhere/test_fp8/x.py", "What it does.")
    options.add("config", "tiny", "the model", nargs="?")
    options.add("--count", 5, "of training, 100 %", type=positive)
    options.add("--names", ["a"], "of cases", nargs="*")
    options.add("--data", None, "prepared", type=Path)
    options.add_shared(row=[], deterministic=False)
    options.add_output("JSON")
    given = [str(tmp_path / "model.json"), "--names", "--data", str(tmp_path / "text"), "--output", "x.json"]
    given += ["--row", "a", "key=two words", f"data={tmp_path}/b", "--row", "b", "x=1", "--deterministic"]
    assert options.command(options.parse([*given, "--", "--seed", "1", f"{ROOT}/train/a.json"])) == (
        "python test_fp8/x.py model.json --count 5 --names --data text --row a 'key=two words' data=b --row b x=1 "
        "--deterministic -- --seed 1 train/a.json"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    repeated = "python train/launch.py --nproc 2 test_fp8/x.py tiny --count 5 --names a"
    assert options.command(options.parse([])) == repeated
    assert "100 %; default: 5\n" in options.format_help()


def test_cases_of_the_command_line() -> None:
    cases = parse_cases(
        [["mine", "model.variant=te_linear", "speed.main_grad=false"]], ["taken"], ["model", "speed"]
    )
    configured = cases["mine"].configured({"model": {"config": "tiny"}, "speed": {}})
    assert configured == {"model": {"config": "tiny", "variant": "te_linear"}, "speed": {"main_grad": False}}
    for given in (["taken"], ["a b"], ["mine", "speed"], ["mine", "learning_rate=1"]):
        with pytest.raises(CaseError):
            parse_cases([given], ["taken"], ["model", "speed"])
    assert parse_cases([["mine", "learning_rate=1"]], [])["mine"].overrides == {"learning_rate": "1"}
    assert [case.name for case in select(["m*"], cases, "--rows")] == ["mine"]
    with pytest.raises(CaseError):
        select(["mine", "x*"], cases, "--rows")


def test_gpus_are_among_those_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setenv("RANK", "3")
    program = Program("train/train.py", ["x"], tmp_path / "log", ranks=2, gpus=[0, 2])
    assert program.environment()["CUDA_VISIBLE_DEVICES"] == "4,7" and "RANK" not in program.environment()
    assert program.command()[1:] == [f"{ROOT}/train/launch.py", "--nproc", "2", f"{ROOT}/train/train.py", "x"]


LAUNCHING = """
import sys
sys.path[0] = sys.argv[1]
from pathlib import Path
from test_fp8.common.launch import Program, run_together
run_together([Program(sys.argv[2] + "/sleep.py", [], Path(sys.argv[2]) / "log")])
"""


@pytest.mark.interpreter
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_program_that_is_stopped_leaves_no_process(number: int, tmp_path: Path) -> None:
    sleep = "import os, time; open('pid.new', 'w').write(str(os.getpid())); os.rename('pid.new', 'pid'); time.sleep(99)"
    (tmp_path / "sleep.py").write_text(sleep)
    command = [sys.executable, "-c", LAUNCHING, str(ROOT), str(tmp_path)]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    running.send_signal(number)
    assert running.wait(30) != 0
    while Path(f"/proc/{pid}/stat").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.interpreter
def test_programs_run_at_the_same_time_and_their_end_is_told(tmp_path: Path) -> None:
    scripts = []
    for name, other in (("a", "b"), ("b", "a")):
        wait = f"while not os.path.exists('{tmp_path}/{other}'): time.sleep(0.01)"
        text = f"import os, sys, time\nopen('{tmp_path}/{name}', 'w')\n{wait}\nprint('the end')\nsys.exit(7)"
        (tmp_path / f"{name}.py").write_text(text)
        scripts.append(Program(str(tmp_path / f"{name}.py"), [], tmp_path / f"{name}.log"))
    before = signal.getsignal(signal.SIGTERM)
    assert run_together(scripts) == [7, 7] and signal.getsignal(signal.SIGTERM) == before
    assert scripts[0].last_lines() == "the end" and os.path.exists(tmp_path / "a.log")


BAD_ARGUMENTS = {
    "test_fp8/test_fp8.py": ["--shapes", "8x8x8"],
    "test_fp8/bench_model.py": ["--config", "tinny"],
    "test_fp8/bench_data.py": ["--tokens", "0"],
    "test_fp8/bench_decode.py": ["--batches", "0"],
    "test_fp8/bench_prepare.py": ["--workers", "0"],
    "test_fp8/bench_save.py": ["--config", "tinny"],
    "test_fp8/bench_scaling.py": ["--stages", "4"],
    "test_fp8/compare_convergence.py": ["--rows", "fp9"],
    "test_fp8/compare_gradients.py": ["--init_from", "nowhere"],
    "test_fp8/convergence_data.py": ["--vocab_size", "1"],
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
