"""The comparison of ranks before a run: which rank differs in what, and which GPU is slow."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures import settings_of
from tests.reliability.launching import run_cases
from tests.train.runs import run
from train.preflight import ranks
from train.preflight.check import PreflightError
from train.preflight.ranks import Rank, compare_ranks

SECOND = f"rank 1 ({socket.gethostname()})"
# Fault of the second of three ranks -> what names it, and whether it refuses the run.
FAULTS = {
    "other_data": ("data.sources", True),
    "other_folder": ("output_dir", True),
    "torch": ("torch", True),
    "sources": ("0123456789ab", True),
    "gpu": ("NVIDIA A100", False),
    "gemm": ("500", False),
}


@pytest.mark.process
def test_different_rank_is_named(tmp_path: Path, data: Path, small_model: Path) -> None:
    """By real ranks; all of them find the same, and the folder is as before."""
    (empty := tmp_path / "empty").mkdir()
    settings = settings_of(data, small_model, tmp_path / "run") | {
        "precision": {"backend": "transformer_engine"}
    }
    before = sorted(tmp_path.iterdir())
    arguments = {"settings": settings, "folder": str(empty), "gpus": True}
    cases = [(3, "alike", arguments | {"fault": fault}) for fault in ["none", *FAULTS]]
    missing = (3, "missing_data", {"settings": settings, "folder": str(empty)})
    none, *others, without_data = run_cases(tmp_path / "cases", [*cases, missing])
    assert without_data == ["folder_missing"] * 3
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "cases"]) and not [*empty.iterdir()]
    assert none[0]["problems"] == none[0]["warnings"] == []
    for (fault, (named, refused)), of_ranks in zip(FAULTS.items(), others, strict=True):
        assert of_ranks[0]["problems"] == of_ranks[2]["problems"]
        found = of_ranks[0]
        assert bool(found["problems"]) == refused and bool(found["warnings"]) != refused, (fault, found)
        (text,) = found["problems"] or found["warnings"]
        assert SECOND in text and named in text, (fault, text)


def test_ranks_are_checked_first(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.phase.build_model_and_precision", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(settings, preflight=True)
    monkeypatch.setattr(ranks, "compare_ranks", lambda *_: (["one", "two"], []))
    with pytest.raises(PreflightError):
        run(settings, preflight=True)
    with pytest.raises(ZeroDivisionError):  # by default only with several nodes
        run(settings)


GOOD = Rank("a", {"torch": "2.13"}, {"gpu": "H100", "driver": "1"}, 700.0)


@pytest.mark.parametrize(("tflops", "slow"), [(610.0, False), (605.0, True), (None, False)])
def test_slow_gpu_warns(tflops: float | None, slow: bool) -> None:
    problems, warnings = compare_ranks([GOOD, GOOD, replace(GOOD, host="b", gemm_tflops=tflops), GOOD])
    assert problems == [] and len(warnings) == slow
    assert not slow or warnings[0].startswith("rank 2 (b)")


def test_bus_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_seconds", lambda call: 0.5)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 4)
    assert ranks.all_reduce_gb_s() == pytest.approx(2 * 3 / 4 * 2**20 / 0.5 / 1e9)
