"""The commands in test_fp8/results are accepted by today's programs."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.config import CONFIGS
from test_fp8 import bench_scaling, compare_convergence
from test_fp8.common.options import choose_defaults
from test_fp8.model import cases
from train import evaluate, launch
from train.config.load import load_arguments
from train.files import REPOSITORY

RESULTS = sorted((REPOSITORY / "test_fp8/results").glob("*.json"))
OF_ROWS = "the command of each row"


def commands(value: Any) -> Iterator[str]:
    """Yield the commands of a report and of its rows."""
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from commands(item)
    if isinstance(value, dict) and "command" in value:
        yield value["command"]


def parse(words: list[str]) -> None:
    """Parse a command line with the parser of its program, and build its cases."""
    if words[1] == "train/launch.py":
        options = launch.parse_arguments(words[2:])
        words = ["python", options.script, *options.arguments]
    _, program, *words = words
    if program == "train/train.py":
        load_arguments(words)
        return
    if program == "train/evaluate.py":
        evaluate.parse_arguments(words)
        return
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    options = module.BENCHMARK.options.parse(words)
    choose_defaults(options)
    if module is compare_convergence:
        for case in module.chosen_cases(options):
            load_arguments(module.training_command(case, options))
    elif module is bench_scaling:
        module.chosen_cases(options)
    elif program == "test_fp8/bench_model.py":
        cases.chosen_cases(options)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_commands_are_accepted(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_fp8").symlink_to(REPOSITORY / "test_fp8")
    for folder in ("hf", "long/bf16", "long/fp8"):  # trained models
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(CONFIGS / "tiny.json", tmp_path / folder / "config.json")
    report = json.loads(path.read_text())
    found = [command for command in commands(report) if not command.startswith(OF_ROWS)]
    assert found
    for command in found:
        for part in command.split("; "):
            if part != "./run_tests.sh --gpu":
                parse(shlex.split(part))
