"""test_fp8/compare_convergence.py and convergence_data.py: figures, texts, and a comparison with real trainings."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from test_fp8 import compare_convergence
from test_fp8.common.cases import Case, parse_cases
from test_fp8.common.report import plain_labels
from test_fp8.compare_convergence import BENCHMARK, plain_name, plots
from test_fp8.convergence_data import extract, read_texts, skip_reason
from tests.fixtures import settings_of
from train.config.load import load_arguments
from train.files import REPOSITORY as ROOT


def training(*evaluated: tuple[int, float], rate: float = 10.0) -> list[dict]:
    """Records of a training of 10 tokens a step that is evaluated at these steps."""
    return [
        {"step": step, "tokens": 10 * step, "loss": loss, "eval_loss": loss, "tokens_per_second": rate}
        for step, loss in evaluated
    ]


def test_step_seconds(tmp_path: Path) -> None:
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


def test_seconds_to_loss() -> None:
    points = compare_convergence.evaluations(training((10, 5.0), (20, 4.0), (30, 4.2), (40, 3.0)))
    times = {loss: compare_convergence.seconds_to_loss(points, loss) for loss in (5.5, 4.25, 3.6, 2.9)}
    assert times == {5.5: 10, 4.25: 17.5, 3.6: 35, 2.9: None}
    slow = training((10, 5.03), (20, 4.03), (30, 4.0))
    worse, fast = training((10, 5.0), (20, 4.02), rate=20), training((10, 4.5), (20, 3.0), rate=20)
    for run, seconds in ((worse, 5 + 5 * 0.96 / 0.98), (fast, 5 + 5 * 0.46 / 1.5)):
        found = compare_convergence.equal_loss(run, slow)
        assert (found["eval_loss"], found["baseline_seconds"]) == pytest.approx((4.04, 19.9))
        assert found["seconds"] == pytest.approx(seconds)
        assert found["ratio"] == pytest.approx(19.9 / seconds)
    assert compare_convergence.equal_loss(training((10, 5.0), (20, 4.1)), slow)["ratio"] is None


def test_loss_differences() -> None:
    base = training(*((step, 4.0) for step in range(1, 21)))
    own = training((1, 4.2), *((step, 5.0) for step in range(2, 19)), (19, 4.04), (20, 4.08), (21, 9.0))
    found = compare_convergence.loss_differences(own, base, 10)
    assert list(found) == list(range(2, 21, 2)), "each has two steps, and step 21 is none of the baseline's"
    assert found[20] == {"mean_percent": pytest.approx(1.5), "standard_error": pytest.approx(0.5)}
    assert found[2]["mean_percent"] == pytest.approx(15) and found[4]["standard_error"] == 0
    short = compare_convergence.loss_differences(own[:5], base, 10)
    assert [w["standard_error"] for w in short.values()] == [None] * 5 and list(short) == [1, 2, 3, 4, 5]
    assert [*compare_convergence.loss_differences(own, base, 3)] == [4, 11, 18], "7, 7 and 6 steps"


def test_interval() -> None:
    """With four values, the t distribution has 3 degrees of freedom and the quantile 3.18245."""
    found = compare_convergence.interval([0.1, 0.4, 0.2, 0.3])
    assert found["mean_percent"] == pytest.approx(0.25)
    assert found["half_width"] == pytest.approx(0.20543, rel=1e-3)
    assert compare_convergence.interval([0.1])["half_width"] is None
    assert math.isnan(compare_convergence.interval([0.1, math.nan])["half_width"])


def test_evaluations_are_compared_at_equal_steps() -> None:
    base, config = training((10, 5.0), (20, 4.0), (30, 3.0)), argparse.Namespace(seed=42)
    own = training((20, 4.4), (30, 3.3))
    found = compare_convergence.make_result(Case("own", {}), config, own, base, same_steps=True)["curves"]
    assert found["eval_step"] == [20, 30] and found["eval_difference_percent"] == pytest.approx([10, 10])


def test_plots_name_cases_and_axes() -> None:
    """Of the published report: what each case trains, not the name of its row, and the loss to reach."""
    file = ROOT / "test_fp8/results/time_to_loss_106m.json"
    results = json.loads(file.read_text())["results"]
    words = (
        ["model.variant=hf", "precision.compute=bf16", "speed.cuda_graphs=false"],
        ["precision.compute=fp8", "optim=muon"],
    )
    cases = parse_cases([["a", *words[0]], ["b", *words[1]], ["c", *words[1]]], [])
    options = BENCHMARK.options.parse(["train_config_evidence"])
    names = {
        name: plain_name(load_arguments(compare_convergence.training_command(case, options)))
        for name, case in cases.items()
    }
    assert names["a"] == "transformers, bf16, AdamW" and names["b"] == "te_layer, FP8 delayed, Muon"
    labels = plain_labels(names)
    assert [*labels.values()] == [names["a"], f"{names['b']} (b)", f"{names['b']} (c)"]
    (time,), differences = plots(results, {r["row"]: r["row"] for r in results}).values()
    assert time.target is not None and time.target[0] == 1.01 * results[0]["eval_loss"]
    assert time.x and time.y and all(panel.x and panel.y for panel in differences)
    assert [*time.series] == [r["row"] for r in results] and len(differences[0].series) == 3


@pytest.fixture(scope="module")
def config(data: Path, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convergence") / "run.json"
    settings = settings_of(data, small_model, path.with_name("run")) | {
        "max_steps": 1000,
        "train_batch_size_tokens": 256,
        "logging_steps": 2,
        "max_eval_samples": 8,
    }
    del settings["gradient_accumulation_steps"]
    path.write_text(json.dumps(settings))
    return path


def program(config: Path, work_dir: Path, *options: str) -> int:
    return BENCHMARK.main([str(config), "--max_steps", "6", "--work_dir", str(work_dir), *options])


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_comparison(config: Path, tmp_path: Path) -> None:
    """Trained, then taken as they are against a tolerance that cannot be met, and one that fails."""
    work, output = tmp_path / "work", tmp_path / "results" / "compare.json"
    cases = ["--rows", "bf16", "delayed", "--row", "seed7", "precision.compute=bf16", "seed=7"]
    changes = ["max_steps=4", "train_batch_size_tokens=128", "max_seq_length=32", 'data.weights={"text": 1}']
    for index, change in enumerate(changes):
        cases += ["--row", f"changed{index}", "precision.compute=bf16", change]
    extra = ["--eval_steps", "4"]
    assert program(config, work, *cases, "--tolerance", "0.1", "--output", str(output), "--", *extra) == 0
    for plot in ("compare.png", "compare_differences.png"):
        assert output.with_name(plot).stat().st_size > 10_000
    report = json.loads(output.read_text())
    assert str(config.parents[1]) not in output.read_text()  # where all temporary folders are
    assert report["training"]["train_batch_size_tokens"] == 256 and report["training"]["max_steps"] == 6
    bf16, delayed, seed7, *changed = report["results"]
    for other in (seed7, *changed):
        assert other["last_tenth"] is None and other["curves"]["difference_step"] == []
        assert set(other["curves"]["eval_difference_percent"]) == {None}
    for result in (bf16, delayed, seed7):
        metrics = [json.loads(x) for x in (work / result["row"] / "metrics.jsonl").read_text().splitlines()]
        assert result["curves"]["loss"] == [m["loss"] for m in metrics if "loss" in m]
        times = result["curves"]["eval_seconds"]
        assert len(times) == 2 and 0 < times[0] < times[1]
        assert result["curves"]["eval_step"] == [4, 6] and result["eval_loss"] == metrics[-1]["eval_loss"]
        difference = 100 * (result["eval_loss"] / bf16["eval_loss"] - 1)
        assert result["eval_difference_percent"] == pytest.approx(difference)
    assert 0 < abs(delayed["last_tenth"]["mean_percent"]) < 2
    assert delayed["curves"]["difference_step"] == [2, 4, 6]
    assert delayed["curves"]["difference_percent"][-1] == delayed["last_tenth"]["mean_percent"]
    assert (seed7["seed"], seed7["overrides"]["seed"]) == (7, "7")

    metrics = work / "delayed/metrics.jsonl"
    before = metrics.read_text()
    better, worse = sorted([bf16, delayed], key=lambda result: result["eval_loss"])
    for baseline, status in ((better, 1), (worse, 0)):
        both = ["--rows", "bf16", "delayed", "--baseline", baseline["row"], "--tolerance", "1e-9"]
        assert program(config, work, *both, "--", *extra) == status
    assert metrics.read_text() == before, "not trained again"
    metrics.write_text(before.replace(json.dumps(delayed["eval_loss"]), "null"))
    assert program(config, work, "--rows", "bf16", "delayed", "--tolerance", "1", "--", *extra) == 1
    assert program(config, work, "--rows", "bf16", "--", *extra, "--seed", "5") == 2, "not the same run"
    broken = ["--row", "broken", 'precision.bf16_modules=["nonsense"]']
    assert program(config, work, "--rows", "bf16", *broken, "--", *extra) == 2


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_seeds(config: Path, tmp_path: Path) -> None:
    """Each seed is compared with the baseline of that seed, and the tolerance applies to the interval."""
    work, output = tmp_path / "work", tmp_path / "seeds.json"
    words = ["--rows", "bf16", "delayed", "--output", str(output), "--seeds"]
    assert program(config, work, *words, "5", "6", "7", "--tolerance", "1e-9") == 0
    report = json.loads(output.read_text())
    losses = {result["row"]: result["eval_loss"] for result in report["results"]}
    percents = [100 * (losses[f"delayed_seed{n}"] / losses[f"bf16_seed{n}"] - 1) for n in (5, 6, 7)]
    found = report["differences"][1]
    assert found["percent"] == pytest.approx(percents) and len({*percents}) == 3
    assert found["half_width"] > abs(found["mean_percent"]), "no case for the tolerance"
    moved = tmp_path / "moved"
    for name in ("bf16_seed5", "delayed_seed5"):
        (moved / name).mkdir(parents=True)
        for file in ("metrics.jsonl", "train_config.json"):
            shutil.copy(work / name / file, moved / name)
    assert program(config, moved, *words, "5") == 0
    assert not (moved / "delayed_seed5/checkpoints").exists(), "a finished run is not trained again"


@pytest.mark.parametrize(
    "options",
    [
        ["--seeds", "5", "5"],
        ["--row", "x", "precision.recipe=best"],
        ["--", "--learnin_rate", "1"],
        ["--row", "x", "per_device_train_batch_size=3"],
        ["--baseline", "x"],
    ],
)
def test_errors_are_raised_before_training(config: Path, tmp_path: Path, options: list[str]) -> None:
    assert program(config, tmp_path / "work", *options) == 2
    assert not (tmp_path / "work").exists()


SOURCE = (
    "def area(width, height):\n    # of a rectangle, in the unit of its sides squared\n    return width * height\n"
    * 3
)
PROSE = "A wheel is a built package. It holds the sources of a project and what pip must know of it. " * 4


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SOURCE, ""),
        ("x = 1\n", "under 200 bytes"),
        (SOURCE * 10_000, "over 1,000,000 bytes"),
        ("# Generated by the protocol buffer compiler.  DO NOT EDIT!\n" + SOURCE, "generated"),
        ("# Code generated by a tool\n" + SOURCE, "generated"),
        ("# This file was automatically generated\n" + SOURCE, "generated"),
        ("\n" * 10 + "# Code generated by a tool, says this line below the head\n" + SOURCE, ""),
        ("[" + "[], " * 200 + "]\n" + "()\n" * 100, "under 25% letters"),
        (SOURCE + "x" * 1001 + "\n" + "a = b\n" * 100, "a line over 1,000"),
        (("word " * 30 + "\n") * 5, "lines over 100"),
    ],
)
def test_skip_reason(text: str, reason: str) -> None:
    found = skip_reason(text, "code")
    assert found is None if not reason else found is not None and found.startswith(reason)
    if "line" in reason or "generated" in reason:
        assert skip_reason(text, "documents") is None, "of source code alone"


def test_read_texts_of_a_wheel(tmp_path: Path) -> None:
    path = wheel(
        tmp_path / "shapes-1.0-py3-none-any.whl",
        {
            "shapes/b.py": SOURCE.encode(),
            "shapes/a.py": b"# -*- coding: latin-1 -*-\n# \xe9\n" + SOURCE.replace("\n", "\r\n").encode(),
            "shapes/bad.py": b"# \xe9\n" + SOURCE.encode(),
            "shapes/guide.rst": f"{PROSE}\r\n{PROSE}".encode(),
            "shapes/data.bin": b"\x00" * 1000,
            "shapes/data.json": PROSE.encode(),
            "shapes-1.0.dist-info/METADATA": f"Name: shapes\nVersion: 1.0\n\n{PROSE}".encode(),
            "shapes-1.0.dist-info/top_level.txt": PROSE.encode(),
        },
    )
    skipped: Counter[str] = Counter()
    found = list(read_texts(path, skipped))
    assert [(kind, name) for kind, name, _ in found] == [
        ("documents", "shapes-1.0.dist-info/METADATA"),
        ("code", "shapes/a.py"),
        ("code", "shapes/b.py"),
        ("documents", "shapes/guide.rst"),
    ]
    assert found[0][2] == PROSE and "é" in found[1][2] and not any("\r" in text for _, _, text in found)
    assert skipped.total() == 1
    counts = extract(path, "shapes", tmp_path / "texts")
    assert counts["code"] == counts["documents"] == 2 and counts["code bytes"] > 2 * len(SOURCE)
    records = [json.loads(line) for line in (tmp_path / "texts/code/shapes.jsonl").read_text().splitlines()]
    assert records[1] == {"text": SOURCE, "path": "shapes/b.py"}
