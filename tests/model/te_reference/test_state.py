"""FP8 state and recomputation; when state moves is in test_te_recorded.py."""

import pytest
import torch

from model import te_reference as te
from model.te_reference.recipe import DelayedScaling
from tests.reliability.launching import run_cases


def test_conversion_to_bfloat16_keeps_the_state_in_float32():
    """DeepSpeed calls module.bfloat16()."""
    module, x = te.Linear(32, 48, bias=False), torch.randn(16, 32)
    with te.autocast(recipe=DelayedScaling()):
        module(x).sum().backward()
    module.bfloat16()
    assert module.fp8_meta["scaling_fwd"].scale.dtype == torch.float32
    with te.autocast(recipe=DelayedScaling()):
        assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.process
def test_amaxes_are_reduced_over_ranks_in_one_call_a_direction(tmp_path):
    (ranks,) = run_cases(tmp_path / "ranks", [(2, "reduce_amaxes", {})])
    for rank, (reduced, own) in enumerate(ranks):
        # one reduction for the forward tensors of both modules, one for the backward
        assert reduced == {"calls": [6, 4], "scales": [448 / 2, 57344 / 2]}
        assert own == {"calls": [], "scales": [448 / (1 + rank), 57344 / (1 + rank)]}
