"""train/monitor/replicas.py: what must be alike on all ranks, and which ranks are at fault."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from train.monitor.replicas import describe_difference, differs_from_rank_0, replicated_tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_single_bit_difference_is_detected(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of -0.0 and NaN, too."""
    values = torch.tensor([0.0, 3.0, math.nan if dtype.is_floating_point else 7.0]).to(dtype)[:, None]
    for byte in range(values.numel() * values.element_size()):
        rank_0 = values.clone()
        rank_0.view(torch.uint8).view(-1)[byte] ^= 128
        for received, expected in ((values, 0), (rank_0, 1)):
            bits = received.reshape(-1).view(torch.uint8)
            monkeypatch.setattr(dist, "broadcast", lambda reference, src, bits=bits: reference.copy_(bits))
            assert differs_from_rank_0(values) == expected


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ([[0, 0], [0, 1], [0, 0]], "ranks [1] have 1 of 2 'b'"),
        ([[0, 0], [1, 1], [0, 0], [0, 1], [0, 0]], "ranks [1, 3] have 2 of 2 'a'"),
        ([[0, 0], [1, 0], [1, 0]], "rank 0 has ranks [1, 2] of 3; 1 of 2 'a'"),
        ([[0, 0], [0, 1]], "rank 0 has ranks [1] of 2; 1 of 2 'b'"),
        ([[0, 0]] * 3, ""),
    ],
)
def test_faulty_ranks_are_found_by_majority(differs: list[list[int]], named: str) -> None:
    message = describe_difference(differs, ["a", "b"]) or ""
    assert bool(message) == bool(named) and message[:8] == named[:8]
    assert all(word in message for word in named.split())


class Module(nn.Module):
    """One Linear with state as of delayed scaling: scales, and a history whose first row is the rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        history = torch.tensor([[1.0], [2.0], [3.0]])
        self.fp8_meta = {"scaling_fwd": SimpleNamespace(scale=torch.ones(1), amax_history=history)}


@pytest.mark.parametrize("reduce_amax", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_replicated_tensors(stage: int, reduce_amax: bool) -> None:
    """At ZeRO 3 nothing but FP8 state, and that not where each rank has its own."""
    engine: Any = SimpleNamespace(module=Module(), zero_optimization_stage=lambda: stage)
    precision = Precision(PrecisionConfig(backend="reference", reduce_amax=reduce_amax))
    found = replicated_tensors(engine, precision)
    weights, state = ["linear.weight"], ["FP8 .scaling_fwd.scale", "FP8 .scaling_fwd.amax_history"]
    assert list(found) == weights * (stage < 3) + state * reduce_amax
    if reduce_amax:
        assert found[state[1]].tolist() == [[2.0], [3.0]]
