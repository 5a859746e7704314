"""test_fp8/common: reports and their tables, command lines, cases, timing, programs that are started, made folders."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from test_fp8.common import report, timing
from test_fp8.common.cases import CaseError, parse_cases, select
from test_fp8.common.options import Options, option, positive, shared
from train.record.provenance import commit

ROOT = Path(__file__).resolve().parents[2]


def test_written_report(tmp_path: Path) -> None:
    """Strict JSON that names hardware and software, and no place."""
    path = tmp_path / "new" / "folder" / "r.json"
    results = [{"loss": float("nan"), "ok": (1.5, float("inf"))}]
    report.write_json(path, "python test_fp8/x.py", results, tolerance=0.1)
    written = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(written) == ["command", "date", "commit", "machine", "versions", "tolerance", "results"]
    assert written["commit"] == commit() and written["results"] == [{"loss": None, "ok": [1.5, None]}]
    assert {"python", "torch", "fp8", "deepspeed", "transformers"} <= written["versions"].keys()
    values = [str(value) for value in [*written["machine"].values(), *written["versions"].values()]]
    assert not {platform.node(), getpass.getuser()} & set(values) and not any("/" in v for v in values)


def test_steps_are_timed_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now_s = [5.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s[-1]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def takes(name: str, seconds: float) -> Callable[[], None]:
        return lambda: (order.append(name), now_s.append(now_s[-1] + seconds)) and None

    found = timing.time_alternately({"a": takes("a", 0.25), "b": takes("b", 0.5)}, 3)
    assert found == {"a": [250.0] * 3, "b": [500.0] * 3} and "".join(order) == "abbaab"
    assert timing.laps_ms([takes("c", 1.0), takes("d", 2.0)]) == [1000.0, 2000.0]


def test_table_with_missing_values() -> None:
    columns: report.Columns = {"row": ("row", "<"), "x": ("x", ".1f"), "twice": (lambda r: 2 * r["n"], "d")}
    text = report.table([{"row": "long name", "x": 1.26, "n": 4}, {"row": "b", "n": 10}], columns)
    assert text.splitlines() == ["row          x  twice", "long name  1.3      8", "b            -     20"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "python test_fp8/x.py"),
        (["/home/me/model.json", "--count", "5"], "python test_fp8/x.py model.json --count 5"),
        (["--row", "a", "key=two words", "data=/a/b"], "python test_fp8/x.py --row a 'key=two words' data=b"),
        (["--", "--data", '{"x": "/home/me/text"}'], 'python test_fp8/x.py -- --data \'{"x": "text"}\''),
        (["../text", "1/2"], "python test_fp8/x.py ../text 1/2"),
    ],
)
def test_command_in_report(words: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without folders of the machine."""
    options = Options("/somewhere/test_fp8/x.py", "What it does.", [option("--count", 5, "%", type=positive)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert options.command(words) == command
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert options.command(words) == command.replace("python ", "python train/launch.py --nproc 2 ", 1)


def test_option_defaults_and_extra_arguments() -> None:
    options = Options("x.py", "What it does.", [option("--count", 5, "100 %"), *shared(row=[])])
    found = options.parse(["--row", "a", "x=1", "--row", "b", "--", "--seed", "1"])
    assert (found.count, found.row, found.extra_arguments) == (5, [["a", "x=1"], ["b"]], ["--seed", "1"])
    assert "100 % Default: 5.\n" in options.format_help()


def test_parse_cases() -> None:
    allowed = ["model", "speed"]
    cases = parse_cases([["mine", "model.variant=te_linear", "speed.main_grad=false"]], ["taken"], allowed)
    configured = cases["mine"].configured({"model": {"config": "tiny"}, "speed": {}})
    assert configured == {"model": {"config": "tiny", "variant": "te_linear"}, "speed": {"main_grad": False}}
    for given in (["taken"], ["a b"], ["mine", "speed"], ["mine", "learning_rate=1"]):
        with pytest.raises(CaseError):
            parse_cases([given], ["taken"], allowed)
    assert parse_cases([["mine", "learning_rate=1"]], [])["mine"].overrides == {"learning_rate": "1"}
    assert [case.name for case in select(["m*"], cases)] == ["mine"]
    with pytest.raises(CaseError):
        select(["mine", "x*"], cases)


BAD_ARGUMENTS = {
    "test_fp8/test_fp8.py": ["--shapes", "8x8x8"],
    "test_fp8/bench_model.py": ["--config", "tinny"],
    "test_fp8/bench_decode.py": ["--batches", "0"],
    "test_fp8/bench_scaling.py": ["--stages", "4"],
    "test_fp8/check_exports.py": ["--recipes", "fp9"],
    "test_fp8/compare_convergence.py": ["--rows", "fp9"],
    "test_fp8/compare_gradients.py": ["--init_from", "nowhere"],
    "test_fp8/convergence_data.py": ["--vocab_size", "1"],
    "fp8_inference_demo/fp8_inference.py": ["--model", "nowhere"],
}


@pytest.mark.interpreter
def test_arguments_are_checked_without_torch() -> None:
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
