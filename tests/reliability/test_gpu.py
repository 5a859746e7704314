"""Tests of faulty and of resumed runs on Hopper GPUs.

The runs use delayed scaling with Transformer Engine. Those with wrong losses, gradients or weights run with and without
CUDA graphs. Those that resume use ZeRO 1 with float32 gradient accumulation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reliability.launching import run_cases, training_case, write_small_config
from tests.reliability.test_numbers import (
    DELAYED,
    FP32_GRADIENTS,
    check_rollback,
    check_steps,
    rollback_cases,
)
from tests.reliability.test_world_size import Runs, differing
from tests.train.runs import curve, metrics

TOKENS = 128  # of a sample


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    return write_small_config(tmp_path_factory.mktemp("config"), **sizes)


@pytest.fixture
def base(config: str, data: Path) -> dict[str, Any]:
    return {
        "model": {"config": config, "variant": "te_layer"},
        "data": {"sources": {"text": str(data)}},
        "precision": DELAYED,
        "full_determinism": True,
        "max_seq_length": TOKENS,
        "per_device_train_batch_size": 2,
        "max_eval_samples": 2,
        "logging_steps": 1,
        "replica_check_steps": 1,
        "spike_window": 16,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
        "save_strategy": "no",
    }


def check_skips(config: str, folder: Path, ranks: int) -> None:
    # a fused loss and a captured graph are not computed where the test can spoil them
    speeds: list[dict[str, bool]] = [{"fused_cross_entropy": False}, {"cuda_graphs": True}]
    stages: list[tuple[int, dict]] = [(0, {}), (1, FP32_GRADIENTS), (2, {})]
    cases = [
        {"stage": stage, "precision": DELAYED, "data_types": types, "clipping": 1.0, "config": config}
        | {"speed": speed, "sizes": (2, TOKENS)}
        for speed in speeds
        for stage, types in stages
    ]
    found = run_cases(folder, [(ranks, "skip", case) for case in cases])
    for case, reports in zip(cases, found, strict=True):
        kinds = {step["kind"] for step in reports[0]["steps"]}
        assert ("nan_loss" in kinds) == ("cuda_graphs" not in case["speed"]) and "nan_weight" in kinds
        for rank, report in enumerate(reports):
            check_steps(report, (case, rank))


@pytest.mark.gpu
@pytest.mark.process
def test_non_finite_step_changes_no_state(config: str, tmp_path: Path) -> None:
    check_skips(config, tmp_path / "skips", 1)


@pytest.mark.multi_gpu
@pytest.mark.process
def test_non_finite_rank_skips_the_step_on_both_gpus(config: str, tmp_path: Path) -> None:
    check_skips(config, tmp_path / "skips", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
@pytest.mark.process
def test_rollback_equals_resume(base: dict[str, Any], tmp_path: Path, graphs: bool) -> None:
    base["speed"] = {"cuda_graphs": graphs}
    base["model"]["initialization"] = "normal"  # learns enough in 18 steps for wrong labels to be a spike
    cases = rollback_cases(base, tmp_path, ranks=1, spike="wrong_labels")
    assert run_cases(tmp_path / "results", list(cases.values())) == [[{"error": None}]] * len(cases)
    check_rollback(tmp_path)


@pytest.mark.multi_gpu
@pytest.mark.process
def test_replica_check_on_two_gpus(base: dict[str, Any], tmp_path: Path) -> None:
    """The check reports a flipped bit, but reports nothing in 30 correct steps with delayed scaling.

    FP8 scales and amax histories are also compared.
    """

    def case(name: str, spoiled: dict[str, str], **changes: Any) -> tuple:
        return training_case(2, {**base, **changes}, tmp_path / name, spoiled, rank=1)

    clean, graphs, flip = run_cases(
        tmp_path / "results",
        [
            case("clean", {}, max_steps=30),
            case("graphs", {}, max_steps=30, speed={"cuda_graphs": True}),
            case("flip", {"5": "flip"}, max_steps=8),
        ],
    )
    assert clean == graphs == [{"error": None}] * 2
    assert [len(metrics(tmp_path / name)) for name in ("clean", "graphs", "flip")] == [30, 30, 4]
    for rank in flip:
        assert "step 5: rank 0 has different weights or FP8 state than ranks [1]" in rank["error"]
        assert "1 of " in rank["error"]


# ---------------------------------------------------------------- resumed runs

MICRO_BATCH, SAVED, STEPS = 4, 10, 20


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Train on two GPUs for STEPS steps, and resume from the checkpoint of step SAVED on two GPUs and on one GPU."""
    folder = tmp_path_factory.mktemp("gpu_runs")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    base: dict[str, Any] = {
        "model": {"config": write_small_config(folder, **sizes), "variant": "te_layer"},
        "data": {"sources": {"text": str(data)}},
        "precision": {"recipe": "delayed"},
        "full_determinism": True,
        "max_seq_length": TOKENS,
        "per_device_train_batch_size": MICRO_BATCH,
        "max_eval_samples": 8,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
    }
    runs = Runs(folder, base, SAVED, STEPS)
    runs.whole("two", 2, 2 * MICRO_BATCH)
    runs.resumed("two_to_two", 2, "two")
    runs.resumed("two_to_one", 1, "two")
    return runs.start()


@pytest.mark.multi_gpu
@pytest.mark.process
def test_resume_on_two_gpus_is_bit_exact(runs: Runs) -> None:
    """The loss and gradient norm of each step after the resume are identical to those of the uninterrupted run."""
    whole, resumed = (curve(runs.folder / name / "run") for name in ("two", "two_to_two"))
    assert [step for step, *_ in resumed] == list(range(SAVED + 1, STEPS + 1))
    assert resumed == whole[SAVED:]
    assert differing(runs.state("two_to_two", "loaded"), runs.state("two", "kept")) == []


@pytest.mark.multi_gpu
@pytest.mark.process
def test_resume_from_two_gpus_on_one(runs: Runs) -> None:
    assert any(key.startswith("FP8") for key in runs.state("two", "kept"))
    runs.check_state_and_samples("two", "two_to_one", 1e-4)
    losses, uninterrupted = runs.losses("two_to_one"), runs.losses("two")
    assert losses[0] == pytest.approx(uninterrupted[0], rel=1e-3)
    assert losses[-1] == pytest.approx(uninterrupted[-1], rel=3e-2)


@pytest.mark.multi_gpu
@pytest.mark.process
def test_process_group_timeouts_exceed_the_watchdog(runs: Runs) -> None:
    runs.check_group_timeouts("two")
