"""test_fp8/bench_scaling.py: its figures, and the program as it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test_fp8 import bench_scaling
from test_fp8.bench_scaling import BENCHMARK, make_programs, summarize
from test_fp8.common.cases import Case
from tests.test_fp8.running import report_of

SMALL = "--config tiny --seq_length 16 --accumulation 1 --stages 1 --precisions bf16".split()


def of_gpus(*speeds: float) -> list[dict[str, Any]]:
    """What bench_model.py measured on GPUs at the same time."""
    found = {"allocated_gib": 3.0, "attention": "flash", "proof": []}
    return [{"tokens_per_second": speed, **found} for speed in speeds]


def test_a_share_is_of_what_the_same_gpus_do_alone() -> None:
    alone = summarize([of_gpus(100.0, 90.0, 110.0, 1000.0)], 1, [])
    assert alone["alone"] == [100, 90, 110, 1000] and alone["tokens_per_second"] == 325
    two = summarize([of_gpus(170.0), of_gpus(182.0)], 2, alone["alone"])
    assert two["tokens_per_second"] == 176 and two["rounds"] == [[170, 182]] and two["peak_gib"] == 3
    assert two["share_of_alone"] == pytest.approx(176 / 190)
    on_a_cpu = summarize([of_gpus(150.0)], 2, [100.0])
    assert on_a_cpu["share_of_alone"] == pytest.approx(0.75), "one rank stands for each"
    assert "share_of_alone" not in summarize([of_gpus(10.0)], 2, [])
    assert summarize([of_gpus(1.0), [{"reason": "why"}]], 1, []) == {"reason": "why"}


def test_one_gpu_is_measured_on_each_at_the_same_time(tmp_path: Path) -> None:
    options = BENCHMARK.options.parse([*SMALL, "--gpus", "1", "3"])
    started = [make_programs(options, Case("a", {}), ranks, 4, tmp_path) for ranks in (1, 3)]
    assert [[program.gpus for program in programs] for programs in started] == [
        [[0], [1], [2]],
        [[0, 1, 2]],
    ]
    assert len({program.log for program in started[0]}) == 3


@pytest.mark.parametrize(
    "words", [["--stages"], ["--row", "mine", "max_steps=3"], ["--row", "f", "optim=sgd"]]
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scaling, "run_together", lambda *_: pytest.fail("a process was started"))
    assert BENCHMARK.main([*SMALL, *words]) == 2


@pytest.mark.interpreter
@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    one, two = report_of(BENCHMARK, tmp_path, *SMALL, "--gpus", "1", "2")["results"]
    assert (one["step_tokens"], two["step_tokens"]) == (32, 64)
    assert two["share_of_alone"] == pytest.approx(two["tokens_per_second"] / (2 * one["tokens_per_second"]))
