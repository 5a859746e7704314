"""Tests of faults during saves and in saved files.

An incomplete checkpoint is never loaded, and a complete one is never lost. The tests train on two ranks with DeepSpeed,
gloo and the CPU reference implementation of FP8 (save_ranks.py). A run that resumes after a fault gives the same
results as a run without faults, bit for bit.
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
from tests.reliability.conftest import assert_equal_runs
from tests.reliability.launching import clean_environment
from tests.train.runs import ROOT
from train.checkpoint.files import checkpoint_name, committed, newest_intact, problems
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder

STEPS = 4
FULL = [pytest.mark.reliability, pytest.mark.timeout(3600)]


def by_form(short: Any, full: Any) -> list[Any]:
    """Return the test parameters for the short form and the full form.

    The full form is marked as a reliability test with a timeout of one hour.
    """
    return [pytest.param(short, id="short"), pytest.param(full, id="full", marks=FULL)]


def train(*cases: tuple[dict[str, Any], str, dict[str, Any]]) -> None:
    """Run cases of save_ranks.py: (settings, fault, arguments of the fault)."""
    file = Path(cases[0][0]["output_dir"]).with_suffix(".json")
    file.write_text(json.dumps(cases))
    command = [sys.executable, str(ROOT / "tests/reliability/save_ranks.py"), str(file)]
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")
    done = programs.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def steps(folder: Path) -> list[str]:
    return [path.name for path in committed(folder / "checkpoints")]


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.fixture(scope="module")
def base(data: Path, small_model: Path) -> dict[str, Any]:
    return {
        "model": {"config": str(small_model)},
        "data": {"sources": {"text": str(data)}},
        "max_steps": STEPS,
        "max_seq_length": 32,
        "per_device_train_batch_size": 1,
        "max_eval_samples": 2,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": 0,
    }


@pytest.fixture(scope="module")
def made(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without faults, which has a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("made") / "run"
    train(({**base, "output_dir": str(folder)}, "", {}))
    assert len(steps(folder)) == STEPS
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
    *_, previous, newest = committed(root)
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
def test_damaged_checkpoint_falls_back_on_all_ranks(base: dict[str, Any], made: Path, saved: Path) -> None:
    """The file `latest` is ignored if its content is invalid."""
    (file,) = (saved / f"checkpoints/{checkpoint_name(STEPS)}").glob("*_pp_rank_1_*optim_states.pt")
    flip(file, 4 * file.stat().st_size)
    (saved / "checkpoints/latest").write_text(f"{checkpoint_name(STEPS)}\x00garbage")
    train(({**base, "output_dir": str(saved)}, "", {}))
    resumed_from = read_starts(RunFolder(saved))[-1]["resumed_from"]
    assert Path(resumed_from).name == checkpoint_name(STEPS - 1)
    assert_equal_runs(saved, made, STEPS)


@pytest.mark.parametrize("trials", by_form(2, 100))
@pytest.mark.process
def test_killed_save_keeps_the_last_checkpoint(
    base: dict[str, Any], made: Path, tmp_path: Path, trials: int
) -> None:
    """Kill all ranks at random moments while checkpoints are saved in the background."""
    chance = random.Random(0)
    for trial in range(trials):
        settings = {**base, "output_dir": str(tmp_path / f"run{trial}")}
        step, folder = chance.randint(1, STEPS - 1), Path(settings["output_dir"])
        train((settings, "kill_all", {"step": step, "delay_s": chance.uniform(0, 0.2)}))
        assert steps(folder)[: step - 1] == steps(made)[: step - 1], trial
        assert not any(problems(path) for path in committed(folder / "checkpoints")), trial
        train((settings, "", {}))
        assert_equal_runs(folder, made, STEPS)


@pytest.mark.parametrize("has_written", [False, True])
@pytest.mark.process
def test_killed_rank_prevents_commit(
    base: dict[str, Any], made: Path, tmp_path: Path, has_written: bool
) -> None:
    settings = {**base, "output_dir": str(tmp_path / "run")}
    train((settings, "kill_one", {"step": 2, "has_written": has_written}))
    assert steps(tmp_path / "run") == steps(made)[:1]
    train((settings, "", {}))
    assert_equal_runs(tmp_path / "run", made, STEPS)


@pytest.mark.process
def test_full_disk_on_one_rank_fails_the_save(base: dict[str, Any], made: Path, tmp_path: Path) -> None:
    """The previous checkpoint is kept, and the next save succeeds."""
    settings = {**base, "output_dir": str(tmp_path / "run"), "on_save_failure": "continue"}
    train((settings, "fill_disk", {"step": 2}))
    assert steps(tmp_path / "run") == [*steps(made)[:1], *steps(made)[2:]]
    assert "rank 1: " in (tmp_path / "run/train.log").read_text()
    assert_equal_runs(tmp_path / "run", made, STEPS)
