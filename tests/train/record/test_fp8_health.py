"""Health of FP8 in runs: its lines, over ranks and resumes, its picture; and that looking changes no number."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from model.checks.health import TOTALS, measure
from model.checks.quantize_hooks import Source
from model.fp8.recipes import OPERANDS, STATISTICS
from tests.train.record.test_plots import make_run
from tests.train.runs import PRECISIONS, curve, metrics, run, tensors
from train import plot
from train.checkpoint.files import committed
from train.record import fp8_health
from train.record.fp8_health import FP8_HEALTH, health_record, scalars, split
from train.record.history import read_history
from train.record.plots import PANELS, draw_health

LAYER = "model.layers.{}.mlp.down_proj"


def record(
    layers: int = 3, factor: float = 1.0, statistics: Sequence[str] = STATISTICS[:4]
) -> dict[str, Any]:
    values = {name: [factor * 10.0 ** -(layer + 1) for layer in range(layers)] for name in statistics}
    return {LAYER.format("*"): {operand: dict(values) for operand in OPERANDS}}


def totals_of(*seeds: int) -> torch.Tensor:
    """Return the totals of a tensor with 16 random rows per seed, quantized with a scale of 4."""
    x = torch.cat([torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) for seed in seeds]) * 80
    codes = (x * 4).clamp(-448, 448).to(torch.float8_e4m3fn)
    return measure(Source("matrix", (x,)), codes, torch.tensor(0.25), True)


def recorded(totals: torch.Tensor, gemms: list[str], layers: int) -> dict[str, Any]:
    """Return the record of GEMMs whose three operands have these totals."""
    totals = totals.expand(len(gemms), 3, -1).clone()
    check: Any = SimpleNamespace(totals=lambda: totals, gemms=gemms)
    return health_record(check, layers)


def test_statistics_over_all_ranks(monkeypatch: pytest.MonkeyPatch, process_group: None) -> None:
    """The kurtosis and the error too, which are not means of the ranks' values."""
    expected, other = recorded(totals_of(1, 2), [LAYER.format(0)], 1), totals_of(2)

    def all_reduce(value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.MAX:
            value.copy_(torch.maximum(value, other[..., len(TOTALS) - 1 :]))
        else:
            value += other[..., : len(TOTALS) - 1]

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    found = recorded(totals_of(1), [LAYER.format(0)], 1)
    assert found == expected
    assert found[LAYER.format("*")]["input"]["kurtosis"] == [pytest.approx(3.0, rel=0.2)]
    assert found[LAYER.format("*")]["weight"]["saturated"][0] > 0.1


def test_health_record_layers(process_group: None) -> None:
    assert fp8_health.OPERANDS == OPERANDS and fp8_health.STATISTICS == STATISTICS == tuple(PANELS)
    found = recorded(totals_of(1), [LAYER.format(1), LAYER.format(3), "lm_head"], 6)
    assert [value is None for value in found[LAYER.format("*")]["input"]["error"]] == [True, False] * 2 + [
        True
    ] * 2
    assert len(found["lm_head"]["weight"]["error"]) == 1
    broken = recorded(torch.full_like(totals_of(1), math.nan), [LAYER.format(0)], 1)
    assert broken[LAYER.format("*")]["gradient"]["range"] == [None]
    json.dumps(broken, allow_nan=False)
    assert split("model.layers.17.mlp.fc1") == ("model.layers.*.mlp.fc1", 17)


def test_tracker_scalars() -> None:
    health = record()
    health[LAYER.format("*")]["weight"]["error"] = [None, 0.03, 0.02]
    found = scalars(health)
    assert found[f"fp8_health/error/weight/{LAYER.format('*')}"] == 0.03
    assert found[f"fp8_health/underflow/input/{LAYER.format('*')}"] == 0.1 and len(found) == 12


def test_draw_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row per layer, a column per sample, a panel per statistic and operand, and the limit of its alarm."""
    drawn = []
    show = Axes.pcolormesh
    monkeypatch.setattr(
        Axes, "pcolormesh", lambda axis, *data, **o: drawn.append(data) or show(axis, *data, **o)
    )
    limits: list[list[float]] = []  # lines in the color bars
    line = Axes.axhline

    def axhline(axis: Axes, y: float, **options: Any) -> Any:
        limits.append(drawn_line := [*line(axis, y, **options).get_ydata()])
        return drawn_line

    monkeypatch.setattr(Axes, "axhline", axhline)
    first = record(statistics=["error"])  # fewer panels are faster
    second = record(layers=4, factor=0.5, statistics=["error"])
    first[LAYER.format("*")]["weight"] = {}
    folder = make_run(tmp_path / "run", lines=2, **{FP8_HEALTH: first})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "tokens": 640, FP8_HEALTH: second}) + "\n")
    assert draw_health(read_history(folder), tmp_path / "health.png")
    assert (tmp_path / "health.png").read_bytes().startswith(b"\x89PNG")
    panels = [data for data in drawn if isinstance(data[0], list)]  # the others are color bars
    assert [(steps, table.shape) for steps, _, table in panels] == [([0, 2, 9], (4, 2))] * 3
    # 0.02 is the darkest that is shown
    inputs, weights, _ = (table.tolist() for *_, table in panels)
    assert inputs[:2] == [[0.1, 0.05], [0.02, 0.02]] and math.isnan(inputs[3][0])
    assert weights[0][1] == 0.05 and math.isnan(weights[0][0])
    assert limits == [[0.106, 0.106], [0.106, 0.106], [0.4, 0.4]]


def test_plot_of_a_single_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr("train.record.plots.draw", lambda *_: None)
    monkeypatch.setattr("train.record.plots.draw_health", lambda _, path: drawn.append(path) or True)
    one, two = (str(make_run(tmp_path / name, **{FP8_HEALTH: record()})) for name in ("a", "b"))
    for runs in ([one], [one, two]):
        assert plot.main([*runs, "--output", str(tmp_path / "x.png")]) == 0
    assert drawn == [tmp_path / "x_health.png"]


def health_lines(folder: Path) -> list[tuple]:
    return [(m["step"], m[FP8_HEALTH]) for m in metrics(folder) if FP8_HEALTH in m]


def test_health_checks_change_no_result(
    settings: dict, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints too. A resume records the same samples, also at steps that are not logged."""
    settings["precision"] = {"health_steps": 2}
    drawn: list[Path] = []
    monkeypatch.setattr("train.record.plots.draw", lambda *_: None)
    monkeypatch.setattr("train.record.plots.draw_health", lambda _, path: drawn.append(path))
    folder = run(settings, plots=True, save_steps=3)
    lines = health_lines(folder)
    assert curve(folder) == curve(trained) and tensors(folder, 6) == tensors(trained, 6)
    assert [step for step, _ in lines] == [2, 4, 6] and drawn == [folder / "health.png"]
    (committed(folder / "checkpoints")[-1] / "manifest.json").unlink()
    run(settings, save_steps=3, logging_steps=5)
    assert health_lines(folder) == lines and curve(folder)[-1][0] == 6
    gemms = dict(lines)[4]
    head = gemms.pop("lm_head")
    assert {operand: len(found["error"]) for operand, found in head.items()} == dict.fromkeys(OPERANDS, 1)
    names = {"self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"}
    assert set(gemms) == {f"model.layers.*.{name}" for name in names}
    assert all(len(values) == 2 and None not in values for *_, values in fp8_health.values(gemms))


@pytest.mark.slow
@pytest.mark.parametrize("variant,precision", [("te_layer", "block"), ("te_linear", "current")])
def test_health_checks_change_no_recipe(settings: dict, tmp_path: Path, variant: str, precision: str) -> None:
    settings["model"]["variant"], settings["max_steps"] = variant, 4
    folders = []
    for steps in (0, 1):
        settings["precision"] = {**PRECISIONS[precision], "health_steps": steps}
        folders.append(run(settings, output_dir=str(tmp_path / f"{steps}")))
    off, on = folders
    assert curve(on) == curve(off) and tensors(on, 4) == tensors(off, 4)
    assert len(health_lines(on)) == 4 and not health_lines(off)


@pytest.mark.slow
def test_health_checks_with_recomputation_and_zero_3(settings: dict, tmp_path: Path) -> None:
    """The same statistics where layers are computed twice, and where weights are partitioned; there they are quantized
    by each micro-batch, of which the first is looked at."""
    settings |= {"precision": {"recipe": "current", "health_steps": 2}, "max_steps": 4}
    found = []
    for index, change in enumerate(
        ({}, {"gradient_checkpointing": True}, {"deepspeed": {"zero_optimization": {"stage": 3}}})
    ):
        found.append(health_lines(run(settings, output_dir=str(tmp_path / f"{index}"), **change)))
    assert len(found[0]) == 2 and found[1] == found[0]
    assert [step for step, _ in found[2]] == [2, 4]
    assert all(None not in values for *_, values in fp8_health.values(found[2][-1][1]))
