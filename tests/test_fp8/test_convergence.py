"""test_fp8/compare_convergence.py: what the metrics of trainings say, and a comparison with real trainings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from model.config import load_config
from test_fp8 import compare_convergence
from test_fp8.compare_convergence import BENCHMARK
from train.prepare_data import main as prepare_data
from train.train_tokenizer import main as train_tokenizer


def training(*evaluated: tuple[int, float], rate: float = 10.0) -> list[dict]:
    """Records of a training of 10 tokens a step that is evaluated at these steps."""
    return [
        {"step": step, "tokens": 10 * step, "loss": loss, "eval_loss": loss, "tokens_per_second": rate}
        for step, loss in evaluated
    ]


def test_time_is_that_of_the_steps(tmp_path: Path) -> None:
    """An interval with compilation, here 1 instead of 10 tokens/s, counts at the speed of the others."""
    records = training(*((step, 4.0) for step in range(10, 70, 10)))
    for slow in (0, 2):
        records[slow]["tokens_per_second"] = 1.0
    records.insert(2, {"step": 25, "tokens": 250, "eval_loss": 4.0})
    records.append({"step": 60, "tokens": 600, "skipped_steps": 0})  # caught up on by a resumed run
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = compare_convergence.read_records(tmp_path)
    assert [r["step"] for r in found] == [10, 20, 25, 30, 40, 50, 60] and found[-1]["skipped_steps"] == 0
    assert [s for s, _ in compare_convergence.step_seconds(found)] == [10, 20, 20, 30, 40, 50, 60]
    assert compare_convergence.speed(found) == 10 and compare_convergence.speed(found[:1]) == 1


def test_time_to_a_loss_is_between_the_evaluations_around_it() -> None:
    records = training((10, 5.0), (20, 4.0), (30, 4.2), (40, 3.0))
    times = {loss: compare_convergence.seconds_to_loss(records, loss) for loss in (5.5, 4.25, 3.6, 2.9)}
    assert times == {5.5: 10, 4.25: 17.5, 3.6: 35, 2.9: None}
    fast, slow = training((10, 4.0), (20, 3.1), rate=20), training((10, 4.0), (20, 3.0))
    found = compare_convergence.equal_loss(fast, slow)
    assert (found["eval_loss"], found["seconds"]) == (3.1, 10)
    assert found["baseline_seconds"] == pytest.approx(19) and found["ratio"] == pytest.approx(1.9)


def test_the_last_tenth_of_the_steps() -> None:
    base = training(*((step, 4.0) for step in range(1, 21)))
    own = training(*((step, 5.0) for step in range(1, 19)), (19, 4.04), (20, 4.08))
    found = compare_convergence.last_tenth(own, base)
    assert found == {"mean_percent": pytest.approx(1.5), "standard_error": pytest.approx(0.5)}
    assert compare_convergence.last_tenth(own[:5], base)["standard_error"] is None


def test_health_names_the_worst_of_each_statistic() -> None:
    def check(step: int, underflow: list[float | None], count: int) -> dict:
        statistics = {"input": {"underflow": underflow, "error": [0.03, 0.01]}}
        health = {"model.layers.*.mlp.fc2": statistics}
        return {"step": step, "fp8_health": health, "fp8_alarms": {"count": count}}

    records = [{"step": 10}, check(20, [0.01, 0.2], 1), check(30, [None, 0.02], 1)]
    found = compare_convergence.health(records)
    assert found == {"checks": 2, "alarms": 1, "worst": {"underflow": 0.2, "error": 0.03}}
    assert compare_convergence.health(records[:1]) is None


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on the sources of a package of the standard library."""
    folder = tmp_path_factory.mktemp("convergence")
    source = ["--input", os.path.dirname(json.__file__)]
    assert train_tokenizer([*source, "--vocab_size", "512", "--output", str(folder / "tokenizer")]) == 0
    data = ["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "text"), "--workers", "1"]
    assert prepare_data([*source, *data, "--eval_fraction", "0.3"]) == 0
    model = load_config("tiny")
    model.vocab_size, model.num_hidden_layers, model.intermediate_size = 512, 2, 256
    (folder / "model.json").write_text(json.dumps(model.to_dict()))
    settings = {
        "model": {"config": str(folder / "model.json")},
        "data": {"sources": {"text": str(folder / "text")}},
        "max_steps": 1000,
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "train_batch_size_tokens": 256,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "logging_steps": 2,
        "max_eval_samples": 8,
    }
    (folder / "run.json").write_text(json.dumps(settings))
    return folder / "run.json"


def program(config: Path, work_dir: Path, *options: str) -> int:
    return BENCHMARK.main([str(config), "--max_steps", "6", "--work_dir", str(work_dir), *options])


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_a_comparison(config: Path, tmp_path: Path) -> None:
    """Trained, then taken as they are against a tolerance that cannot be met, and one that fails."""
    work, output = tmp_path / "work", tmp_path / "results" / "compare.json"
    cases = ["--rows", "bf16", "delayed", "--row", "seed7", "precision.compute=bf16", "seed=7"]
    extra = ["--eval_steps", "4"]
    assert program(config, work, *cases, "--tolerance", "0.1", "--output", str(output), "--", *extra) == 0
    assert output.with_suffix(".png").stat().st_size > 10_000
    report = json.loads(output.read_text())
    assert str(config.parent) not in output.read_text() and str(tmp_path) not in output.read_text()
    assert report["training"]["train_batch_size_tokens"] == 256 and report["training"]["max_steps"] == 6
    bf16, delayed, seed7 = report["results"]
    for result in (bf16, delayed, seed7):
        metrics = [json.loads(x) for x in (work / result["row"] / "metrics.jsonl").read_text().splitlines()]
        assert result["curves"]["loss"] == [m["loss"] for m in metrics if "loss" in m]
        assert result["curves"]["eval_step"] == [4, 6] and result["eval_loss"] == metrics[-1]["eval_loss"]
        difference = 100 * (result["eval_loss"] / bf16["eval_loss"] - 1)
        assert result["eval_difference_percent"] == pytest.approx(difference)
    assert 0 < abs(delayed["last_tenth"]["mean_percent"]) < 2 and seed7["last_tenth"] is None
    assert (seed7["seed"], seed7["overrides"]["seed"]) == (7, "7")

    before = (work / "delayed/metrics.jsonl").read_bytes()
    assert program(config, work, "--rows", "bf16", "delayed", "--tolerance", "1e-9", "--", *extra) == 1
    assert (work / "delayed/metrics.jsonl").read_bytes() == before, "it was not trained again"
    broken = ["--row", "broken", 'precision.bf16_modules=["nonsense"]']
    assert program(config, work, "--rows", "bf16", *broken, "--", *extra) == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--row", "x", "precision.recipe=best"],
        ["--", "--learnin_rate", "1"],
        ["--row", "x", "per_device_train_batch_size=3"],
        ["--baseline", "x"],
    ],
)
def test_errors_come_before_any_training(config: Path, tmp_path: Path, options: list[str]) -> None:
    assert program(config, tmp_path / "work", *options) == 2
    assert not (tmp_path / "work").exists()
