"""Tests of skipped steps, spikes, rollbacks and ranks with different weights."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from model.config import flops_per_token, load_config
from tests.reliability.launching import run_cases, training_case, write_small_config
from tests.train.runs import ROOT, metrics
from train.data.stream import open_stream
from train.monitor.spikes import judge

DELAYED = {"recipe": "delayed", "amax_history_len": 4}
FP32 = {"compute": "fp32"}
FP32_GRADIENTS = {"grad_accum_dtype": "fp32"}

SKIPS = [  # ZeRO stage, precision, data_types, max_grad_norm, optim
    (0, DELAYED, {}, 1.0),
    (0, FP32, {}, 1.0),
    (1, DELAYED, FP32_GRADIENTS, 1.0),
    (2, DELAYED, {}, 1.0),
    (3, DELAYED, {}, 1.0),
]
MORE_SKIPS = [
    (0, FP32, {}, 0.0),
    (0, {"compute": "bf16"}, {}, 0.0),
    (1, FP32, {}, 0.0),
    (1, {"compute": "bf16"}, {}, 1.0),
    (1, {"recipe": "current"}, FP32_GRADIENTS, 0.0),
    (2, FP32, {}, 1.0),
    (3, FP32, {}, 0.0),
    (3, {"compute": "bf16"}, {}, 1.0),
    (0, FP32, {}, 1.0, "muon"),
    (1, {"compute": "bf16"}, FP32_GRADIENTS, 1.0, "muon"),
]


# ---------------------------------------------------------------- skipped steps


def check_skips(tmp_path: Path, matrix: list[tuple], ranks: int = 2) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    config = write_small_config(tmp_path, **sizes, num_attention_heads=2, num_key_value_heads=1)
    keys = ("stage", "precision", "data_types", "clipping", "optim")
    cases = [(ranks, "skip", {**dict(zip(keys, row, strict=False)), "config": config}) for row in matrix]
    for row, reports in zip(matrix, run_cases(tmp_path / "skips", cases), strict=True):
        for rank, found in enumerate(reports):
            kinds = [step["kind"] for step in found["steps"]]
            assert {"nan_loss", "inf_loss", "nan_gradient"} <= set(kinds), row
            assert ("nan_weight" in kinds) == (row[0] < 3), row
            assert ("nan_in_buffer" in kinds) == (row[2] == FP32_GRADIENTS), row
            check_steps(found, (row, rank))


def check_steps(found: dict[str, Any], what: tuple) -> None:
    """Check that exactly the steps with a fault are skipped, and that a skipped step changes no state."""
    for step in found["steps"]:
        where = (what, step)
        assert step["finite"], where
        assert step["skipped"] == (step["kind"] is not None), where
        if step["skipped"]:
            assert step["changed"] == [], where
        else:
            assert {"weights", "optimizer"} <= set(step["changed"]), where
    assert found["count"] == len(found["steps"]) - 3


FULL = [
    pytest.mark.reliability,
    pytest.mark.timeout(1200),
]  # ranks of gloo spin: more of them than cores take long


@pytest.mark.parametrize(
    ("matrix", "ranks"),
    [
        pytest.param(SKIPS, 2, id="short"),
        pytest.param(MORE_SKIPS, 2, id="full", marks=FULL),
        pytest.param(SKIPS, 4, id="four", marks=FULL),
    ],
)
@pytest.mark.process
def test_non_finite_rank_skips_the_step_on_all(tmp_path: Path, matrix: list[tuple], ranks: int) -> None:
    """A skipped step leaves weights, optimizer state and FP8 state bit-identical, and the next step is not skipped."""
    check_skips(tmp_path, matrix, ranks)


# ---------------------------------------------------------------- spikes


def recorded(name: str) -> list[tuple[str, dict[str, list[float]]]]:
    """Return the losses and gradient norms of real GPU runs, recorded every tenth step."""
    found = json.loads((ROOT / "test_fp8/results" / f"{name}.json").read_text())["results"]
    return [(row["row"], row["curves"]) for row in found]


def test_spike_detection_on_recorded_runs() -> None:
    steps = 0
    runs = [*recorded("evidence"), *recorded("time_to_loss_106m")]
    for row, curves in [found for found in runs if "muon" not in found[0]]:
        for key in ("loss", "grad_norm"):
            values = curves[key]
            recent = deque[float](maxlen=25)
            assert [i for i, value in enumerate(values) if judge(recent, value, 10.0)] == [], (row, key)
            steps += len(values) if key == "loss" else 0
            last = statistics.median(values[-16:])
            assert judge(recent, 10 * last, 10.0) is not None, (row, key)
            assert judge(recent, last, 10.0) is None
    assert steps >= 1000


def test_persistent_loss_level_is_no_spike() -> None:
    recent = deque[float](maxlen=16)
    flagged = [judge(recent, value, 10.0) is not None for value in [1.0] * 16 + [5.0] * 16]
    assert flagged[:16] == [False] * 16 and flagged[16] and not flagged[-1]


@pytest.mark.parametrize(
    ("values", "median", "threshold"),
    [([2.0], 2.0, 2.4), ([-2.0], -2.0, -1.6), ([0.9, 1.1], 1.0, 1 + 10 * 1.4826 * 0.1)],
)
def test_spike_threshold(values: list[float], median: float, threshold: float) -> None:
    """The spread is at least 2% of the median, so that noise after constant values is not a spike."""
    recent = deque[float](maxlen=16)
    assert not any(judge(recent, value, 10.0) for value in values * 16)
    assert judge(recent.copy(), threshold - 1e-3, 10.0) is None
    assert judge(recent.copy(), threshold + 1e-3, 10.0) == pytest.approx((median, threshold))
    assert judge(recent.copy(), 1e9, 0.0) is None  # never
    before = list(recent)
    assert judge(recent, math.nan, 10.0) is None is judge(recent, math.inf, 10.0) and list(recent) == before


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def base(data: Path, small_model: Path) -> dict[str, Any]:
    return {
        "model": {"config": str(small_model)},
        "data": {"sources": {"text": str(data)}},
        "precision": DELAYED,
        "max_seq_length": 32,
        "per_device_train_batch_size": 1,
        "max_eval_samples": 2,
        "logging_steps": 1,
        "replica_check_steps": 1,
        "spike_window": 16,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
    }


def rollback_cases(
    base: dict[str, Any], folder: Path, stage: int = 1, ranks: int = 2, spike: str = "large_loss"
) -> dict[str, tuple]:
    """Return cases for a run that rolls back after a spike, and for a reference run that must give the same results.

    Each step uses two samples. The first run has a spike in step 19, rolls back to step 16, skips the samples of steps
    18 and 19, and continues to step 22. It is then resumed. The reference run stops after step 16, and its resume is
    told to skip the same samples.
    """
    settings = {
        **base,
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 20,
        "on_spike": "rollback",
        "allow_changes_on_resume": ["max_steps"],
        "logging_steps": 2,
        "deepspeed": f"ds_config_zero{stage}.json",
    }

    def case(name: str, steps: int, spoiled: dict, left_out: Any = None) -> tuple:
        values = {**settings, "max_steps": steps}
        return training_case(ranks, values, folder / name, spoiled, left_out=left_out)

    return {
        "rollback": case("rollback", 22, {"19": spike}),
        "rollback_resumed": case("rollback", 26, {}),
        "to_16": case("reference", 16, {}),
        "reference": case("reference", 26, {}, [[34, 38]]),
    }


def check_rollback(folder: Path) -> None:
    lines = metrics(folder / "rollback")
    back = [line["rollback"] for line in lines if "rollback" in line]
    assert [(b["first_sample"], b["samples"], b["from_step"]) for b in back] == [(34, 4, 19)]
    state = json.loads((folder / "rollback/checkpoints/step-00000026/run_state.json").read_text())
    assert state["skipped_samples"] == [[34, 38]]
    assert state["consumed_samples"] == 26 * 2 + 4

    def curve(name: str) -> list[tuple]:
        return [(m["step"], m["loss"], m["grad_norm"]) for m in metrics(folder / name) if "loss" in m]

    assert [step for step, *_ in curve("rollback")] == list(range(2, 27, 2))
    assert curve("rollback") == curve("reference")


@pytest.mark.reliability
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.process
def test_rollback_at_each_zero_stage(base: dict[str, Any], tmp_path: Path, stage: int) -> None:
    for ranks in run_cases(tmp_path / "results", list(rollback_cases(base, tmp_path, stage).values())):
        assert ranks == [{"error": None}] * 2
    check_rollback(tmp_path)


@pytest.fixture(scope="module")
def runs(
    base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[dict]]]:
    """Return a dictionary from run name to the output folder and the results of all ranks."""
    folder = tmp_path_factory.mktemp("runs")

    def case(name: str, ranks: int, spoiled: dict, **changes: Any) -> tuple:
        return training_case(ranks, {**base, **changes}, folder / name, spoiled, rank=1)

    cases = {
        "nan": case("nan", 2, {"3": "nan_loss"}, max_steps=5),
        "spike": case(
            "spike", 2, {"19": "large_loss"}, max_steps=22, logging_steps=11, precision={"compute": "bf16"}
        ),
        **rollback_cases(base, folder),
        "losses": (
            2,
            "run_with_given_losses",
            {
                "settings": {
                    **base,
                    "output_dir": str(folder / "losses"),
                    "data": {**base["data"], "document_mask": True},
                    "max_steps": 2,
                    "logging_steps": 2,
                },
                "losses": [(2.0, 1.0), (0.75, 0.25)],
            },
        ),
        "flip": case("flip", 3, {"4": "flip"}, max_steps=6, replica_check_steps=2),
    }
    found = run_cases(folder / "results", list(cases.values()))
    return {name: (folder / name, ranks) for name, ranks in zip(cases, found, strict=True)}


@pytest.mark.process
def test_skipped_step_is_recorded(runs: dict, base: dict) -> None:
    folder, ranks = runs["nan"]
    assert [rank["error"] for rank in ranks] == [None, None]
    lines = metrics(folder)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1]
    assert [line["step"] for line in lines if "skipped" in line] == [3]
    stream = open_stream(base["data"]["sources"], None, 32, 42)
    windows = [window for _, window in stream.sample_ids(4, 2)]
    expected = {"first_sample": 4, "samples": 2, "windows": {"text": windows}, "ranks": [1]}
    assert lines[2]["skipped"] == expected


@pytest.mark.process
def test_logged_loss_and_mfu_of_two_ranks(runs: dict, base: dict) -> None:
    """With a document mask, the loss is the ratio of sums over the ranks, not the mean of their ratios (2.5)."""
    folder, ranks = runs["losses"]
    assert [rank["error"] for rank in ranks] == [None, None]
    (line,) = (line for line in metrics(folder) if "loss" in line)
    assert (line["loss"], line["step_loss"]) == (pytest.approx(2.75 / 1.25), pytest.approx(2.75 / 1.25))
    flops = flops_per_token(load_config(base["model"]["config"]), 32)
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] / 2 * flops / 0.5e12)


@pytest.mark.process
def test_spike_is_logged(runs: dict) -> None:
    folder, ranks = runs["spike"]
    assert [rank["error"] for rank in ranks] == [None, None]
    lines = metrics(folder)
    assert [line["spikes"] for line in lines] == [0, 1]
    found = lines[1]["spikes_found"]
    assert {spike["step"] for spike in found} == {19}
    loss = next(spike for spike in found if "loss" in spike)
    assert loss["loss"] > loss["threshold"] and loss["first_sample"] == 36 and loss["samples"] == 2


@pytest.mark.process
def test_rollback_skips_samples_and_equals_resume(runs: dict) -> None:
    for name in ("rollback", "rollback_resumed", "to_16", "reference"):
        assert runs[name][1] == [{"error": None}] * 2
    check_rollback(runs["nan"][0].parent)


@pytest.mark.process
def test_replica_check_detects_a_flipped_weight(runs: dict) -> None:
    for rank in runs["flip"][1]:
        assert "step 4: ranks [1] have different weights" in rank["error"]
        assert "1 of " in rank["error"]
