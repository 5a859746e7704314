"""test_fp8/bench_save.py: its arithmetic, and the program as it is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_fp8.model.saves import share_lost
from tests.reliability.launching import launch


def test_the_first_saves_do_not_count() -> None:
    saves = [
        (True, True, 9.0),
        (False, True, 1.0),
        (True, False, 0.2),
        (True, False, 0.4),
        (False, False, 3.0),
    ]
    results = [{"background": b, "first": f, "lost_s": s} for b, f, s in saves]
    assert share_lost(results) == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.process
def test_the_program(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--steps", "2", "--output", str(tmp_path / "save.json")]
    (tmp_path / "disk").mkdir()
    done = launch(2, "test_fp8/bench_save.py", *options, TMPDIR=str(tmp_path / "disk"))
    assert done.returncode == 0
    written = json.loads((tmp_path / "save.json").read_text())
    assert written["ranks"] == 2 and isinstance(written["lost"], float)
    kinds = [(r["background"], r["first"]) for r in written["results"]]
    assert kinds == [(False, True), (True, True), (False, False), (True, False)]
    for r in written["results"]:
        assert 0 < r["begin_s"] <= r["waited_s"] + 0.01 and r["gigabytes"] > 0.001
        assert r["lost_s"] == pytest.approx(r["waited_s"] + r["slower_s"])
        assert not r["steps_during_s"] or r["background"], "a blocking save is over when training goes on"
    assert not list((tmp_path / "disk").iterdir()), "the checkpoints are gone"
