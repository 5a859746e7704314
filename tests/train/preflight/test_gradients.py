"""The preflight's check of the gradients: right ones pass and leave no trace, wrong ones are found and named."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.conftest import small_config
from tests.reliability.launching import run_cases
from tests.train.engine.test_packed_adamw import Trained
from tests.train.preflight.preflight_ranks import ACCUMULATION
from tests.train.runs import curve, run
from train.config.load import load_deepspeed
from train.data.stream import Batch
from train.preflight import gradients
from train.preflight.check import PreflightError

FLOAT32_GRADIENTS = {"grad_accum_dtype": "fp32"}
FP32, BF16 = {"compute": "fp32"}, {"compute": "bf16"}


@pytest.fixture
def config(tmp_path: Path) -> str:
    small = small_config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=128, num_attention_heads=2
    )
    small.num_key_value_heads = 1
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small.to_dict()))
    return str(path)


def check_cases(folder: Path, cases: list[dict[str, Any]], ranks: int = 2) -> None:
    """Each case is refused if it has a fault, on all ranks, and the check changes nothing."""
    reports = run_cases(folder, [(ranks, "gradients", case) for case in cases])
    for case, of_ranks in zip(cases, reports, strict=True):
        for its in of_ranks:
            assert its["changed"] == [] and its["random"], case
            assert its["counters"] == [1, ACCUMULATION, 0], case
            assert (its["error"] is None) == (case["fault"] in ("none", "not_finite")), (case, its)
        for fault, named in (("factor", f"{ACCUMULATION} times"), ("one_parameter", "layernorm_qkv")):
            assert case["fault"] != fault or named in of_ranks[0]["error"], of_ranks[0]


OF_STAGES = [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2, 3))]


@pytest.mark.process
@pytest.mark.parametrize("stage", OF_STAGES)
def test_wrong_reduction_is_detected(tmp_path: Path, config: str, stage: int) -> None:
    """A micro-batch that DeepSpeed drops, and a division that it forgets."""
    types = FLOAT32_GRADIENTS if stage == 1 else {}
    faults = ("none", "left_out", "factor")
    cases = [{"stage": stage, "fault": f, "config": config, "data_types": types} for f in faults]
    check_cases(tmp_path / "cases", cases)


@pytest.mark.slow
@pytest.mark.process
def test_gradient_check_with_other_faults_and_types(tmp_path: Path, config: str) -> None:
    rows: list[tuple[int, str, dict, dict, float]] = [
        (stage, "none", precision, types, clipping)
        for stage, precision, types in [
            (0, FP32, {}),
            (0, BF16, {}),
            (1, {}, {}),
            (1, FP32, {}),
            (2, BF16, {}),
            (3, FP32, {}),
        ]
        for clipping in (0.0, 1.0)
    ]
    rows += [
        (stage, fault, {}, {}, 0.0) for stage in range(4) for fault in ("twice", "one_parameter", "norm")
    ]
    rows += [(1, "not_finite", BF16, FLOAT32_GRADIENTS, 1.0), (0, "not_finite", FP32, {}, 1.0)]
    keys = ("stage", "fault", "precision", "data_types", "clipping")
    cases = [{"config": config} | dict(zip(keys, row, strict=True)) for row in rows]
    stages = [(0, FP32, {}), (0, BF16, {}), (1, BF16, FLOAT32_GRADIENTS), (2, BF16, FLOAT32_GRADIENTS)]
    for stage, precision, types in stages:
        muon = {"optim": "muon", "stage": stage, "precision": precision, "data_types": types}
        cases += [{"config": config, "fault": fault} | muon for fault in ("none", "twice", "not_finite")]
    check_cases(tmp_path / "cases", cases)


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """What the files of DeepSpeed and of each rank hold."""
    files = {path.name: torch.load(path, weights_only=False) for path in checkpoint.glob("*.pt")}
    return {keystr(place): value for place, value in tree_flatten_with_path(files)[0]}


def check_same(one: Path, other: Path) -> None:
    assert curve(one) == curve(other)
    a, b = (tensors_of(path / "checkpoints/step-00000006") for path in (one, other))
    assert a.keys() == b.keys() and len(a) > 40
    for name, value in a.items():
        same = torch.equal(value, b[name]) if torch.is_tensor(value) else str(value) == str(b[name])
        assert same or "config" in name, name


def test_preflight_changes_no_result(trained: Path, settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning, and resumed; the checkpoint after it holds the same, to the last counter."""
    checks: list[int] = []
    compare = gradients.compare_gradients
    monkeypatch.setattr(gradients, "compare_gradients", lambda *a: checks.append(1) or compare(*a))
    output_dir = run(settings, save_steps=3, preflight=True)
    check_same(output_dir, trained)
    shutil.rmtree(output_dir / "checkpoints/step-00000006")
    run(settings, save_steps=3, preflight=True)
    check_same(output_dir, trained)
    run(settings, save_steps=3, preflight=True)  # nothing is left to train
    assert len(checks) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, {}), (2, BF16), (3, {}), (1, {"optimizer_states": "bf16_remainder"})],
)
def test_preflight_changes_no_result_at_each_zero_stage(
    settings: dict, tmp_path: Path, stage: int, precision: dict
) -> None:
    settings |= {"deepspeed": f"ds_config_zero{stage}.json", "precision": precision}
    without = run(settings)
    check_same(run(settings, preflight=True, output_dir=str(tmp_path / "with")), without)


def test_out_of_memory_in_gradient_check(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def runs_out(*_: object) -> None:
        raise error

    monkeypatch.setattr("train.preflight.gradients.take_step", runs_out)
    with pytest.raises(PreflightError):
        run(settings, preflight=True)
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError):
        run(settings, preflight=True)


def test_gradient_check_with_document_mask(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model of which only a part is compared."""
    monkeypatch.setattr(gradients, "SAMPLE", 2**14)
    run(settings, max_steps=2, data={**settings["data"], "document_mask": True}, preflight=True, dry_run=True)


def test_allowed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a unit in the last place of each addition, over micro-batches and ranks, three times as much."""
    monkeypatch.setattr(gradients.dist, "get_world_size", lambda: 8)
    for dtype, communication, rounding in (
        (torch.bfloat16, torch.float32, 2**-8),
        (torch.float32, torch.bfloat16, 2**-8),
        (torch.float32, torch.float32, 1e-6),
    ):
        module = torch.nn.Linear(1, 1, dtype=dtype)
        engine = SimpleNamespace(communication_data_type=communication, module=module)
        assert gradients.allowed_error(engine, 8) == pytest.approx(3 * rounding * 4)


@pytest.mark.parametrize(("stage", "device"), [(1, "none"), *product((2, 3), ("none", "cpu"))])
def test_shipped_configurations_accumulate_in_float32(settings: dict, stage: int, device: str) -> None:
    """The gradient of 64 micro-batches against their float32 sum, also with optimizer offload.

    With bf16 accumulation the error is 8e-3.
    """
    changes = {"train_batch_size_tokens": None, "gradient_accumulation_steps": 64, "max_grad_norm": 0.0}
    deepspeed = load_deepspeed(f"ds_config_zero{stage}.json")
    deepspeed["zero_optimization"]["offload_optimizer"] = {"device": device}
    trained = Trained(settings, BF16, deepspeed=deepspeed, **changes)
    batches = []
    for index in range(64):
        ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(index))
        batches.append(Batch(ids, ids))
    plain = gradients.empty_sample(trained.engine)
    with gradients.accumulate_local_gradients(trained.engine, plain) as weight:
        reduced = gradients.take_step(trained.engine, trained.micro_step, batches, weight)
    assert reduced is not None
    difference = torch.cat([reduced[0][name] - values / 64 for name, values in plain.items()])
    assert difference.norm() < 2e-3 * torch.cat([*plain.values()]).norm() / 64
