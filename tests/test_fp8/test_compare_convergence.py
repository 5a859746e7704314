"""test_fp8/compare_convergence.py: its arithmetic, what it refuses, and a comparison with real trainings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from model.config import load_config
from test_fp8 import compare_convergence
from test_fp8.common.options import public
from test_fp8.common.rows import Row, RowError
from test_fp8.convergence import rows as convergence_rows
from test_fp8.convergence import trainings as convergence_trainings
from test_fp8.convergence.results import compared, largest_rise, largest_spike, percent, smoothed, summary
from test_fp8.convergence.rows import (
    AFTER_START,
    STAGE_ENDS,
    ComparisonError,
    at_logging_steps,
    check_same_training,
    chosen_rows,
)
from train.prepare_data import main as prepare_data
from train.train_tokenizer import main as train_tokenizer

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- the arithmetic


def training(losses: list[float], eval_loss: float = 3.0, **last: object) -> list[dict]:
    """Records of a training of 10 tokens a step, logged at every step."""
    records = [
        {"step": i, "tokens": 10 * i, "loss": loss, "grad_norm": 1.0, "skipped_steps": 0}
        | {"tokens_per_second": 100.0, "memory_gib": 2.0}
        for i, loss in enumerate(losses, 1)
    ]
    records[-1] |= {"eval_loss": eval_loss, "unigram_loss": 6.0, **last}
    return records


def test_differences_are_in_percent_of_the_baseline() -> None:
    result = compared("x", training([5, 4.04, 3.9], 3.003), training([5, 4, 4], 3.0), 1, 0.005)
    curve = result["curves"]
    assert curve["difference_percent"] == pytest.approx([0, 1, -2.5])
    assert result["largest_difference_percent_after_warmup"] == {"step": 3, "percent": pytest.approx(-2.5)}
    assert result["eval_difference_percent"] == pytest.approx(0.1)
    assert curve["tokens_per_second"] == [100] * 3
    assert curve["eval_step"] == [3] and curve["eval_difference_percent"] == pytest.approx([0.1])
    assert percent(3, 4) == -25


@pytest.mark.parametrize(
    ("eval_loss", "skipped", "misses"),
    [
        (3.0149, 0, []),
        (3.0151, 0, ["+0.50 % from the baseline's 3.0000; allowed are 0.5 %"]),
        (2.98, 0, ["-0.67 %"]),  # better by that much is another training too
        (3.0, 2, ["2 steps were skipped"]),
        (3.1, 2, ["+3.33 %", "2 steps were skipped"]),
        (float("nan"), 0, ["evaluation loss nan"]),
    ],
)
def test_what_misses_the_tolerance(eval_loss: float, skipped: int, misses: list[str]) -> None:
    row, base = training([5, 4], eval_loss, skipped_steps=skipped), training([5, 4])
    found = compared("x", row, base, 0, 0.005)["misses"]
    assert len(found) == len(misses)
    assert all(words in miss for words, miss in zip(misses, found, strict=True))


def test_another_order_of_samples_has_no_differences_by_step() -> None:
    result = compared("x", training([5, 4.5]), training([5, 4]), 0, 0.005, same_samples=False)
    assert result["curves"]["difference_percent"] == []
    assert "largest_difference_percent_after_warmup" not in result and result["last_tenth"] is None
    assert result["curves"]["loss"] == [5, 4.5]


def test_the_last_tenth_of_the_steps() -> None:
    base = training([4.0] * 20)
    found = compared("x", training([5.0] * 18 + [4.04, 4.08]), base, 0, 0.005)["last_tenth"]
    assert found == {"mean_percent": pytest.approx(1.5), "standard_error": pytest.approx(0.5)}
    few = compared("x", training([4.04, 4.0, 4.2]), base[:2] + training([4.0] * 3)[2:], 0, 0.005)[
        "last_tenth"
    ]
    assert few == {"mean_percent": pytest.approx(5), "standard_error": None}


def test_smoothing_is_a_centred_mean() -> None:
    assert smoothed([1, 2, 6, 2, 1], points=3) == pytest.approx([1.5, 3, 10 / 3, 3, 1.5])
    assert smoothed([], points=3) == []


def test_a_rise_is_over_the_minimum_until_then() -> None:
    assert largest_rise([5, 4, 3]) == 0
    assert largest_rise([5, 4, 6, 2, 2.5]) == pytest.approx(50)  # 6 over 4, more than 2.5 over 2
    assert largest_spike([1, 1, 8]) == 8
    assert largest_spike([]) is None and largest_spike([0, 0, 1]) is None


def test_instability_counts_after_warmup_only() -> None:
    records = training([9, 5, 8, 4, 4.4])
    records[1]["grad_norm"], records[4]["grad_norm"] = 50.0, 3.0
    whole, after = summary(records, 0), summary(records, 3)
    assert (whole["largest_rise_percent"], whole["largest_grad_norm"]) == (pytest.approx(60), 50)
    assert (after["largest_rise_percent"], after["largest_grad_norm"]) == (pytest.approx(10), 3)
    assert after["largest_grad_norm_to_median"] == pytest.approx(1.5)
    late = compared("x", records, records, warmup_steps=5, tolerance=0.1)  # nothing after warmup
    assert late["largest_grad_norm"] is None and "largest_difference_percent_after_warmup" not in late


def test_speed_is_a_median_without_the_first_interval() -> None:
    records = training([5, 4, 3, 2])
    for record, rate, memory in zip(records, [1, 90, 110, 100], [1.0, 7.0, 6.0, 6.0], strict=True):
        record |= {"tokens_per_second": rate, "memory_gib": memory}
    assert summary(records, 0)["tokens_per_second"] == 100
    assert summary(records, 0)["memory_gib"] == 7
    assert compared("x", records, training([5, 4, 3, 2]), 0, 1)["speed_to_baseline"] == 1
    on_a_cpu = [record | {"memory_gib": None} for record in records]
    assert summary(on_a_cpu, 0)["memory_gib"] is None


def test_stages_that_end_between_two_lines_are_in_the_next_one() -> None:
    """Two of them, after 3 and 4 of the 5 steps of a line; the last line is of 2."""
    records = [
        {"step": 5, "tokens": 50, "loss": 6.0, "tokens_per_second": 10.0},
        {"step": 8, "tokens": 80, "loss": 5.0, "tokens_per_second": 30.0, "eval_loss": 4.5, STAGE_ENDS: {}},
        {"step": 9, "tokens": 90, "loss": 4.0, "tokens_per_second": 5.0, AFTER_START: True, STAGE_ENDS: {}},
        {"step": 10, "tokens": 100, "loss": 1.0, "tokens_per_second": 10.0, AFTER_START: True},
        {"step": 12, "tokens": 120, "loss": 3.0, "tokens_per_second": 10.0, STAGE_ENDS: {}},
    ]
    found = at_logging_steps(records, 5)
    assert [r["step"] for r in found if "loss" in r] == [5, 10, 12] and records[1]["loss"] == 5.0
    assert found[1] == {"step": 8, "tokens": 80, "eval_loss": 4.5}
    assert found[3]["loss"] == pytest.approx((3 * 5 + 4 + 1) / 5) and STAGE_ENDS in found[3]
    assert found[3]["tokens_per_second"] == pytest.approx(5 / (3 / 30 + 1 / 5 + 1 / 10))
    assert found[4] == records[4] and found[0] == records[0]


# ---------------------------------------------------------------- the same training?


def test_only_the_overrides_may_differ() -> None:
    base = {"seed": 1, "precision": {"compute": "bf16", "recipe": "delayed"}, "output_dir": "a"}
    row = {"seed": 1, "precision": {"compute": "fp8", "recipe": "delayed"}, "output_dir": "b"}
    check_same_training("x", ["precision.compute"], base, row)
    check_same_training("x", ["precision"], base, row)
    with pytest.raises(ComparisonError, match=r"row x (?s:.)*precision\.compute: \"bf16\" -> \"fp8\""):
        check_same_training("x", ["precision.recipe"], base, row)
    with pytest.raises(ComparisonError, match="seed: 1 -> 2"):
        check_same_training("x", ["precision.compute"], base, row | {"seed": 2})
    with pytest.raises(ComparisonError, match="data.sources.web: null -> "):
        check_same_training("x", [], base, base | {"data": {"sources": {"web": "w"}}})


def test_what_changes_between_two_rows_ends_the_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = {"machine": {}, "versions": {}, "data": {"eval": "a"}}
    found = iter([now, now | {"data": {"eval": "b"}}])
    monkeypatch.setattr(convergence_trainings, "conditions", lambda *_: next(found))
    monkeypatch.setattr(convergence_trainings, "state_of", lambda *_: convergence_rows.State(None))
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 3.0}')
    (folder / "conditions.json").write_text('{"config": {}, "conditions": {}}')
    config = convergence_rows.make_plan(rows_of()[0], compare_convergence.parse_arguments([])).config
    plans = [convergence_rows.Plan(Row(name, {}), config, [], folder) for name in ("a", "b")]
    with pytest.raises(ComparisonError, match=r"changed before row b \(data\.eval\)"):
        convergence_trainings.train_all(plans, now)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a/b", "precision.recipe=block"], "a name has letters"),
        (["x", "precision.recipe"], "key=value is expected"),
        (
            ["x", "weight_decay=1"],
            "weight_decay would make another training; for all rows: -- --weight_decay VALUE",
        ),
        (["x", "data.sources.text=y"], "another training"),
        (["x", "precisions=1"], "another training"),
        (["bf16", "precision.recipe=block"], "there is such a row already"),
    ],
)
def test_rows_that_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(RowError, match=words):
        rows_of("--rows", "bf16", "--row", *given)


def rows_of(*options: str) -> list[Row]:
    return chosen_rows(compare_convergence.parse_arguments(options))


def test_rows() -> None:
    row = ["--row", "lm_head", "precision.bf16_modules=[]"]
    rows = rows_of("--rows", "delayed", "bf16", *row, "--noise_seed", "7")
    assert [row.name for row in rows] == ["bf16", "bf16_seed7", "delayed", "lm_head"]
    assert rows[1] == Row("bf16_seed7", {"precision.compute": "bf16", "seed": "7"})
    assert rows[2].settings == {"precision.compute": "fp8", "precision.recipe": "delayed"}
    with pytest.raises(RowError, match="baseline fp16 is not among the rows bf16"):
        rows_of("--rows", "bf16", "--baseline", "fp16")
    several = ["--noise_seed", "7", "8", "7", "--noise_rows"]
    rows = rows_of("--rows", "delayed", "bf16", *row, *several, "lm_head")
    assert [row.name for row in rows] == [
        "bf16", "bf16_seed7", "bf16_seed8", "delayed", "lm_head", "lm_head_seed7", "lm_head_seed8"
    ]  # fmt: skip
    assert rows[-1].settings == {"precision.bf16_modules": "[]", "seed": "8"}
    with pytest.raises(RowError, match="--noise_rows block: there is no such row; there are delayed, bf16"):
        rows_of("--rows", "delayed", "bf16", *several, "block")
    with pytest.raises(RowError, match="with the seeds of --noise_seed; give some"):
        rows_of("--rows", "delayed", "bf16", "--noise_rows", "delayed")


def test_reports_name_no_folder_of_the_machine() -> None:
    assert public("/somewhere/else/run.json") == "run.json"
    assert public("--deepspeed=/somewhere/zero.json") == "--deepspeed=zero.json"
    assert public(str(ROOT / "train_args/train_config_fp8.json")) == "train_args/train_config_fp8.json"
    assert (
        public("train_config_fp8") == "train_config_fp8"
        and public("precision.margin=1") == "precision.margin=1"
    )


# ---------------------------------------------------------------- the program, with real trainings


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on the sources of a package of the standard library."""
    folder = tmp_path_factory.mktemp("convergence")
    source = ["--input", os.path.dirname(json.__file__)]
    tokenizer = [*source, "--vocab_size", "512", "--output", str(folder / "tokenizer")]
    assert train_tokenizer(tokenizer) == 0
    data = ["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "text"), "--workers", "1"]
    assert prepare_data([*source, *data, "--eval_fraction", "0.3"]) == 0
    model = load_config("tiny")
    model.vocab_size, model.num_hidden_layers, model.intermediate_size = 512, 2, 256
    (folder / "model.json").write_text(json.dumps(model.to_dict()))
    path = folder / "run.json"
    settings = {
        "model": {"config": str(folder / "model.json")},
        "data": {"sources": {"text": str(folder / "text")}},
        "max_steps": 1000,
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "train_batch_size_tokens": 256,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "max_eval_samples": 8,
    }
    path.write_text(json.dumps(settings))
    return path


def program(config: Path, work_dir: Path, *options: str) -> int:
    """compare_convergence.py with 6 steps; every second is logged. Its trainings are processes of their own."""
    limits = ["--max_steps", "6", "--logging_steps", "2", "--work_dir", str(work_dir)]
    return compare_convergence.main([str(config), *limits, *options])


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_a_comparison(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings at a time, stopped and gone on with; then reused, with one more that fails, against a tolerance
    that cannot be met, and changed."""
    work, output = tmp_path / "work", tmp_path / "results" / "compare.json"
    rows, extra = ["--rows", "bf16", "delayed"], ["--", "--eval_steps", "4"]

    def left(_: object) -> float:
        """No time any more, once both have told something."""
        logs = [work / name / "log.txt" for name in ("bf16", "delayed")]
        return float(not all(log.exists() and log.stat().st_size for log in logs))

    with monkeypatch.context() as patch:
        patch.setattr(convergence_trainings.Asked, "left_s", property(left))
        assert program(config, work, *rows, "--at_once", "2", *extra) == 3
    printed = capfd.readouterr().out
    assert "bf16: stopped with a checkpoint" in printed and "delayed: stopped with a checkpoint" in printed
    assert "not finished: bf16, delayed; the same command goes on" in printed

    assert program(config, work, *rows, "--output", str(output), *extra) == 0
    printed = capfd.readouterr().out
    assert printed.count("not finished; goes on") == 2
    assert "stopped on request after step" in (work / "bf16" / "log.txt").read_text()
    assert "delayed: FP8: 6 of 7 GEMM modules ran FP8 (delayed scaling)" in printed
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert not list(work.glob("*/checkpoints")) and not list(work.glob("*/hf")), "15 GB a row at 1.1B"

    report = json.loads(output.read_text())
    assert {"command", "date", "machine", "versions", "training", "tolerance", "results"} <= report.keys()
    assert str(config.parent) not in output.read_text() and str(tmp_path) not in output.read_text()
    assert report["training"]["train_batch_size_tokens"] == 256 and report["training"]["max_steps"] == 6
    bf16, delayed = report["results"]
    assert (bf16["row"], delayed["row"]) == ("bf16", "delayed")
    assert delayed["settings"]["precision.compute"] == "fp8" and "6 of 7" in delayed["fp8"]
    for result in (bf16, delayed):
        metrics = [json.loads(x) for x in (work / result["row"] / "metrics.jsonl").read_text().splitlines()]
        assert result["curves"]["step"] == [2, 4, 6] and result["curves"]["eval_step"] == [4, 6]
        assert result["curves"]["loss"] == [m["loss"] for m in metrics if "loss" in m], "a stop may part them"
        assert result["eval_loss"] == metrics[-1]["eval_loss"] and result["misses"] == []
        assert result["loss"] < 5.6  # of ln(512) = 6.24: it learns
    # the same training, and not the same arithmetic
    assert 0 < max(map(abs, delayed["curves"]["difference_percent"])) < 2

    # between two steps that each row tells of
    stages = 'precision.schedule=[{"until_step": 3, "compute": "bf16"}, {}]'
    staged = [*rows, "--row", "staged", "precision.compute=fp8", stages]
    assert program(config, work, *staged, "--output", str(output), *extra) == 0
    found = json.loads(output.read_text())["results"][-1]
    curves = found["curves"]
    assert curves["stage_ends"] == [4, 6] and len(found["changes_s"]) == 1 and curves["step"] == [2, 4, 6]
    assert "staged: to change the precision took " in capfd.readouterr().out
    check_what_is_taken_from_a_result(config, tmp_path, staged, extra)
    capfd.readouterr()
    # both rows are there; the one that is added fails, and its reason is shown
    broken = ["--row", "broken", 'precision.bf16_modules=["nonsense"]']
    assert program(config, work, *rows, *broken, *extra) == 2
    told = capfd.readouterr()
    assert told.out.count("not run again") == 2
    assert "row broken: the training ended with status 2" in told.err
    assert "'nonsense' matches no module" in told.err

    assert program(config, work, *rows, "--tolerance", "1e-9", *extra) == 1
    told = capfd.readouterr()
    assert told.out.count("not run again") == 2
    assert "missed: delayed: evaluation loss" in told.err and "missed: bf16" not in told.err

    check_what_is_run_again(config, work, rows, extra)


def check_what_is_taken_from_a_result(config: Path, folder: Path, rows: list[str], extra: list[str]) -> None:
    """Where the folder of the trainings is gone: all that they were compared by, and nothing is trained."""
    output, again = folder / "results/compare.json", folder / "again.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convergence_trainings, "start", lambda *_: pytest.fail("it trains"))
        options = ["--earlier", str(output), "--output", str(again)]
        assert program(config, folder / "lost", *rows, *options, *extra) == 0
    before, after = (json.loads(path.read_text()) for path in (output, again))
    # killed before it had all of a row, it begins with that row again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_fp8.convergence.earlier.write_durably", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            program(config, folder / "killed", *rows, "--earlier", str(output), *extra)
    assert program(config, folder / "killed", *rows, "--earlier", str(output), *extra) == 0
    for one, other in zip(before["results"], after["results"], strict=True):
        assert one == other, one.keys() | other.keys()
    assert {key: before[key] for key in ("training", "seeds")} == {
        key: after[key] for key in ("training", "seeds")
    }
    # another training is not taken for it, nor is another file
    assert (
        program(config, folder / "other", *rows, "--earlier", str(output), *extra, "--learning_rate", "1e-3")
        == 2
    )
    assert program(config, folder / "other", *rows, "--earlier", str(config), *extra) == 2
    assert program(config, folder / "other", *rows, "--earlier", str(folder / "none.json"), *extra) == 2
    assert not (folder / "other/bf16").exists()


def check_what_is_run_again(config: Path, work: Path, rows: list[str], extra: list[str]) -> None:
    """Another configuration, version or incomplete metrics: each is a reason to train again."""

    def reason(*options: str, **versions: str) -> str | None:
        limits = ["--max_steps", "6", "--logging_steps", "2", "--work_dir", str(work)]
        arguments = compare_convergence.parse_arguments([str(config), *limits, *rows, *options])
        plan = convergence_rows.make_plan(rows_of("--rows", "bf16", "delayed")[1], arguments)
        now = json.loads((work / "delayed" / "conditions.json").read_text())["conditions"]
        return convergence_rows.state_of(plan, {**now, "versions": {**now["versions"], **versions}}).why

    assert reason(*extra) is None
    assert "eval_steps: 4 -> 0" in (reason() or "")
    assert "versions.torch: " in (reason(*extra, torch="1.0") or "")
    metrics = work / "delayed" / "metrics.jsonl"
    whole = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text(metrics.read_text()[:-10])
    assert reason(*extra) == "its metrics end at step 0 of 6, or without a loss"
    # stopped in its last evaluation, for which it made up when it went on
    trained, late = {**whole[2]}, {key: whole[2][key] for key in ("step", "tokens", "eval_loss", "time")}
    del trained["eval_loss"]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in (*whole[:2], trained, late)))
    assert reason(*extra) is None
    assert [r["step"] for r in convergence_rows.read_metrics(metrics.parent)] == [2, 4, 6]
    for lost in (
        whole[:2],
        [*whole[:2], {**whole[2], "loss": None}],
        [*whole[:2], {**whole[2], "eval_loss": None}],
    ):
        metrics.write_text("".join(json.dumps(record) + "\n" for record in lost))
        assert reason(*extra) == f"its metrics end at step {lost[-1]['step']} of 6, or without a loss"
    (work / "delayed" / "conditions.json").rename(work / "kept.json")
    plan = convergence_rows.Plan(Row("delayed", {}), {}, [], work / "delayed")
    assert convergence_rows.state_of(plan, {}).why == "not trained yet"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--row", "x", "precision.recipe=best"], '"best" is given, one of delayed'),
        (["--", "--learnin_rate", "1"], "did you mean learning_rate?"),
        (["--", "--data.sources.text", "nowhere"], "nowhere"),
        (["--row", "x", "per_device_train_batch_size=3"], "not divisible by"),
        (["--baseline", "x"], "the baseline x is not among"),
        (["--noise_seed", "7", "42"], "--noise_seed 42 is the seed of the rows themselves"),
    ],
)  # fmt: skip
def test_errors_come_before_any_training(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str], words: str
) -> None:
    assert program(config, tmp_path / "work", *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_several_processes_are_started_by_the_launcher(config: Path) -> None:
    arguments = compare_convergence.parse_arguments([str(config), "--nproc", "2"])
    plan = convergence_rows.make_plan(chosen_rows(arguments)[0], arguments)
    scripts = [str(ROOT / "train" / name) for name in ("launch.py", "train.py")]
    assert plan.command[1:5] == [scripts[0], "--nproc", "2", scripts[1]]
    assert plan.config["gradient_accumulation_steps"] == 1  # 256 tokens = 2 ranks x 2 samples x 64


def test_the_shipped_comparison_is_large_and_long_enough() -> None:
    """Its defaults: at least 0.3B parameters, 300 steps, most of them after warmup."""
    from model.config import num_parameters

    arguments = compare_convergence.parse_arguments([])
    configs = [convergence_rows.make_plan(row, arguments).config for row in chosen_rows(arguments)]
    assert {c["precision"]["recipe"] for c in configs} == {"delayed", "current", "block"}
    for c in configs:
        assert num_parameters(load_config(c["model"]["config"])) >= 300e6
        assert c["max_steps"] >= 300 and c["warmup_steps"] <= c["max_steps"] / 3
        assert c["save_steps"] == c["save_minutes"] == 0, "saves when it is stopped, and at its end"
