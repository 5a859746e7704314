"""train/monitor/replicas.py: what must be alike on all ranks, a checksum of it, and who is odd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from train.monitor import replicas
from train.monitor.replicas import checksum, difference, make_multipliers, replicated_tensors, scope


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8])
def test_a_checksum_tells_every_single_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "ROW", 8)  # rows, several at a time, and a rest
    monkeypatch.setattr(replicas, "ROWS", 2)
    multipliers = make_multipliers("cpu")
    tensor = (torch.randn(45, generator=torch.Generator().manual_seed(0)) * 50).abs().to(dtype)
    right = int(checksum(tensor, multipliers))
    data = tensor.view(torch.uint8)
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert int(checksum(tensor, multipliers)) != right
            data[byte] ^= 1 << bit
    assert int(checksum(tensor.reshape(5, 9), multipliers)) == right
    for other in (1, 8, 44):
        swapped = tensor.clone()
        swapped[0], swapped[other] = tensor[other], tensor[0]
        assert int(checksum(swapped, multipliers)) != right


def test_the_odd_ranks_are_named_by_majority() -> None:
    names = ["a", "b"]
    assert difference([[1, 2], [1, 2], [1, 2]], names) is None
    assert "rank 1 differs from the other 2" in str(difference([[1, 2], [1, 3], [1, 2]], names))
    assert "'b' is the first of 1 tensors that differ, of 2" in str(
        difference([[1, 2], [1, 3], [1, 2]], names)
    )
    assert "ranks [0, 3] differ" in str(difference([[9, 2], [1, 2], [1, 2], [1, 7], [1, 2]], names))
    both = str(difference([[1, 2], [1, 3]], names))
    assert "ranks [0, 1]" in both and "no majority" in both


class Module(nn.Module):
    """One Linear with state as of delayed scaling: scales, and a history whose first row is the rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        history = torch.tensor([[1.0], [2.0], [3.0]])
        self.fp8_meta = {"scaling_fwd": SimpleNamespace(scale=torch.ones(1), amax_history=history)}


def engine_after_a_step(stage: int) -> Any:
    """As much of DeepSpeed's engine as is looked at; at stage 0 its optimizer is torch's."""
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {parameter: name for name, parameter in module.named_parameters()}
    return SimpleNamespace(
        module=module, optimizer=optimizer, param_names=names, zero_optimization_stage=lambda: stage
    )


WEIGHT, FP8 = "linear.weight", ["FP8 .scaling_fwd.scale", "FP8 .scaling_fwd.amax_history"]


@pytest.mark.parametrize("reduce_amax", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_must_be_alike(stage: int, reduce_amax: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ZeRO the moments, too; at ZeRO 3 nothing but FP8 state, and that not where each rank has its own."""
    engine = engine_after_a_step(stage)
    precision = Precision(PrecisionConfig(backend="reference", reduce_amax=reduce_amax))
    expected = {0: [WEIGHT, *(f"optimizer {WEIGHT} {m}" for m in ("exp_avg", "exp_avg_sq"))], 3: []}
    found = replicated_tensors(engine, precision)
    assert list(found) == expected.get(stage, [WEIGHT]) + (FP8 if reduce_amax else [])
    if reduce_amax:
        assert found[FP8[1]].tolist() == [[2.0], [3.0]]
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    said = scope(engine, precision)
    assert ("optimizer state" in said) == (stage == 0) and ("FP8 scales" in said) == reduce_amax
    assert ("ZeRO 3 has no copies" in said) == (stage == 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert scope(engine, precision) == "not applicable with one rank"
