"""Tests of faults during saves and in saved files.

An incomplete checkpoint is never loaded, and a complete one is never lost. The tests run save_ranks.py with two ranks,
DeepSpeed, gloo and the CPU reference implementation of FP8.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.reliability.launching import clean_environment
from tests.train.runs import ROOT
from train.checkpoint.files import committed, newest_intact

FULL = [pytest.mark.reliability, pytest.mark.timeout(3600)]


def by_form(short: Any, full: Any) -> list[Any]:
    """Return the test parameters for the short form and the full form.

    The full form is marked as a reliability test with a timeout of one hour.
    """
    return [pytest.param(short, id="short"), pytest.param(full, id="full", marks=FULL)]


def ranks(scenario: str, folder: Path, *options: object) -> list[Any]:
    """Run a scenario of save_ranks.py, and return the report of each rank."""
    command = [sys.executable, str(ROOT / "tests/reliability/save_ranks.py"), scenario, str(folder)]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")
    done = programs.run([*command, *map(str, options)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with checkpoints of steps 2 and 3, written by two ranks."""
    folder = tmp_path_factory.mktemp("made")
    ranks("make", folder, "--trials", 3)
    assert [p.name for p in committed(folder / "checkpoints")] == ["step-00000002", "step-00000003"]
    return folder


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder `made` that a test may damage."""
    return shutil.copytree(made, tmp_path / "saved")


@pytest.mark.parametrize("trials", by_form(1, 100))
@pytest.mark.process
def test_bit_flip_in_any_file_is_detected(saved: Path, trials: int, logged: list[str]) -> None:
    """Flip `trials` random bits in each file of a checkpoint, including the manifest."""
    chance, root = random.Random(0), saved / "checkpoints"
    previous, newest = committed(root)
    for file in sorted(newest.iterdir()):
        for _ in range(trials):
            bit = chance.randrange(8 * file.stat().st_size)
            flip(file, bit)
            logged.clear()
            assert newest_intact(root) == previous, (file.name, bit)
            assert len(logged) == 1 and str(file) in logged[0], (logged, bit)
            flip(file, bit)
    assert newest_intact(root) == newest and len(logged) == 1


@pytest.mark.process
def test_damaged_checkpoint_falls_back_on_all_ranks(saved: Path) -> None:
    """All ranks load the previous checkpoint and repeat its steps with the same results.

    The file `latest` is ignored if its content is invalid.
    """
    (file,) = (saved / "checkpoints/step-00000003").glob("*_pp_rank_1_*optim_states.pt")
    flip(file, 4 * file.stat().st_size)
    (saved / "checkpoints/latest").write_text("step-00000003\x00garbage")
    reports = ranks("load", saved)
    assert [r["loaded"] for r in reports] == ["step-00000002"] * 2
    assert len(reports[0]["why"]) == 1 and file.name in reports[0]["why"][0]


@pytest.mark.parametrize("trials", by_form(2, 200))
@pytest.mark.process
def test_killed_save_keeps_the_last_checkpoint(tmp_path: Path, trials: int) -> None:
    """Kill all ranks at random moments while checkpoints are saved in the background.

    Each trial resumes from the checkpoint of the previous trial, and repeated steps must give the same results.
    """
    first, second = ranks("kill_all", tmp_path, "--trials", trials)
    assert first["loaded"] == second["loaded"] is not None


@pytest.mark.parametrize("trials", by_form(1, 50))
@pytest.mark.process
def test_killed_rank_prevents_commit(tmp_path: Path, trials: int) -> None:
    reports = ranks("kill_one", tmp_path, "--trials", trials, "--seed", 1)
    assert [report["loaded"] for report in reports] == ["step-00000001"] * 2


@pytest.mark.process
def test_full_disk_on_one_rank_fails_the_save(tmp_path: Path) -> None:
    """The previous checkpoint is kept, and the next save succeeds."""
    outcomes = ranks("full_disk", tmp_path)
    assert outcomes[0] == outcomes[1]
    first, failed, after = outcomes[0]
    assert first == ["saved", ["step-00000001"]]
    assert "rank 1: " in failed[0] and failed[1] == ["step-00000001"]
    assert after == ["saved", ["step-00000001", "step-00000003"]]
