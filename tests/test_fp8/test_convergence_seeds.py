"""test_fp8/convergence: what several seeds of a training say of a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_fp8 import compare_convergence
from test_fp8.convergence import evidence, trainings
from test_fp8.convergence.results import compared, plot, print_table
from test_fp8.convergence.rows import ComparisonError, reference_of
from tests.test_fp8.test_convergence_evidence import plans_of, training


def test_the_band_of_seeds() -> None:
    seeds = [training((10, 4.0), (20, 2.0)), training((10, 4.04), (20, 1.98)), training((20, 2.06))]
    found = evidence.band(seeds[:2])
    assert found["step"] == [10, 20] and found["mean"] == pytest.approx([4.02, 1.99])
    assert found["low_percent"] == pytest.approx([0, -1]) and found["high_percent"] == pytest.approx([1, 0])
    assert evidence.band(seeds)["step"] == [20], "where all were evaluated"
    assert found["final_mean"] == pytest.approx(1.99)


def test_a_row_is_held_to_the_mean_of_the_seeds() -> None:
    base, row = training((10, 4.0), (20, 2.0)), training((10, 4.0), (20, 2.012))
    for record in base + row:
        record |= {"grad_norm": 1.0, "skipped_steps": 0}
    assert compared("x", row, base, 0, 0.005)["misses"]
    found = compared("x", row, base, 0, 0.005, mean=2.01)
    assert not found["misses"] and found["difference_to_seeds_mean_percent"] == pytest.approx(
        100 * 0.002 / 2.01
    )
    assert "from the seeds' mean 1.9900" in compared("x", row, base, 0, 0.005, mean=1.99)["misses"][0]
    assert not compared("x", row, base, 0, 0.005, held=False)["misses"], "another optimizer"


def test_a_row_with_another_seed_has_the_one_of_that_seed() -> None:
    options = ["--rows", "bf16", "delayed", "muon", "muon_delayed", "--noise_seed", "7", "8", "--noise_rows"]
    plans = plans_of(*options, "delayed", "muon", "muon_delayed")
    found = {plan.row.name: reference_of(plan, plans).row.name for plan in plans}
    assert found["bf16_seed8"] == "bf16" and found["delayed"] == "bf16"
    assert found["delayed_seed7"] == "bf16_seed7" and found["delayed_seed8"] == "bf16_seed8"
    assert found["muon"] == "bf16" and found["muon_seed7"] == "bf16_seed7", "on the same samples"
    assert found["muon_delayed_seed7"] == "muon_seed7"
    with pytest.raises(
        ComparisonError, match="with this seed; add one, .* optim=muon and name it in --noise_rows"
    ):
        plans_of(*options, "muon_delayed")


def test_a_difference_is_the_mean_over_the_seeds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each pair has the samples of its seed; the row is held to the mean, and its twins to nothing."""
    options = ["--noise_seed", "7", "8", "--noise_rows", "delayed", "--work_dir", str(tmp_path)]
    plans = plans_of("--rows", "bf16", "delayed", *options)
    losses = {"bf16": 2.0, "bf16_seed7": 2.1, "bf16_seed8": 1.9}
    losses |= {"delayed": 2.02, "delayed_seed7": 2.1, "delayed_seed8": 1.881}  # +1, 0 and -1 %
    records = {}
    for plan in plans:
        plan.folder.mkdir()
        trainings.note(plan, under := {"sources": "a", "machine": {"gpu": "H200"}, "versions": {}}, True)
        (plan.folder / "log.txt").touch()
        records[plan.row.name] = training((1000, 4.0), (1910, losses[plan.row.name]))
        for record in records[plan.row.name]:
            record |= {"grad_norm": 1.0, "skipped_steps": 0}
    results, band = compare_convergence.compare(plans, records, under, 0.005)
    found = {result["row"]: result for result in results}
    over = found["delayed"]["over_seeds"]
    assert over["percent"] == pytest.approx([1, 0, -1]) and over["mean_percent"] == pytest.approx(0)
    assert over["standard_error"] == pytest.approx(3**-0.5)
    assert all(found[name]["over_seeds"] is None for name in losses if name != "delayed")
    assert not any(result["misses"] for result in results)
    assert found["delayed_seed7"]["compared_with"] == "bf16_seed7" and found["delayed_seed7"]["seed"] == 7
    assert found["delayed_seed8"]["last_tenth"]["mean_percent"] == pytest.approx(-1), "on the same samples"
    assert found["bf16_seed8"]["last_tenth"] is None
    assert found["delayed_seed8"]["equal_loss"]["row"] == "bf16_seed8"
    assert band is not None and band["seeds"] == 3

    records["delayed_seed8"][-1]["eval_loss"] = 1.95
    results, band = compare_convergence.compare(plans, records, under, 0.005)
    held = next(result for result in results if result["row"] == "delayed")
    assert held["misses"] == [
        "evaluation loss is +1.21 ± 0.77 % from the baseline's in the mean of 3 seeds; allowed are 0.5 %"
    ]
    # a seed that is not finished has no say
    results, _ = compare_convergence.compare(
        plans, {k: v for k, v in records.items() if "8" not in k}, under, 0.005
    )
    assert [r["over_seeds"]["percent"] for r in results if r["row"] == "delayed"] == [pytest.approx([1, 0])]
    training_keys = {
        "model.config": "m",
        "parameters": 1,
        "train_batch_size_tokens": 1,
        "seed": 42,
        "warmup_steps": 0,
    }
    print_table(results, 0)
    assert "+0.50 ± 0.50 %" in capsys.readouterr().out
    assert plot(results, training_keys, 0.005, tmp_path / "x.json", band).stat().st_size > 10_000
