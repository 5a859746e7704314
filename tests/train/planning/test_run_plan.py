"""The plan that a run tells of itself, what was measured beside it, and faults in it, which end no run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.config import GIB, load_sizes
from tests.train.planning.settings import setting
from train import setup, train
from train.config.arguments import load_arguments
from train.config.ds_config import resolve_ds_config
from train.guard.signals import Stopped
from train.planning import rates
from train.planning.plan import Prediction
from train.planning.rates import GPUS, RESULTS, estimate, measured
from train.preflight.together import tell_memory


def read_anew() -> None:
    rates.measured.cache_clear()
    rates._report.cache_clear()


@pytest.fixture
def other_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of test_fp8/results that may be changed, and is read anew."""
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(rates, "RESULTS", tmp_path)
    read_anew()
    yield tmp_path
    read_anew()


def test_a_run_goes_on_without_the_measured_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy of the code that has no test_fp8/results."""
    read_anew()
    monkeypatch.setattr(rates, "RESULTS", tmp_path)
    assert Prediction.of(setting(), "NVIDIA H200").estimate is None
    monkeypatch.undo()
    assert Prediction.of(setting(), "NVIDIA H200").estimate is not None


def test_rows_that_did_not_run_or_are_not_ours_are_no_rates(other_results: Path) -> None:
    """bench_model.py writes "reason" for a row that did not run; megatron_core_* name te_layer in their settings."""
    path = other_results / "hare_1.1b_step.json"
    report = json.loads(path.read_text())
    usual = next(row for row in report["results"] if row["row"] == "te_layer_fp8_delayed")
    named = ("row", "measure", "variant", "compute", "configuration", "automatic")
    failed = {key: usual[key] for key in named} | {"reason": "out of memory", "failed": False}
    megatron = usual | {"row": "megatron_core_fp8_delayed", "variant": "megatron_core", "step_ms": 1.0}
    fused = megatron | {"configuration": usual["configuration"] | {"use_transformer_engine_op_fuser": True}}
    path.write_text(json.dumps(report | {"results": [failed, megatron, fused, *report["results"]]}))
    sources = [m.source for m in measured()]
    assert len(sources) == len(set(sources)) > 35 and not [s for s in sources if "megatron" in s]


def planned_by_setup(
    monkeypatch: pytest.MonkeyPatch, *options: str, evaluates: bool = True
) -> tuple[Prediction | None, list[str]]:
    """What setup.planned_for gives on an H200, and what it tells."""
    told: list[str] = []
    monkeypatch.setattr(setup.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(setup.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(setup, "say", lambda *lines: told.extend(lines))
    arguments = load_arguments(["train_config_fp8.json", *options]).resolve(1)
    sizes: Any = load_sizes(arguments.model.config)
    return setup.planned_for(arguments, resolve_ds_config(arguments, 1), sizes, evaluates), told


def test_a_fault_in_the_plan_ends_no_run(other_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, told = planned_by_setup(monkeypatch)
    assert planned and told == [planned.told()]
    (other_results / "hare_2.0b_step.json").write_text('{"model": "hare_2')
    read_anew()
    planned, told = planned_by_setup(monkeypatch)
    assert planned is None and len(told) == 1
    assert told[0].startswith("warning: no plan of this run: JSONDecodeError: Unterminated string")


def test_evaluations_that_never_come_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run without held-out data."""
    option, peaks = "--per_device_eval_batch_size=256", []
    for evaluates in (True, False):
        planned, _ = planned_by_setup(monkeypatch, option, evaluates=evaluates)
        assert planned is not None
        peaks.append(planned.memory.peak_gib)
    usual, _ = planned_by_setup(monkeypatch)
    assert usual is not None and peaks[0] > peaks[1] == usual.memory.peak_gib


def test_a_run_tells_its_plan_and_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = Prediction.of(setting(), "NVIDIA H200")
    assert prediction.estimate is not None
    assert (
        "GiB a GPU at the peak (weights 2.1," in prediction.told()
        and " tokens/s, within" in prediction.told()
    )
    told: list[str] = []
    run: Any = SimpleNamespace(
        speeds=[1.0, 70_000.0, 90_000.0, 80_000.0], metrics=SimpleNamespace(message=told.append)
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 40 * GIB)
    record = prediction.to_json()
    stopped = Stopped(4, None)  # as each segment of a Slurm job
    with pytest.raises(Stopped), train.beside_the_plan(run, prediction, record):
        raise stopped
    assert record["measured"] == {"peak_gib": 40, "tokens_per_second": 80_000}
    off = 100 * (prediction.memory.peak_gib / 40 - 1)
    assert f"and 40.00 GiB at the peak ({off:+.1f} %)" in told[0] and "and 80,000 tokens/s (" in told[0]
    json.dumps(record)
    del run.speeds
    with train.beside_the_plan(run, prediction, record):
        pass
    assert (
        told[1].startswith("warning: nothing measured beside the plan: AttributeError: ") and len(told) == 2
    )


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB"])
def test_of_other_gpus_memory_alone_is_told(name: str) -> None:
    prediction = Prediction.of(setting(), name)
    assert prediction.estimate is None and "tokens/s" not in prediction.told()
    assert "tokens/s" not in prediction.beside(40, 1000.0)


@pytest.mark.parametrize(("name", "gpu"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H800", "h800")])
def test_the_speed_of_a_run_is_that_of_its_gpu(name: str, gpu: str) -> None:
    assert Prediction.of(setting(), name).estimate == estimate(setting(), GPUS[gpu])


def test_a_step_that_takes_more_memory_than_planned_is_warned_of_by_rank() -> None:
    prediction = Prediction.of(setting(), "NVIDIA H200")
    planned, where = prediction.memory.measured_as_gib, ["rank 0 (one)", "rank 1 (two)"]
    for share, warned in ((1.09, False), (1.11, True)):
        told: list[str] = []
        tell_memory([int(0.9 * planned * GIB), int(share * planned * GIB)], where, prediction, told.append)
        peak = f"{share * planned:,.2f} GiB at the peak"
        assert told[0] == f"preflight: memory of a step: {peak}, the most on rank 1 (two)"
        assert f"plan and measured: {planned:,.2f} and {peak}" in told[1] and len(told) == 2 + warned
        if warned:
            assert (
                f"a step takes {share * planned:,.1f} GiB on rank 1 (two), and {planned:,.1f} are planned, which is an "
                "assumption for several GPUs: should" in told[2]
            )
            tell_memory([int(share * planned * GIB)], where[:1], prediction, told.append)
            assert f"and {planned:,.1f} are planned: should" in told[-1]
    told = []
    tell_memory([GIB], where, None, told.append)
    assert len(told) == 1
